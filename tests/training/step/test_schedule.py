import math
from itertools import pairwise

import pytest
import torch
from transformers import get_inverse_sqrt_schedule

from vanilla_transformer.training.step.schedule import learning_rate


@pytest.mark.parametrize(("d_model", "warmup_steps"), [(512, 4000), (1024, 4000), (128, 1), (256, 7)])
def test_rate_is_equation_3(d_model, warmup_steps):
    for step in (1, 2, 3, warmup_steps, warmup_steps + 1, 10 * warmup_steps, 100_000):
        expected = 1.0 / math.sqrt(d_model) * min(1.0 / math.sqrt(step), step / warmup_steps**1.5)
        assert learning_rate(step, d_model=d_model, warmup_steps=warmup_steps) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("d_model", "warmup_steps"), [(512, 4000), (128, 1), (256, 7)])
def test_rate_rises_linearly_to_its_peak_at_the_end_of_the_warm_up_and_then_falls(d_model, warmup_steps):
    rates = [
        learning_rate(step, d_model=d_model, warmup_steps=warmup_steps) for step in range(1, 3 * warmup_steps + 1)
    ]
    peak = rates[warmup_steps - 1]
    assert peak == max(rates) == pytest.approx((d_model * warmup_steps) ** -0.5, rel=1e-12)
    rise, fall = rates[:warmup_steps], rates[warmup_steps - 1 :]
    assert rise == pytest.approx([peak * step / warmup_steps for step in range(1, warmup_steps + 1)], rel=1e-12)
    assert all(later < earlier for earlier, later in pairwise(fall))


def test_scale_multiplies_the_whole_curve():
    for step in (1, 10, 100, 1000):
        plain = learning_rate(step, d_model=512, warmup_steps=100)
        assert learning_rate(step, d_model=512, warmup_steps=100, scale=2.0) == pytest.approx(2.0 * plain, rel=1e-12)


@pytest.mark.parametrize(("d_model", "warmup_steps"), [(512, 400), (128, 1), (64, 33)])
def test_rate_equals_transformers_inverse_square_root_schedule(d_model, warmup_steps):
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=(d_model * warmup_steps) ** -0.5)
    schedule = get_inverse_sqrt_schedule(optimizer, num_warmup_steps=warmup_steps)
    for update in range(1, 1500):
        # Theirs counts from 0, at which its rate is 0.
        optimizer.step()
        schedule.step()
        expected = learning_rate(update, d_model=d_model, warmup_steps=warmup_steps)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-12)
