"""Several processes do what one does. They are real ones, started as users start them."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from safetensors.torch import load_file

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.cli.options import parse
from vanilla_transformer.training.engine import TrainingRun, train
from vanilla_transformer.training.options import TrainingOptions
from vanilla_transformer.training.records.checkpoints import checkpoint_name, fault_of, list_checkpoints, update_of
from vanilla_transformer.training.records.journal import read_journal
from vanilla_transformer.training.records.leases import training_in


TESTS = Path(__file__).parents[1]
IN_FLOAT64 = Path(__file__).with_name("train_in_float64.py")
SCRIPT = TESTS.parent / "scripts" / "train.py"
LAUNCH = TESTS.parent / "scripts" / "launch"
WRAPPERS = {
    "many_gpus": "DistributedDataParallel, none sharded",
    "fsdp": "FSDPSmoothedTranslationLoss, all sharded",
}
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


@pytest.fixture(scope="module")
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
def processes(launcher: str, script: Path, arguments: list[str], log: Path, number: int = 2):
    """Start processes on CPUs, with `torchrun` or a file of scripts/launch, in a process group of their own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    if launcher == "torchrun":
        command = ["torch.distributed.run", "--nproc_per_node", str(number), "--master_port", port]
    else:
        command = ["accelerate.commands.launch", "--config_file", str(LAUNCH / f"{launcher}.yaml")]
        command += ["--num_processes", str(number), "--main_process_port", port]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    if torch.accelerator.is_available():
        # A machine without needs no telling.
        environment["ACCELERATE_USE_CPU"] = "true"
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


def workers_of(log: Path, launcher: str, number: int = 2) -> list[int]:
    """Process ids that the workers printed, once each was seen to wrap the model as it should."""
    # Not only at the start of a line: the other process's progress bar leaves its line open.
    found = re.findall(r"process (\d+) trains a (\w+, \w+ sharded)\n", log.read_text())
    assert [what for _, what in found] == [WRAPPERS[launcher]] * number, log.read_text()
    return [int(worker) for worker, _ in found]


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
        for name in ("tokens_per_second", "model_flops_utilization", "seconds"):
            record.pop(name, None), other.pop(name, None)
        assert record.pop("kind") == other.pop("kind")
        assert record == pytest.approx(other, rel=1e-12)


def assert_same_weights(actual: Path, expected: Path, file: str = "model.safetensors") -> None:
    weights, others = (load_file(folder / file) for folder in (actual, expected))
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        assert tensor.dtype == torch.float64
        torch.testing.assert_close(tensor, others[name], rtol=1e-10, atol=1e-12)


# Clipping, dropout and averaging concern every process; 18 and 25 are numbers that processes cannot share evenly.
SETTINGS = {
    "d_model": 18, "encoder_ffn_dim": 25, "dropout": 0.2, "max_grad_norm": 0.5, "ema_decay": 0.9, "average_last": 1,
    "max_updates": 9,
}  # fmt: skip


@pytest.fixture(scope="module")
def run_of_one(flags, tmp_path_factory):
    """Folder of the run that the others are compared with."""
    folder, steps, step = tmp_path_factory.mktemp("one"), [], TrainingRun.step
    with mock.patch.object(
        TrainingRun, "step", lambda self, update, number: steps.append(update) or step(self, update, number)
    ):
        train_here(flags(folder, **SETTINGS))
    # What makes comparisons worth something: a process that has fewer batches, and one that has none.
    assert {len(update.batches) for update in steps} == {1, 3}
    return folder


@pytest.mark.parametrize(
    ("launcher", "number", "more"),
    [("many_gpus", 2, []), ("many_gpus", 4, []), ("fsdp", 2, ["--gradient_checkpointing"]), ("fsdp", 4, [])],
    ids=["many_gpus-2", "many_gpus-4", "fsdp-2", "fsdp-4"],
)
def test_processes_train_the_model_of_one(flags, run_of_one, tmp_path, launcher, number, more):
    log, folder = tmp_path / "log", tmp_path / "run"
    with processes(launcher, IN_FLOAT64, [*flags(folder, **SETTINGS), *more], log, number) as process:
        assert process.wait(timeout=300) == 0, log.read_text()
    workers_of(log, launcher, number)
    record = json.loads((folder / "run.json").read_text())
    assert record["processes"] == number
    assert record["wrapper"] == WRAPPERS[launcher].split(",")[0]
    # 3 batches, which 4 processes cannot all have one of.
    assert (record["division"]["fewest"], record["division"]["most"]) == {2: (1, 2), 4: (0, 1)}[number]
    assert f"480 tokens an update = 3 batches of 160 over {number} processes" in log.read_text()
    assert_same_journal(folder, run_of_one)
    assert_same_weights(folder, run_of_one)


