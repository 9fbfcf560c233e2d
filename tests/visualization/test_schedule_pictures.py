import numpy as np
import pytest

from vanilla_transformer.errors import UserError
from vanilla_transformer.training.step.schedule import learning_rate
from vanilla_transformer.visualization.schedule import schedule_picture


def test_rates_are_those_that_training_uses():
    picture = schedule_picture(learning_rate, d_model=(64, 512), warmup_steps=(7, 300), scale=0.5, updates=2000)
    updates, rates = picture.arrays["updates"], picture.arrays["rates"]
    assert rates.shape == (4, len(updates))
    pairs = [(width, warmup) for width in (64, 512) for warmup in (7, 300)]
    for (width, warmup), row, curve in zip(pairs, rates, picture.panels[0].series, strict=True):
        expected = [learning_rate(int(u), d_model=width, warmup_steps=warmup, scale=0.5) for u in updates]
        assert row.tolist() == expected == list(curve.y)
        assert updates[row.argmax()] == warmup
        assert curve.name == f"d_model {width}, warm-up {warmup}"


def test_without_a_last_update_the_peak_and_the_fall_are_shown():
    updates = schedule_picture(learning_rate, d_model=(8,), warmup_steps=(4000,)).arrays["updates"]
    assert (updates[0], updates[-1]) == (1, 20000)
    assert len(np.unique(updates)) == len(updates) <= 401


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"d_model": (0,)}, "--d_model is 0"),
        ({"warmup_steps": (5, -1)}, "--warmup_steps is -1"),
        ({"warmup_steps": ()}, "--warmup_steps is empty"),
        ({"scale": 0.0}, "--learning_rate_scale is 0.0"),
        ({"scale": float("nan")}, "--learning_rate_scale is nan"),
        ({"updates": 1}, "--updates is 1"),
    ],
)
def test_numbers_out_of_range_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        schedule_picture(learning_rate, **{"d_model": (8,), "warmup_steps": (5,), **settings})
