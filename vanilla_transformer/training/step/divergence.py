"""Divergence: losses and gradients that are NaN or infinite, and losses that explode."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from vanilla_transformer.data.encoding import EncodedCorpus
from vanilla_transformer.errors import UserError
from vanilla_transformer.training.records.checkpoints import list_checkpoints, update_of


# A loss has exploded if in PATIENCE updates in a row it exceeds both FACTOR times its running mean and the loss of a
# model that guesses. A single hard batch is not enough.
FACTOR = 3.0
PATIENCE = 20
_MEMORY = 0.99
# Pairs that a message names; it only counts the others.
_NAMED_PAIRS = 8


class NotFinite(Exception):
    """A gradient that is infinite or NaN.

    Args:
        batch: Pair numbers of the batch whose loss is not finite, or `None` if the gradient alone is not.
    """

    def __init__(self, batch: np.ndarray | None):
        super().__init__("the gradient is not finite")
        self.batch = batch


@dataclass(slots=True)
class LossWatch:
    """Recognises a loss that explodes.

    Args:
        mean: Exponential moving average of the loss in nats a token, with decay 0.99, without the updates that exceed
            the limit; `None` before the first update.
        streak: Number of updates in a row that have exceeded the limit.
    """

    mean: float | None = None
    streak: int = 0

    def see(self, loss: float, guess: float) -> bool:
        """Count an update.

        Args:
            loss: The update's loss in nats a token.
            guess: Loss of a model that gives every token the same probability, the logarithm of the vocabulary's size.

        Returns:
            Whether the loss has exploded.
        """
        if self.mean is None:
            self.mean = loss
        # The comparison is false for NaN, so that NaN exceeds the limit.
        if loss <= max(FACTOR * self.mean, guess):
            self.mean = _MEMORY * self.mean + (1.0 - _MEMORY) * loss
            self.streak = 0
            return False
        self.streak += 1
        return self.streak >= PATIENCE or not math.isfinite(loss)

    def state(self) -> dict[str, float | int | None]:
        """What a resumed run needs, as keyword arguments of the class."""
        return asdict(self)


def not_finite(number: int, batches: tuple[np.ndarray, ...], bad: np.ndarray | None, corpus: EncodedCorpus) -> str:
    """Say which update, and which pairs of text, gave a loss or gradient that is not finite.

    Args:
        number: Number of the optimiser step.
        batches: Pair numbers of the step's batches.
        bad: Pair numbers of the batch whose loss is not finite, or `None` if the gradient alone is not.
        corpus: Training text.

    Returns:
        The beginning of a sentence.
    """
    what = "the gradient" if bad is None else "the loss"
    pairs = np.concatenate(batches) if bad is None else bad
    return f"In update {number:,} {what} is infinite or not a number, on {_places(pairs, corpus)}"


def exploded(number: int, watch: LossWatch, loss: float, pairs: np.ndarray, corpus: EncodedCorpus) -> str:
    """Say since when, and how far, the loss has exploded; the beginning of a sentence."""
    return (
        f"The loss has exploded: in update {number:,} it is {loss:.4g} nats a token, and for {watch.streak:,} updates "
        f"it was more than {FACTOR:g} times its running mean of {watch.mean:.4g}; the last batches were "
        f"{_places(pairs, corpus)}"
    )


def stopped(reason: str, checkpoints: Path, last_sound: int) -> UserError:
    """The error that ends a run that has diverged.

    Args:
        reason: Beginning of the sentence.
        checkpoints: Folder of the checkpoints.
        last_sound: Number of the last optimiser step that counts as sound.

    Returns:
        The error, which names the last sound checkpoint and the remedy.
    """
    sound = [checkpoint for checkpoint in list_checkpoints(checkpoints) if update_of(checkpoint) <= last_sound]
    remedy = "a lower `learning_rate_scale`, a higher `warmup_steps` or a `max_grad_norm` of 1"
    if not sound:
        return UserError(f"{reason}; nothing was saved before, so start again with {remedy}.")
    return UserError(
        f"{reason}; the last sound checkpoint is {sound[-1]}, from which a new run may start with `init_from` and "
        f"{remedy}."
    )


def _places(pairs: np.ndarray, corpus: EncodedCorpus) -> str:
    """Name pairs by their numbers and, if no pair of the text was dropped, by their lines."""
    named = [int(pair) for pair in pairs[:_NAMED_PAIRS]]
    more = f" and {len(pairs) - len(named):,} more" if len(pairs) > len(named) else ""
    text = f"pairs {', '.join(map(str, named))}{more}"
    report = corpus.report
    if report["pairs_read"] == report["pairs_kept"]:
        lines = ", ".join(str(pair + 1) for pair in named)
        text += f" (lines {lines}{more} of {' and '.join(report['files'])})"
    return text
