import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import pytest
import yaml

from vanilla_transformer.cli.options import name_flags, parse, read_recipe, recipes
from vanilla_transformer.errors import UserError
from vanilla_transformer.presets import TRAINING_PAPER
from vanilla_transformer.training.options import TrainingOptions, option


@dataclass(kw_only=True)
class Everything:
    TAKES_RECIPE: ClassVar[bool] = True

    words: tuple[str, ...] = option((), "Words.", positional=True)
    number: int = option(7, "A number, 100 % whole.")
    ratio: float = option(0.5, "A ratio.")
    switch: bool = option(False, "A switch.")
    switched_on: bool = option(True, "Another.")
    place: Path = option(Path("here"), "A path.")
    places: tuple[Path, ...] = option((), "Paths.")
    columns: tuple[int, int] | None = option(None, "Two numbers.")
    choice: Literal["no", "bf16"] = option("no", "A choice.")
    maybe: Literal["post", "pre"] | None = option(None, "A choice, or none.")
    maybe_number: int | None = option(None, "A number, or none.")
    maybe_switch: bool | None = option(None, "A switch, or none.")
    name: str = option("nobody", "A name.")


@dataclass(kw_only=True)
class Strict:
    model: str = option(..., "A model.")
    input: Path | None = option(None, "A file.")


def everything(*argv: str) -> Everything:
    return parse(Everything, argv, prog="program verb", summary="Summary.")


def recipe(folder: Path, text: str) -> str:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


# Flags


def test_numbers_beyond_counting(tmp_path):
    largest = 2**31 - 1
    assert everything("--number", str(largest)).number == largest
    for given in (["--number", str(2**31)], ["--maybe_number", "99999999999"]):
        with pytest.raises(UserError, match=rf"^{given[0]} is {given[1]}; it must be below 2 \*\* 31\.$"):
            everything(*given)
    with pytest.raises(UserError, match=r"^--number is 99999999999; it must be below"):
        everything("--config", recipe(tmp_path, "number: 99999999999"))
    options = parse(TrainingOptions, ["--seed", str(2**40)], prog="train", summary="")
    assert options.seed == 2**40


def test_without_flags_the_options_are_the_dataclass_defaults():
    assert everything() == Everything()


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--number", "3"], "number", 3),
        (["--number", "-3"], "number", -3),
        (["--number=3"], "number", 3),
        (["--ratio", "1e-9"], "ratio", 1e-9),
        (["--ratio=2"], "ratio", 2.0),
        (["--switch"], "switch", True),
        (["--no_switch"], "switch", False),
        (["--switched_on"], "switched_on", True),
        (["--no_switched_on"], "switched_on", False),
        (["--switch", "--no_switch"], "switch", False),
        (["--place", "a b/c"], "place", Path("a b/c")),
        (["--place=a=b"], "place", Path("a=b")),
        (["--places", "a"], "places", (Path("a"),)),
        (["--places", "a", "b", "c"], "places", (Path("a"), Path("b"), Path("c"))),
        (["--columns", "2", "1"], "columns", (2, 1)),
        (["--choice", "bf16"], "choice", "bf16"),
        (["--choice=no"], "choice", "no"),
        (["--maybe", "pre"], "maybe", "pre"),
        (["--maybe_number", "5"], "maybe_number", 5),
        (["--maybe_switch"], "maybe_switch", True),
        (["--no_maybe_switch"], "maybe_switch", False),
        (["--name", ""], "name", ""),
        (["one", "two"], "words", ("one", "two")),
        (["--", "--one"], "words", ("--one",)),
        (["--number", "3", "--number", "4"], "number", 4),
    ],
)
def test_a_flag_sets_its_option_to_a_value_of_its_type_and_no_other(argv, name, value):
    options = everything(*argv)
    assert options == dataclasses.replace(Everything(), **{name: value})
    assert type(getattr(options, name)) is type(value)


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--number", "three"], ["--number", "three"]),
        (["--number=1.5"], ["--number", "1.5"]),
        (["--number="], ["--number"]),
        (["--ratio", "half"], ["--ratio", "half"]),
        (["--number"], ["--number"]),
        (["--places"], ["--places"]),
        (["--columns", "1"], ["--columns", "2"]),
        (["--choice", "bf17"], ["--choice", "bf17", "no", "bf16"]),
        (["--maybe", "none"], ["--maybe", "none", "post", "pre"]),
        (["--switch=yes"], ["--switch", "yes"]),
    ],
)
def test_a_value_of_the_wrong_type_names_flag_and_value(argv, parts):
    with pytest.raises(UserError) as error:
        everything(*argv)
    for part in parts:
        assert part in str(error.value)
    assert "program verb --help" in str(error.value)


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("--numbr", "--number"),
        ("--numbe", "--number"),
        ("--numb=3", "--number"),
        ("--maybe-number", "--maybe_number"),
        ("--no-switch", "--no_switch"),
        ("--confg", "--config"),
    ],
)
def test_an_unknown_flag_names_the_nearest(given, nearest):
    with pytest.raises(UserError) as error:
        everything(given)
    assert str(error.value) == f"{given.split('=')[0]} is not an option of `program verb`; did you mean {nearest}?"


