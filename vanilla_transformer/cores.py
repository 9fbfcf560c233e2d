"""How many processes or threads may run at the same time on this machine."""

import os

from .errors import UserError


# Allowed on every machine, so that options can be tried on a small one.
_ALWAYS_ALLOWED = 4


def check_side_by_side(name: str, number: int | None) -> None:
    """Refuse more processes or threads than the machine has cores.

    All cores of the machine count, even if the affinity of this process excludes some.

    Args:
        name: Name of the option.
        number: Its value; `None` passes.

    Raises:
        UserError: The number is below 1, or above both the number of cores and 4.
    """
    if number is None:
        return
    if number < 1:
        raise UserError(f"`{name}` is {number}; it must be at least 1.")
    cores = os.cpu_count() or 1
    most = max(cores, _ALWAYS_ALLOWED)
    if number > most:
        raise UserError(
            f"`{name}` is {number}; it must be at most {most} on this machine, which has {cores} cores "
            f"({_ALWAYS_ALLOWED} are allowed on any)."
        )
