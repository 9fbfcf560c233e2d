"""`visualize`: pages, figures and arrays by one command each, and what users get wrong."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer, MarianConfig, MarianMTModel

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.cli.options import parse
from vanilla_transformer.cli.visualize import OPTIONS


SCRIPT = Path(sysconfig.get_path("scripts")) / "vanilla-transformer"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def vocabulary(here):
    VanillaTransformerTokenizer().save_pretrained(here / "vocabulary")
    return here / "vocabulary"


def files(folder):
    return {path.name for path in folder.iterdir() if path.is_file()}


# What is written


def test_attention_as_page_figure_and_arrays(call, run_folder, here):
    outputs = ["a.html", "a.png", "a.svg", "a.npz"]
    status, out, _ = call(
        "visualize", "attention", "--model", run_folder, "--text", "A house.", "--target", "Ein Haus.",
        "--output", *outputs, "--layer", "1",
    )  # fmt: skip
    assert (status, out.split()) == (0, outputs)
    assert files(here) == {*outputs}
    with np.load("a.npz", allow_pickle=False) as arrays:
        np.testing.assert_allclose(arrays["cross"].sum(axis=-1), 1.0, atol=1e-5)
        assert arrays["source_tokens"][-1] == "</s>"
    # Where a model lies is nobody's business.
    assert str(run_folder.parent) not in Path("a.html").read_text(encoding="utf-8")


def test_without_a_target_the_models_own_translation_is_shown(call, run_folder, here):
    assert call("translate", "--model", run_folder, "A house.")[0] == 0
    _, translation, _ = call("translate", "--model", run_folder, "--num_beams", "2", "A house.")
    assert call("visualize", "attention", "--model", run_folder, "--num_beams", "2", "--text", "A house.")[0] == 0
    page = Path("attention.html").read_text(encoding="utf-8")
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert " ".join(data["targetText"].split()) == " ".join(translation.split())
    assert len(data["tree"]["hypotheses"]) == 2


def test_positions_schedule_run_and_vocabulary(call, run_folder, corpus, vocabulary, here):
    commands = {
        "positions": ["--d_model", "16", "--length", "20"],
        "schedule": ["--d_model", "16", "32", "--warmup_steps", "10"],
        "run": [run_folder, run_folder],
        "tokenizer": ["--model", vocabulary, "--text", "A house.", "--files", *corpus, "--languages", "en", "de"],
    }
    for what, arguments in commands.items():
        outputs = [f"{what}.html", f"{what}.svg", f"{what}.npz"]
        status, out, err = call("visualize", what, *arguments, "--output", *outputs)
        assert (status, out.split(), err) == (0, outputs, "")
    assert len(files(here)) == 12


def test_positions_of_a_model(call, run_folder, here):
    assert call("visualize", "positions", "--model", run_folder, "--length", "10", "--trained_length", "5")[0] == 0
    assert "Beyond the training length" in Path("positions.html").read_text(encoding="utf-8")


def test_a_run_is_followed_until_it_is_over(here, call, monkeypatch):
    run = here / "run"
    run.mkdir()
    record = {"kind": "train", "update": 1, "nll": 2.0}
    (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    waits = []

    def wait(seconds):
        waits.append(seconds)
        assert '"refresh":2.0' in Path("run.html").read_text(encoding="utf-8")
        (run / "metrics.jsonl").write_text(json.dumps(record) + "\n" + json.dumps({**record, "update": 2}) + "\n")
        if len(waits) == 2:
            (run / "run.json").write_text(json.dumps({"result": {"updates": [2]}}))

    monkeypatch.setattr("vanilla_transformer.cli.visualize.time.sleep", wait)
    assert call("visualize", "run", run, "--follow", "2")[0] == 0
    assert waits == [2.0, 2.0]
    page = Path("run.html").read_text(encoding="utf-8")
    assert '"refresh":null' in page and "2 updates" in page and "so far" not in page


# What users get wrong


@pytest.mark.parametrize("what", OPTIONS)
def test_everything_has_help(call, what):
    status, out, err = call("visualize", what, "--help")
    assert (status, err) == (0, "")
    assert out.startswith(f"usage: vanilla-transformer visualize {what} ")
    summary = OPTIONS[what].SUMMARY
    assert summary[0].upper() + summary[1:] in " ".join(out.split())
    assert summary in call("visualize", "--help")[1]


@pytest.mark.parametrize(
    ("arguments", "status", "part"),
    [
        ([], 2, "name one of attention, positions, schedule, run, tokenizer"),
        (["atention"], 2, "did you mean attention?"),
        (["run", "--folow", "3"], 2, "did you mean --follow?"),
        (["attention", "--model", "m"], 2, "--text must be given"),
        (["attention", "--model", "nosuch", "--text", "a"], 1, "There is no folder nosuch;"),
        (["attention", "--model", "nosuch", "--text", " "], 1, "--text is empty;"),
        (["attention", "--model", "nosuch", "--text", "a", "--target", ""], 1, "--target is empty;"),
        (["attention", "--model", "nosuch", "--text", "a", "--layer", "0"], 1, "--layer is 0;"),
        (["attention", "--model", "nosuch", "--text", "a", "--num_beams", "0"], 1, "--num_beams is 0;"),
        (["attention", "--model", "nosuch", "--text", "a", "--output", "a.gif"], 1, "a.gif ends with none of .html,"),
        (["schedule", "--output", "nosuch/a.html"], 1, "its folder does not exist"),
        (["schedule", "--output", "a.html", "./a.html"], 1, "was given twice"),
        (["schedule", "--warmup_steps", "0"], 1, "--warmup_steps is 0;"),
        (["positions", "--d_model", "7"], 1, "--d_model is 7; it must be even"),
        (["positions", "--length", "1"], 1, "--length is 1;"),
        (["positions", "--trained_length", "0"], 1, "--trained_length is 0;"),
        (["run"], 1, "No run was given"),
        (["run", "nosuch"], 1, "metrics.jsonl cannot be read"),
        (["run", "nosuch", "--follow", "0"], 1, "--follow is 0.0;"),
        (["tokenizer", "--model", "m"], 1, "No text was given"),
        (["tokenizer", "--model", "nosuch", "--text", "a"], 1, "There is no folder nosuch;"),
        (["tokenizer", "--model", ".", "--text", "a"], 1, "The tokenizer in . cannot be loaded"),
        (["tokenizer", "--model", ".", "--files", "nosuch", "nosuch"], 1, "nosuch cannot be read"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_get_one_sentence_and_nothing_is_written(refused, here, arguments, status, part):
    assert part in refused("visualize", *arguments, status=status)
    assert not files(here)


def test_layers_that_the_model_does_not_have(refused, run_folder, here):
    line = refused("visualize", "attention", "--model", run_folder, "--text", "a", "--head", "3")
    assert "--head is 3, and the cross attention has 2" in line
    assert not files(here)


def test_models_of_other_classes_are_refused(refused, run_folder, here):
    config = MarianConfig(
        vocab_size=300, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, pad_token_id=0, decoder_start_token_id=1,
    )  # fmt: skip
    MarianMTModel(config).save_pretrained(here / "marian")
    AutoTokenizer.from_pretrained(run_folder).save_pretrained(here / "marian")
    line = refused("visualize", "attention", "--model", "marian", "--text", "a")
    assert "marian holds a MarianMTModel; give a model of this package" in line
    assert "marian is a MarianConfig" in refused("visualize", "positions", "--model", "marian")


@pytest.fixture
def classifier(run_folder, here):
    """A model for classification with the encoder of a translation model."""
    model = AutoModelForSequenceClassification.from_pretrained(run_folder)
    model.save_pretrained(here / "classifier")
    AutoTokenizer.from_pretrained(run_folder).save_pretrained(here / "classifier")
    return here / "classifier"


def test_of_a_model_without_a_decoder_the_encoder_is_shown(call, refused, run_folder, classifier, here):
    outputs = ["a.html", "a.svg", "a.npz"]
    assert call("visualize", "attention", "--model", classifier, "--text", "A house.", "--output", *outputs)[0] == 0
    assert call("visualize", "attention", "--model", run_folder, "--text", "A house.", "--output", "b.npz")[0] == 0
    with np.load("a.npz") as alone, np.load("b.npz") as both:
        np.testing.assert_array_equal(alone["encoder"], both["encoder"])
        assert alone["decoder"].size == alone["cross"].size == 0 < both["cross"].size
    data = json.loads(Path("a.html").read_text(encoding="utf-8").split('id="data">')[1].split("</script>")[0])
    assert [part["name"] for part in data["parts"]] == ["encoder"]
    line = refused("visualize", "attention", "--model", classifier, "--text", "a", "--target", "b")
    assert "which has no decoder; leave --target out" in line
    line = refused(
        "visualize", "attention", "--model", classifier, "--text", "a", "--attention", "cross", "--output", "c.svg"
    )
    assert "--attention is cross, of which" in line


def test_without_matplotlib_pages_and_arrays_are_written_and_figures_refused(call, refused, here, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert call("visualize", "schedule", "--output", "a.html", "a.npz")[0] == 0
    assert "vanilla-transformer[visualization]" in refused("visualize", "schedule", "--output", "b.html", "b.png")
    assert files(here) == {"a.html", "a.npz"}


def test_a_figure_that_fails_leaves_nothing_behind(call, here, monkeypatch):
    Path("a.npz").write_text("old")
    monkeypatch.setattr(np, "savez_compressed", lambda path, **_: Path(path).write_text("half") and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        call("visualize", "schedule", "--output", "a.npz")
    assert files(here) == {"a.npz"}
    assert Path("a.npz").read_text() == "old"


def test_options_are_one_dataclass_for_each_word():
    options = parse(OPTIONS, ["schedule", "--d_model", "8", "16"], prog="visualize", summary="")
    assert isinstance(options, OPTIONS["schedule"])
    assert options.d_model == (8, 16)


# The end of a training run


@pytest.mark.skipif(os.name != "posix", reason="needs a terminal of POSIX")
def test_training_in_a_terminal_ends_with_its_curve(train, corpus, tmp_path):
    import pty

    outer, inner = pty.openpty()
    arguments = [*map(str, train("--max_updates", "8", "--validate_every", "4")), "--valid_files", *map(str, corpus)]
    with subprocess.Popen([sys.executable, SCRIPT, *arguments], stderr=inner, stdout=subprocess.PIPE) as process:
        os.close(inner)
        shown = b""
        while True:
            try:
                part = os.read(outer, 65536)
            except OSError:
                break
            if not part:
                break
            shown += part
    os.close(outer)
    text = shown.decode("utf-8")
    assert process.returncode == 0, text
    end = text[text.index("validation loss, nats per token") :]
    assert "8 updates" in end and "best" in end and str(tmp_path / "run" / "metrics.jsonl") in end


def test_training_into_a_file_ends_as_before(call, train):
    _, _, err = call(*train())
    assert "metrics.jsonl" not in err
