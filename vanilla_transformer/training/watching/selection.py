"""Selects the best checkpoints by a validation score, and decides when to stop early."""

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Selection:
    """Follows one score over the validations of a run.

    Args:
        metric: `loss`, which is better the lower it is, or a score that is better the higher it is.
        keep: Number of best checkpoints to keep.
        patience: Number of validations in a row without an improvement after which training stops; 0 never stops it.
        threshold: By how much a score must improve to count as an improvement for `patience`.
        best: Optimiser steps and their scores, best first; of equal scores the earlier step is better.
        reference: The score that the next one must improve upon, or `None` before the first.
        stale: Number of validations since the last improvement.
        validated: Number of optimiser steps at the last validation.
    """

    metric: str
    keep: int
    patience: int
    threshold: float
    best: list[tuple[int, float]] = field(default_factory=list)
    reference: float | None = None
    stale: int = 0
    validated: int = 0

    def see(self, update: int, record: dict[str, float]) -> bool:
        """Count a validation.

        Args:
            update: Number of optimiser steps done.
            record: Its scores.

        Returns:
            Whether the checkpoint of this update is one to keep.
        """
        score = record[self.metric]
        if math.isnan(score):
            score = self._worst()
        self.validated = update
        self.best = sorted([*self.best, (update, score)], key=lambda entry: (self._cost(entry[1]), entry[0]))
        self.best = self.best[: self.keep]
        if self.reference is None or self._cost(score) < self._cost(self.reference) - self.threshold:
            self.reference, self.stale = score, 0
        else:
            self.stale += 1
        return update in self.best_updates

    @property
    def best_updates(self) -> list[int]:
        """Numbers of optimiser steps of the checkpoints to keep, best first."""
        return [update for update, _ in self.best]

    @property
    def is_exhausted(self) -> bool:
        """Whether training should stop."""
        return 0 < self.patience <= self.stale

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, as keyword arguments of `restore`."""
        return {name: getattr(self, name) for name in ("best", "reference", "stale", "validated")}

    def restore(self, best: list[tuple[int, float]], reference: float | None, stale: int, validated: int) -> None:
        """Continue from what `state` returned."""
        self.best = [(update, score) for update, score in best][: self.keep]
        self.reference, self.stale, self.validated = reference, stale, validated

    def _cost(self, score: float) -> float:
        return score if self.metric == "loss" else -score

    def _worst(self) -> float:
        return math.inf if self.metric == "loss" else -math.inf
