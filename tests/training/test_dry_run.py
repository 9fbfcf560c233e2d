import math
import resource
import sys
import tempfile
from dataclasses import replace
from itertools import chain, count
from types import SimpleNamespace

import pytest
from accelerate.state import AcceleratorState
from runs import make_run

from vanilla_transformer.training import dry_run as dry_run_module
from vanilla_transformer.training.dry_run import dry_run
from vanilla_transformer.training.engine import train


def test_a_dry_run_reports_and_leaves_nothing_behind(make_options, tmp_path, monkeypatch):
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    options = make_options(tmp_path / "run", cache_dir=None, tokenizer=None, vocab_size=300, max_epochs=3)
    options.dry_run = True
    options.max_updates = 7
    AcceleratorState._reset_state(reset_partial_state=True)
    # The first batch, which warms up, takes two hours, and each of the others ten minutes.
    clock = chain((0, 7200), count(7200, 600))
    monkeypatch.setattr(dry_run_module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    figures = dry_run(options)
    peak_after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
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
    sides = run.data.train.source_lengths, run.data.train.target_lengths
    padded = sum(len(batch) * int(lengths[batch].max()) for batch in batches for lengths in sides)
    all_tokens = sum(int(lengths.sum()) for lengths in sides)
    assert figures["share of tokens that are not padding"] == pytest.approx(all_tokens / padded, abs=5e-5)
    # The first batch is the largest one, and is not counted.
    rate = sum(int(lengths[batch].sum()) for batch in batches[:3] for lengths in sides) / 1800
    assert figures["tokens per second (source and target)"] == round(rate)
    epochs = 7 / figures["updates per epoch"]
    assert figures["expected time"] == f"{all_tokens * epochs / rate / 3600:.1f} hours"
    # Linux tells kibibytes.
    if sys.platform == "linux":
        assert peak_before - 0.005 <= float(figures["expected memory of a process"].removesuffix(" GiB"))
        assert float(figures["expected memory of a process"].removesuffix(" GiB")) <= peak_after + 0.005
    with pytest.raises(ValueError, match="call `dry_run`"):
        train(options)
