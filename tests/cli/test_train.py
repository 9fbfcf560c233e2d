"""What users get wrong first in `train` and `prepare`: text, options, folders."""

import shutil

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from vanilla_transformer.training.records.checkpoints import list_checkpoints


# Text


def test_no_text(refused):
    assert "--train_files" in refused("train")


def test_a_missing_file(refused, train, corpus, tmp_path):
    line = refused(*train(files=(tmp_path / "nosuch.en", corpus[1])))
    assert f"{tmp_path / 'nosuch.en'} does not exist" in line
    assert not (tmp_path / "run").exists()


def test_a_missing_validation_file(refused, train, corpus, tmp_path):
    line = refused(*train("--valid_files", corpus[0], tmp_path / "nosuch.de"))
    assert f"{tmp_path / 'nosuch.de'} does not exist" in line
    assert not (tmp_path / "run").exists()


def test_a_folder_instead_of_a_file(refused, train, corpus, tmp_path):
    assert f"{tmp_path} is a folder" in refused(*train(files=(corpus[0], tmp_path)))


def test_files_of_unequal_length(refused, train, corpus, tmp_path, write):
    short = write(tmp_path / "short.de", "eins", "zwei")
    line = refused(*train(files=(corpus[0], short)))
    assert f"{corpus[0]} has 40 lines and {short} has 2" in line
    assert not (tmp_path / "run").exists()


def test_an_empty_file(refused, train, tmp_path, write):
    empty = (write(tmp_path / "empty.en"), write(tmp_path / "empty.de"))
    assert f"{empty[0]} is empty" in refused(*train(files=empty))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("verb", ["train", "prepare"])
def test_text_of_blank_lines_only(refused, train, tmp_path, verb, write):
    blank = (write(tmp_path / "blank.en", "", " "), write(tmp_path / "blank.de", "", "Hallo"))
    line = refused(verb, *train(files=blank)[1:])
    assert f"None of the 2 lines of {blank[0]} / {blank[1]} can be used" in line
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_validation_text_of_blank_lines_only(refused, train, tmp_path, write):
    blank = (write(tmp_path / "blank.en", "", ""), write(tmp_path / "blank.de", "", ""))
    line = refused(*train("--valid_files", *blank))
    assert f"None of the 2 lines of {blank[0]} / {blank[1]} can be used" in line
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_empty_lines_when_they_are_refused(refused, train, tmp_path, write):
    files = (write(tmp_path / "gap.en", "one", "", "three"), write(tmp_path / "gap.de", "eins", "zwei", "drei"))
    line = refused(*train("--invalid_pairs", "refuse", files=files))
    assert f"{files[0]} / {files[1]}, line 2: the source is empty" in line
    assert '--invalid_pairs "drop"' in line


def test_text_that_is_not_utf8_when_it_is_refused(refused, train, tmp_path, write):
    files = (write(tmp_path / "latin.en", "street", "road"), tmp_path / "latin.de")
    files[1].write_bytes("Straße\nWeg\n".encode("latin-1"))
    line = refused(*train("--invalid_pairs", "refuse", files=files))
    assert f"{files[1]}, line 1, byte 5 (0xdf): the text is not UTF-8" in line


def test_validation_files_in_the_other_order(refused, train, corpus, tmp_path):
    line = refused(*train("--valid_files", *reversed(corpus)))
    assert "opposite order" in line
    assert all(str(path) in line for path in corpus)
    assert not (tmp_path / "run").exists()


def test_files_that_contradict_the_declared_languages(refused, train, tmp_path):
    line = refused(*train("--source_language", "de", "--target_language", "en"))
    assert "declared as de to en" in line
    assert not (tmp_path / "run").exists()


# Options


def test_an_unknown_option(refused, train):
    assert "--optimizer is not an option of `vanilla-transformer train`" in refused(
        *train("--optimizer", "sgd"), status=2
    )


def test_more_processes_than_the_machine_has_cores_for(refused, train, tmp_path):
    line = refused(*train("--num_processes", 100_000))
    assert "--num_processes is 100000; it must be at most " in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("flag", ["--max_update", "--max-updates", "--MAX_UPDATES", "--maxupdates"])
