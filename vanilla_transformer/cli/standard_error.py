"""Standard error that drops its text once it cannot be written any more, so that the work goes on."""

import os
from typing import Any, TextIO


class StandardError:
    """A stream for messages: a closed terminal, or a pipe without a reader, must not end a run.

    Args:
        stream: The stream to write to; attributes that are not defined here are taken from it.
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
        # The text in the buffer would raise again, at the latest when the interpreter exits.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
