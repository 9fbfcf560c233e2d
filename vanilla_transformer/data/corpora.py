"""Parallel text from files, with checks that name the file and the line."""

import gzip
import re
import stat
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from vanilla_transformer.errors import UserError
from vanilla_transformer.files import describe

from .utf8 import BEGINNING, NUL, check_beginning


# How many pairs of a text its languages are told by.
_COMPARED_PAIRS = 2000


@dataclass(slots=True)
class Rejections:
    """Pairs that cannot be used: refused with an error, or dropped, counted and shown by example.

    Args:
        policy: `refuse` raises at the first such pair; `drop` leaves it out.
    """

    policy: Literal["drop", "refuse"] = "drop"
    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, place: str) -> None:
        """Record a pair.

        Args:
            reason: What is wrong, the same words for every such pair.
            place: File and line, and what was found there.

        Raises:
            UserError: The policy is to refuse.
        """
        if self.policy == "refuse":
            raise UserError(f"{place}: {reason}; correct the line, or drop such pairs with --invalid_pairs drop.")
        self.counts[reason] += 1
        self.examples.setdefault(reason, place)

    def summary(self) -> str:
        """One clause a reason: how many pairs were dropped, why, and where the first of them stands."""
        return "; ".join(
            f"dropped {count:,}: {reason} (first: {self.examples[reason]})"
            for reason, count in self.counts.most_common()
        )


class Pair(NamedTuple):
    """A sentence pair.

    Args:
        number: Line, record or unit that it stands in, from 1 on.
        source: Source text.
        target: Target text.
        language: Code of the target's language, if the text has one for each pair.
    """

    number: int
    source: str
    target: str
    language: str | None = None


class PairSource(ABC):
    """Sentence pairs, read one at a time from wherever they are kept.

    Attributes:
        names: Names of the files, or of the data set.
        files: The files, if there are any.
        unit: What a pair is called in messages: a line, a record.
    """

    names: tuple[str, ...]
    files: tuple[Path, ...]
    unit = "line"

    @abstractmethod
    def check_lines(self) -> int | None:
        """Count the pairs, usable or not, and refuse text that cannot be read.

        Returns:
            The number of pairs; `None` if only reading all of a stream would tell.

        Raises:
            UserError: There is none, or the text is damaged.
        """

    @abstractmethod
    def digests(self) -> Iterator[bytes]:
        """Digests of the content, which tell one text from another."""

    @property
    @abstractmethod
    def layout(self) -> object:
        """The options that decide what is read from the content, as JSON holds them."""

    @abstractmethod
    def read(self, rejections: Rejections) -> Iterator[Pair]:
        """Read the pairs as they stand there, empty sides included; what is no pair goes to `rejections`."""

    def tagged_pairs(self, rejections: Rejections) -> Iterator[Pair]:
        """Read the pairs one at a time, with the target's language.

        Args:
            rejections: Receives what is no pair, not UTF-8 or has an empty side.

        Returns:
            Pairs without surrounding white space.

        Raises:
            UserError: A pair is unusable and the policy is to refuse.
        """
        return self.usable(self.read(rejections), rejections)

    def usable(self, pairs: Iterable[Pair], rejections: Rejections) -> Iterator[Pair]:
        """Strip pairs of surrounding white space, and leave out those with a NUL character or an empty side."""
        for pair in pairs:
            source, target = pair.source.strip(), pair.target.strip()
            if "\0" in source or "\0" in target:
                rejections.add(NUL, self.place(pair.number))
            elif source and target:
                yield Pair(pair.number, source, target, pair.language)
            else:
                rejections.add(f"the {'target' if source else 'source'} is empty", self.place(pair.number))

    def pairs(self, rejections: Rejections) -> Iterator[tuple[int, str, str]]:
        """Read the pairs one at a time.

        Args:
            rejections: As for `tagged_pairs`.

        Returns:
            Number from 1 on, source and target, without surrounding white space.

        Raises:
            UserError: As for `tagged_pairs`.
        """
        return (pair[:3] for pair in self.tagged_pairs(rejections))

    def place(self, number: int) -> str:
        """Name line `number`, as error messages do."""
        return f"{self}, {self.unit} {number:,}"

    def __str__(self) -> str:
        return " / ".join(self.names)


