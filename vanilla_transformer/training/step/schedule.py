"""The paper's learning rate."""


def learning_rate(update: int, *, d_model: int, warmup_steps: int, scale: float = 1.0) -> float:
    """Learning rate of an optimiser step: d_model^-0.5 min(step^-0.5, step warmup_steps^-1.5) (§5.3, Eq. 3).

    Args:
        update: Number of the optimiser step, from 1 on.
        d_model: Width of the model.
        warmup_steps: Number of steps over which the rate rises, at least 1; the paper has 4,000.
        scale: Factor on the whole curve; 1 is the paper's.

    Returns:
        The rate, whose maximum, at `warmup_steps`, is scale (d_model warmup_steps)^-0.5.
    """
    return scale * d_model**-0.5 * min(update**-0.5, update * warmup_steps**-1.5)
