"""Batches of similar lengths within a budget of tokens: one plan, whatever the number of processes."""

from dataclasses import dataclass

import numpy as np

from vanilla_transformer.errors import UserError


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
        """The batches that a process works on, each with its number within the step; possibly none."""
        return [(i, batch) for i, batch in enumerate(self.batches) if i % num_processes == process]


class TokenBatches:
    """The batches of every epoch, a function of the lengths, the budget, the seed and the epoch alone.

    A batch of B pairs holds B times its longest source, and B times its longest target, at most `tokens_per_batch`
    tokens each, padding included; the paper counts 25,000 on each side of an update (§5.1). Pairs are sorted by length
    with ties in random order, cut into batches, and the batches are shuffled.

    Args:
        source_lengths: Number of tokens of each source [num_pairs].
        target_lengths: Number of tokens of each target [num_pairs].
        tokens_per_batch: Largest padded number of tokens on either side of a batch.
        batches_per_update: Number of batches in one optimiser step; the last step of an epoch may have fewer.
        seed: Seed of the shuffling.
        shuffle: Whether batches come in random order; otherwise from short to long.

    Raises:
        UserError: A pair is longer than a batch may be.
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
                f"--tokens_per_batch is {tokens_per_batch}, but a pair has {longest} tokens on one side; raise it, or "
                "lower --max_length."
            )

    def batches(self, epoch: int) -> list[np.ndarray]:
        """The pair numbers of each batch of an epoch; every pair occurs exactly once."""
        generator = np.random.default_rng((self.seed, epoch))
        pairs = (
            generator.permutation(len(self.source_lengths)) if self.shuffle else np.arange(len(self.source_lengths))
        )
        source, target = self.source_lengths[pairs], self.target_lengths[pairs]
        # Within one target length the source lengths rise, within the next they fall, so that neighbours stay alike
        # on both sides. `lexsort` is stable: equal pairs keep their random order.
        pairs = pairs[np.lexsort((np.where(target % 2 == 0, source, -source), target))]
        batches = self._cut(pairs)
        if self.shuffle:
            batches = [batches[i] for i in generator.permutation(len(batches))]
        return batches

    def updates(self, epoch: int) -> list[Update]:
        """The optimiser steps of an epoch."""
        batches = self.batches(epoch)
        return [
            Update(tuple(group), int(sum(self.target_lengths[batch].sum() for batch in group)))
            for start in range(0, len(batches), self.batches_per_update)
            for group in [batches[start : start + self.batches_per_update]]
        ]

    def fill_rate(self, batches: list[np.ndarray]) -> float:
        """Share of the tokens of these batches that are not padding, both sides together, 0 to 1."""
        real = padded = 0
        for batch in batches:
            for lengths in (self.source_lengths, self.target_lengths):
                real += int(lengths[batch].sum())
                padded += int(lengths[batch].max()) * len(batch)
        return real / padded

    def _cut(self, pairs: np.ndarray) -> list[np.ndarray]:
        """Cut sorted pairs into the longest runs that the budget allows."""
        widths = np.maximum(self.source_lengths[pairs], self.target_lengths[pairs]).astype(np.int64)
        batches, start = [], 0
        while start < len(pairs):
            window = widths[start : start + self.tokens_per_batch // widths[start]]
            sizes = np.maximum.accumulate(window) * np.arange(1, len(window) + 1)
            end = start + int(np.searchsorted(sizes, self.tokens_per_batch, side="right"))
            batches.append(pairs[start:end])
            start = end
        return batches
