import ast
import importlib.metadata
import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import vanilla_transformer
from vanilla_transformer.cli import VERBS, main
from vanilla_transformer.errors import UserError
from vanilla_transformer.training.options import TrainingOptions
from vanilla_transformer.translation.backends import SearchBackend


SCRIPT = Path(sysconfig.get_path("scripts")) / "vanilla-transformer"
# What takes seconds to import.
HEAVY = {"torch", "transformers", "accelerate", "datasets", "evaluate", "tokenizers", "sacrebleu", "pandas", "pyarrow"}


def run_script(*arguments: str) -> tuple[subprocess.CompletedProcess, set[str]]:
    """Run the console script itself; returns its result and what it imported."""
    result = subprocess.run(
        [sys.executable, "-X", "importtime", SCRIPT, *arguments], capture_output=True, text=True, check=False
    )
    times = re.findall(r"^import time:.*\|\s*(\S+)$", result.stderr, flags=re.MULTILINE)
    result.stderr = re.sub(r"^import time:.*\n", "", result.stderr, flags=re.MULTILINE)
    return result, set(times)


# Options in messages


def test_the_library_names_arguments_and_the_command_line_flags(refused, train, corpus):
    options = TrainingOptions(train_files=corpus, tokens_per_batch=99, max_length=100)
    with pytest.raises(UserError) as raised:
        options.check()
    assert str(raised.value).startswith("`max_length` is 100 and `tokens_per_batch` 99; a batch must hold")
    told = refused(*train("--tokens_per_batch", "99", "--max_length", "100"))
    assert told == "vanilla-transformer train: " + re.sub("`(.*?)`", r"--\1", str(raised.value))


def test_hyper_parameters_are_named_as_flags_where_flags_set_them(refused, train, run_folder, tmp_path):
    assert "--d_model (15) must be divisible by --encoder_attention_heads (2)" in refused(*train("--d_model", "15"))
    shutil.copytree(run_folder, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"d_model": 15}), encoding="utf-8")
    told = refused(*train("--init_from", tmp_path / "model"))
    assert "'d_model' (15) must be divisible by" in told and "--d_model" not in told


@pytest.mark.parametrize(
    "place",
    [
        "*.py",
        "data/*.py",
        "publishing/*.py",
        "training/options.py",
        "training/preparation/*.py",
        "training/records/*.py",
    ],
)
def test_messages_of_the_library_hold_no_flags(place):
    for path in Path(vanilla_transformer.__file__).parent.glob(place):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("UserError", "option"):
                texts = [part.value for part in ast.walk(call) if isinstance(part, ast.Constant)]
                assert not re.search(r"(^|[\s(])--\w", re.sub("`.*?`", "", "".join(map(str, texts)))), (
                    f"{path}, line {call.lineno}"
                )


# Help and version


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_every_verb(call, flag):
    status, out, err = call(flag)
    assert (status, err) == (0, "")
    for verb, summary in VERBS.items():
        assert re.search(rf"^ +{verb} +{re.escape(summary)}$", out, flags=re.MULTILINE)


def test_the_version_is_the_installed_packages(call):
    version = importlib.metadata.version("vanilla-transformer")
    assert call("--version") == (0, f"vanilla-transformer {version}\n", "")
    assert vanilla_transformer.__version__ == version


def test_without_a_verb_the_overview_is_printed_and_the_command_fails(call):
    status, out, err = call()
    assert (status, err) == (2, "")
    assert out == call("--help")[1]


@pytest.mark.parametrize(("given", "nearest"), [("trian", "train"), ("translat", "translate"), ("scores", "score")])
def test_an_unknown_verb_names_the_nearest(refused, given, nearest):
    assert refused(given, status=2) == f"vanilla-transformer: {given} is not a verb; did you mean {nearest}?"


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "train"])
def test_launchers_share_out_training_alone(refused, monkeypatch, verb):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    line = refused(verb)
    assert f"{verb}: A launcher has started 2 processes, and each would do the same; start {verb} without" in line
    # One process is none of several.
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr("sys.argv", ["vanilla-transformer", verb, "--help"])
    assert main() == 0


@pytest.mark.parametrize(("rank", "local_rank", "speaks"), [("0", "0", True), ("1", "1", False), ("8", "0", True)])
def test_one_process_of_each_machine_tells_what_is_wrong(call, monkeypatch, rank, local_rank, speaks):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    status, _, err = call("train")
    assert (status, bool(err)) == (1, speaks)


@pytest.mark.parametrize("reserve", [lambda: bytearray(1 << 60), lambda: torch.empty(1 << 58)])
def test_memory_that_does_not_suffice(refused, run_folder, monkeypatch, reserve):
    monkeypatch.setattr(SearchBackend, "translate", lambda *arguments, **options: reserve())
    line = refused("translate", "--model", run_folder, "Hello.")
    assert "Out of memory; lower the sizes of batches" in line


