import math
import tempfile
from dataclasses import replace

import pytest
from accelerate.state import AcceleratorState
from runs import make_run

from vanilla_transformer.training.dry_run import dry_run
from vanilla_transformer.training.engine import train


def test_a_dry_run_reports_and_leaves_nothing_behind(make_options, tmp_path, monkeypatch):
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    options = make_options(tmp_path / "run", cache_dir=None, tokenizer=None, vocab_size=300, max_epochs=3)
    options.dry_run = True
    options.max_updates = 7
    AcceleratorState._reset_state(reset_partial_state=True)
    figures = dry_run(options)
    assert [path.name for path in tmp_path.rglob("*")] == ["scratch"]
    assert list(figures) == [
        "parameters",
        "vocabulary entries",
        "training pairs",
        "dropped",
        "batches per epoch",
        "updates per epoch",
        "updates",
        "epochs",
        "share of tokens that are not padding",
        "tokens per second (source and target)",
        "expected time",
        "expected memory of a process",
    ]
    model_figures = replace(options, dry_run=False, cache_dir=tmp_path / "cache", output_dir=tmp_path / "real")
    run = make_run(model_figures)
    assert figures["parameters"] == sum(parameter.numel() for parameter in run.model.parameters())
    assert figures["vocabulary entries"] == run.model.config.vocab_size == 300
    assert (figures["training pairs"], figures["dropped"], figures["updates"]) == (30, "none", 7)
    batches = run.batches.batches(0)
    assert figures["batches per epoch"] == len(batches)
    assert figures["updates per epoch"] == math.ceil(len(batches) / 3)
    assert figures["epochs"] == pytest.approx(7 / math.ceil(len(batches) / 3), abs=0.005)
    assert 0.5 < figures["share of tokens that are not padding"] <= 1.0
    assert figures["tokens per second (source and target)"] > 0
    assert figures["expected time"].endswith("minutes")
    assert float(figures["expected memory of a process"].removesuffix(" GiB")) > 0.05
    with pytest.raises(ValueError, match="call `dry_run`"):
        train(options)
