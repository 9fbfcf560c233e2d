"""The learning rate over the updates, for any width and warm-up."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from vanilla_transformer.errors import UserError

from .panels import Lines, Picture, Series


class LearningRate(Protocol):
    """The rate of training (§5.3, Eq. 3), which the caller brings along."""

    def __call__(self, update: int, *, d_model: int, warmup_steps: int, scale: float) -> float:
        """Rate of an update, from 1 on."""
        ...


def schedule_picture(
    learning_rate: LearningRate,
    *,
    d_model: Sequence[int],
    warmup_steps: Sequence[int],
    scale: float = 1.0,
    updates: int | None = None,
    points: int = 400,
) -> Picture:
    """Curves of the learning rate, one for each pair of a width and a warm-up.

    Args:
        learning_rate: What training calls.
        d_model: Widths, at least 1.
        warmup_steps: Numbers of updates over which the rate rises, at least 1.
        scale: Factor on every curve, above 0.
        updates: Last update to show; `None` is five times the longest warm-up.
        points: Number of points of a curve, which has the peak among them.

    Returns:
        The picture; its arrays are `updates` [N] and `rates` [curves, N].

    Raises:
        UserError: A number is out of range.
    """
    for name, values in (("d_model", d_model), ("warmup_steps", warmup_steps)):
        if not values or min(values) < 1:
            raise UserError(f"--{name} is {min(values, default='empty')}; it must be at least 1.")
    if not scale > 0.0 or not np.isfinite(scale):
        raise UserError(f"--learning_rate_scale is {scale}; it must be above 0 and finite.")
    if updates is not None and updates < 2:
        raise UserError(f"--updates is {updates}; it must be at least 2.")
    last = 5 * max(warmup_steps) if updates is None else updates
    where = {*np.linspace(1, last, min(points, last)).round().astype(int).tolist()}
    where = np.array(sorted(where | {step for step in warmup_steps if step <= last}))
    series = []
    for width in d_model:
        for warmup in warmup_steps:
            rates = [learning_rate(int(step), d_model=width, warmup_steps=warmup, scale=scale) for step in where]
            name = f"d_model {width}, warm-up {warmup:,}"
            series.append(Series(name, where, np.array(rates), colour=len(series)))
    peaks = "; ".join(f"{curve.name}: {curve.y.max():.3g} at update {where[curve.y.argmax()]:,}" for curve in series)
    panel = Lines(
        "Learning rate",
        f"It rises in proportion to the update, and then falls with its square root. Largest rates: {peaks}.",
        "update",
        "learning rate",
        tuple(series),
    )
    about = f"{scale:g} · d_model^-0.5 · min(update^-0.5, update · warm-up^-1.5), equation 3 of the paper."
    arrays = {"updates": where, "rates": np.array([curve.y for curve in series])}
    return Picture("Learning rate", about, (panel,), arrays)
