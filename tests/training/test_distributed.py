"""Two processes do what one does. They are real ones, started as users start them."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.cli.options import parse
from vanilla_transformer.training.checkpoints import fault_of, list_checkpoints, update_of
from vanilla_transformer.training.configuration import TrainingOptions
from vanilla_transformer.training.engine import TrainingRun, train
from vanilla_transformer.training.journal import read_journal


TESTS = Path(__file__).parents[1]
IN_FLOAT64 = Path(__file__).with_name("train_in_float64.py")
SCRIPT = TESTS.parent / "scripts" / "train.py"
# More updates than any test waits for.
ENDLESS = 1_000_000


@pytest.fixture(autouse=True)
def forget_accelerate():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A folder with training and validation text and a vocabulary."""
    folder = tmp_path_factory.mktemp("material")
    for language in ("en", "de"):
        lines = (TESTS / "data" / f"sentences.{language}").read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / f"train.{language}").write_text("".join(lines[:30]), encoding="utf-8")
        (folder / f"valid.{language}").write_text("".join(lines[30:]), encoding="utf-8")
    VanillaTransformerTokenizer().save_pretrained(folder / "tokenizer")
    return folder


@pytest.fixture
def flags(material):
    """Flags of a run whose updates are of three batches, so that one process has fewer, or of a single one."""

    def make(output_dir: Path, **values) -> list[str]:
        sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in SIZES.items()}
        settings = {
            "output_dir": output_dir,
            "cache_dir": material / "cache",
            "tokenizer": material / "tokenizer",
            "max_length": 100,
            "d_model": 16,
            **sizes,
            "tokens_per_batch": 160,
            "tokens_per_update": 480,
            "warmup_steps": 5,
            "log_every": 1,
            "validate_every": 4,
            "valid_bleu_sentences": 0,
            "keep_last": 2,
            "keep_best": 0,
            "average_last": 2,
            "save_every": 5,
            **values,
        }
        texts = ["--train_files", material / "train.en", material / "train.de"]
        texts += ["--valid_files", material / "valid.en", material / "valid.de"]
        pairs = [part for name, value in settings.items() for part in (f"--{name}", value)]
        return [str(part) for part in (*texts, *pairs)]

    return make


SIZES = {"layers": 1, "attention_heads": 2, "ffn_dim": 24}


def train_here(arguments: list[str], *more: str):
    """Train in this process, in float64."""
    AcceleratorState._reset_state(reset_partial_state=True)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return train(parse(TrainingOptions, [*arguments, "--device", "cpu", *more], prog="train", summary=""))
    finally:
        torch.set_default_dtype(previous)


@contextmanager
def two_processes(launcher: str, script: Path, arguments: list[str], log: Path):
    """Start two processes with `accelerate launch` or `torchrun`, on CPUs, in a process group of their own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = {
        "accelerate": ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"],
        "torchrun": ["torch.distributed.run", "--nproc_per_node", "2", "--master_port", port],
    }[launcher]
    if launcher == "accelerate":
        command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
        command += ["--main_process_port", port]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command, str(script), *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            # The launcher ends the workers, which are in process groups of their own.
            process.terminate()
            process.wait(timeout=60)


def wait_for_updates(folder: Path, updates: int, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 200
    path = folder / "metrics.jsonl"
    while not path.exists() or len(read_journal(path)) < updates:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def workers_of(log: Path) -> list[int]:
    """Process ids that the workers printed, once each was seen to wrap the model."""
    # Not only at the start of a line: the other process's progress bar leaves its line open.
    found = re.findall(r"process (\d+) trains a (\w+)\n", log.read_text())
    assert [name for _, name in found] == ["DistributedDataParallel"] * 2, log.read_text()
    return [int(number) for number, _ in found]


def is_running(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def assert_same_journal(actual: Path, expected: Path) -> None:
    records, others = (read_journal(folder / "metrics.jsonl") for folder in (actual, expected))
    assert [(r["kind"], r["update"]) for r in records] == [(r["kind"], r["update"]) for r in others]
    for record, other in zip(records, others, strict=True):
        record.pop("tokens_per_second", None), other.pop("tokens_per_second", None)
        assert record.pop("kind") == other.pop("kind")
        assert record == pytest.approx(other, rel=1e-12)


def assert_same_weights(actual: Path, expected: Path) -> None:
    weights, others = (load_file(folder / "model.safetensors") for folder in (actual, expected))
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        assert tensor.dtype == torch.float64
        torch.testing.assert_close(tensor, others[name], rtol=1e-9, atol=1e-11)


def test_two_processes_train_the_model_of_one(flags, tmp_path, monkeypatch):
    steps = []
    step = TrainingRun.step
    monkeypatch.setattr(
        TrainingRun, "step", lambda self, update, number: steps.append(update) or step(self, update, number)
    )
    train_here(flags(tmp_path / "one", dropout=0, max_updates=9))
    # What makes the comparison worth something: a process that has fewer batches, and one that has none.
    assert {len(update.batches) for update in steps} == {1, 3}

    log = tmp_path / "log"
    with two_processes("accelerate", IN_FLOAT64, flags(tmp_path / "two", dropout=0, max_updates=9), log) as process:
        assert process.wait(timeout=300) == 0, log.read_text()
    workers_of(log)
    assert [json.loads((tmp_path / name / "run.json").read_text())["processes"] for name in ("one", "two")] == [1, 2]
    assert_same_journal(tmp_path / "two", tmp_path / "one")
    assert_same_weights(tmp_path / "two", tmp_path / "one")


def test_a_run_stopped_on_two_processes_continues_on_one(flags, tmp_path):
    settings = {"dropout": 0.2, "save_every": 1000, "validate_every": 1000}
    log = tmp_path / "log"
    arguments = flags(tmp_path / "two", **settings, max_updates=ENDLESS)
    with two_processes("accelerate", IN_FLOAT64, arguments, log) as process:
        wait_for_updates(tmp_path / "two", 6, process, log)
        workers = workers_of(log)
        assert all(map(is_running, workers))
        process.terminate()
        # The launcher's own status says that it failed; it does not pass on the workers'.
        assert process.wait(timeout=60) == 1, log.read_text()
    assert not any(map(is_running, workers))
    (checkpoint,) = list_checkpoints(tmp_path / "two" / "checkpoints")
    assert fault_of(checkpoint) is None
    updates = update_of(checkpoint)
    assert updates >= 6
    assert f"Stopped after {updates:,} updates and saved; continue with --resume." in log.read_text()

    last = updates + 5
    assert train_here(flags(tmp_path / "two", **settings, max_updates=last), "--resume").updates == last
    assert json.loads((tmp_path / "two" / "run.json").read_text())["processes"] == 1
    train_here(flags(tmp_path / "one", **settings, max_updates=last))
    assert_same_journal(tmp_path / "two", tmp_path / "one")
    assert_same_weights(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)], ids=lambda number: number.name
)
def test_a_signal_to_the_whole_group_saves_a_checkpoint(flags, tmp_path, number):
    log, folder = tmp_path / "log", tmp_path / "run"
    with two_processes("torchrun", SCRIPT, flags(folder, max_updates=ENDLESS, save_every=ENDLESS), log) as process:
        wait_for_updates(folder, 3, process, log)
        os.killpg(process.pid, number)
        assert process.wait(timeout=60) == 1, log.read_text()
    assert json.loads((folder / "run.json").read_text())["processes"] == 2
    (checkpoint,) = list_checkpoints(folder / "checkpoints")
    assert fault_of(checkpoint) is None
    journal = read_journal(folder / "metrics.jsonl")
    assert journal[-1]["update"] == update_of(checkpoint)
