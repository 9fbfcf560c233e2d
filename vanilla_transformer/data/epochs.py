"""The order of a run's updates, epoch after epoch; a resumed run continues where it stopped."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from .batching import BATCHINGS, TokenBatches, Update, Updates
from .bpe_dropout import DropoutCorpus
from .encoding import EncodedCorpus


class EpochPlan:
    """The updates of a corpus, epoch after epoch. They depend only on corpus, budget and seed.

    Args:
        corpus: Encoded text. Its token ids may differ from epoch to epoch.
        tokens_per_batch: Largest number of tokens on either side of a batch, as `batching` counts them.
        batches_per_update: Number of batches in one optimiser step.
        seed: Seed of the shuffling.
        batching: Name of a planner in `BATCHINGS`, which decides which pairs form a batch.
        guard: Returns a context manager in which every process begins an epoch. The first process to enter it may
            have to write the epoch's token ids.
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
        self._make_planner = BATCHINGS[batching]
        self._guard = guard
        self._epoch = 0
        self._done_before = 0
        self._planner: TokenBatches | None = None
        self._updates: Updates | None = None
        self._updates_per_epoch: int | None = None

    def begin(self) -> None:
        """Plan the current epoch if that is not done yet; processes may have to wait for each other."""
        if self._updates is None:
            self._begin(self._epoch, self._done_before)
        if self._updates_per_epoch is None:
            self._updates_per_epoch = len(self._updates)

    @property
    def updates_per_epoch(self) -> int:
        """Number of updates in the first epoch; in every epoch, if the corpus does not change."""
        self.begin()
        return self._updates_per_epoch

    @property
    def batches(self) -> TokenBatches:
        """The planner of the batches, with the lengths of the current epoch."""
        self.begin()
        return self._planner

    @property
    def fill_rate(self) -> float:
        """Share of the tokens of the current epoch that are not padding."""
        self.begin()
        return self._planner.fill_rate(batch for update in self._updates for batch in update.batches)

    def update(self, done: int) -> Update:
        """The next update.

        Args:
            done: Number of updates done, at least those before the current epoch.

        Returns:
            The update.
        """
        self.begin()
        while done >= self._done_before + len(self._updates):
            self._begin(self._epoch + 1, self._done_before + len(self._updates))
        return self._updates[done - self._done_before]

    def passes(self, done: int) -> float:
        """Number of passes over the text after `done` updates."""
        return self._epoch + (done - self._done_before) / len(self._updates)

    def state(self) -> dict[str, int]:
        """The position of the current epoch, in JSON values."""
        return {
            "epoch": self._epoch,
            "done_before": self._done_before,
            "updates_per_epoch": self.updates_per_epoch,
        }

    def save(self, folder: Path) -> None:
        """Write nothing: text, seed and `state` determine the updates."""

    def load(self, state: dict[str, int], folder: Path) -> None:
        """Continue where `state` says."""
        self._epoch, self._done_before, self._updates = state["epoch"], state["done_before"], None
        self._updates_per_epoch = state["updates_per_epoch"]

    def _begin(self, epoch: int, done_before: int) -> None:
        # Free the old epoch's lengths and order before the new ones are made.
        self._planner = self._updates = None
        with self._guard():
            self.corpus.begin_epoch(epoch)
        # BPE-dropout changes the lengths.
        self._planner = self._make_planner(self.corpus.source_lengths, self.corpus.target_lengths, **self._budget)
        self._epoch, self._done_before, self._updates = epoch, done_before, self._planner.updates(epoch)