class FileSource(PairSource):
    """Sentence pairs in files, which may be compressed with gzip if their names end in `.gz`."""

    @property
    def names(self) -> tuple[str, ...]:
        """Paths of the files."""
        return tuple(str(path) for path in self.files)

    def digests(self) -> Iterator[bytes]:
        """SHA-256 of each file."""
        for path in self.files:
            yield bytes.fromhex(describe(path, "sha256")["sha256"])

    def check_files(self) -> None:
        """Refuse files that are missing, folders, pipes or unreadable.

        Raises:
            UserError: As said.
        """
        for path in self.files:
            try:
                mode = path.stat().st_mode
                if stat.S_ISDIR(mode):
                    raise UserError(f"{path} is a folder; give a text file.")
                # To open a pipe may wait for its writer for ever.
                if not stat.S_ISREG(mode):
                    raise UserError(
                        f"{path} is a pipe or a device, which can be read only once, and this text is read several "
                        "times; write it to a file first, which may be compressed (.gz)."
                    )
                path.open("rb").close()
            except FileNotFoundError as error:
                raise UserError(
                    f"{path} does not exist; check the path (relative paths start at {Path.cwd()})."
                ) from error
            except OSError as error:
                raise UserError(f"{path} cannot be read ({error.strerror}); check its permissions.") from error

    def check_lines(self) -> int:
        """Count the lines, as `PairSource.check_lines` says; files that stand side by side must have equally many.

        Unchanged files are read once only, however often they are counted.
        """
        files = tuple(self.files)
        statuses = [path.stat() for path in files]
        return _count(self.count, files, tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in statuses))

    @staticmethod
    def count(files: tuple[Path, ...]) -> int:
        """Read files to count their lines, as `check_lines` says."""
        counts = [_count_lines(path) for path in files]
        for path, count in zip(files, counts, strict=True):
            if count == 0:
                raise UserError(f"{path} is empty; it must hold at least one sentence pair.")
        if len(counts) == 2 and counts[0] != counts[1]:
            raise UserError(
                f"{files[0]} has {counts[0]:,} lines and {files[1]} has {counts[1]:,}; parallel files must "
                "have one line for each pair, so align them again."
            )
        return counts[0]


@dataclass(frozen=True)
class ParallelText(FileSource):
    """Sentence pairs in UTF-8: one text file per language, line N beside line N, or one tab-separated file.

    Args:
        files: Source file and target file, or a single tab-separated file.
        columns: Numbers, from 1 on, of the source's and the target's column; for a tab-separated file only. `None`
            means that it has exactly two columns, source first.
        language_column: Number of the column with the code of the target's language, beside `columns`.

    Raises:
        UserError: A file is missing, a folder, a pipe or unreadable, or the arguments contradict each other.
    """

    files: tuple[Path, ...]
    columns: tuple[int, int] | None = None
    language_column: int | None = None

    def __post_init__(self) -> None:
        if len(self.files) not in (1, 2):
            raise UserError(
                f"Parallel text was given as {len(self.files)} files; give a source and a target file, or one "
                "tab-separated file."
            )
        if self.columns is not None and len(self.files) == 2:
            raise UserError("--tsv_columns was given with two files; it applies to one tab-separated file.")
        if self.columns is not None and (min(self.columns) < 1 or self.columns[0] == self.columns[1]):
            raise UserError(
                f"--tsv_columns is {self.columns[0]} {self.columns[1]}; give two different column numbers from 1 on."
            )
        if self.language_column is not None and (self.columns is None or self.language_column in (0, *self.columns)):
            raise UserError(
                f"--language_column is {self.language_column}; in a tab-separated file it is the number of a third "
                "column, from 1 on, beside two --tsv_columns."
            )
        self.check_files()

    @property
    def layout(self) -> object:
        """The columns, if they were chosen."""
        return self.columns if self.language_column is None else [self.columns, self.language_column]

    def read(self, rejections: Rejections) -> Iterator[Pair]:
        """Read the lines as they stand there."""
        with open_file(self.files[0]) as first, open_file(self.files[-1]) as second:
            lines = zip(first, second, strict=True) if len(self.files) == 2 else ((line,) for line in first)
            for number, raw in enumerate(lines, start=1):
                sides = self._sides(number, raw, rejections)
                if sides is not None:
                    yield Pair(number, *sides)

    def _sides(self, number: int, raw: tuple[bytes, ...], rejections: Rejections) -> tuple[str, ...] | None:
        """Decode a line, and split it if it is tab-separated; `None` if that fails."""
        texts = []
        for path, line in zip(self.files, raw, strict=True):
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                found = f"{path}, line {number:,}, byte {error.start + 1} (0x{line[error.start]:02x})"
                rejections.add("the text is not UTF-8", found)
                return None
            texts.append(text.removeprefix("\ufeff") if number == 1 else text)
        if len(texts) == 2:
            return texts[0], texts[1]
        cells = texts[0].rstrip("\r\n").split("\t")
        if self.columns is None:
            if len(cells) == 2:
                return cells[0], cells[1]
            rejections.add(
                "a tab-separated line must have two columns (choose two of more with --tsv_columns)",
                f"{self.place(number)} with {len(cells)} columns",
            )
            return None
        wanted = self.columns if self.language_column is None else (*self.columns, self.language_column)
        if len(cells) >= max(wanted):
            return tuple(cells[column - 1].strip() for column in wanted)
        rejections.add(
            "a tab-separated line lacks a column that --tsv_columns names",
            f"{self.place(number)} with {len(cells)} columns",
        )
        return None


