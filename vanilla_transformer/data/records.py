"""Parallel text in records: JSON lines, and data sets of the `datasets` library."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from vanilla_transformer.errors import UserError

from .corpora import FileSource, Pair, PairSource, Rejections, open_file


if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


@dataclass(frozen=True, slots=True)
class PairKeys:
    """The fields of a record that hold source and target.

    Without `keys`, these are tried in order: a field 'translation' with one text per language, fields named after the
    two languages, and fields 'source' and 'target'.

    Args:
        keys: Names of the fields of source and target, or `None`.
        languages: Codes of the source and the target language, or `None`.
        language_key: Name of the field with the code of the target's language, or `None`.
    """

    keys: tuple[str, str] | None = None
    languages: tuple[str, str] | None = None
    language_key: str | None = None

    def sides(self, record: object) -> tuple[str, ...]:
        """Read a record.

        Args:
            record: Mapping of names to values.

        Returns:
            Source, target and, with a `language_key`, the target's language.

        Raises:
            ValueError: A field is missing or holds no text; the message names it.
        """
        if not isinstance(record, Mapping):
            raise ValueError("the record is not an object with named fields")
        record, keys = self._resolve(record)
        sides = tuple(_text(record, key) for key in keys)
        return sides if self.language_key is None else (*sides, _text(record, self.language_key))

    def _resolve(self, record: Mapping) -> tuple[Mapping, tuple[str, str]]:
        if self.keys is not None:
            return record, self.keys
        if isinstance(record.get("translation"), Mapping):
            if self.languages is None:
                raise ValueError("the field 'translation' needs `source_language` and `target_language`")
            return {**record, **record["translation"]}, self.languages
        if self.languages is not None and all(language in record for language in self.languages):
            return record, self.languages
        return record, ("source", "target")


@dataclass(frozen=True)
class JsonLines(FileSource):
    """Sentence pairs in a file with one JSON object per line.

    Args:
        files: The file, alone.
        fields: The fields of source and target.

    Raises:
        UserError: The file is missing, a folder, a pipe or unreadable.
    """

    files: tuple[Path]
    fields: PairKeys

    def __post_init__(self) -> None:
        self.check_files()

    @property
    def layout(self) -> object:
        """Where the sides are."""
        return ["json", self.fields.keys, self.fields.languages, self.fields.language_key]

    def read(self, rejections: Rejections) -> Iterator[Pair]:
        """Read the objects without cleaning their texts."""
        with open_file(self.files[0]) as file:
            for number, line in enumerate(file, start=1):
                try:
                    pair = Pair(number, *self.fields.sides(_parse(line)))
                except ValueError as error:
                    rejections.add(str(error), self.place(number))
                else:
                    yield pair


@dataclass(frozen=True)
class DataSet(PairSource):
    """Sentence pairs in a data set: a name on the Hub, or a folder that `save_to_disk` wrote or that holds data files.

    Args:
        path: Name or folder.
        split: Name of the split.
        fields: The fields of source and target.
        config: Name of the data set's configuration, or `None`.
        revision: Commit, tag or branch on the Hub, or `None`.
        streaming: Whether records are read when they are needed, instead of being downloaded first.

    Raises:
        UserError: From all methods, when there is no such data set, configuration or split.
    """

    path: str
    split: str
    fields: PairKeys
    config: str | None = None
    revision: str | None = None
    streaming: bool = False

    files = ()
    unit = "record"

    @property
    def names(self) -> tuple[str, ...]:
        """Name and split."""
        return (f"{self.path} ({self.split})",)

    @property
    def layout(self) -> object:
        """Where the sides are."""
        return ["data set", self.fields.keys, self.fields.languages, self.fields.language_key]

    @cached_property
    def records(self) -> "Dataset | IterableDataset":
        """The split, opened once; read it from the beginning only."""
        return self.open()

    def open(self) -> "Dataset | IterableDataset":
        """Open the split again, so that the state of a stream does not depend on earlier reading."""
        # Slow to import, and not needed for files.
        import datasets

        try:
            if (Path(self.path) / "dataset_dict.json").is_file():
                found = datasets.load_from_disk(self.path)[self.split]
            elif (Path(self.path) / "state.json").is_file():
                found = datasets.load_from_disk(self.path)
            else:
                return datasets.load_dataset(
                    self.path,
                    self.config,
                    split=self.split,
                    revision=self.revision,
                    streaming=self.streaming,
                )
        except (OSError, ValueError, LookupError, datasets.exceptions.DatasetsError) as error:
            # Names in backticks are read as our caller's arguments; these are those of `datasets`.
            reason = " ".join(str(error).split()).replace("`", "'") or type(error).__name__
            raise UserError(
                f"The data set {self.path} has no readable split {self.split} ({reason}); give the name of a data set "
                "on the Hub or a folder, and one of its splits."
            ) from error
        return found.to_iterable_dataset() if self.streaming else found

    def check_lines(self) -> int | None:
        """Count the records, as `PairSource.check_lines` says."""
        if self.streaming:
            if next(iter(self.records), None) is None:
                raise UserError(f"{self} is empty; it must hold at least one sentence pair.")
            return None
        if len(self.records) == 0:
            raise UserError(f"{self} is empty; it must hold at least one sentence pair.")
        return len(self.records)

    def digests(self) -> Iterator[bytes]:
        """Digest of the pairs; for a stream, which may be endless, only of its name."""
        digest = hashlib.sha256()
        if self.streaming:
            digest.update(json.dumps([self.path, self.split, self.config, self.revision]).encode())
        else:
            for pair in self.read(Rejections("drop")):
                digest.update(json.dumps(pair).encode())
        yield digest.digest()

    def read(self, rejections: Rejections) -> Iterator[Pair]:
        """Read the records without cleaning their texts."""
        return self._pairs(_rows(self.records), rejections, 1)

    def pairs_of(self, rows: Iterable[Mapping], rejections: Rejections, first: int) -> Iterator[Pair]:
        """Turn records into pairs.

        Args:
            rows: Records.
            rejections: Receives records that hold no pair, or a pair with an empty side.
            first: Number of the first record.

        Returns:
            The pairs, without surrounding white space.
        """
        return self.usable(self._pairs(rows, rejections, first), rejections)

    def _pairs(self, rows: Iterable[Mapping], rejections: Rejections, first: int) -> Iterator[Pair]:
        for number, row in enumerate(rows, start=first):
            try:
                pair = Pair(number, *self.fields.sides(row))
            except ValueError as error:
                rejections.add(str(error), self.place(number))
            else:
                yield pair


def _rows(records: "Dataset | IterableDataset") -> Iterator[Mapping]:
    # Reading blocks of columns is many times faster than reading rows.
    for block in records.iter(batch_size=1000):
        for values in zip(*block.values(), strict=True):
            yield dict(zip(block, values, strict=True))


def _parse(line: bytes) -> object:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError("the text is not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise ValueError("the line is not JSON") from error


def _text(record: Mapping, key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        found = "lacks" if key not in record else "has no text in"
        raise ValueError(f"the record {found} the field {key!r} (choose fields with `pair_keys`)")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the field {key!r} holds half a surrogate pair") from error
    return value
