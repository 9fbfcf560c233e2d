import json
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import transformers
import yaml

from vanilla_transformer import Translator, VanillaTransformerForConditionalGeneration
from vanilla_transformer.cli import main
from vanilla_transformer.cli.options import read_recipe
from vanilla_transformer.evaluation import score
from vanilla_transformer.quickstart.first_run import SAMPLE, first_run, sample_files
from vanilla_transformer.training import engine
from vanilla_transformer.training.options import TrainingOptions


README = Path(__file__).parents[2] / "README.md"
SPLITS = ("train", "valid", "test")


def lines_of(path: Path) -> list[str]:
    return path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")


def small_run(folder: Path) -> TrainingOptions:
    return TrainingOptions(
        output_dir=folder, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=600, max_length=128,
        tokens_per_batch=1024, tokens_per_update=1024, warmup_steps=4, max_updates=4, save_every=2, keep_last=2,
        average_last=2, num_beams=2, device="cpu", validate_every=100, valid_bleu_sentences=0,
    )  # fmt: skip


# The sample


def test_the_sample_is_parallel_clean_text():
    for split in SPLITS:
        source, target = (lines_of(path) for path in sample_files(split))
        assert len(source) == len(target) > 0
        for line in [*source, *target]:
            assert line == line.strip()
            assert line
            # One line for every reader, whatever it takes for a line's end.
            assert line.splitlines() == [line]
        assert source != target
    sizes = {split: len(lines_of(sample_files(split)[0])) for split in SPLITS}
    assert sizes["train"] > 10 * sizes["test"]


def test_no_sentence_of_the_validation_or_test_text_was_trained_on():
    known = [set(lines_of(path)) for path in sample_files("train")]
    for split in ("valid", "test"):
        for path, trained in zip(sample_files(split), known, strict=True):
            assert not set(lines_of(path)) & trained, path
    for valid, test in zip(sample_files("valid"), sample_files("test"), strict=True):
        assert not set(lines_of(valid)) & set(lines_of(test))


def test_the_sample_comes_with_its_licence():
    notice = (SAMPLE / "NOTICE").read_text(encoding="utf-8")
    assert "Apache" in notice
    assert "Home Assistant" in notice


# The run


def test_a_small_first_run_leaves_a_model_its_translations_and_scores(tmp_path):
    options = small_run(tmp_path / "run")
    result = first_run(options)
    folder = options.output_dir
    sources, references = (lines_of(path) for path in sample_files("test"))
    translations = lines_of(folder / "translations.de")
    assert len(translations) == len(sources)
    assert result.interrupted_by is None
    assert result.scores == score(translations, references)
    assert result.copy_scores == score(sources, references)
    record = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    how = {"test_set": "quickstart sample", "num_beams": 2, "length_penalty": 0.6, "rules": "paper"}
    assert record == {"model": result.scores.as_dict() | how, "copy_of_the_source": result.copy_scores.as_dict()}
    assert len(result.examples) == 10
    triples = list(zip(sources, references, translations, strict=True))
    places = [triples.index(example) for example in result.examples]
    assert places == sorted(set(places))
    assert result.seconds > 0.0
    # It trained on the sample.
    written = yaml.safe_load((folder / "options.yaml").read_text(encoding="utf-8"))
    assert written["train_files"] == [str(path) for path in sample_files("train")]
    # The folder is a model's, for the package and for transformers alone.
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert type(model) is VanillaTransformerForConditionalGeneration
    again = Translator.from_pretrained(folder, device="cpu", num_beams=2)
    assert again.translate(sources) == translations


def test_an_interrupted_first_run_has_no_scores(tmp_path, monkeypatch):
    step = engine.TrainingRun.step

    def interrupted(self, update, number):
        if number == 2:
            signal.raise_signal(signal.SIGTERM)
        return step(self, update, number)

    monkeypatch.setattr(engine.TrainingRun, "step", interrupted)
    options = small_run(tmp_path / "run")
    result = first_run(options)
    assert result.interrupted_by == signal.SIGTERM
    assert (result.scores, result.copy_scores, result.examples) == (None, None, ())
    assert not (options.output_dir / "evaluation.json").exists()
    monkeypatch.undo()
    resumed = first_run(replace(options, resume=True))
    never_interrupted = first_run(small_run(tmp_path / "whole"))
    assert (resumed.scores, resumed.examples) == (never_interrupted.scores, never_interrupted.examples)


def test_the_recipe_can_learn_the_samples_vocabulary():
    options = TrainingOptions(**read_recipe("quickstart", TrainingOptions), train_files=sample_files("train"))
    options.check()
    assert options.device == "cpu"
    assert (options.source_language, options.target_language) == ("en", "de")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_quickstart_keeps_what_the_readme_promises(tmp_path, capsys):
    stated = re.search(r"BLEU of the quickstart model: (\d+\.\d)", README.read_text(encoding="utf-8"))
    assert stated, "README.md lacks the line 'BLEU of the quickstart model: NN.N'"
    folder = tmp_path / "quickstart"
    assert main(["quickstart", "--output_dir", str(folder)]) == 0
    record = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    assert record["model"]["bleu"] >= 0.8 * float(stated[1])
    assert record["model"]["bleu"] > record["copy_of_the_source"]["bleu"]
    assert f"BLEU of the model on {record['model']['num_sentences']} sentences" in capsys.readouterr().out
