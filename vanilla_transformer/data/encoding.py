"""Text to token ids, once, in an Arrow file that is memory-mapped afterwards."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.compute
from datasets import Dataset
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from vanilla_transformer.errors import UserError

from .corpora import ParallelText, Rejections


# Raised when what an encoded folder holds changes, so that older folders are made anew.
FORMAT_VERSION = 1

_SCHEMA = pyarrow.schema({"input_ids": pyarrow.list_(pyarrow.int32()), "labels": pyarrow.list_(pyarrow.int32())})


class EncodedCorpus:
    """Token ids of sentence pairs, memory-mapped; every source and target ends with `</s>`.

    Args:
        folder: Folder that `encode` made.

    Attributes:
        fingerprint: Digest of the text, the vocabulary and the options that it was made from.
        source_lengths: Number of tokens of each source, `</s>` included, int32 [num_pairs].
        target_lengths: Number of tokens of each target, likewise.
        report: Counts of pairs read, kept and dropped, with reasons.
    """

    def __init__(self, folder: Path):
        self.report: dict = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        self.fingerprint: str = self.report["fingerprint"]
        self.dataset = Dataset.from_file(str(folder / "pairs.arrow"))
        self._rows = self.dataset.with_format("arrow")
        self.source_lengths, self.target_lengths = (
            pyarrow.compute.list_value_length(self.dataset.data.column(name)).to_numpy()
            for name in ("input_ids", "labels")
        )

    def __len__(self) -> int:
        return len(self.dataset)

    def rows(self, indices: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Read pairs.

        Args:
            indices: Pair numbers [B].

        Returns:
            B source id arrays and B target id arrays, int32.
        """
        table = self._rows[indices]
        return tuple(_split(table.column(name)) for name in ("input_ids", "labels"))


def encode(
    text: ParallelText,
    tokenizer: PreTrainedTokenizerBase,
    cache_dir: Path,
    *,
    max_length: int,
    invalid_pairs: str = "drop",
    show_progress: bool = False,
) -> EncodedCorpus:
    """Turn text into ids, or open what an earlier call with the same text, vocabulary and options left.

    Args:
        text: Sentence pairs.
        tokenizer: Turns both sides into ids and appends `</s>`.
        cache_dir: Folder that holds one folder for each encoded corpus.
        max_length: Largest number of tokens of a side, `</s>` included; longer pairs are invalid.
        invalid_pairs: `drop` or `refuse`, for pairs that are too long, empty, not UTF-8 or lack columns.
        show_progress: Whether to draw a progress bar.

    Returns:
        The corpus, with at least one pair.

    Raises:
        UserError: Files of unequal length, an invalid pair that is refused, or no pair left.
    """
    num_lines = text.check_lines()
    options = (FORMAT_VERSION, fingerprint_of_tokenizer(tokenizer), max_length, invalid_pairs)
    fingerprint = fingerprint_of_text(text, options)
    folder = cache_dir / fingerprint
    if not folder.exists():
        partial = cache_dir / f"{fingerprint}.partial-{os.getpid()}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            rejections = Rejections(invalid_pairs)
            kept = _write(text, tokenizer, partial / "pairs.arrow", max_length, rejections, num_lines, show_progress)
            report = {
                "fingerprint": fingerprint,
                "files": [str(path) for path in text.files],
                "pairs_read": num_lines,
                "pairs_kept": kept,
                "dropped": dict(rejections.counts),
                "first_dropped": rejections.examples,
                "summary": rejections.summary(),
            }
            if kept == 0:
                raise UserError(
                    f"None of the {num_lines:,} lines of {' / '.join(map(str, text.files))} can be used: "
                    f"{rejections.summary()}."
                )
            (partial / "report.json").write_text(json.dumps(report, indent=2, ensure_ascii=False), encoding="utf-8")
            try:
                partial.rename(folder)
            except OSError:
                # Another process may have finished the same corpus first.
                if not folder.exists():
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return EncodedCorpus(folder)


def fingerprint_of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest of everything that decides how a tokenizer turns text into ids."""
    state = {
        "backend": json.loads(tokenizer.backend_tokenizer.to_str()),
        "split_special_tokens": tokenizer.split_special_tokens,
    }
    # Truncation and padding are set by calls, not by the vocabulary.
    state["backend"].update(truncation=None, padding=None)
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def fingerprint_of_text(text: ParallelText, options: Sequence[object]) -> str:
    """Digest of the content of text files, and of options that decide what is made of them."""
    digest = hashlib.sha256()
    for path in text.files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    digest.update(json.dumps([text.columns, *options]).encode())
    return digest.hexdigest()[:32]


def _write(
    text: ParallelText,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    max_length: int,
    rejections: Rejections,
    num_lines: int,
    show_progress: bool,
) -> int:
    """Write the ids of all usable pairs; return their number."""
    kept = 0
    pairs = text.pairs(rejections)
    with (
        pyarrow.OSFile(str(path), "wb") as file,
        pyarrow.ipc.new_stream(file, _SCHEMA) as writer,
        tqdm(
            total=num_lines, desc=f"Encoding {text.files[0].name}", unit="pair", unit_scale=True,
            disable=not show_progress,
        ) as progress,
    ):  # fmt: skip
        while block := list(islice(pairs, 2000)):
            sources, targets = (_encode_block(tokenizer, [pair[side] for pair in block]) for side in (1, 2))
            columns: tuple[list, list] = ([], [])
            for (number, _, _), source, target in zip(block, sources, targets, strict=True):
                longest = max(len(source), len(target))
                if longest > max_length:
                    rejections.add(
                        f"a side is longer than --max_length {max_length} tokens",
                        f"{text.place(number)} with {longest} tokens",
                    )
                    continue
                columns[0].append(source)
                columns[1].append(target)
            arrays = [pyarrow.array(column, type=pyarrow.list_(pyarrow.int32())) for column in columns]
            writer.write_batch(pyarrow.record_batch(arrays, schema=_SCHEMA))
            kept += len(columns[0])
            progress.update(block[-1][0] - progress.n)
        progress.update(num_lines - progress.n)
    return kept


def _encode_block(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    # Without the length warning: pairs beyond `max_length` are reported with their line.
    return tokenizer(list(texts), return_attention_mask=False, verbose=False)["input_ids"]


def _split(column: pyarrow.ChunkedArray) -> list[np.ndarray]:
    """The rows of a column of lists, as views of one array."""
    joined = column.combine_chunks()
    offsets = joined.offsets.to_numpy()
    values = joined.values.to_numpy()
    return [values[start:end] for start, end in pairwise(offsets)]


def iterate_texts(text: ParallelText, invalid_pairs: str = "drop") -> Iterator[str]:
    """Both sides of every usable pair in turn, as the training of a shared vocabulary wants them."""
    for _, source, target in text.pairs(Rejections(invalid_pairs)):
        yield source
        yield target
