import pytest

from vanilla_transformer.errors import UserError
from vanilla_transformer.translation.arguments import MODEL_FILES, check_model_id, check_search


SEARCH = {"num_beams": None, "length_penalty": None, "tokens_per_batch": 1}


@pytest.mark.parametrize("name", ["num_beams", "tokens_per_batch"])
@pytest.mark.parametrize("value", [0, -1])
def test_numbers_below_one_are_refused(name, value):
    with pytest.raises(UserError, match=f"^--{name} is {value}; it must be at least 1.$"):
        check_search(**{**SEARCH, name: value})
    check_search(**{**SEARCH, name: 1})


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_length_penalty_is_a_finite_number(value):
    with pytest.raises(UserError, match=f"^--length_penalty is {value}; it must be a finite number.$"):
        check_search(**{**SEARCH, "length_penalty": float(value)})
    for finite in (None, 0.0, 0.6, -2.0, 1):
        check_search(**{**SEARCH, "length_penalty": finite})


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