def test_a_run_moves_from_one_process_to_sharded_ones_and_back(flags, run_of_one, tmp_path):
    log, folder = tmp_path / "log", tmp_path / "run"
    train_here(flags(folder, **SETTINGS | {"max_updates": 3}))
    arguments = [*flags(folder, **SETTINGS | {"max_updates": 6}), "--resume"]
    with processes("fsdp", IN_FLOAT64, arguments, log) as process:
        assert process.wait(timeout=300) == 0, log.read_text()
    workers_of(log, "fsdp")
    train_here(flags(folder, **SETTINGS), "--resume")
    # Each part of the run validated at its end, too.
    losses, expected = (
        {(record["kind"], record["update"]): record["loss"] for record in read_journal(path / "metrics.jsonl")}
        for path in (folder, run_of_one)
    )
    assert {key: losses[key] for key in expected} == pytest.approx(expected, rel=1e-12)
    last = [path / "checkpoints" / checkpoint_name(9) for path in (folder, run_of_one)]
    assert_same_weights(*last)
    assert_same_weights(*last, file="optimizer.safetensors")
    assert_same_weights(*last, file="ema.safetensors")


@pytest.mark.parametrize("kind", ["dropout", "stream"])
def test_two_processes_read_the_same_of_text_that_changes(flags, material, tmp_path, kind):
    texts = [(material / f"train.{language}").read_text(encoding="utf-8").splitlines() for language in ("en", "de")]
    arguments = {"dropout": 0, "max_updates": 8, "cache_dir": tmp_path / "cache"}
    if kind == "dropout":
        vocabulary = VanillaTransformerTokenizer.train_from_iterator([*texts[0], *texts[1]], 300)
        vocabulary.save_pretrained(tmp_path / "merges")
        arguments |= {"tokenizer": tmp_path / "merges", "bpe_dropout": 0.3}
        runs = [flags(tmp_path / name, **arguments) for name in ("one", "two")]
    else:
        records = [{"source": source, "target": target} for source, target in zip(*texts, strict=True)]
        Dataset.from_list(records).save_to_disk(tmp_path / "data")
        arguments |= {"dataset": tmp_path / "data", "stream_window": 15}
        # Without the files that all runs are given.
        runs = [[*flags(tmp_path / name, **arguments)[3:], "--streaming"] for name in ("one", "two")]
    train_here(runs[0])
    log = tmp_path / "log"
    with processes("many_gpus", IN_FLOAT64, runs[1], log) as process:
        assert process.wait(timeout=300) == 0, log.read_text()
    workers_of(log, "many_gpus")
    assert_same_journal(tmp_path / "two", tmp_path / "one")
    assert_same_weights(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize("launcher", ["many_gpus", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_run_stopped_on_two_processes_continues_on_one(flags, tmp_path, launcher):
    settings = {"dropout": 0.2, "save_every": 1000, "validate_every": 1000}
    log = tmp_path / "log"
    arguments = flags(tmp_path / "two", **settings, max_updates=ENDLESS)
    with processes(launcher, IN_FLOAT64, arguments, log) as process:
        wait_for_updates(tmp_path / "two", 6, process, log)
        workers = workers_of(log, launcher)
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
    "number",
    [signal.SIGHUP, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGTERM))],
    ids=lambda number: number.name,
)
def test_a_signal_to_the_whole_group_saves_a_checkpoint(flags, tmp_path, number):
    log, folder = tmp_path / "log", tmp_path / "run"
    with processes("torchrun", SCRIPT, flags(folder, max_updates=ENDLESS, save_every=ENDLESS), log) as process:
        wait_for_updates(folder, 3, process, log)
        os.killpg(process.pid, number)
        assert process.wait(timeout=60) == 1, log.read_text()
    assert json.loads((folder / "run.json").read_text())["processes"] == 2
    (checkpoint,) = list_checkpoints(folder / "checkpoints")
    assert fault_of(checkpoint) is None
    journal = read_journal(folder / "metrics.jsonl")
    assert journal[-1]["update"] == update_of(checkpoint)


@pytest.mark.parametrize("refused", ["text", "folder"])
def test_what_the_main_process_refuses_is_one_sentence(flags, tmp_path, refused):
    output = tmp_path / "run"
    output.mkdir()
    arguments = flags(output, **({"max_length": 2} if refused == "text" else {}))
    command = [sys.executable, "-m", "vanilla_transformer", "train", *arguments, "--num_processes", "2"]
    with training_in(output) if refused == "folder" else nullcontext():
        done = subprocess.run([*command, "--device", "cpu"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert done.stderr.count("None of the 30 lines of" if refused == "text" else "Another process trains in") == 1
    assert "Traceback" not in done.stderr
