import os

import pytest

from vanilla_transformer.cli.standard_error import StandardError


@pytest.mark.parametrize("buffering", [1, -1])
def test_a_stream_that_nobody_reads_falls_silent(buffering):
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", buffering=buffering) as stream:
        error = StandardError(stream)
        print("before", file=error, flush=True)
        assert os.read(reader, 100) == b"before\n"
        os.close(reader)
        for _ in range(2):
            assert error.write("after\n") == 6
            error.flush()
        assert not error.isatty()
        assert error.encoding == stream.encoding
    # Closing it wrote what was left in the buffer.
    assert stream.closed
