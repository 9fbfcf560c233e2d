import os

import pytest

from vanilla_transformer.cores import check_side_by_side
from vanilla_transformer.errors import UserError


@pytest.mark.parametrize(("cores", "most"), [(None, 4), (1, 4), (2, 4), (64, 64)])
def test_the_machine_bounds_what_is_done_side_by_side(monkeypatch, cores, most):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    for number in (None, 1, most):
        check_side_by_side("workers", number)
    with pytest.raises(UserError, match=f"^`workers` is {most + 1}; it must be at most {most} on this machine"):
        check_side_by_side("workers", most + 1)
    with pytest.raises(UserError, match=r"^`workers` is 0; it must be at least 1\.$"):
        check_side_by_side("workers", 0)
