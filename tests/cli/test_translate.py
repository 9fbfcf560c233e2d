import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
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
        (latin, "byte 5: the text is not UTF-8"),
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
    assert "Standard input, line 4, byte 1: the text is not UTF-8" in line
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
    assert status == 141
    # Libraries that torch finds installed may have something to say as well.
    assert "Traceback" not in err
    assert "pipe" not in err.lower()


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
    assert str(folder) in line and line.endswith(".")


@pytest.mark.parametrize("flag", ["--num_beams", "--tokens_per_batch"])
def test_search_options_out_of_range(refused, run_folder, flag):
    assert f"{flag} is 0; it must be at least 1" in refused("translate", "--model", run_folder, flag, "0", "Hello")


# Layouts, scores, samples


def test_tab_separated_and_json_lines(call, run_folder, corpus, tmp_path, write):
    lines = corpus[0].read_text(encoding="utf-8").splitlines()[:4]
    model = ["translate", "--model", run_folder, "--num_beams", "2"]
    status, plain, _ = call(*model, "--", *lines)
    assert status == 0
    translations = plain.splitlines()
    table = write(tmp_path / "in.tsv", *(f"{number}\t{line}" for number, line in enumerate(lines)))
    assert call(*model, "--input", table, "--column", "2", "--output", tmp_path / "out.tsv")[0] == 0
    expected = [
        f"{number}\t{line}\t{found}" for number, (line, found) in enumerate(zip(lines, translations, strict=True))
    ]
    assert (tmp_path / "out.tsv").read_text(encoding="utf-8").splitlines() == expected
    assert call(*model, "--input", table, "--column", "2", "--output_format", "text")[1] == plain
    records = write(tmp_path / "in.jsonl", *(json.dumps({"text": line, "id": 1}) for line in lines))
    status, out, _ = call(*model, "--input", records, "--key", "text")
    found = [json.loads(line) for line in out.splitlines()]
    assert found == [
        {"text": line, "id": 1, "translation": translation}
        for line, translation in zip(lines, translations, strict=True)
    ]


def test_several_translations_and_scores(call, run_folder, tmp_path):
    model = ["translate", "--model", run_folder, "--num_beams", "3", "--num_hypotheses", "3", "--extra_length", "5"]
    status, out, _ = call(*model, "Hello.", "Yes.")
    assert status == 0
    for line in out.splitlines():
        columns = line.split("\t")
        assert len(columns) == 6
        scores = [float(score) for score in columns[1::2]]
        assert scores == sorted(scores, reverse=True)
    status, out, _ = call(*model, "Hello.", "--output_format", "jsonl")
    (record,) = map(json.loads, out.splitlines())
    assert record["source"] == "Hello."
    assert len(record["translations"]) == 3
    status, single, _ = call("translate", "--model", run_folder, "--num_beams", "3", "--scores", "Hello.")
    assert len(single.split("\t")) == 2


def test_samples_depend_on_the_seed(call, run_folder):
    model = ["translate", "--model", run_folder, "--sample", "--extra_length", "5"]
    first = call(*model, "Hello.", "Hello.")
    assert first[0] == 0
    assert first[1] == call(*model, "Hello.", "Hello.", "--seed", "0")[1]
    assert first[1] != call(*model, "Hello.", "Hello.", "--seed", "1")[1]
    assert len({*first[1].splitlines()}) == 2


def test_lines_of_standard_input_that_are_not_json(refused, run_folder, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"source": "a"}\nb\n')))
    line = refused("translate", "--model", run_folder, "--format", "jsonl")
    assert "Standard input, line 2, is not JSON" in line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num_hypotheses", "3", "--num_beams", "2"], "--num_hypotheses is 3; it must be at most --num_beams, 2."),
        (["--top_k", "3"], "--top_k was given without --sample"),
        (["--sample", "--temperature", "0"], "--temperature is 0.0; it must be above 0."),
        (["--column", "0"], "--column is 0; it must be at least 1."),
        (["--format", "tsv"], "--format was given with texts"),
        (["--resume"], "--resume needs --input and an --output that is a file"),
        (["--target_language", "de"], "--target_language is de, but the vocabulary has no language tags"),
        (["--device", "nosuch"], "--device nosuch cannot be used ("),
        (["--long_texts", "refuse", "--max_source_tokens", "3"], "Text 1 has 5 tokens, and at most 3 are translated"),
    ],
)
def test_options_that_do_not_fit(refused, run_folder, flags, message):
    assert message in refused("translate", "--model", run_folder, "--num_beams", "1", "Hello", *flags)


