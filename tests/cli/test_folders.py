"""Folders that a verb cannot read or write: what every verb does about them."""

import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("verb", ["train", "prepare", "tokenizer", "average"])
@pytest.mark.parametrize("place", ["file", "below a file", "/proc"])
def test_an_output_folder_that_cannot_be_made(refused, train, run_folder, corpus, tmp_path, verb, place, write):
    taken = write(tmp_path / "taken", "precious")
    folder = {"file": taken, "below a file": taken / "run", "/proc": Path("/proc/vanilla-transformer-run")}[place]
    if place == "/proc" and not sys.platform.startswith("linux"):
        pytest.skip("there is no /proc")
    arguments = {
        "train": train(),
        "prepare": ["prepare", *train()[1:], "--cache_dir", folder],
        "tokenizer": ["tokenizer", *corpus, "--vocab_size", "300"],
        "average": ["average", run_folder, "--last", "2"],
    }[verb]
    assert str(folder) in refused(*arguments, "--output_dir", folder)
    assert taken.read_text(encoding="utf-8") == "precious\n"


@pytest.fixture(params=["empty", "text", "missing"])
def no_model(request, tmp_path, write):
    """A folder that is not a model's."""
    folder = tmp_path / "nomodel"
    if request.param != "missing":
        folder.mkdir()
    if request.param == "text":
        write(folder / "notes.txt", "nothing here")
    return folder


def test_folders_that_are_no_checkpoints(refused, no_model, corpus, tmp_path):
    output = tmp_path / "out"
    for arguments in (
        ["translate", "--model", no_model, "--output", output, "Hello"],
        ["evaluate", "--model", no_model, "--source", corpus[0], "--references", corpus[1], "--output", output],
        ["average", no_model, "--output_dir", output],
        ["train", "--train_files", *corpus, "--tokenizer", no_model, "--output_dir", tmp_path / "run"],
    ):
        assert str(no_model) in refused(*arguments)
        assert not output.exists()


@pytest.mark.parametrize("verb", ["tokenizer", "average"])
def test_a_disk_that_fills(refused, run_folder, corpus, tmp_path, file_limit, verb):
    arguments = {
        "tokenizer": [*corpus, "--vocab_size", "300"],
        "average": [run_folder, "--last", "2"],
    }[verb]
    # Room for what the verb writes before its largest file.
    largest = {"tokenizer": "tokenizer.json", "average": "model.safetensors"}[verb]
    with file_limit((run_folder / largest).stat().st_size - 1):
        line = refused(verb, *arguments, "--output_dir", tmp_path / "out")
    assert "File too large" in line
    assert not list((tmp_path / "out").glob("*model*"))