def test_a_misspelt_option(refused, train, tmp_path, flag):
    line = refused(*train(flag, "3"), status=2)
    if flag != "--MAX_UPDATES":
        assert line.endswith("did you mean --max_updates?")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_updates", 0),
        ("max_updates", -5),
        ("tokens_per_update", 300),
        ("max_length", 257),
        ("label_smoothing", 1),
        ("adam_beta2", 1.5),
        ("average_last", 3),
        ("preset", "huge"),
        ("learning_rate_scale", "nan"),
    ],
)
def test_a_value_out_of_range(refused, train, tmp_path, name, value):
    line = refused(*train(f"--{name}", value))
    assert f"--{name} is {value}" in line
    assert not (tmp_path / "run").exists()


def test_a_beam_of_one_is_no_mistake(call, train, tmp_path):
    # transformers refuses to save a generation configuration with one beam and options of beam search.
    assert call(*train("--num_beams", "1"))[0] == 0
    assert call("translate", "--model", tmp_path / "run", "Hello")[0] == 0


@pytest.mark.parametrize("num_positions", [60, 100, 120])
def test_generation_ends_where_learned_positions_do(call, train, tmp_path, num_positions):
    flags = ["--position_embedding_type", "learned", "--max_position_embeddings", num_positions, "--max_length", "60"]
    assert call(*train(*flags))[0] == 0
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run").eval()
    # The paper's cap where the positions allow it.
    assert model.generation_config.max_length == min(60 + 50, num_positions)
    model.generation_config.eos_token_id = None
    for cache in (None, "static"):
        ids = model.generate(torch.full((1, 60), 7), cache_implementation=cache)
        assert ids.shape == (1, model.generation_config.max_length)


def test_a_width_that_the_heads_do_not_divide(refused, train, tmp_path):
    line = refused(*train("--d_model", "30", "--encoder_attention_heads", "4"))
    assert "--d_model (30) must be divisible by --encoder_attention_heads (4)" in line
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_vocabulary_larger_than_the_text_allows(refused, train, tmp_path):
    line = refused(*train("--vocab_size", "20000"))
    assert "--vocab_size is 20000" in line
    # The largest possible size is named, and it is right.
    largest = line.partition("use at most ")[2].partition(",")[0]
    shutil.rmtree(tmp_path / "run")
    assert f"use at most {largest}," in refused(*train("--vocab_size", int(largest) + 1))


def test_a_recipe_with_a_misspelt_key(refused, train, tmp_path, write):
    path = write(tmp_path / "recipe.yaml", "max_update: 3")
    line = refused(*train("--config", path), status=2)
    assert f"{path}: max_update is not an option; did you mean max_updates?" in line
    assert not (tmp_path / "run").exists()


def test_a_recipe_with_a_value_of_the_wrong_type(refused, train, tmp_path, write):
    path = write(tmp_path / "recipe.yaml", "max_updates: many")
    line = refused(*train("--config", path), status=2)
    assert f"{path}: max_updates is 'many'; it must be a whole number." in line


def test_a_recipe_that_does_not_exist(refused, train):
    assert "quickstart" in refused(*train("--config", "quikstart"), status=2)


# Folders


def test_an_output_folder_with_a_run(refused, train, run_folder, contents):
    before = contents(run_folder)
    line = refused(*train("--output_dir", run_folder))
    assert f"{run_folder} already holds a run; continue it with --resume" in line
    assert contents(run_folder) == before
    assert "already holds a run" in refused("quickstart", "--output_dir", run_folder)
    assert contents(run_folder) == before


def test_resuming_what_is_not_a_run(refused, train, tmp_path):
    assert f"{tmp_path / 'run'} holds no checkpoints" in refused(*train("--resume"))
    assert not (tmp_path / "run").exists()


def test_resuming_with_another_configuration(refused, train, run_folder, contents):
    before = contents(run_folder)
    line = refused(*train("--output_dir", run_folder, "--resume", "--d_model", "32", "--seed", "2"))
    assert "d_model (16 then, 32 now)" in line
    assert "seed (1 then, 2 now)" in line
    assert contents(run_folder) == before


def test_resuming_with_other_text(refused, train, run_folder, corpus, tmp_path, write):
    files = []
    for path in corpus:
        lines = path.read_text(encoding="utf-8").splitlines()
        files.append(write(tmp_path / path.name, *lines[1:], lines[0]))
    copy = shutil.copytree(run_folder, tmp_path / "copy")
    line = refused(*train("--output_dir", copy, "--resume", files=files))
    assert "training text" in line
    assert [path.name for path in list_checkpoints(copy / "checkpoints")] == ["update-00000002", "update-00000004"]
