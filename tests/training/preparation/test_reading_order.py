import json
import signal
from dataclasses import replace

import pytest
from datasets import Dataset
from runs import (
    MAX_UPDATES,
    assert_same_run,
    make_run,
    observed_steps,
    records_of,
    stopped_after,
    train_anew,
    weights_of,
)

from vanilla_transformer.training.engine import TrainingRun


@pytest.fixture(scope="module")
def plans(make_options, material, tmp_path_factory):
    """Options of runs whose text changes from epoch to epoch, or is a stream; with their uninterrupted runs."""
    folder = tmp_path_factory.mktemp("plans")
    sides = [(material / f"train.{code}").read_text(encoding="utf-8").splitlines() for code in ("en", "de")]
    records = [{"source": source, "target": target} for source, target in zip(*sides, strict=True)]
    Dataset.from_list(records).save_to_disk(folder / "data")
    plans = {}
    for name, values in {
        "dropout": {"tokenizer": material / "merges", "bpe_dropout": 0.3},
        "stream": {
            "train_files": (),
            "dataset": str(folder / "data"),
            "streaming": True,
            "stream_window": 12,
            "tokens_per_update": 320,
        },
        "random": {"batching": "random", "bpe_dropout": 0.3, "tokenizer": material / "merges"},
        # What is packed where it can be.
        "packed": {"batching": "random", "mixed_precision": "bf16", "device": "cpu", "d_k": 16, "d_v": 16},
    }.items():
        options = make_options(folder / name, cache_dir=folder / f"cache-{name}", **values)
        assert train_anew(options).is_complete
        plans[name] = options
    return plans


@pytest.mark.parametrize("name", ["dropout", "stream", "random", "packed"])
@pytest.mark.parametrize("update", [1, 3, 5, 8, 10])
def test_stopping_and_resuming_changes_nothing(plans, tmp_path, name, update):
    options = replace(plans[name], output_dir=tmp_path / "run", cache_dir=tmp_path / "cache")
    with stopped_after(update) as before:
        assert train_anew(options).interrupted_by == signal.SIGINT
    with observed_steps() as after:
        assert train_anew(replace(options, resume=True)).is_complete
    assert before + after == list(range(1, MAX_UPDATES + 1))
    assert_same_run(options.output_dir, plans[name].output_dir)


def test_dropout_changes_training_and_not_validation_text(plans, make_options, tmp_path, material):
    plain = make_options(tmp_path, tokenizer=material / "merges")
    assert train_anew(plain).is_complete
    dropped = plans["dropout"]
    assert weights_of(dropped.output_dir) != weights_of(plain.output_dir)
    reports = [
        json.loads((options.output_dir / "run.json").read_text(encoding="utf-8"))["valid"]
        for options in (plain, dropped)
    ]
    assert reports[0] == reports[1]


def test_dropout_makes_epochs_of_their_own_length(plans, tmp_path):
    run: TrainingRun = make_run(replace(plans["dropout"], output_dir=tmp_path))
    lengths = []
    for done in range(MAX_UPDATES):
        update = run.plan.update(done)
        assert update.num_target_tokens == sum(int(run.data.train.target_lengths[b].sum()) for b in update.batches)
        lengths.append(int(run.data.train.target_lengths.sum()))
    assert len(set(lengths)) >= 2


def test_a_streams_record_tells_its_passes(plans):
    options = plans["stream"]
    record = json.loads((options.output_dir / "run.json").read_text(encoding="utf-8"))
    assert record["updates_per_epoch"] is None and record["updates"] == MAX_UPDATES
    passes = [entry["epoch"] for entry in records_of(options.output_dir, "train")]
    assert passes == sorted(passes) and passes[-1] >= 1
