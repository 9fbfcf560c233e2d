import json
import math

import pytest

from vanilla_transformer.training.watching.selection import Selection


def follow(selection: Selection, scores: list[float]) -> list[bool]:
    return [selection.see(10 * i, {selection.metric: score}) for i, score in enumerate(scores, start=1)]


@pytest.mark.parametrize(("metric", "sign"), [("loss", 1.0), ("bleu", -1.0)])
def test_the_best_are_kept_and_of_equal_ones_the_earlier(metric, sign):
    selection = Selection(metric, keep=2, patience=0, threshold=0.0)
    kept = follow(selection, [sign * score for score in (5.0, 4.0, 4.5, 4.0, 6.0, 3.0, math.nan)])
    assert kept == [True, True, True, True, False, True, False]
    assert selection.best_updates == [60, 20]
    assert not selection.is_exhausted


@pytest.mark.parametrize(("metric", "sign"), [("loss", 1.0), ("bleu", -1.0)])
def test_patience_ends_after_as_many_validations_without_enough_improvement(metric, sign):
    scores = [sign * score for score in (5.0, 4.0, 3.95, 3.85, 4.5, 3.8, math.nan)]
    ends = {}
    for threshold in (0.0, 0.1):
        selection = Selection(metric, keep=1, patience=2, threshold=threshold)
        for number, score in enumerate(scores, start=1):
            selection.see(number, {metric: score})
            if selection.is_exhausted:
                ends[threshold] = number
                break
    # With a threshold 3.95 is no improvement on 4.0, but 3.85 is; 4.5 and 3.8 are none on that.
    assert ends == {0.1: 6}
    assert selection.best_updates == [6]


def test_a_state_that_went_through_json_goes_on_alike():
    scores = [5.0, 4.0, 4.5, math.inf, 3.0, 3.5, 3.5]
    whole = Selection("loss", keep=2, patience=3, threshold=0.1)
    expected = follow(whole, scores)
    for cut in range(len(scores)):
        first = Selection("loss", keep=2, patience=3, threshold=0.1)
        follow(first, scores[:cut])
        second = Selection("loss", keep=2, patience=3, threshold=0.1)
        second.restore(**json.loads(json.dumps(first.state())))
        rest = [second.see(10 * i, {"loss": scores[i - 1]}) for i in range(cut + 1, len(scores) + 1)]
        assert rest == expected[cut:]
        assert second.state() == whole.state()
