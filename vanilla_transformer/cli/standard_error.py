"""Standard error that falls silent when it can no longer be written, instead of ending the work that it tells of."""

import os
from typing import Any, TextIO


class StandardError:
    """A stream for commentary: a terminal that was closed, or a pipe whose reader has left, is no error of a run.

    Args:
        stream: The stream to write to; what is not defined here is its own.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or drop, the text."""
        try:
            return self._stream.write(text)
        except OSError:
            self._fall_silent()
            return len(text)

    def flush(self) -> None:
        """Write, or drop, what is in the buffer."""
        try:
            self._stream.flush()
        except OSError:
            self._fall_silent()

    def _fall_silent(self) -> None:
        # What is in the buffer would be an error again, at the latest when the interpreter ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
