"""How much may be done at a time on this machine."""

import os

from .errors import UserError


# So much can be tried out on a machine of any size.
_ALWAYS_ALLOWED = 4


def check_side_by_side(name: str, number: int | None) -> None:
    """Refuse more processes or threads than can be of use here.

    The cores of the machine count, not only those that this process may use, for its affinity may be narrowed.

    Args:
        name: Name of the option.
        number: Its value; `None` passes.

    Raises:
        UserError: The number is below 1, or above the number of the machine's cores and 4.
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
