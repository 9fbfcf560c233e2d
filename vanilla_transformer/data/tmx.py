"""Parallel text in TMX files (Translation Memory eXchange 1.4b), read as a stream."""

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from xml.parsers import expat

from vanilla_transformer.errors import UserError

from .corpora import FileSource, Pair, Rejections, read_blocks
from .utf8 import foreign_encoding


# The encoding that a file declares in its first line, if that line is in an ASCII-compatible encoding.
_DECLARATION = re.compile(rb"""(?:\xef\xbb\xbf)?<\?xml[^>]*?\sencoding\s*=\s*["']([^"'>]*)["']""")
# Encodings that the parser decodes itself.
_PARSED = ("utf-8", "utf-16", "iso8859-1", "ascii")
# Elements that must not be nested in an element of the same name.
_NOT_NESTED = ("tu", "tuv", "seg")
# Elements inside a segment that contain mark-up of another format, not text.
_CODES = ("bpt", "ept", "it", "ph", "ut")


@dataclass(frozen=True)
class TranslationMemory(FileSource):
    """Sentence pairs in the units of a TMX file.

    Two language codes match if one is the beginning of the other: `en-GB` matches `en`, but not `en-US`.

    Args:
        files: The file, alone.
        languages: Codes of the source and the target language.

    Raises:
        UserError: The file is missing, a folder, a pipe or unreadable.
    """

    files: tuple[Path]
    languages: tuple[str, str]

    unit = "unit"

    def __post_init__(self) -> None:
        self.check_files()

    @property
    def layout(self) -> object:
        """The languages."""
        return ["tmx", self.languages]

    @staticmethod
    def count(files: tuple[Path]) -> int:
        """Count the units of the file; refuse XML that is unsafe or not well-formed."""
        count = sum(1 for _ in _units(files[0]))
        if count == 0:
            raise UserError(f"{files[0]} has no <tu>; it must be a TMX file with at least one unit.")
        return count

    def read(self, rejections: Rejections) -> Iterator[Pair]:
        """Read the units without cleaning them; of several segments in one language, the first is used."""
        for number, segments in enumerate(_units(self.files[0]), start=1):
            sides = []
            for wanted in self.languages:
                found = next((text for language, text in segments if _matches(language, wanted)), None)
                if found is None:
                    rejections.add(f"the unit has no segment in {wanted}", self.place(number))
                    break
                sides.append(found)
            else:
                yield Pair(number, *sides)


class _Reader:
    """Collects the segments of units while a parser is fed."""

    def __init__(self, path: Path):
        self._path = path
        self._units: list[list[tuple[str, str]]] = []
        self._segments: list[tuple[str, str]] = []
        self._language = ""
        self._text: list[str] | None = None
        self._open: set[str] = set()
        self._depth_of_codes = 0
        self.parser = expat.ParserCreate()
        self.parser.buffer_text = True
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._characters
        # Nested entities can expand until memory is full, and external ones read other files.
        self.parser.EntityDeclHandler = self._refuse_entity
        self.parser.SkippedEntityHandler = self._refuse_entity

    def take(self) -> list[list[tuple[str, str]]]:
        units, self._units = self._units, []
        return units

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        if name in _NOT_NESTED:
            if name in self._open:
                raise UserError(
                    f"{self._path}, line {self.parser.CurrentLineNumber:,}: a <{name}> begins inside another one, "
                    "which TMX does not allow; correct the file."
                )
            self._open.add(name)
        if name == "tu":
            self._segments = []
        elif name == "tuv":
            self._language = attributes.get("xml:lang", attributes.get("lang", ""))
        elif name == "seg":
            self._text = []
        elif name in _CODES:
            self._depth_of_codes += 1

    def _end(self, name: str) -> None:
        self._open.discard(name)
        if name == "tu":
            self._units.append(self._segments)
        elif name == "seg":
            self._segments.append((self._language, "".join(self._text)))
            self._text = None
        elif name in _CODES:
            self._depth_of_codes -= 1

    def _characters(self, text: str) -> None:
        if self._text is not None and self._depth_of_codes == 0:
            self._text.append(text)

    def _refuse_entity(self, name: str, *_: object) -> None:
        raise UserError(
            f"{self._path}, line {self.parser.CurrentLineNumber:,}: the entity {name} is not one of XML's own five; "
            "entities can expand to text of any size, so replace it by its content."
        )


def _units(path: Path) -> Iterator[list[tuple[str, str]]]:
    """Language and text of the segments of each unit."""
    reader = _Reader(path)
    try:
        for block in _decoded(path):
            reader.parser.Parse(block, False)
            yield from reader.take()
        reader.parser.Parse(b"", True)
        yield from reader.take()
    except expat.ExpatError as error:
        raise UserError(
            f"{path}, line {error.lineno:,}, column {error.offset + 1}: the XML is not well-formed "
            f"({expat.ErrorString(error.code)}); correct the file."
        ) from error
    except UserError:
        raise
    except (LookupError, ValueError) as error:
        # The declaration itself is in UTF-16.
        raise UserError(f"{path} declares an encoding that is unknown ({error}); convert it to UTF-8.") from error


def _decoded(path: Path) -> Iterator[bytes | str]:
    """The blocks of a file: bytes if the parser knows their encoding, else decoded text."""
    blocks = read_blocks(path)
    first = next(blocks, b"")
    encoding = _encoding_of(path, first)
    if encoding is None:
        yield first
        yield from blocks
        return
    try:
        yield from codecs.iterdecode(chain((first,), blocks), encoding)
    except (UnicodeError, LookupError) as error:
        raise UserError(f"{path} is not {encoding} ({error}); correct it, or convert it to UTF-8.") from error


def _encoding_of(path: Path, beginning: bytes) -> str | None:
    """The encoding of a file that the parser does not know; `None` for one that it does."""
    if foreign_encoding(beginning[:1024]) == "UTF-32":
        return "utf-32"
    declared = _DECLARATION.match(beginning)
    if declared is None:
        return None
    name = declared[1].decode("ascii", "replace")
    try:
        codec = codecs.lookup(name)
        # Some codecs turn text into text, or bytes into bytes.
        "".encode(name)
    except (LookupError, ValueError) as error:
        raise UserError(f"{path} declares the encoding {name}, which is unknown; convert it to UTF-8.") from error
    return None if codec.name in _PARSED else codec.name


def _matches(language: str, wanted: str) -> bool:
    """Whether two language codes agree in all subtags that both have."""
    pairs = zip(*(code.lower().replace("_", "-").split("-") for code in (language, wanted)), strict=False)
    return all(one == other for one, other in pairs)
