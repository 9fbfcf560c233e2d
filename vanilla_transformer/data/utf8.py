"""Reads lines of UTF-8 and names other encodings in error messages. Nothing heavy is imported here."""

import codecs
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress

from vanilla_transformer.errors import UserError


# Number of bytes from which the encoding is recognised.
BEGINNING = 1 << 16

NUL = "the text has a NUL character, as text in UTF-16 has when it is read as UTF-8"

_ENCODING_MARKS = (
    # UTF-32 first, because its mark begins with that of UTF-16.
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
_ARCHIVE_MARKS = (
    (b"\x1f\x8b", "gzip"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"BZh91AY&SY", "bzip2"),
    (b"PK\x03\x04", "zip"),
)
# 7-bit text in which escape sequences switch the character set, such as ISO-2022-JP.
_ISO_2022 = re.compile(rb"\x1b\$[@AB(]")


def foreign_encoding(beginning: bytes) -> str | None:
    """Recognise an encoding other than UTF-8 by the beginning of a text.

    Args:
        beginning: First bytes of the text.

    Returns:
        The name of the encoding for `iconv`; `None` if the text may be UTF-8.
    """
    for mark, name in _ENCODING_MARKS:
        if beginning.startswith(mark):
            return name
    if _ISO_2022.search(beginning):
        return "ISO-2022-JP"
    zeros = [beginning[place::4].count(0) for place in range(4)]
    if sum(zeros) < max(2, len(beginning) // 100):
        return None
    for name in ("UTF-32LE", "UTF-32BE"):
        # Other text fails to decode, because no character lies beyond 0x10FFFF.
        with suppress(UnicodeDecodeError):
            beginning[: len(beginning) // 4 * 4].decode(name)
            return name
    even, odd = zeros[0] + zeros[2], zeros[1] + zeros[3]
    if max(even, odd) < 0.75 * (even + odd):
        return None
    return "UTF-16LE" if odd > even else "UTF-16BE"


def check_beginning(name: object, beginning: bytes) -> None:
    """Refuse compressed files and text in recognised encodings other than UTF-8.

    Args:
        name: Path of the file, or another name of the text.
        beginning: Its first bytes.

    Raises:
        UserError: Names the encoding, or the program that compressed it, and how to convert it.
    """
    for mark, program in _ARCHIVE_MARKS:
        if beginning.startswith(mark):
            raise UserError(f"{name} is compressed with {program}, and text must be plain UTF-8 here; decompress it.")
    encoding = foreign_encoding(beginning)
    if encoding is not None:
        raise UserError(
            f"{name} is {encoding}, and text must be UTF-8; convert it: iconv -f {encoding} -t UTF-8 OLD > NEW."
        )


def decode_lines(lines: Iterable[bytes], name: object) -> Iterator[str]:
    r"""Read a text line by line.

    Args:
        lines: Its lines with line ends. Only "\n" ends a line; U+2028, for instance, does not.
        name: Path of the file, or another name of the text.

    Yields:
        The lines without line ends, and without a byte-order mark at the beginning.

    Raises:
        UserError: A line is not UTF-8, or has a NUL character; the message names the encoding if it is recognised.
    """
    for number, line in enumerate(lines, start=1):
        if number == 1:
            check_beginning(name, line[:BEGINNING])
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{name}, line {number:,}, byte {error.start + 1}: the text is not UTF-8; convert it."
            ) from error
        if "\0" in text:
            raise UserError(f"{name}, line {number:,}: {NUL}; convert it.")
        yield text.rstrip("\r\n")
