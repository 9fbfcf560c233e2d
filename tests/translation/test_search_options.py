import math

import numpy as np
import pytest

from vanilla_transformer.errors import UserError
from vanilla_transformer.translation.options import (
    MODEL_FILES,
    SearchOptions,
    check_model_id,
    check_search,
)


def test_the_defaults_are_the_papers():
    assert SearchOptions() == SearchOptions(
        num_beams=4, length_penalty=0.6, rules="paper", extra_length=50, num_hypotheses=1, sample=False
    )


@pytest.mark.parametrize(
    ("name", "smallest"),
    [
        ("num_beams", 1),
        ("num_hypotheses", 1),
        ("max_length", 1),
        ("extra_length", 0),
        ("min_length", 0),
        ("top_k", 0),
        ("seed", 0),
    ],
)
def test_numbers_below_the_smallest_are_refused(name, smallest):
    with pytest.raises(UserError, match=f"^`{name}` is {smallest - 1}; it must be at least {smallest}.$"):
        SearchOptions(**{name: smallest - 1})
    SearchOptions(**{name: smallest})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length_penalty": math.nan}, "`length_penalty` is nan; it must be a number from -10 to 10."),
        ({"length_penalty": -math.inf}, "`length_penalty` is -inf; it must be a number from -10 to 10."),
        ({"rules": "marian"}, "`rules` is marian; it must be one of paper, transformers."),
        ({"temperature": 0.0}, "`temperature` is 0.0; it must be above 0."),
        ({"temperature": math.nan}, "`temperature` is nan; it must be above 0."),
        ({"seed": 1 << 63}, f"`seed` is {1 << 63}; it must be below 2**63."),
        ({"top_p": 0.0}, "`top_p` is 0.0; it must be above 0 and at most 1."),
        ({"top_p": 1.1}, "`top_p` is 1.1; it must be above 0 and at most 1."),
        ({"sample": True}, "`num_beams` is 4, but `sample` needs `num_beams` 1."),
        ({"num_hypotheses": 5}, "`num_hypotheses` is 5; it must be at most `num_beams`, 4."),
        ({"top_k": 3}, "`top_k` was given without `sample`; it applies to sampling only."),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(UserError) as error:
        SearchOptions(**options)
    assert str(error.value) == message


def test_what_is_possible_is_not_refused():
    for length_penalty in (0.0, -2.0, 1):
        SearchOptions(length_penalty=length_penalty)
    SearchOptions(num_beams=1, sample=True, num_hypotheses=9, temperature=0.7, top_k=3, top_p=1.0)


def test_the_penalty_is_that_of_wu_et_al():
    options = SearchOptions(length_penalty=0.6)
    assert options.penalty(1) == 1.0
    assert options.penalty(7) == pytest.approx(2**0.6)
    assert SearchOptions(length_penalty=2.0, rules="transformers").penalty(3) == 9.0
    np.testing.assert_allclose(options.penalty(np.array([1, 7])), [1.0, 2**0.6])


@pytest.mark.parametrize("name", ["tokens_per_batch", "max_source_tokens"])
def test_sizes_below_one_are_refused(name):
    with pytest.raises(UserError, match=f"^`{name}` is 0; it must be at least 1.$"):
        check_search({}, **{"tokens_per_batch": 1, name: 0})


def test_what_the_model_decides_is_not_checked_before_it_is_loaded():
    check_search({"num_beams": None, "num_hypotheses": 9}, tokens_per_batch=1)
    check_search({"num_beams": None, "sample": True, "num_hypotheses": 2}, tokens_per_batch=1)
    with pytest.raises(UserError, match=r"^`num_hypotheses` is 3; it must be at most"):
        check_search({"num_beams": 2, "num_hypotheses": 3}, tokens_per_batch=1)


@pytest.mark.parametrize("missing", MODEL_FILES)
def test_a_folder_that_lacks_a_file_is_named_with_it(tmp_path, missing):
    for name in {*MODEL_FILES} - {missing}:
        (tmp_path / name).write_text("{}")
    with pytest.raises(UserError) as error:
        check_model_id(tmp_path)
    assert str(error.value).startswith(f"{tmp_path} is not a model folder: it lacks {missing};")
    (tmp_path / missing).write_text("{}")
    check_model_id(tmp_path)


def test_a_file_is_no_model(tmp_path):
    (tmp_path / "model").write_text("")
    with pytest.raises(UserError, match="model is a file; give a model folder, or a name on the Hub"):
        check_model_id(str(tmp_path / "model"))


@pytest.mark.parametrize(
    "name", ["nosuch", "/no/such/folder", "./nowhere", "../nowhere", "runs/nosuch/", "a/b/c", "~/nosuch", "user /name"]
)
def test_what_cannot_be_a_name_on_the_hub_is_a_folder_that_does_not_exist(name):
    with pytest.raises(UserError) as error:
        check_model_id(name)
    assert str(error.value).startswith(f"There is no folder {name}; ")


@pytest.mark.parametrize("name", ["user/name", "Helsinki-NLP/opus-mt-en-de", "a_b/c.d-2"])
def test_what_can_be_a_name_on_the_hub_is_left_to_the_hub(name):
    check_model_id(name)