# Prompt


def test_what_is_typed_is_answered_at_once(run_folder, monkeypatch, call):
    class Terminal(io.BytesIO):
        """Standard input that notes what had been answered when each line was read."""

        def __init__(self, content):
            super().__init__(content)
            self.seen = []

        def __next__(self):
            self.seen.append(len(answers))
            return super().__next__()

    answers = []
    terminal = Terminal(b"Yes.\nNo.\n")
    stdin = io.TextIOWrapper(terminal)
    monkeypatch.setattr(sys, "stdin", stdin)
    monkeypatch.setattr(stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.print", lambda *args, file=None, **_: answers.append(args) if file is None else None)
    assert call("translate", "--model", run_folder, "--extra_length", "3")[0] == 0
    assert terminal.seen == [0, 1, 2]
    assert len(answers) == 2


def test_a_line_that_is_refused_does_not_end_the_prompt(run_folder, monkeypatch, call):
    stdin = io.TextIOWrapper(io.BytesIO(b"Yes.\nThis is too long.\nNo.\n"))
    monkeypatch.setattr(sys, "stdin", stdin)
    monkeypatch.setattr(stdin, "isatty", lambda: True, raising=False)
    flags = ["--long_texts", "refuse", "--max_source_tokens", "8", "--extra_length", "3"]
    status, out, err = call("translate", "--model", run_folder, *flags)
    assert status == 0
    assert len(out.splitlines()) == 2
    assert "Text 2 has" in err


# Interruptions


def test_an_interrupted_file_is_resumed(call, refused, run_folder, tmp_path, write, start):
    lines = [f"Number {number}." for number in range(9000)]
    source = write(tmp_path / "source.en", *lines)
    arguments = ["translate", "--model", run_folder, "--num_beams", "1", "--extra_length", "1", "--input", source]
    assert call(*arguments, "--output", tmp_path / "whole")[0] == 0
    target = tmp_path / "target"
    arguments += ["--output", target]
    partial = tmp_path / "target.partial"
    process = start(arguments)
    try:
        deadline = time.monotonic() + 120
        while not (partial.exists() and partial.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert partial.stat().st_size > 0
    assert not target.exists()
    assert "continue it with --resume" in refused(*arguments)
    assert call(*arguments, "--resume")[0] == 0
    assert target.read_bytes() == (tmp_path / "whole").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source.en", "target", "whole"]


def test_ctrl_c_tells_how_to_go_on(call, run_folder, tmp_path, write, monkeypatch):
    from vanilla_transformer import Translator

    source = write(tmp_path / "source.en", *["Yes."] * 6)
    arguments = ["translate", "--model", run_folder, "--extra_length", "1", "--input", source]
    assert call(*arguments, "--output", tmp_path / "whole")[0] == 0
    whole = Translator.translate_window

    def interrupted(self, texts, *, start, **options):
        if start > 0:
            raise KeyboardInterrupt
        return whole(self, texts, start=start, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Translator, "translate_window", interrupted)
        # Windows of two lines.
        patch.setattr(Translator, "window", property(lambda _: 2, lambda *_: None), raising=False)
        status, _, err = call(*arguments, "--output", tmp_path / "target")
    assert status == 130
    assert f"{tmp_path / 'target.partial'} keeps what is done; --resume goes on with it." in err
    assert len((tmp_path / "target.partial").read_text(encoding="utf-8").splitlines()) == 2
    assert call(*arguments, "--output", tmp_path / "target", "--resume")[0] == 0
    assert (tmp_path / "target").read_bytes() == (tmp_path / "whole").read_bytes()
