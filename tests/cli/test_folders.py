"""Folders that a verb cannot read or write: what every verb does about them."""

import os
import sys
import threading
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


@pytest.mark.parametrize("verb", ["train", "quickstart", "average", "tokenizer"])
def test_a_file_that_no_run_wrote_is_not_overwritten(refused, train, run_folder, corpus, tmp_path, verb, contents):
    folder = tmp_path / "project"
    folder.mkdir()
    name = {"tokenizer": "tokenizer_config.json", "quickstart": "translations.de"}.get(verb, "config.json")
    (folder / name).write_text('{"database": "precious"}')
    before = contents(folder)
    arguments = {
        "train": train(),
        "quickstart": ["quickstart"],
        "average": ["average", run_folder, "--last", "2"],
        "tokenizer": ["tokenizer", *corpus, "--vocab_size", "300"],
    }[verb]
    line = refused(*arguments, "--output_dir", folder)
    assert f"{folder} holds {name}, which would be overwritten; name another --output_dir, or move it away." in line
    assert contents(folder) == before


@pytest.mark.parametrize("flag", ["--output", "--translations"])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_models_own_files_are_no_output(refused, run_folder, corpus, flag, name, contents):
    before = contents(run_folder)
    texts = ["--source", corpus[0], "--references", corpus[1]]
    assert "is a file of the model" in refused("evaluate", "--model", run_folder, *texts, flag, run_folder / name)
    if flag == "--output":
        assert "is a file of the model" in refused("translate", "--model", run_folder, "Hi", flag, run_folder / name)
    assert contents(run_folder) == before


def test_links_that_lead_to_each_other_are_no_output(refused, run_folder, tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "loop" in refused("translate", "--model", run_folder, "Hi", "--output", tmp_path / "loop")


@pytest.mark.parametrize("verb", ["score", "tokenizer"])
def test_what_is_read_once_may_be_a_pipe(call, corpus, tmp_path, verb):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(corpus[1].read_bytes()))
    writer.start()
    if verb == "score":
        assert call("score", "--translations", pipe, "--references", corpus[1])[0] == 0
    else:
        assert call("tokenizer", pipe, "--vocab_size", "270", "--output_dir", tmp_path / "vocabulary")[0] == 0
    writer.join(timeout=60)


@pytest.mark.parametrize("verb", ["score", "evaluate", "tokenizer", "translate", "train"])
def test_text_in_utf16_is_refused_with_the_way_to_convert_it(refused, train, run_folder, corpus, tmp_path, verb):
    wide = tmp_path / "wide"
    wide.write_bytes(corpus[0].read_text(encoding="utf-8").encode("utf-16-le"))
    arguments = {
        "score": ["score", "--translations", wide, "--references", corpus[1]],
        "evaluate": ["evaluate", "--model", run_folder, "--source", wide, "--references", corpus[1]],
        "tokenizer": ["tokenizer", wide, "--vocab_size", "300", "--output_dir", tmp_path / "vocabulary"],
        "translate": ["translate", "--model", run_folder, "--input", wide],
        "train": train(files=(wide, corpus[1])),
    }[verb]
    line = refused(*arguments)
    assert f"{wide} is UTF-16LE, and text must be UTF-8; convert it: iconv -f UTF-16LE -t UTF-8 " in line