@pytest.mark.parametrize("item", dataclasses.fields(TrainingOptions), ids=lambda item: item.name)
def test_no_training_option_can_be_abbreviated(item):
    # Every proper prefix is refused, unless it is itself an option's name.
    names = {other.name for other in dataclasses.fields(TrainingOptions)} | {"config", "help"}
    for end in range(3, len(item.name)):
        if item.name[:end] not in names:
            with pytest.raises(UserError, match=f"--{item.name[:end]} is not an option"):
                parse(TrainingOptions, [f"--{item.name[:end]}", "1"], prog="program", summary="")


def test_a_flag_like_no_other_is_refused_with_where_to_look():
    with pytest.raises(UserError, match=r"^--xyzzy is not an option of `program verb`; --help lists them all\.$"):
        everything("--xyzzy")


def test_an_option_without_a_default_is_required():
    with pytest.raises(UserError, match=r"^--model must be given; see program --help\.$"):
        parse(Strict, [], prog="program", summary="")
    # A misspelt one is what the user gave, and is named.
    with pytest.raises(UserError, match=r"^--modle is not an option of `program`; did you mean --model\?$"):
        parse(Strict, ["--modle", "m"], prog="program", summary="")
    assert parse(Strict, ["--model", "m"], prog="program", summary="") == Strict(model="m")


def test_only_a_verb_that_takes_recipes_has_config():
    with pytest.raises(UserError, match="--config is not an option"):
        parse(Strict, ["--model", "m", "--config", "base"], prog="program", summary="")


def test_the_help_shows_every_option_its_text_and_its_default(capsys):
    with pytest.raises(SystemExit) as stop:
        everything("--help")
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for item in dataclasses.fields(Everything):
        assert item.metadata["help"] in text
        if not item.metadata.get("positional"):
            assert f"--{item.name}" in text
    for shown in ("A number, 100 % whole. Default: 7.", "A ratio. Default: 0.5.", "A path. Default: here."):
        assert shown in text
    # Where nothing is the default, nothing is said.
    for bare in ("Two numbers.", "A number, or none.", "A switch.", "Paths."):
        assert f"{bare} Default" not in text
    for name in recipes():
        assert name in text


def test_the_help_names_flags_where_the_text_names_options(capsys):
    @dataclass(kw_only=True)
    class Hints:
        source: str = option("", "Used without `target`, and read by `datasets`.")
        target: str = option("", "The other.")

    with pytest.raises(SystemExit):
        parse(Hints, ["--help"], prog="program", summary="Summary.")
    assert "Used without --target, and read by `datasets`." in " ".join(capsys.readouterr().out.split())


# What the library says


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("`number` is 0; it must be at least 1.", "--number is 0; it must be at least 1."),
        ("Lower `number`, or give `ratio` and `words`.", "Lower --number, or give --ratio and WORDS."),
        ("A switch (`switch`) needs `number`: give both.", "A switch (--switch) needs --number: give both."),
    ],
)
def test_options_in_a_message_are_named_as_flags(text, shown):
    assert name_flags(text, Everything) == shown


@pytest.mark.parametrize(
    "text",
    [
        "`another` is 0.",
        "Its number is 0.",
        "Give a folder that `verb --number` wrote.",
        "Call `number()`, or `item.number`.",
        "/tmp/`number`/file does not exist; nor do /tmp/`number` and `number`/file.",
        "``number`` is code.",
    ],
)
def test_what_else_a_message_quotes_stays(text):
    assert name_flags(text, Everything) == text


