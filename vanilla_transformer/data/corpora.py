"""Parallel text from files, with checks that name the file and the line."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

from vanilla_transformer.errors import UserError


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


@dataclass(frozen=True, slots=True)
class ParallelText:
    """Sentence pairs in UTF-8: one text file per language, line N beside line N, or one tab-separated file.

    Args:
        files: Source file and target file, or a single tab-separated file.
        columns: Numbers, from 1 on, of the source's and the target's column; for a tab-separated file only. `None`
            means that it has exactly two columns, source first.

    Raises:
        UserError: A file is missing, a folder or unreadable, or the arguments contradict each other.
    """

    files: tuple[Path, ...]
    columns: tuple[int, int] | None = None

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
        for path in self.files:
            try:
                if path.is_dir():
                    raise UserError(f"{path} is a folder; give a text file.")
                path.open("rb").close()
            except FileNotFoundError as error:
                raise UserError(
                    f"{path} does not exist; check the path (relative paths start at {Path.cwd()})."
                ) from error
            except OSError as error:
                raise UserError(f"{path} cannot be read ({error.strerror}); check its permissions.") from error

    def check_lines(self) -> int:
        """Count the pairs.

        Returns:
            The number of lines.

        Raises:
            UserError: A file is empty, or the two files have different numbers of lines.
        """
        counts = [_count_lines(path) for path in self.files]
        for path, count in zip(self.files, counts, strict=True):
            if count == 0:
                raise UserError(f"{path} is empty; it must hold at least one sentence pair.")
        if len(counts) == 2 and counts[0] != counts[1]:
            raise UserError(
                f"{self.files[0]} has {counts[0]:,} lines and {self.files[1]} has {counts[1]:,}; parallel files must "
                "have one line for each pair, so align them again."
            )
        return counts[0]

    def pairs(self, rejections: Rejections) -> Iterator[tuple[int, str, str]]:
        """Read the pairs one at a time.

        Args:
            rejections: Receives lines that are not UTF-8, have empty sides or too few or many columns.

        Yields:
            Line number from 1 on, source and target, without surrounding white space.

        Raises:
            UserError: A line is unusable and the policy is to refuse.
        """
        with self.files[0].open("rb") as first, self.files[-1].open("rb") as second:
            lines = zip(first, second, strict=True) if len(self.files) == 2 else ((line,) for line in first)
            for number, raw in enumerate(lines, start=1):
                sides = self._sides(number, raw, rejections)
                if sides is None:
                    continue
                source, target = (side.strip() for side in sides)
                for side, name in ((source, "source"), (target, "target")):
                    if not side:
                        rejections.add(f"the {name} is empty", self.place(number))
                        break
                else:
                    yield number, source, target

    def place(self, number: int) -> str:
        """Name line `number`, as error messages do."""
        return f"{' / '.join(str(path) for path in self.files)}, line {number:,}"

    def _sides(self, number: int, raw: tuple[bytes, ...], rejections: Rejections) -> tuple[str, str] | None:
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
        if len(cells) >= max(self.columns):
            return cells[self.columns[0] - 1], cells[self.columns[1] - 1]
        rejections.add(
            "a tab-separated line lacks a column that --tsv_columns names",
            f"{self.place(number)} with {len(cells)} columns",
        )
        return None


def check_language_order(train: ParallelText, valid: ParallelText, *, num_pairs: int = 2000) -> None:
    """Refuse training and validation text whose languages stand in opposite order.

    Compares the words of each side: the training source must look more like the validation source than like the
    validation target. Text of which this cannot be said (the same language on both sides, say) passes.

    Args:
        train: Training pairs.
        valid: Validation pairs.
        num_pairs: How many pairs of each are looked at.

    Raises:
        UserError: Each side of one looks like the other side of the other.
    """
    train_sides, valid_sides = (_word_frequencies(text, num_pairs) for text in (train, valid))
    straight = [_overlap(train_sides[side], valid_sides[side]) for side in (0, 1)]
    crossed = [_overlap(train_sides[side], valid_sides[1 - side]) for side in (0, 1)]
    if all(cross > 1.5 * same for cross, same in zip(crossed, straight, strict=True)):
        raise UserError(
            f"The languages of {' / '.join(map(str, train.files))} and {' / '.join(map(str, valid.files))} stand in "
            "opposite order: the source side of the one looks like the target side of the other; exchange the files "
            "(or the --tsv_columns) of one of them."
        )


def check_language_suffixes(text: ParallelText, source_language: str | None, target_language: str | None) -> None:
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
    suffixes = [path.suffix.removeprefix(".").lower() for path in text.files]
    if suffixes[0] == target_language.lower() or suffixes[1] == source_language.lower():
        raise UserError(
            f"{text.files[0]} is given as the source and {text.files[1]} as the target, but the languages are "
            f"declared as {source_language} to {target_language}; exchange the files or the languages."
        )


def _count_lines(path: Path) -> int:
    """Number of lines; a last line without an end counts."""
    count, last = 0, b"\n"
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            count += block.count(b"\n")
            last = block[-1:]
    return count + (last != b"\n")


def _word_frequencies(text: ParallelText, num_pairs: int) -> tuple[Counter[str], Counter[str]]:
    """Relative frequencies of the words of both sides of the first pairs."""
    counts = (Counter(), Counter())
    for _, *sides in islice(text.pairs(Rejections("drop")), num_pairs):
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
