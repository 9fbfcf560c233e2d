"""No verb runs Python that comes with a model, and what stands on standard input is text, never an answer."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest


CODE = """
from pathlib import Path
Path({marker!r}).write_text("ran")
from transformers import MarianConfig, MarianMTModel
from transformers import PreTrainedTokenizerFast
class Config(MarianConfig):
    model_type = "brings_code"
class Model(MarianMTModel):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast):
    pass
def generate(model, *arguments, **options):
    raise AssertionError
"""
MODELS = {"AutoConfig": "code.Config", "AutoModelForSeq2SeqLM": "code.Model"}
TOKENIZER = {"AutoTokenizer": [None, "code.Tokenizer"]}


@pytest.fixture
def folder(run_folder, tmp_path):
    """A model of a class of its own, whose code leaves a mark when it runs."""
    folder = tmp_path / "model"
    shutil.copytree(run_folder, folder, ignore=shutil.ignore_patterns("checkpoints", "cache"))
    code = CODE.format(marker=str(tmp_path / "marker"))
    (folder / "code.py").write_text(code)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(code)
    return folder


def change(path: Path, **values) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture
def piped(start, tmp_path):
    """Run the console script with `y` before the text on standard input; returns status, output and complaint."""

    def piped(*arguments):
        with start(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            out, err = process.communicate("y\nThe device is not supported.\n", timeout=120)
        return process.returncode, out, err

    return piped


def test_the_text_does_not_answer_for_the_user(piped, folder, tmp_path):
    change(folder / "config.json", model_type="brings_code", auto_map=MODELS)
    status, out, err = piped("translate", "--model", folder, "--device", "cpu")
    assert not (tmp_path / "marker").exists()
    assert (status, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert f"{folder} needs Python code that comes with it" in err and "--trust_remote_code" in err
    assert "[y/N]" not in out + err


def test_a_published_model_translates_with_the_installed_classes(piped, folder, tmp_path):
    change(folder / "config.json", auto_map=MODELS)
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["code.VanillaTransformerTokenizer", None]})
    for flags in ([], ["--trust_remote_code"]):
        status, out, err = piped("translate", "--model", folder, "--device", "cpu", *flags)
        assert (status, len(out.splitlines())) == (0, 2), err
        assert not (tmp_path / "marker").exists()


def test_with_the_flag_the_code_runs(call, folder, tmp_path):
    change(folder / "tokenizer_config.json", tokenizer_class="Tokenizer", auto_map=TOKENIZER)
    assert call("translate", "--model", folder, "--device", "cpu", "--trust_remote_code", "Hello")[0] == 0
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("what", ["model", "tokenizer"])
def test_no_verb_runs_code_or_asks(call, folder, corpus, small, tmp_path, monkeypatch, what):
    if what == "model":
        change(folder / "config.json", model_type="brings_code", auto_map=MODELS)
    else:
        change(folder / "tokenizer_config.json", tokenizer_class="Tokenizer", auto_map=TOKENIZER)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    files = ["--train_files", *corpus, "--device", "cpu", "--output_dir", tmp_path / "run", "--max_updates", "1"]
    verbs = {
        "translate": ["--model", folder, "--device", "cpu", "Hello"],
        "evaluate": ["--model", folder, "--device", "cpu", "--source", corpus[0], "--references", corpus[1]],
        "average": [folder, "--output_dir", tmp_path / "mean"],
        "publish": [folder, "--repo", "user/name", "--dry_run"],
        "train": ["--init_from", folder, *files],
        "prepare": ["--tokenizer", folder, *files, *small],
    }
    for verb, arguments in verbs.items():
        if (what, verb) == ("model", "prepare"):
            # A vocabulary needs no model.
            continue
        status, _, err = call(verb, *arguments)
        assert status == 1, (verb, err)
        complaint = err.splitlines()[-1]
        assert complaint.startswith("vanilla-transformer"), err
        # Models of other types are not published in any case.
        reason = "brings_code" if (what, verb) == ("model", "publish") else "trust_remote_code"
        assert reason in complaint, verb
    assert not (tmp_path / "marker").exists()
    assert not (tmp_path / "mean").exists()
