"""BPE-dropout (Provilkov et al., 2020) with a seed, which the dropout of `tokenizers` lacks."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow
from transformers import PreTrainedTokenizerBase

from vanilla_transformer.errors import UserError

from .cached_folders import write_whole
from .encoding import PAIRS_SCHEMA, EncodedCorpus, new_pairs_file


# Larger than the rank of any merge, and still within 64 bits after a shift by 32.
_NEVER = np.int64(1) << 30


class MergeTable:
    """The merges of a byte-pair vocabulary, as arrays that segment many words at once.

    Args:
        tokenizer: Tokenizer with a byte-pair vocabulary.

    Raises:
        UserError: The vocabulary is not plain byte-pair encoding, or lacks a symbol that one of its tokens contains.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
        changes = ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
        if model["type"] != "BPE" or any(model.get(name) for name in changes):
            raise UserError(
                "`bpe_dropout` was given with a vocabulary that is not plain byte-pair encoding; leave it out, or "
                "train a vocabulary."
            )
        vocabulary: dict[str, int] = model["vocab"]
        merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        self._size = np.int64(max(max(vocabulary.values()) + 1, len(tokenizer)))
        keys = np.array([vocabulary[left] * self._size + vocabulary[right] for left, right in merges], dtype=np.int64)
        order = np.argsort(keys)
        # A sentinel, so that a search always ends on an entry.
        self._keys = np.append(keys[order], np.iinfo(np.int64).max)
        self._ranks = np.append(order, _NEVER).astype(np.int64)
        self._merged = np.array([vocabulary[left + right] for left, right in merges], dtype=np.int32)
        # Special tokens and language tags are not split.
        symbols = [[index] for index in range(self._size)]
        specials = set(tokenizer.get_added_vocab())
        for token, index in vocabulary.items():
            if token not in specials:
                symbols[index] = [vocabulary.get(symbol, -1) for symbol in token]
        self._symbols = np.fromiter((symbol for row in symbols for symbol in row), dtype=np.int32)
        if (self._symbols < 0).any():
            raise UserError(
                "`bpe_dropout` was given with a vocabulary that lacks single symbols of its tokens; leave it out, or "
                "train a vocabulary."
            )
        self._num_symbols = np.fromiter((len(row) for row in symbols), dtype=np.int64, count=len(symbols))
        self._first_symbol = np.cumsum(self._num_symbols) - self._num_symbols

    def split(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Split tokens into symbols.

        Args:
            ids: Token ids [N].

        Returns:
            Ids of the symbols they consist of, and the number of symbols of each token [N].
        """
        counts = self._num_symbols[ids]
        before = np.cumsum(counts) - counts
        positions = np.repeat(self._first_symbol[ids] - before, counts) + np.arange(counts.sum())
        return self._symbols[positions], counts

    def merge(
        self, symbols: np.ndarray, words: np.ndarray, dropout: float, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Merge the symbols of words; at each step, each possible merge is dropped with probability `dropout`.

        Each step makes, in every word, the remaining merge of the lowest rank, the leftmost one if it occurs several
        times. A word is done when no merge remains (Provilkov et al., 2020, algorithm 1). Without dropout, the result
        is the segmentation of `tokenizers`.

        Args:
            symbols: Ids of single symbols [N].
            words: Number of the word of each symbol, non-decreasing [N].
            dropout: Probability of dropping a merge, 0 to 1.
            generator: Random number generator.

        Returns:
            Token ids [M], and the number of the word of each [M].
        """
        symbols = symbols.copy()
        kept = np.ones(len(symbols), dtype=bool)
        # The unfinished words: current tokens, their positions among all symbols, their words, and the rank of the
        # merge of each token with the next one.
        tokens, places, active = symbols.copy(), np.arange(len(symbols)), words
        ranks = self._rank(tokens, active, np.arange(len(tokens)))
        while len(tokens):
            drawn = ranks
            if dropout > 0.0:
                drawn = np.where(generator.random(len(ranks), dtype=np.float32) < dropout, _NEVER, ranks)
            starts = np.flatnonzero(np.diff(active, prepend=-1))
            best = np.minimum.reduceat((drawn << 32) | np.arange(len(drawn)), starts)
            can_merge = (best >> 32) < _NEVER
            left = best[can_merge] & 0xFFFFFFFF
            tokens[left] = symbols[places[left]] = self._merged[ranks[left]]
            kept[places[left + 1]] = False
            # Words without a remaining merge are finished.
            stays = np.repeat(can_merge, np.diff(starts, append=len(tokens)))
            stays[left + 1] = False
            left = (np.cumsum(stays) - 1)[left]
            tokens, places, active, ranks = tokens[stays], places[stays], active[stays], ranks[stays]
            changed = np.concatenate([left, left[left > 0] - 1])
            ranks[changed] = self._rank(tokens, active, changed)
        return symbols[kept], words[kept]

    def _rank(self, tokens: np.ndarray, words: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """Ranks of the merges of tokens with the next token of the same word; `_NEVER` if there is none."""
        following = np.minimum(indices + 1, len(tokens) - 1)
        keys = tokens[indices] * self._size + tokens[following]
        found = np.searchsorted(self._keys, keys)
        possible = (self._keys[found] == keys) & (words[indices] == words[following]) & (following > indices)
        return np.where(possible, self._ranks[found], _NEVER)


def drop_merges(
    table: MergeTable, values: np.ndarray, dropout: float, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Segment text again, with dropout.

    Args:
        table: Merges of the vocabulary.
        values: Token ids of the segmentation without dropout; an id that begins a word is complemented (`~id`) [N].
        dropout: Probability of dropping a merge, 0 to 1.
        generator: Random number generator.
        generator: Source of chance.

    Returns:
        Ids of the new segmentation [M], and for each the index in `values` of its word's first token [M].
    """
    begins = values < 0
    symbols, counts = table.split(np.where(begins, ~values, values))
    firsts = np.flatnonzero(begins)
    words = np.repeat(np.cumsum(begins) - 1, counts)
    ids, words = table.merge(symbols, words, dropout, generator)
    return ids, firsts[words]


class DropoutCorpus:
    """A corpus that is segmented again for each epoch, on disk. The result depends only on text, seed and epoch.

    A side that would be longer than `max_length` keeps its segmentation without dropout, so that every epoch has the
    same pairs.

    Args:
        base: Corpus whose words are marked, as `encode` makes it with `mark_words`.
        table: Merges of its vocabulary.
        folder: Folder for the token ids of the current epoch.
        dropout: Probability of dropping a merge.
        seed: Seed of the random numbers.
        max_length: Largest number of tokens of a side.

    Attributes:
        fingerprint: That of the base.
        report: That of the base.
    """

    def __init__(
        self, base: EncodedCorpus, table: MergeTable, folder: Path, *, dropout: float, seed: int, max_length: int
    ):
        self.fingerprint = base.fingerprint
        self.report = base.report
        self._base = base
        self._table = table
        self._folder = folder / f"{base.fingerprint}-dropout-{dropout}-{seed}"
        self._dropout = dropout
        self._seed = seed
        self._max_length = max_length
        self._epoch: EncodedCorpus | None = None

    def __len__(self) -> int:
        return len(self._base)

    @property
    def source_lengths(self) -> np.ndarray:
        """Number of tokens of each source in this epoch, int32 [num_pairs]."""
        return self._epoch.source_lengths

    @property
    def target_lengths(self) -> np.ndarray:
        """Number of tokens of each target in this epoch, int32 [num_pairs]."""
        return self._epoch.target_lengths

    def rows(self, indices: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Read pairs as they are segmented in this epoch; as `EncodedCorpus.rows`."""
        return self._epoch.rows(indices)

    def begin_epoch(self, epoch: int) -> None:
        """Segment the text for an epoch, and delete the ids of older epochs.

        Args:
            epoch: Number of the epoch, from 0.
        """
        folder = self._folder / str(epoch)
        write_whole(folder, lambda partial: self._write(epoch, partial))
        self._epoch = EncodedCorpus(folder)
        for other in self._folder.iterdir():
            if other.name.isdecimal() and int(other.name) < epoch:
                shutil.rmtree(other, ignore_errors=True)

    def _write(self, epoch: int, folder: Path) -> None:
        (folder / "report.json").write_text(json.dumps(self.report), encoding="utf-8")
        first = 0
        with new_pairs_file(folder) as writer:
            for block in self._base.dataset.data.to_batches():
                columns = (
                    self._redraw(block.column(name), np.random.default_rng((self._seed, epoch, first, side)))
                    for side, name in enumerate(("input_ids", "labels"))
                )
                writer.write_batch(pyarrow.record_batch(list(columns), schema=PAIRS_SCHEMA))
                first += len(block)

    def _redraw(self, column: pyarrow.ListArray, generator: np.random.Generator) -> pyarrow.ListArray:
        """The rows of a column in another segmentation."""
        offsets = column.offsets.to_numpy()
        values = column.values.to_numpy()[offsets[0] : offsets[-1]]
        offsets = offsets - offsets[0]
        ids, firsts = drop_merges(self._table, values, self._dropout, generator)
        new_offsets = np.searchsorted(firsts, offsets)
        too_long = np.flatnonzero(np.diff(new_offsets) > self._max_length)
        if len(too_long):
            rows = np.split(ids, new_offsets[1:-1])
            for row in too_long:
                kept = values[offsets[row] : offsets[row + 1]]
                rows[row] = np.where(kept < 0, ~kept, kept)
            ids = np.concatenate(rows)
            new_offsets = np.cumsum([0, *map(len, rows)])
        return pyarrow.ListArray.from_arrays(pyarrow.array(new_offsets, pyarrow.int32()), ids.astype(np.int32))