def test_a_verb_like_no_other_is_answered_with_the_verbs(refused):
    line = refused("xyzzy", status=2)
    assert all(verb in line for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(call, verb):
    status, out, err = call(verb, "--help")
    assert (status, err) == (0, "")
    assert out.startswith(f"usage: vanilla-transformer {verb} ")
    # Names keep their capitals.
    assert f"\n\n{VERBS[verb][:1].upper()}{VERBS[verb][1:]}.\n\n" in out


def test_every_module_of_a_verb_is_in_the_overview():
    folder = Path(vanilla_transformer.__file__).parent / "cli"
    with_options = {path.stem for path in folder.glob("*.py") if "\nOPTIONS = " in path.read_text(encoding="utf-8")}
    assert with_options == set(VERBS)


# Nothing heavy is imported before it is needed


@pytest.mark.parametrize(
    ("arguments", "status", "answer"),
    [
        (["--help"], 0, "usage: vanilla-transformer VERB"),
        (["--version"], 0, f"vanilla-transformer {vanilla_transformer.__version__}"),
        (["train", "--help"], 0, "usage: vanilla-transformer train"),
        (["train", "--max_update", "3"], 2, "did you mean --max_updates?"),
        (["train", "--config", "nosuch"], 2, "base, big, multi30k, quickstart"),
        (["train", "--train_files", "nosuch.en", "nosuch.de"], 1, "nosuch.en does not exist"),
        (["translate", "--model", "nosuch", "Hello"], 1, "There is no folder nosuch;"),
        (["translate", "--model", "user/name", "--num_beams", "0", "Hello"], 1, "--num_beams is 0;"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_the_console_script_answers_without_importing_torch(arguments, status, answer):
    result, imported = run_script(*arguments)
    assert result.returncode == status
    assert answer in result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert "vanilla_transformer.cli" in imported
    assert not {name.split(".")[0] for name in imported} & HEAVY


def test_a_reader_that_leaves_is_no_error():
    # Standard output is a pipe whose reading end is closed.
    reading, writing = os.pipe()
    os.close(reading)
    # Without a buffer, argparse itself hides the error.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for arguments in (["--help"], ["average", "--help"]):
        result = subprocess.run(
            [sys.executable, SCRIPT, *arguments],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            check=False,
        )
        assert (result.returncode, result.stderr) == (141, "")
    os.close(writing)


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
@pytest.mark.parametrize("arguments", ["--version", "--help", "train --help"])
def test_standard_output_that_is_closed(arguments):
    result = subprocess.run(
        ["/bin/sh", "-c", f'exec "$0" "$1" {arguments} >&-', sys.executable, SCRIPT],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr == "vanilla-transformer: Standard output is closed; leave it open, or send it to a file.\n"


def test_text_is_utf8_whatever_the_locale(tmp_path):
    # What Python would do for an old locale, which systems rarely have installed.
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = subprocess.run(
        [sys.executable, SCRIPT, "score", "--translations", "Größe.de", "--references", "Größe.de"],
        capture_output=True,
        env=environment,
        check=False,
        cwd=tmp_path,
    )
    assert result.returncode == 1
    assert "Größe.de cannot be read" in result.stderr.decode("utf-8")


@pytest.mark.skipif(os.name != "posix", reason="elsewhere the names of files are Unicode")
@pytest.mark.parametrize("place", ["of the recipe", "in the recipe", "of the text"])
def test_names_that_the_locale_cannot_hold_are_refused_with_the_remedy(tmp_path, place):
    folder = tmp_path / "Übung"
    folder.mkdir()
    recipe = folder / "recipe.yaml" if place == "of the recipe" else tmp_path / "recipe.yaml"
    recipe.write_text(f"output_dir: {folder / 'run'}\n", encoding="utf-8")
    text = folder / "text" if place == "of the text" else tmp_path / "text"
    text.write_text("one\n", encoding="utf-8")
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    result = subprocess.run(
        [sys.executable, SCRIPT, "train", "--config", recipe, "--train_files", text, text, "--device", "cpu"],
        capture_output=True,
        env=environment,
        check=False,
        cwd=tmp_path,
    )
    assert result.returncode == 1
    (line,) = result.stderr.decode("utf-8").splitlines()
    assert re.fullmatch(r"vanilla-transformer train: .*/Übung/.* has characters .*; set PYTHONUTF8=1, or .*", line)


def test_what_is_printed_is_utf8_and_may_name_files_that_are_not(run_folder, tmp_path, monkeypatch):
    name = os.fsencode(tmp_path / "Größe") + b"-\xdf"
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii"))
    assert main(["average", str(run_folder), "--last", "2", "--output_dir", os.fsdecode(name)]) == 0
    assert output.getvalue().startswith(name + b": mean of ")


# The package


def test_importing_the_package_registers_its_classes(tmp_path):
    code = """
import json, sys, vanilla_transformer
assert "vanilla_transformer.modeling_vanilla_transformer" in sys.modules
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer
config = AutoConfig.for_model("vanilla_transformer", vocab_size=300, d_model=8, encoder_layers=1, decoder_layers=1)
vanilla_transformer.register()
names = [type(config), type(AutoModel.from_config(config)), type(AutoModelForSeq2SeqLM.from_config(config))]
vanilla_transformer.VanillaTransformerTokenizer().save_pretrained(sys.argv[1])
config.save_pretrained(sys.argv[1])
print(json.dumps([kind.__name__ for kind in [*names, type(AutoTokenizer.from_pretrained(sys.argv[1]))]]))
"""
    result = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == [
        "VanillaTransformerConfig",
        "VanillaTransformerModel",
        "VanillaTransformerForConditionalGeneration",
        "VanillaTransformerTokenizer",
    ]


def test_the_public_names_are_there_and_no_others_are_made_up():
    for name in vanilla_transformer.__all__:
        assert getattr(vanilla_transformer, name).__name__ == name
    assert set(vanilla_transformer.__all__) <= set(dir(vanilla_transformer))
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = vanilla_transformer.Nothing
