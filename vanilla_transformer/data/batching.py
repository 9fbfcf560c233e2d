"""Planners of batches within a token budget; their plan does not depend on the number of processes."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vanilla_transformer.errors import UserError


# Number of pairs whose sort keys are made at once; bounds the memory of planning.
_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class Update:
    """The batches of one optimiser step, in order.

    Args:
        batches: Pair numbers of each batch.
        num_target_tokens: Number of target tokens of all batches, `</s>` included, padding excluded; the loss of the
            step is divided by it.
    """

    batches: tuple[np.ndarray, ...]
    num_target_tokens: int

    def share_of(self, process: int, num_processes: int) -> list[tuple[int, np.ndarray]]:
        """The batches of one process, each with its number within the step; the list may be empty."""
        return [(i, batch) for i, batch in enumerate(self.batches) if i % num_processes == process]


class Batches(Sequence[np.ndarray]):
    """Batches, as views of one array of pair numbers: 4 bytes per pair and 16 per batch.

    Args:
        pairs: Pair numbers, batch after batch [num_pairs].
        offsets: Start of each batch in `pairs`, and the end of the last batch [num_batches + 1].
        order: Numbers of the batches, in the order of training.
    """

    def __init__(self, pairs: np.ndarray, offsets: np.ndarray, order: np.ndarray):
        self._pairs = pairs
        self._offsets = offsets
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, position):
        if isinstance(position, slice):
            return Batches(self._pairs, self._offsets, self._order[position])
        number = self._order[position]
        return self._pairs[self._offsets[number] : self._offsets[number + 1]]


class Updates(Sequence[Update]):
    """Optimiser steps, each made of consecutive batches when it is indexed.

    Args:
        batches: Batches in order.
        batches_per_update: Number of batches in one step; the last may have fewer.
        target_lengths: Number of tokens of each target [num_pairs].
    """

    def __init__(self, batches: Batches, batches_per_update: int, target_lengths: np.ndarray):
        self._batches = batches
        self._batches_per_update = batches_per_update
        self._target_lengths = target_lengths

    def __len__(self) -> int:
        return -(-len(self._batches) // self._batches_per_update)

    def __getitem__(self, position):
        if isinstance(position, slice):
            return [self[number] for number in range(len(self))[position]]
        start = range(len(self))[position] * self._batches_per_update
        group = tuple(self._batches[start : start + self._batches_per_update])
        return Update(group, int(sum(self._target_lengths[batch].sum() for batch in group)))


class TokenBatches:
    """Plans batches of similar lengths. The plan of an epoch depends only on lengths, budget, seed and epoch.

    On either side, B pairs times the longest length of the batch is at most `tokens_per_batch`, which thus includes
    padding; the paper's updates have approximately 25,000 tokens on each side (§5.1). Pairs are sorted by length, with
    ties in random order, and cut into batches; then the batches are shuffled.

    Args:
        source_lengths: Number of tokens of each source [num_pairs].
        target_lengths: Number of tokens of each target [num_pairs].
        tokens_per_batch: Largest number of tokens on either side of a batch, padding included.
        batches_per_update: Number of batches in one optimiser step; the last step of an epoch may have fewer.
        seed: Seed of the shuffling.
        shuffle: Whether batches come in random order; otherwise they come from short to long.

    Raises:
        UserError: A pair has more than `tokens_per_batch` tokens on one side.
    """

    def __init__(
        self,
        source_lengths: np.ndarray,
        target_lengths: np.ndarray,
        *,
        tokens_per_batch: int,
        batches_per_update: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ):
        self.source_lengths = source_lengths
        self.target_lengths = target_lengths
        self.tokens_per_batch = tokens_per_batch
        self.batches_per_update = batches_per_update
        self.seed = seed
        self.shuffle = shuffle
        longest = int(max(source_lengths.max(), target_lengths.max()))
        if longest > tokens_per_batch:
            raise UserError(
                f"`tokens_per_batch` is {tokens_per_batch}, but a pair has {longest} tokens on one side; raise it, or "
                "lower `max_length`."
            )

    def batches(self, epoch: int) -> Batches:
        """The pair numbers of each batch of an epoch; every pair occurs exactly once."""
        generator = np.random.default_rng((self.seed, epoch))
        pairs = np.arange(len(self.source_lengths), dtype=np.int32)
        if self.shuffle:
            generator.shuffle(pairs)
        self._sort(pairs)
        offsets = self._cut(pairs)
        order = np.arange(len(offsets) - 1)
        if self.shuffle:
            generator.shuffle(order)
        return Batches(pairs, offsets, order)

    def updates(self, epoch: int) -> Updates:
        """The optimiser steps of an epoch."""
        return Updates(self.batches(epoch), self.batches_per_update, self.target_lengths)

    def parts(self, batch: np.ndarray) -> list[np.ndarray]:
        """The parts of a batch that are padded separately, as pair numbers."""
        return [batch]

    def tokens(self, batch: np.ndarray) -> int:
        """Number of tokens of a batch, both sides together, without padding."""
        return sum(int(lengths[batch].sum()) for lengths in (self.source_lengths, self.target_lengths))

    def padded_tokens(self, batch: np.ndarray) -> int:
        """Number of tokens of a batch, both sides together, padding included."""
        return sum(
            int(lengths[part].max()) * len(part)
            for part in self.parts(batch)
            for lengths in (self.source_lengths, self.target_lengths)
        )

    def fill_rate(self, batches: Iterable[np.ndarray]) -> float:
        """Share of non-padding tokens in these batches, both sides together, 0 to 1."""
        real = padded = 0
        for batch in batches:
            real += self.tokens(batch)
            padded += self.padded_tokens(batch)
        return real / padded

    def _sort(self, pairs: np.ndarray) -> None:
        """Sort pairs by target and source length in place; pairs of equal lengths keep their order."""
        # One integer holds target length, source length and position, so that sorting in place is stable and needs
        # 8 bytes per pair; `lexsort` needs three times as much.
        keys = np.empty(len(pairs), dtype=np.uint64)
        position_bits = max(1, (len(pairs) - 1).bit_length())
        length_bits = (64 - position_bits) // 2
        blocks = [slice(start, start + _BLOCK) for start in range(0, len(pairs), _BLOCK)]
        for block in blocks:
            source = self.source_lengths[pairs[block]].astype(np.int64)
            target = self.target_lengths[pairs[block]].astype(np.int64)
            # Source lengths rise within one target length and fall within the next, so that neighbours have similar
            # lengths on both sides.
            source = np.where(target % 2 == 0, source, (1 << length_bits) - 1 - source)
            position = np.arange(block.start, block.start + len(source))
            keys[block] = (((target << length_bits) | source) << position_bits) | position
        keys.sort()
        keys &= np.uint64((1 << position_bits) - 1)
        # Look up pair numbers into `keys` first, because `pairs` is read by position until the end.
        for block in blocks:
            keys[block] = pairs[keys[block].astype(np.int64)]
        pairs[:] = keys

    def _cut(self, pairs: np.ndarray) -> np.ndarray:
        """Cut sorted pairs into the longest runs within the budget; return their starts, and the end."""
        offsets, start = array("q", [0]), 0
        while start < len(pairs):
            window = pairs[start : start + self.tokens_per_batch // self._widths(pairs[start])]
            sizes = np.maximum.accumulate(self._widths(window)) * np.arange(1, len(window) + 1)
            start += int(np.searchsorted(sizes, self.tokens_per_batch, side="right"))
            offsets.append(start)
        return np.frombuffer(offsets, dtype=np.int64)

    def _widths(self, pairs: np.ndarray) -> np.ndarray:
        return np.maximum(self.source_lengths[pairs], self.target_lengths[pairs]).astype(np.int64)


class RandomBatches(TokenBatches):
    """Plans batches of random pairs, with at most `tokens_per_batch` tokens on either side, padding excluded.

    Each batch then represents all lengths of the text. The gradient of a batch of similar lengths comes from such
    sentences only, and an update of one or a few such batches learns less (measured by
    `scripts/benchmarks/batching.py`).
    """

    def parts(self, batch: np.ndarray) -> list[np.ndarray]:
        """Parts of similar lengths, each with about a fifth of the tokens of a batch."""
        lengths = self.source_lengths[batch], self.target_lengths[batch]
        budget = max(self.tokens_per_batch // 5, int(max(lengths[0].max(), lengths[1].max())))
        return [batch[part] for part in TokenBatches(*lengths, tokens_per_batch=budget, shuffle=False).batches(0)]

    def _sort(self, pairs: np.ndarray) -> None:
        """Keep the random order."""

    def _cut(self, pairs: np.ndarray) -> np.ndarray:
        """Cut pairs into the longest runs within the budget on both sides; return their starts, and the end."""
        done = [lengths[pairs].cumsum(dtype=np.int64) for lengths in (self.source_lengths, self.target_lengths)]
        offsets, start = array("q", [0]), 0
        while start < len(pairs):
            before = [sums[start - 1] if start > 0 else 0 for sums in done]
            start = min(
                int(np.searchsorted(sums, first + self.tokens_per_batch, side="right"))
                for sums, first in zip(done, before, strict=True)
            )
            offsets.append(start)
        return np.frombuffer(offsets, dtype=np.int64)


BATCHINGS = {"lengths": TokenBatches, "random": RandomBatches}
