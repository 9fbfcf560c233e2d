"""Encodes text as token ids, once, into an Arrow file that is memory-mapped afterwards."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.compute
from datasets import Dataset
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from vanilla_transformer.errors import UserError

from .cached_folders import write_whole
from .corpora import Pair, PairSource, Rejections


# Increased when the content of encoded folders changes, so that older folders are not reused.
FORMAT_VERSION = 1

# Number of pairs to tokenise at once.
_BLOCK = 2000

PAIRS_SCHEMA = pyarrow.schema({"input_ids": pyarrow.list_(pyarrow.int32()), "labels": pyarrow.list_(pyarrow.int32())})


class EncodedCorpus:
    """Token ids of sentence pairs, memory-mapped; every source and target ends with `</s>`.

    Args:
        folder: Folder that `encode` made.

    Attributes:
        fingerprint: Digest of its text, vocabulary and options.
        report: Counts of pairs read, kept and dropped, with reasons.
    """

    def __init__(self, folder: Path):
        self.report: dict = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        self.fingerprint: str = self.report["fingerprint"]
        self.dataset = Dataset.from_file(str(folder / "pairs.arrow"))
        self._rows = self.dataset.with_format("arrow")

    def __len__(self) -> int:
        return len(self.dataset)

    # Computed on first use, since `DropoutCorpus` never needs the lengths of its base corpus.
    @cached_property
    def source_lengths(self) -> np.ndarray:
        """Number of tokens of each source, `</s>` included, int32 [num_pairs]."""
        return self._lengths("input_ids")

    @cached_property
    def target_lengths(self) -> np.ndarray:
        """Number of tokens of each target, `</s>` included, int32 [num_pairs]."""
        return self._lengths("labels")

    def begin_epoch(self, epoch: int) -> None:
        """Do nothing: every epoch has the same ids."""

    def rows(self, indices: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Read pairs.

        Args:
            indices: Pair numbers [B].

        Returns:
            B source id arrays and B target id arrays, int32.
        """
        table = self._rows[indices]
        return tuple(_split(table.column(name)) for name in ("input_ids", "labels"))

    def _lengths(self, column: str) -> np.ndarray:
        # Chunk by chunk, because joining the results would need their memory twice.
        lengths, start = np.empty(len(self), dtype=np.int32), 0
        for chunk in self.dataset.data.column(column).chunks:
            lengths[start : start + len(chunk)] = pyarrow.compute.list_value_length(chunk)
            start += len(chunk)
        return lengths


def encode(
    text: PairSource,
    tokenizer: PreTrainedTokenizerBase,
    cache_dir: Path,
    *,
    max_length: int,
    invalid_pairs: str = "drop",
    language_tags: bool = False,
    target_language: str | None = None,
    mark_words: bool = False,
    show_progress: bool = False,
) -> EncodedCorpus:
    """Encode text as ids, or open the result of an earlier call with the same text, vocabulary and options.

    Args:
        text: Sentence pairs.
        tokenizer: Turns both sides into ids and appends `</s>`.
        cache_dir: Folder with one folder per encoded corpus.
        max_length: Largest number of tokens of a side, `</s>` and tag included; longer pairs are invalid.
        invalid_pairs: `drop` or `refuse`, for pairs that are too long, empty, not UTF-8 or lack columns.
        language_tags: Whether each source begins with the vocabulary's tag for the target language (Johnson et al.,
            2017).
        target_language: Target language of pairs for which the text gives none.
        mark_words: Whether ids that begin a word are complemented (`~id`), which `DropoutCorpus` needs.
        show_progress: Whether to draw a progress bar.

    Returns:
        The corpus, with at least one pair.

    Raises:
        UserError: Files differ in length, an invalid pair is refused, or no pair is left.
    """
    num_lines = text.check_lines()
    encoder = PairEncoder(
        tokenizer,
        max_length=max_length,
        language_tags=language_tags,
        target_language=target_language,
        mark_words=mark_words,
    )
    fingerprint = fingerprint_of_text(text, encoder.options(invalid_pairs))
    folder = cache_dir / fingerprint

    def write(partial: Path) -> None:
        rejections = Rejections(invalid_pairs)
        kept = _write(text, encoder, partial, rejections, num_lines, show_progress)
        pairs_read = kept + rejections.counts.total()
        report = {
            "fingerprint": fingerprint,
            "files": list(text.names),
            "pairs_read": pairs_read,
            "pairs_kept": kept,
            "dropped": dict(rejections.counts),
            "first_dropped": rejections.examples,
            "summary": rejections.summary(),
        }
        if kept == 0:
            raise nothing_usable(text, pairs_read, rejections)
        # Bytes of file names that are not UTF-8 are escaped.
        content = json.dumps(report, indent=2, ensure_ascii=False)
        (partial / "report.json").write_text(content, encoding="utf-8", errors="backslashreplace")

    write_whole(folder, write)
    return EncodedCorpus(folder)


def nothing_usable(text: PairSource, pairs_read: int, rejections: Rejections) -> UserError:
    """The error for text without a usable pair, with the reasons and their counts."""
    return UserError(f"None of the {pairs_read:,} {text.unit}s of {text} can be used: {rejections.summary()}.")


@contextmanager
def new_pairs_file(folder: Path) -> Iterator[pyarrow.ipc.RecordBatchStreamWriter]:
    """The writer of a corpus's ids, which `EncodedCorpus` reads."""
    with (
        pyarrow.OSFile(str(folder / "pairs.arrow"), "wb") as file,
        pyarrow.ipc.new_stream(file, PAIRS_SCHEMA) as writer,
    ):
        yield writer