def check_language_order(train: PairSource, valid: PairSource) -> None:
    """Refuse training and validation text whose languages stand in opposite order.

    Compares the words of the first pairs: the training source must look more like the validation source than like the
    validation target. Text of which this cannot be said (the same language on both sides, say) passes.

    Args:
        train: Training pairs.
        valid: Validation pairs.

    Raises:
        UserError: Each side of one looks like the other side of the other.
    """
    train_sides, valid_sides = (_word_frequencies(text) for text in (train, valid))
    straight = [_overlap(train_sides[side], valid_sides[side]) for side in (0, 1)]
    crossed = [_overlap(train_sides[side], valid_sides[1 - side]) for side in (0, 1)]
    if all(cross > 1.5 * same for cross, same in zip(crossed, straight, strict=True)):
        raise UserError(
            f"The languages of {train} and {valid} stand in opposite order: the source side of the one looks like the "
            "target side of the other; exchange the files (or the --tsv_columns) of one of them."
        )


def check_language_suffixes(text: PairSource, source_language: str | None, target_language: str | None) -> None:
    """Refuse files whose names contradict the languages that were declared.

    Args:
        text: Pairs in two files, whose names may end in a language's code (`train.de`).
        source_language: Code of the source language, or `None` if it was not declared.
        target_language: Code of the target language, or `None` if it was not declared.

    Raises:
        UserError: The source file is named after the target language, or the target file after the source language.
    """
    if len(text.files) != 2 or source_language is None or target_language is None:
        return
    suffixes = [Path(path.name.removesuffix(".gz")).suffix.removeprefix(".").lower() for path in text.files]
    if suffixes[0] == target_language.lower() or suffixes[1] == source_language.lower():
        raise UserError(
            f"{text.files[0]} is given as the source and {text.files[1]} as the target, but the languages are "
            f"declared as {source_language} to {target_language}; exchange the files or the languages."
        )


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading, through gzip if its name ends in `.gz`."""
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def read_blocks(path: Path) -> Iterator[bytes]:
    """Read a file in blocks.

    Args:
        path: File, compressed if its name ends in `.gz`.

    Yields:
        The content, a mebibyte at a time.

    Raises:
        UserError: It is not compressed, or damaged, though its name ends in `.gz`.
    """
    try:
        with open_file(path) as file:
            while block := file.read(1 << 20):
                yield block
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be decompressed ({error}); compress it again with gzip.") from error


@lru_cache(maxsize=16)
def _count(
    count: Callable[[tuple[Path, ...]], int], files: tuple[Path, ...], _versions: tuple[tuple[int, ...], ...]
) -> int:
    return count(files)


def _count_lines(path: Path) -> int:
    """Number of lines; a last line without an end counts. What is recognised as another encoding is refused."""
    count, last = 0, b"\n"
    for number, block in enumerate(read_blocks(path)):
        if number == 0:
            check_beginning(path, block[:BEGINNING])
        count += block.count(b"\n")
        last = block[-1:]
    return count + (last != b"\n")


def _word_frequencies(text: PairSource) -> tuple[Counter[str], Counter[str]]:
    """Relative frequencies of the words of both sides of the first pairs."""
    counts = (Counter(), Counter())
    for _, *sides in islice(text.pairs(Rejections("drop")), _COMPARED_PAIRS):
        for counter, side in zip(counts, sides, strict=True):
            # Scripts without spaces are compared by character.
            words = re.findall(r"\w+", side.lower())
            counter.update(words if all(word.isascii() for word in words) else [*words, *"".join(words)])
    return tuple(
        Counter({word: count / counter.total() for word, count in counter.items()}) if counter else counter
        for counter in counts
    )


def _overlap(one: Counter[str], other: Counter[str]) -> float:
    """Shared probability mass of two distributions, 0 to 1."""
    return (one & other).total()
