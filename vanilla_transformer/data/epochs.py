"""Epoch after epoch of a corpus, update by update, which a resumed run continues at its place."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from .batching import BATCHINGS, TokenBatches, Update, Updates
from .bpe_dropout import DropoutCorpus
from .encoding import EncodedCorpus


class EpochPlan:
    """The updates of a corpus, epoch after epoch; a function of corpus, budget and seed alone.

    Args:
        corpus: Encoded text, the same in every epoch or not.
        tokens_per_batch: Largest number of tokens on either side of a batch, as `batching` counts them.
        batches_per_update: Number of batches in one optimiser step.
        seed: Seed of the shuffling.
        batching: Which pairs a batch has, by the name in `BATCHINGS`.
        guard: Makes a context for the beginning of an epoch, which all processes reach; the first of them to enter may
            have to write the epoch's ids.
    """

    def __init__(
        self,
        corpus: EncodedCorpus | DropoutCorpus,
        *,
        tokens_per_batch: int,
        batches_per_update: int,
        seed: int,
        batching: str = "lengths",
        guard: Callable[[], AbstractContextManager] = nullcontext,
    ):
        self.corpus = corpus
        self._budget = {"tokens_per_batch": tokens_per_batch, "batches_per_update": batches_per_update, "seed": seed}
        self._make_batches = BATCHINGS[batching]
        self._guard = guard
        self._epoch = 0
        self._done_before = 0
        self._batches: TokenBatches | None = None
        self._updates: Updates | None = None
        self._updates_per_epoch: int | None = None

    def begin(self) -> None:
        """Plan the current epoch, where it is not yet planned; processes may have to wait for one another."""
        if self._updates is None:
            self._begin(self._epoch, self._done_before)
        if self._updates_per_epoch is None:
            self._updates_per_epoch = len(self._updates)

    @property
    def updates_per_epoch(self) -> int:
        """Number of updates of the first epoch, and of all if the corpus does not change."""
        self.begin()
        return self._updates_per_epoch

    @property
    def batches(self) -> TokenBatches:
        """The batches, by the lengths of the current epoch."""
        self.begin()
        return self._batches

    @property
    def fill_rate(self) -> float:
        """Share of the tokens of the current epoch that are not padding."""
        self.begin()
        return self._batches.fill_rate(batch for update in self._updates for batch in update.batches)

    def update(self, done: int) -> Update:
        """The update that follows.

        Args:
            done: Number of updates done, no fewer than before the current epoch.

        Returns:
            The update.
        """
        self.begin()
        while done >= self._done_before + len(self._updates):
            self._begin(self._epoch + 1, self._done_before + len(self._updates))
        return self._updates[done - self._done_before]

    def passes(self, done: int) -> float:
        """How often the text has been read after so many updates of this epoch."""
        return self._epoch + (done - self._done_before) / len(self._updates)

    def state(self) -> dict[str, int]:
        """Where a resumed run finds the current epoch, as JSON holds it."""
        return {
            "epoch": self._epoch,
            "done_before": self._done_before,
            "updates_per_epoch": self.updates_per_epoch,
        }

    def save(self, folder: Path) -> None:
        """Write nothing into a checkpoint's folder: text, seed and state tell everything."""

    def load(self, state: dict[str, int], folder: Path) -> None:
        """Continue where `state` says."""
        self._epoch, self._done_before, self._updates = state["epoch"], state["done_before"], None
        self._updates_per_epoch = state["updates_per_epoch"]

    def _begin(self, epoch: int, done_before: int) -> None:
        # The old epoch's lengths and order make room for the new one's.
        self._batches = self._updates = None
        with self._guard():
            self.corpus.begin_epoch(epoch)
        # The lengths may be others than in the epoch before.
        self._batches = self._make_batches(self.corpus.source_lengths, self.corpus.target_lengths, **self._budget)
        self._epoch, self._done_before, self._updates = epoch, done_before, self._batches.updates(epoch)