# Recipes


def test_recipe_values_have_the_declared_types(tmp_path):
    text = """
        words: [one, two]
        number: 3
        ratio: 2
        switch: true
        switched_on: false
        place: there
        places: [a, b]
        columns: [3, 1]
        choice: bf16
        maybe: pre
        maybe_number: null
        maybe_switch: false
        name: "no"
    """
    options = everything("--config", recipe(tmp_path, text))
    assert options == Everything(
        words=("one", "two"),
        number=3,
        ratio=2.0,
        switch=True,
        switched_on=False,
        place=Path("there"),
        places=(Path("a"), Path("b")),
        columns=(3, 1),
        choice="bf16",
        maybe="pre",
        maybe_number=None,
        maybe_switch=False,
        name="no",
    )
    assert type(options.ratio) is float


@pytest.mark.parametrize(
    ("written", "name", "value"),
    [
        ("choice: no", "choice", "no"),
        ("choice: 'no'", "choice", "no"),
        ("ratio: 1e-9", "ratio", 1e-9),
        ("ratio: 1.0e-09", "ratio", 1e-9),
        ("places: alone", "places", (Path("alone"),)),
        ("maybe: ~", "maybe", None),
        ("columns:", "columns", None),
    ],
)
def test_what_yaml_reads_differently_than_it_looks_is_understood(tmp_path, written, name, value):
    options = everything("--config", recipe(tmp_path, written))
    assert options == dataclasses.replace(Everything(), **{name: value})


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("number", "three", "a whole number"),
        ("number", 1.5, "a whole number"),
        ("number", True, "a whole number"),
        ("number", None, "a whole number"),
        ("number", [1], "a whole number"),
        ("ratio", "half", "a number"),
        ("ratio", True, "a number"),
        ("switch", "maybe", "true or false"),
        ("switch", 1, "true or false"),
        ("place", 5, "a path"),
        ("places", ["a", 5], "a path"),
        ("columns", [1], "a list of 2 values"),
        ("columns", [1, 2, 3], "a list of 2 values"),
        ("columns", [1, "b"], "a whole number"),
        ("choice", "bf17", "no, bf16"),
        ("choice", ["no"], "no, bf16"),
        ("choice", {"a": 1}, "no, bf16"),
        ("maybe", True, "post, pre"),
        ("name", False, "text in quotes"),
        ("maybe_number", "x", "a whole number"),
    ],
)
def test_a_recipe_value_of_the_wrong_type_names_file_key_value_and_rule(tmp_path, key, value, rule):
    path = recipe(tmp_path, yaml.safe_dump({key: value}))
    with pytest.raises(UserError) as error:
        everything("--config", path)
    assert str(error.value).startswith(f"{path}: {key} is ")
    assert str(error.value).endswith(f"{rule}.")


def test_flags_win_over_the_recipe_also_where_they_repeat_the_default(tmp_path):
    path = recipe(tmp_path, "number: 3\nratio: 0.25\nswitch: true\nplaces: [a, b]\n")
    before = everything("--number", "7", "--no_switch", "--places", "c", "--config", path)
    after = everything("--config", path, "--number", "7", "--no_switch", "--places", "c")
    assert before == after == Everything(number=7, ratio=0.25, switch=False, places=(Path("c"),))


@pytest.mark.parametrize(("key", "nearest"), [("numbr", "number"), ("maybe-number", "maybe_number")])
def test_an_unknown_key_names_the_file_and_the_nearest_option(tmp_path, key, nearest):
    path = recipe(tmp_path, f"ratio: 1\n{key}: 3\n")
    with pytest.raises(UserError) as error:
        everything("--config", path)
    assert str(error.value) == f"{path}: {key} is not an option; did you mean {nearest}?"


def test_a_key_that_is_no_text_is_refused(tmp_path):
    with pytest.raises(UserError, match="5 is not an option"):
        everything("--config", recipe(tmp_path, "5: 6"))


@pytest.mark.parametrize("text", ["- number\n- 3\n", "just text", "7", ""])
def test_a_recipe_that_is_no_mapping_is_refused(tmp_path, text):
    path = recipe(tmp_path, text)
    with pytest.raises(UserError, match=r"`option: value`") as error:
        everything("--config", path)
    assert path in str(error.value)


