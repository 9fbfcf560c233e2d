"""Small runs of the engine, and what tests compare of them."""

import signal
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from accelerate.state import AcceleratorState

from vanilla_transformer.training.engine import TrainingRun, train
from vanilla_transformer.training.options import TrainingOptions
from vanilla_transformer.training.preparation.vocabulary_and_ids import prepare
from vanilla_transformer.training.records.checkpoints import list_checkpoints
from vanilla_transformer.training.records.journal import read_journal
from vanilla_transformer.training.step.process import make_accelerator


D_MODEL, WARMUP_STEPS = 16, 5
# 30 training pairs make 10 batches of 160 tokens: 4 updates an epoch, the last of a single batch.
UPDATES_PER_EPOCH, MAX_UPDATES = 4, 11


# What no two runs share.
MEASURED = ("tokens_per_second", "model_flops_utilization", "seconds")


def train_anew(options: TrainingOptions, evaluation=None):
    AcceleratorState._reset_state(reset_partial_state=True)
    return train(options, evaluation)


def make_run(options: TrainingOptions) -> TrainingRun:
    AcceleratorState._reset_state(reset_partial_state=True)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    return TrainingRun(options, make_accelerator(options), prepare(options, options.cache_dir), None)


@contextmanager
def observed_steps(after=None):
    """Collect the numbers of the optimiser steps; `after` is called with each when it is done."""
    original, numbers = TrainingRun.step, []

    def step(self, update, number):
        sums = original(self, update, number)
        numbers.append(number)
        if after is not None:
            after(number)
        return sums

    with mock.patch.object(TrainingRun, "step", step):
        yield numbers


@contextmanager
def stopped_after(update: int, number: int = signal.SIGINT, times: int = 1):
    def raise_signal(done):
        if done == update:
            for _ in range(times):
                signal.raise_signal(number)

    with observed_steps(raise_signal) as numbers:
        yield numbers


def records_of(folder: Path, kind: str | None = None) -> list[dict]:
    """The journal without the one measurement that no two runs share."""
    records = read_journal(folder / "metrics.jsonl")
    return [
        {name: value for name, value in record.items() if name not in MEASURED}
        for record in records
        if kind in (None, record["kind"])
    ]


def weights_of(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def assert_same_run(actual: Path, expected: Path) -> None:
    assert records_of(actual) == records_of(expected)
    assert weights_of(actual) == weights_of(expected)
    names = [path.name for path in list_checkpoints(expected / "checkpoints")]
    assert [path.name for path in list_checkpoints(actual / "checkpoints")] == names
    for name in names:
        for file in ("model.safetensors", "optimizer.safetensors"):
            paths = (folder / "checkpoints" / name / file for folder in (actual, expected))
            assert len({path.read_bytes() for path in paths}) == 1
