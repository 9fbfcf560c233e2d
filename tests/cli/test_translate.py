import io
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest


# Input


def test_translations_of_arguments_a_file_and_standard_input_agree(
    call, run_folder, corpus, tmp_path, monkeypatch, write
):
    lines = [*corpus[0].read_text(encoding="utf-8").splitlines()[:5], "", "  ", "Last."]
    model = ["translate", "--model", run_folder]
    source = write(tmp_path / "source.en", *lines)
    status, arguments, _ = call(*model, "--", *lines)
    assert status == 0
    assert call(*model, "--input", source)[:2] == (0, arguments)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(source.read_bytes())))
    assert call(*model)[:2] == (0, arguments)
    # One line for each, empty for empty, and the same in a file.
    translations = arguments.removesuffix("\n").split("\n")
    assert [line == "" for line in translations] == [not line.strip() for line in lines]
    assert call(*model, "--input", source, "--output", tmp_path / "out")[:2] == (0, "")
    assert (tmp_path / "out").read_text(encoding="utf-8") == arguments


def test_texts_and_a_file_at_once(refused, run_folder, corpus):
    assert "--input" in refused("translate", "--model", run_folder, "--input", corpus[0], "Hello")


def test_a_text_that_is_not_utf8(refused, run_folder):
    assert "is not UTF-8" in refused(
        "translate", "--model", run_folder, b"Stra\xdfe".decode("utf-8", "surrogateescape")
    )


def test_an_input_that_cannot_be_read(refused, run_folder, tmp_path, write):
    latin = tmp_path / "latin"
    latin.write_bytes(b"Stra\xdfe\n")
    for path, reason in (
        (latin, "is not UTF-8 (byte 5)"),
        (tmp_path / "nosuch", "No such file"),
        (tmp_path, "cannot be read"),
        (write(tmp_path / "empty"), "is empty"),
    ):
        line = refused("translate", "--model", run_folder, "--input", path)
        assert str(path) in line
        assert reason in line


def test_standard_input_that_is_closed(refused, run_folder, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input is closed; give texts, or --input FILE." in refused("translate", "--model", run_folder)


# Output


def test_an_output_that_is_the_input(refused, run_folder, tmp_path, write):
    source = write(tmp_path / "source", "Hello.")
    assert "was given twice" in refused("translate", "--model", run_folder, "--input", source, "--output", source)
    assert source.read_text() == "Hello.\n"


def test_an_output_is_replaced_when_the_new_one_is_whole(call, refused, run_folder, tmp_path, monkeypatch, write):
    output = write(tmp_path / "out", "what was there")
    lines = ["Hello."] * 3
    bad = "\n".join(lines).encode() + b"\n\xff\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(bad)))
    line = refused("translate", "--model", run_folder, "--output", output)
    assert "Standard input, line 4, is not UTF-8" in line
    assert output.read_text(encoding="utf-8") == "what was there\n"
    link = tmp_path / "link"
    link.symlink_to(output)
    assert call("translate", "--model", run_folder, "--output", link, *lines)[0] == 0
    assert link.is_symlink()
    assert len(output.read_text(encoding="utf-8").splitlines()) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "out"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_a_pipe_is_written_to_and_stays_a_pipe(call, run_folder, tmp_path):
    pipe, received = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: received.append(pipe.read_text(encoding="utf-8")))
    reader.start()
    assert call("translate", "--model", run_folder, "--output", pipe, "Hello.", "Yes.")[0] == 0
    reader.join(timeout=60)
    assert pipe.is_fifo()
    assert len(received[0].splitlines()) == 2


@pytest.mark.parametrize("place", ["missing/out", "folder", "taken/out"])
def test_an_output_that_cannot_be_written(refused, run_folder, corpus, tmp_path, contents, place, write):
    (tmp_path / "folder").mkdir()
    write(tmp_path / "taken", "precious")
    before = contents(tmp_path)
    assert str(tmp_path / place) in refused("translate", "--model", run_folder, "--output", tmp_path / place, "Hello")
    for flag in ("--output", "--translations"):
        files = ["--source", corpus[0], "--references", corpus[1]]
        assert str(tmp_path / place) in refused("evaluate", "--model", run_folder, *files, flag, tmp_path / place)
    assert contents(tmp_path) == before


def test_a_reader_of_translations_that_leaves(run_folder, tmp_path, write, start):
    # As in `translate ... | head -1`: the reader takes one line and goes.
    source = write(tmp_path / "source.en", *["Yes."] * 9000)
    with source.open("rb") as lines:
        process = start(["translate", "--model", run_folder, "--num_beams", "1"], stdin=lines, stdout=subprocess.PIPE)
        try:
            process.stdout.readline()
            process.stdout.close()
            err = process.stderr.read()
            status = process.wait(timeout=120)
        finally:
            process.kill()
            process.wait()
            process.stderr.close()
    assert (status, err) == (141, "")


# Models


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def other_width(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"d_model": 32}))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", truncate),
        ("model.safetensors", lambda path: path.write_bytes(b"")),
        ("model.safetensors", Path.unlink),
        ("config.json", truncate),
        ("config.json", lambda path: path.write_text('{"model_type": "nosuch"}')),
        ("config.json", lambda path: path.write_text('{"model_type": "gpt2"}')),
        ("config.json", other_width),
        ("tokenizer.json", lambda path: path.write_text("{}")),
        ("tokenizer.json", truncate),
    ],
)
def test_a_damaged_model(refused, run_folder, tmp_path, name, damage):
    folder = tmp_path / "damaged"
    shutil.copytree(run_folder, folder, ignore=shutil.ignore_patterns("checkpoints", "cache"))
    damage(folder / name)
    line = refused("translate", "--model", folder, "Hello")
    assert line.startswith(f"vanilla-transformer translate: No translation model can be loaded from {folder} (")


@pytest.mark.parametrize("flag", ["--num_beams", "--tokens_per_batch"])
def test_search_options_out_of_range(refused, run_folder, flag):
    assert f"{flag} is 0; it must be at least 1" in refused("translate", "--model", run_folder, flag, "0", "Hello")
