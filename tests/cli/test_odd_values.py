"""Odd values of every option that is a number, in every verb: a sentence, or they are taken; no other error."""

from dataclasses import fields
from typing import get_type_hints

import pytest

from vanilla_transformer.cli import average, evaluate, tokenizer, train, translate
from vanilla_transformer.cli.options import parse
from vanilla_transformer.errors import UserError
from vanilla_transformer.tokenization_vanilla_transformer import LARGEST_VOCABULARY
from vanilla_transformer.training import options as configuration
from vanilla_transformer.translation.options import SearchOptions, check_search


WHOLE = ("0", "-1", "2147483647", "99999999999", "1" + "0" * 30, "9" * 5000, "1e30", "nan", "", "1.5")
REAL = ("0", "-1", "nan", "inf", "-inf", "1e30", "-1e30", "1e-300", "1e999", "9" * 400, "", "x")
REQUIRED = {
    evaluate: ["--model", "m", "--source", "s", "--references", "r"],
    translate: ["--model", "m"],
    train: ["--train_files", "a", "b"],
}
SEARCH = {field.name for field in fields(SearchOptions)}


def numbers(verb) -> list[tuple[str, tuple[str, ...]]]:
    hints = get_type_hints(verb.OPTIONS)
    kinds = {int: WHOLE, int | None: WHOLE, float: REAL, float | None: REAL}
    return [(field.name, kinds[hints[field.name]]) for field in fields(verb.OPTIONS) if hints[field.name] in kinds]


def check(verb, options) -> None:
    if verb is train:
        options.check()
    if verb in (translate, evaluate):
        search = {name: value for name, value in vars(options).items() if name in SEARCH}
        check_search(search, tokens_per_batch=options.tokens_per_batch, max_source_tokens=options.max_source_tokens)


@pytest.mark.parametrize("verb", [average, evaluate, tokenizer, train, translate], ids=lambda verb: verb.__name__)
def test_every_number_is_taken_or_refused_with_a_sentence(verb):
    assert numbers(verb)
    for name, values in numbers(verb):
        for value in values:
            try:
                options = parse(verb.OPTIONS, [*REQUIRED.get(verb, []), f"--{name}={value}"], prog="x", summary="x")
                check(verb, options)
            except UserError as error:
                assert f"--{name}" in str(error)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("num_beams", "10001", "it must be at most 10000"),
        ("num_beams", "2000000000", "it must be at most 10000"),
        ("extra_length", "2000000000", "it must be at most 100000"),
        ("length_penalty", "1e30", "it must be a number from -10 to 10"),
    ],
)
def test_what_would_take_all_memory_is_refused_before_the_model_is_loaded(refused, run_folder, name, value, sentence):
    assert sentence in refused("translate", "--model", run_folder, "A house.", f"--{name}={value}")


@pytest.mark.parametrize("verb", ["tokenizer", "train", "prepare"])
def test_a_vocabulary_beyond_all_bounds_is_refused_before_any_work(refused, train, corpus, tmp_path, verb):
    arguments = ["tokenizer", *corpus] if verb == "tokenizer" else [verb, *train()[1:]]
    line = refused(*arguments, "--vocab_size", "2000000000", "--output_dir", tmp_path / "run")
    assert f"--vocab_size is 2000000000; it must be at most {LARGEST_VOCABULARY}." in line
    line = refused(*arguments, "--vocab_size", "99999999999", "--output_dir", tmp_path / "run", status=2)
    assert "--vocab_size is 99999999999; it must be below 2 ** 31." in line
    assert not (tmp_path / "run").exists()
    assert configuration.LARGEST_VOCABULARY == LARGEST_VOCABULARY


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("max_updates: 2021-13-45", "is not valid YAML"),
        ("max_updates: " + "9" * 5000, "is not valid YAML"),
        ("[" * 5000, "is not valid YAML"),
        ("learning_rate_scale: " + "9" * 400, "it must be a number"),
        ('train_files: ["a\\0b"]', "it must not have a NUL character"),
    ],
)
def test_odd_recipes_are_refused(refused, write, tmp_path, content, sentence):
    assert sentence in refused("train", "--config", write(tmp_path / "odd.yaml", content), status=2)


def test_a_name_with_a_line_end_makes_one_line(refused, tmp_path):
    assert r"a\nb" in refused("score", "--translations", tmp_path / "a\nb", "--references", tmp_path / "c")