def fingerprint_of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest of everything that decides how a tokenizer turns text into ids."""
    state = {
        "backend": json.loads(tokenizer.backend_tokenizer.to_str()),
        "split_special_tokens": tokenizer.split_special_tokens,
    }
    # Truncation and padding are set by calls, not by the vocabulary.
    state["backend"].update(truncation=None, padding=None)
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def fingerprint_of_text(text: PairSource, options: Sequence[object]) -> str:
    """Digest of the content of text, and of the options with which it is encoded."""
    digest = hashlib.sha256()
    for content in text.digests():
        digest.update(content)
    digest.update(json.dumps([text.layout, *options]).encode())
    return digest.hexdigest()[:32]


class PairEncoder:
    """Turns pairs into ids, a block at a time.

    Args:
        tokenizer: Turns both sides into ids and appends `</s>`.
        max_length: Largest number of tokens of a side, `</s>` and tag included.
        language_tags: Whether each source begins with the vocabulary's tag for the target language.
        target_language: Target language of pairs that give none.
        mark_words: Whether ids that begin a word are complemented (`~id`).
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        language_tags: bool = False,
        target_language: str | None = None,
        mark_words: bool = False,
    ):
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._tags: dict[str, int] | None = tokenizer.language_tags if language_tags else None
        self._target_language = target_language
        self._mark_words = mark_words

    def options(self, invalid_pairs: str) -> list[object]:
        """Everything but the text that the ids depend on, in JSON values."""
        options = [FORMAT_VERSION, fingerprint_of_tokenizer(self._tokenizer), self._max_length, invalid_pairs]
        if self._tags is not None:
            options += ["tagged", self._target_language]
        if self._mark_words:
            options.append("words")
        return options

    def __call__(
        self, text: PairSource, block: Sequence[Pair], rejections: Rejections
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Encode pairs.

        Args:
            text: Where the pairs come from.
            block: Pairs, at least one.
            rejections: Receives pairs that are too long, or in a language without a tag.

        Returns:
            Source ids and target ids of the others.
        """
        sources, targets = (self._ids([pair[side] for pair in block]) for side in (1, 2))
        kept: tuple[list[list[int]], list[list[int]]] = ([], [])
        for pair, source, target in zip(block, sources, targets, strict=True):
            if self._tags is not None:
                language = pair.language or self._target_language
                if language not in self._tags:
                    rejections.add(
                        "the vocabulary has no tag for the target's language",
                        f"{text.place(pair.number)} in {language or 'no language'}",
                    )
                    continue
                tag = self._tags[language]
                source = [~tag if self._mark_words else tag, *source]
            longest = max(len(source), len(target))
            if longest > self._max_length:
                rejections.add(
                    f"a side is longer than `max_length`, {self._max_length} tokens",
                    f"{text.place(pair.number)} with {longest} tokens",
                )
                continue
            kept[0].append(source)
            kept[1].append(target)
        return kept

    def _ids(self, texts: list[str]) -> list[list[int]]:
        # Without the length warning: pairs beyond `max_length` are reported with their line.
        encoded = self._tokenizer(texts, return_attention_mask=False, verbose=False)
        if not self._mark_words:
            return encoded["input_ids"]
        return [
            # Special tokens belong to no word (`None`); each counts as its own word.
            [
                ~index if word is None or word != previous else index
                for index, word, previous in zip(row.ids, row.word_ids, [None, *row.word_ids], strict=False)
            ]
            for row in encoded.encodings
        ]


def _write(
    text: PairSource,
    encoder: PairEncoder,
    folder: Path,
    rejections: Rejections,
    num_lines: int | None,
    show_progress: bool,
) -> int:
    """Write the ids of all usable pairs; return their number."""
    kept = 0
    pairs = text.tagged_pairs(rejections)
    with (
        new_pairs_file(folder) as writer,
        tqdm(
            total=num_lines, desc=f"Encoding {Path(text.names[0]).name}", unit="pair", unit_scale=True,
            disable=not show_progress,
        ) as progress,
    ):  # fmt: skip
        while block := list(islice(pairs, _BLOCK)):
            columns = encoder(text, block, rejections)
            arrays = [pyarrow.array(column, type=pyarrow.list_(pyarrow.int32())) for column in columns]
            writer.write_batch(pyarrow.record_batch(arrays, schema=PAIRS_SCHEMA))
            kept += len(columns[0])
            progress.update(block[-1].number - progress.n)
        progress.update(kept + rejections.counts.total() - progress.n)
    return kept


def _split(column: pyarrow.ChunkedArray) -> list[np.ndarray]:
    """The rows of a column of lists, as views of one array."""
    joined = column.combine_chunks()
    offsets = joined.offsets.to_numpy()
    values = joined.values.to_numpy()
    return [values[start:end] for start, end in pairwise(offsets)]


def iterate_texts(
    text: PairSource, rejections: Rejections | None = None, *, num_pairs: int | None = None
) -> Iterator[str]:
    """Sources and targets of usable pairs in turn, for the training of a shared vocabulary.

    Args:
        text: Sentence pairs.
        rejections: Receives pairs that are not usable; by default they are dropped.
        num_pairs: Largest number of pairs to take, evenly spaced, or from the beginning of a stream; `None` takes
            all.

    Yields:
        Source and target of each pair.
    """
    total = text.check_lines()
    pairs = text.pairs(Rejections() if rejections is None else rejections)
    if total is None:
        # Without a known length, pairs cannot be evenly spaced.
        total = num_pairs
        pairs = islice(pairs, num_pairs)
    wanted = total if num_pairs is None else min(num_pairs, total)
    for number, source, target in pairs:
        if wanted == total or number * wanted // total > (number - 1) * wanted // total:
            yield source
            yield target