@pytest.mark.parametrize("text", ["number: [3", "a: b: c", "\tnumber: 3", "number: !!python/object:x.Y {}"])
def test_broken_yaml_is_one_sentence_with_the_place(tmp_path, text):
    path = recipe(tmp_path, text)
    with pytest.raises(UserError, match="is not valid YAML") as error:
        everything("--config", path)
    assert path in str(error.value)
    assert "line 1" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_recipe_that_cannot_be_read_names_the_shipped_ones(tmp_path):
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    for name in ("nosuch", str(tmp_path), str(binary)):
        with pytest.raises(UserError) as error:
            everything("--config", name)
        assert name in str(error.value)
        assert all(shipped in str(error.value) for shipped in recipes())


# Training options and the shipped recipes


def test_the_recipes_are_those_of_the_package():
    assert recipes() == ["base", "big", "multi30k", "quickstart"]


@pytest.mark.parametrize("name", ["base", "big", "multi30k", "quickstart"])
def test_a_shipped_recipe_lacks_nothing_but_text(name):
    options = parse(TrainingOptions, ["--config", name], prog="program train", summary="")
    written = read_recipe(name, TrainingOptions)
    assert written
    assert {key: getattr(options, key) for key in written} == written
    with pytest.raises(UserError, match=r"^No training text was given"):
        options.check()
    dataclasses.replace(options, train_files=(Path("a"), Path("b"))).check()


@pytest.mark.parametrize("name", ["base", "big"])
def test_the_papers_recipes_are_the_papers(name):
    options = TrainingOptions(**read_recipe(name, TrainingOptions))
    # §5.1 to §5.4 and §6.1.
    assert options.preset == name
    assert options.vocab_size == 37000
    assert options.max_updates == {"base": 100_000, "big": 300_000}[name]
    assert options.average_last == {"base": 5, "big": 20}[name]
    assert (options.warmup_steps, options.label_smoothing) == (4000, 0.1)
    assert (options.adam_beta1, options.adam_beta2, options.adam_epsilon) == (0.9, 0.98, 1e-9)
    assert (options.num_beams, options.length_penalty) == (4, 0.6)
    assert abs(options.tokens_per_update - 25_000) < 0.05 * 25_000


@pytest.mark.parametrize("name", ["base", "big", "multi30k", "quickstart"])
@pytest.mark.parametrize("preset", TRAINING_PAPER)
def test_a_preset_wins_over_a_recipe_in_label_smoothing_too(name, preset):
    options = parse(TrainingOptions, ["--config", name, "--preset", preset], prog="program", summary="")
    assert options.label_smoothing == TRAINING_PAPER[preset]["label_smoothing"]


def test_the_options_that_a_run_writes_are_a_recipe_that_repeats_it(run_folder, corpus, small):
    files = [str(path) for path in corpus]
    flags = ["--train_files", *files, "--valid_files", *files, "--output_dir", str(run_folder), *small]
    expected = parse(TrainingOptions, [*flags, "--max_updates", "4"], prog="program", summary="")
    again = parse(TrainingOptions, ["--config", str(run_folder / "options.yaml")], prog="program", summary="")
    assert again == expected


def test_all_options_survive_yaml_and_back(tmp_path):
    options = TrainingOptions(
        train_files=(Path("a.tsv"),),
        tsv_columns=(2, 1),
        cache_dir=Path("cache"),
        d_k=8,
        dropout=0.3,
        norm_position="pre",
        attention_bias=True,
        tie_word_embeddings=False,
        mixed_precision="no",
        max_epochs=3,
    )
    path = recipe(tmp_path, yaml.safe_dump(options.as_dict()))
    assert parse(TrainingOptions, ["--config", path], prog="program", summary="") == options


def test_the_help_of_training_shows_the_papers_values(capsys):
    with pytest.raises(SystemExit):
        parse(TrainingOptions, ["--help"], prog="program", summary="")
    text = " ".join(capsys.readouterr().out.split())
    for item in dataclasses.fields(TrainingOptions):
        assert f"--{item.name}" in text
        if isinstance(item.default, (int, float)) and not isinstance(item.default, bool):
            assert f"{name_flags(item.metadata['help'], TrainingOptions)} Default: {item.default}." in text
