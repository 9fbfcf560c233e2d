"""The mistakes that users make first: one sentence, a status other than 0, and nothing damaged."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import pytest

from vanilla_transformer.data import encoding
from vanilla_transformer.training.checkpoints import fault_of, list_checkpoints, update_of
from vanilla_transformer.training.journal import read_journal


SCRIPT = Path(sysconfig.get_path("scripts")) / "vanilla-transformer"


@pytest.fixture
def train(corpus, small, tmp_path):
    """Arguments of a short training in `tmp_path / "run"`; later flags win."""

    def train(*flags, files=corpus):
        folder = ["--output_dir", tmp_path / "run"]
        return ["train", "--train_files", *files, *folder, *small, "--max_updates", "2", *flags]

    return train


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


# Training text


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


def test_files_of_unequal_length(refused, train, corpus, tmp_path):
    short = write(tmp_path / "short.de", "eins", "zwei")
    line = refused(*train(files=(corpus[0], short)))
    assert f"{corpus[0]} has 40 lines and {short} has 2" in line
    assert not (tmp_path / "run").exists()


def test_an_empty_file(refused, train, tmp_path):
    empty = (write(tmp_path / "empty.en"), write(tmp_path / "empty.de"))
    assert f"{empty[0]} is empty" in refused(*train(files=empty))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("verb", ["train", "prepare"])
def test_text_of_blank_lines_only(refused, train, tmp_path, verb):
    blank = (write(tmp_path / "blank.en", "", " "), write(tmp_path / "blank.de", "", "Hallo"))
    line = refused(verb, *train(files=blank)[1:])
    assert line
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_validation_text_of_blank_lines_only(refused, train, tmp_path):
    blank = (write(tmp_path / "blank.en", "", ""), write(tmp_path / "blank.de", "", ""))
    line = refused(*train("--valid_files", *blank))
    assert f"None of the 2 lines of {blank[0]} / {blank[1]} can be used" in line
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_empty_lines_when_they_are_refused(refused, train, tmp_path):
    files = (write(tmp_path / "gap.en", "one", "", "three"), write(tmp_path / "gap.de", "eins", "zwei", "drei"))
    line = refused(*train("--invalid_pairs", "refuse", files=files))
    assert f"{files[0]} / {files[1]}, line 2: the source is empty" in line
    assert "--invalid_pairs drop" in line


def test_text_that_is_not_utf8_when_it_is_refused(refused, train, tmp_path):
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


def test_a_width_that_the_heads_do_not_divide(refused, train, tmp_path):
    line = refused(*train("--d_model", "30", "--encoder_attention_heads", "4"))
    assert "`d_model` (30) must be divisible by `encoder_attention_heads` (4)" in line
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_vocabulary_larger_than_the_text_allows(refused, train, tmp_path):
    line = refused(*train("--vocab_size", "20000"))
    assert "`vocab_size` is 20000" in line
    # The largest possible size is named, and it is right.
    largest = line.partition("use at most ")[2].partition(",")[0]
    shutil.rmtree(tmp_path / "run")
    assert f"use at most {largest}," in refused(*train("--vocab_size", int(largest) + 1))


def test_a_recipe_with_a_misspelt_key(refused, train, tmp_path):
    path = write(tmp_path / "recipe.yaml", "max_update: 3")
    line = refused(*train("--config", path), status=2)
    assert f"{path}: max_update is not an option; did you mean max_updates?" in line
    assert not (tmp_path / "run").exists()


def test_a_recipe_with_a_value_of_the_wrong_type(refused, train, tmp_path):
    path = write(tmp_path / "recipe.yaml", "max_updates: many")
    line = refused(*train("--config", path), status=2)
    assert f"{path}: max_updates is 'many'; it must be a whole number." in line


def test_a_recipe_that_does_not_exist(refused, train):
    assert "quickstart" in refused(*train("--config", "quikstart"), status=2)


# Output folders


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


def test_resuming_with_other_text(refused, train, run_folder, corpus, tmp_path):
    files = []
    for path in corpus:
        lines = path.read_text(encoding="utf-8").splitlines()
        files.append(write(tmp_path / path.name, *lines[1:], lines[0]))
    copy = shutil.copytree(run_folder, tmp_path / "copy")
    line = refused(*train("--output_dir", copy, "--resume", files=files))
    assert "training text" in line
    assert [path.name for path in list_checkpoints(copy / "checkpoints")] == ["update-00000002", "update-00000004"]


@pytest.mark.parametrize("verb", ["train", "prepare", "tokenizer", "average"])
@pytest.mark.parametrize("place", ["file", "below a file", "/proc"])
def test_an_output_folder_that_cannot_be_made(refused, train, run_folder, corpus, tmp_path, verb, place):
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


# Models


@pytest.fixture(params=["empty", "text", "missing"])
def no_model(request, tmp_path):
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


def test_averaging_more_checkpoints_than_there_are(refused, run_folder, tmp_path):
    assert "holds 2 checkpoints, and --last is 3" in refused(
        "average", run_folder, "--last", "3", "--output_dir", tmp_path / "mean"
    )
    assert not (tmp_path / "mean").exists()
    assert "No checkpoint was given" in refused("average")
    assert "--last is 0" in refused("average", run_folder, "--last", "0")


def test_an_average_in_place_of_a_checkpoint(refused, run_folder, contents):
    before = contents(run_folder)
    first, last = list_checkpoints(run_folder / "checkpoints")
    refused("average", first, last, "--output_dir", last)
    assert contents(run_folder) == before


def test_a_vocabulary_in_place_of_a_models(refused, run_folder, corpus, contents):
    before = contents(run_folder)
    refused("tokenizer", *corpus, "--vocab_size", "300", "--output_dir", run_folder)
    assert contents(run_folder) == before


def test_text_for_a_vocabulary_that_cannot_be_read(refused, tmp_path):
    latin = tmp_path / "latin.de"
    latin.write_bytes("Haus\nStraße\n".encode("latin-1"))
    output = ["--vocab_size", "261", "--output_dir", tmp_path / "tokenizer"]
    assert f"{latin}, line 2, byte 5: the text is not UTF-8" in refused("tokenizer", latin, *output)
    assert "No text was given" in refused("tokenizer", *output)
    assert f"{tmp_path / 'nosuch'} does not exist" in refused("tokenizer", tmp_path / "nosuch", *output)
    assert not (tmp_path / "tokenizer" / "tokenizer.json").exists()


# Translating and scoring


def test_translations_of_arguments_a_file_and_standard_input_agree(call, run_folder, corpus, tmp_path, monkeypatch):
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


def test_an_output_is_replaced_when_the_new_one_is_whole(call, refused, run_folder, tmp_path, monkeypatch):
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
def test_an_output_that_cannot_be_written(refused, run_folder, corpus, tmp_path, contents, place):
    (tmp_path / "folder").mkdir()
    write(tmp_path / "taken", "precious")
    before = contents(tmp_path)
    assert str(tmp_path / place) in refused("translate", "--model", run_folder, "--output", tmp_path / place, "Hello")
    for flag in ("--output", "--translations"):
        files = ["--source", corpus[0], "--references", corpus[1]]
        assert str(tmp_path / place) in refused("evaluate", "--model", run_folder, *files, flag, tmp_path / place)
    assert contents(tmp_path) == before


def test_an_output_that_is_an_input_of_the_evaluation(refused, run_folder, corpus, tmp_path, contents):
    source, references = (Path(shutil.copy(path, tmp_path)) for path in corpus)
    before = contents(tmp_path)
    arguments = ["evaluate", "--model", run_folder, "--source", source, "--references", references]
    for flags in (
        ["--translations", references],
        ["--output", tmp_path / "." / source.name],
        ["--output", tmp_path / "same", "--translations", tmp_path / "same"],
    ):
        assert "was given twice" in refused(*arguments, *flags)
    assert contents(tmp_path) == before


def test_texts_and_a_file_at_once(refused, run_folder, corpus):
    assert "--input" in refused("translate", "--model", run_folder, "--input", corpus[0], "Hello")


def test_a_text_that_is_not_utf8(refused, run_folder):
    assert "is not UTF-8" in refused(
        "translate", "--model", run_folder, b"Stra\xdfe".decode("utf-8", "surrogateescape")
    )


def test_an_input_that_cannot_be_read(refused, run_folder, tmp_path):
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


def test_evaluating_files_of_unequal_length(refused, run_folder, corpus, tmp_path):
    short = write(tmp_path / "short.de", "eins", "zwei")
    files = ["--source", corpus[0], "--references", short, "--output", tmp_path / "scores.json"]
    assert "40 sources and 2 references" in refused("evaluate", "--model", run_folder, *files)
    assert not (tmp_path / "scores.json").exists()


def test_evaluation_writes_what_it_prints(call, run_folder, corpus, tmp_path):
    files = ["--source", corpus[0], "--references", corpus[1]]
    outputs = ["--output", tmp_path / "scores.json", "--translations", tmp_path / "out.de"]
    status, out, _ = call("evaluate", "--model", run_folder, *files, *outputs)
    assert status == 0
    scores = json.loads(out)
    assert scores == json.loads((tmp_path / "scores.json").read_text())
    status, out, _ = call("score", "--translations", tmp_path / "out.de", "--references", corpus[1])
    assert status == 0
    assert json.loads(out) | {"model": str(run_folder)} == scores


def test_scoring_files_of_unequal_length(refused, corpus, tmp_path):
    short = write(tmp_path / "short.de", "eins", "zwei")
    assert "2 translations and 40 references" in refused("score", "--translations", short, "--references", corpus[1])


@pytest.mark.parametrize("verb", ["score", "evaluate"])
def test_an_unknown_tokenisation(refused, run_folder, corpus, verb):
    files = {
        "score": ["--translations", corpus[0], "--references", corpus[1]],
        "evaluate": ["--model", run_folder, "--source", corpus[0], "--references", corpus[1]],
    }[verb]
    line = refused(verb, *files, "--tokenize", "14a")
    assert "--tokenize is 14a" in line
    assert "13a" in line


# Interruptions


def test_ctrl_c_while_text_is_encoded(call, train, tmp_path, monkeypatch):
    encode_block = encoding._encode_block

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        return encode_block(*arguments)

    monkeypatch.setattr(encoding, "_encode_block", interrupted)
    status, out, err = call(*train())
    assert (status, out) == (130, "")
    assert err.endswith("vanilla-transformer train: stopped by Ctrl-C.\n")
    assert "Traceback" not in err
    # Nothing half done is left, and the same command then runs to its end.
    assert not list((tmp_path / "run").rglob("*partial*"))
    monkeypatch.undo()
    assert call(*train())[0] == 0
    assert (tmp_path / "run" / "model.safetensors").is_file()


def start(arguments, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, SCRIPT, *map(str, arguments)], stderr=subprocess.PIPE, text=True, **options
    )


def test_signals_in_the_middle_of_training_save_and_resuming_finishes(train, corpus, tmp_path):
    folder = tmp_path / "run"
    arguments = train("--max_updates", "1000000", "--save_every", "100000", "--log_every", "1", "--keep_last", "5")
    reached = [0]
    for number, flags in ((signal.SIGINT, []), (signal.SIGTERM, ["--resume"])):
        process = start([*arguments, *flags], stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 120
            while process.poll() is None and time.monotonic() < deadline:
                journal = folder / "metrics.jsonl"
                if journal.exists() and any(r["update"] > reached[-1] + 2 for r in read_journal(journal)):
                    break
                time.sleep(0.05)
            process.send_signal(number)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 128 + number, err
        assert "Traceback" not in err
        newest = list_checkpoints(folder / "checkpoints")[-1]
        assert fault_of(newest) is None
        reached.append(update_of(newest))
        assert reached[-1] > reached[-2]
        assert err.endswith(f"Stopped after {reached[-1]:,} updates and saved; continue with --resume.\n")
        assert not (folder / "model.safetensors").exists()
    end = reached[-1] + 3
    result = subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments), "--resume", "--max_updates", str(end)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert (folder / "model.safetensors").is_file()
    assert update_of(list_checkpoints(folder / "checkpoints")[-1]) == end
    updates = [record["update"] for record in read_journal(folder / "metrics.jsonl") if record["kind"] == "train"]
    assert updates == list(range(1, end + 1))


def test_a_reader_of_translations_that_leaves(run_folder, tmp_path):
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
