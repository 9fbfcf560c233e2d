"""Parallel text in TMX files (Translation Memory eXchange 1.4b), read as a stream."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.parsers import expat

from vanilla_transformer.errors import UserError

from .corpora import FileSource, Pair, Rejections, read_blocks


# Elements inside a segment whose content is another format's mark-up, not text.
_CODES = ("bpt", "ept", "it", "ph", "ut")


@dataclass(frozen=True)
class TranslationMemory(FileSource):
    """Sentence pairs in the units of a TMX file.

    A language matches another if one is the other's beginning: `en-GB` is `en`, but not `en-US`.

    Args:
        files: The file, alone.
        languages: Codes of the source and the target language.

    Raises:
        UserError: The file is missing, a folder or unreadable.
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
        """Read the file to count its units; also refuse XML that is not well-formed or unsafe."""
        count = sum(1 for _ in _units(files[0]))
        if count == 0:
            raise UserError(f"{files[0]} has no <tu>; it must be a TMX file with at least one unit.")
        return count

    def read(self, rejections: Rejections) -> Iterator[Pair]:
        """Read the units as they stand there; of several segments in one language, the first counts."""
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
        self._depth_of_codes = 0
        self.parser = expat.ParserCreate()
        self.parser.buffer_text = True
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._characters
        # An entity that stands for others a thousandfold fills the memory, and an external one reads other files.
        self.parser.EntityDeclHandler = self._refuse_entity
        self.parser.SkippedEntityHandler = self._refuse_entity

    def take(self) -> list[list[tuple[str, str]]]:
        units, self._units = self._units, []
        return units

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "tu":
            self._segments = []
        elif name == "tuv":
            self._language = attributes.get("xml:lang", attributes.get("lang", ""))
        elif name == "seg":
            self._text = []
        elif name in _CODES:
            self._depth_of_codes += 1

    def _end(self, name: str) -> None:
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
            "entities can hide text of any size, so replace it by what it stands for."
        )


def _units(path: Path) -> Iterator[list[tuple[str, str]]]:
    """Language and text of the segments of each unit."""
    reader = _Reader(path)
    try:
        for block in read_blocks(path):
            reader.parser.Parse(block, False)
            yield from reader.take()
        reader.parser.Parse(b"", True)
        yield from reader.take()
    except expat.ExpatError as error:
        raise UserError(
            f"{path}, line {error.lineno:,}, column {error.offset + 1}: the XML is not well-formed "
            f"({expat.ErrorString(error.code)}); correct the file."
        ) from error


def _matches(language: str, wanted: str) -> bool:
    """Whether the subtags that both codes have are the same."""
    pairs = zip(*(code.lower().replace("_", "-").split("-") for code in (language, wanted)), strict=False)
    return all(one == other for one, other in pairs)
