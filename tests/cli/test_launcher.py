"""What the launcher hands on; its workers are small programs, but for one run that is real."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vanilla_transformer.cli import launcher
from vanilla_transformer.training.checkpoints import fault_of, list_checkpoints
from vanilla_transformer.training.journal import read_journal


# Writes its process id, waits for the answer that its signal deserves, and takes a while to give it.
WORKER = """
import os, pathlib, runpy, signal, sys, time
runpy.run_path(sys.argv[2])["bind_to_launcher"]()
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
def stop(number, frame):
    time.sleep(0.3)
    with (folder / f"saved-{rank}").open("a") as file:
        file.write(f"{number} ")
    sys.exit(128 + number)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, stop)
(folder / f"pid-{rank}").write_text(str(os.getpid()))
time.sleep(100)
"""
# The module by its path: to import the package takes longer than all of this.
LAUNCHER = """
import runpy, sys
launch = runpy.run_path(sys.argv[3])["launch"]
launch.__globals__["_WORKER"] = sys.argv[1]
sys.exit(launch(sys.argv[2:], 2))
"""


@pytest.fixture
def launched(tmp_path):
    """A launcher in a process group of its own, and its two workers' process ids."""
    command = [sys.executable, "-c", LAUNCHER, WORKER, str(tmp_path), launcher.__file__]
    process = subprocess.Popen(command, process_group=0)
    try:
        paths = [tmp_path / f"pid-{rank}" for rank in (0, 1)]
        wait_until(lambda: all(path.exists() and path.read_text() for path in paths))
        yield process, [int(path.read_text()) for path in paths]
    finally:
        process.kill()
        process.wait()


def wait_until(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(number: int) -> bool:
    try:
        # Dead, but not yet waited for by whoever inherited it.
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("target", ["launcher", "group"])
def test_a_signal_reaches_every_worker_once_and_their_status_comes_back(launched, tmp_path, number, status, target):
    process, workers = launched
    (os.kill if target == "launcher" else os.killpg)(process.pid, number)
    assert process.wait(timeout=60) == status
    assert not any(map(is_running, workers))
    for rank in (0, 1):
        assert (tmp_path / f"saved-{rank}").read_text().split()[0] == str(int(number))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's notice of a parent's death")
def test_workers_save_and_end_when_the_launcher_is_killed(launched, tmp_path):
    process, workers = launched
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(is_running, workers)))
    assert all((tmp_path / f"saved-{rank}").exists() for rank in (0, 1))


def test_a_worker_that_fails_ends_the_others(launched, tmp_path):
    process, workers = launched
    os.kill(workers[1], signal.SIGKILL)
    assert process.wait(timeout=60) == 128 + signal.SIGKILL
    assert not any(map(is_running, workers))
    assert (tmp_path / "saved-0").read_text().split()[0] == str(int(signal.SIGTERM))


def test_workers_that_do_not_end_are_killed(tmp_path, monkeypatch):
    stubborn = "import os, signal, sys, time; signal.signal(15, signal.SIG_IGN); rank = int(os.environ['RANK'])\n"
    stubborn += "sys.exit(3) if rank == 1 else time.sleep(100)"
    monkeypatch.setattr(launcher, "_WORKER", stubborn)
    monkeypatch.setattr(launcher, "GRACE_SECONDS", 0.5)
    assert launcher.launch([], 2) == 3


def test_all_is_well_if_every_worker_is(monkeypatch):
    monkeypatch.setattr(launcher, "_WORKER", "import os; assert os.environ['WORLD_SIZE'] == '3'")
    before = signal.getsignal(signal.SIGTERM)
    assert launcher.launch([], 3) == 0
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_real_run_on_two_processes_saves_and_answers_with_the_signal(train, tmp_path):
    flags = ["--max_updates", 10**6, "--log_every", 1, "--save_every", 10**6, "--num_processes", 2]
    command = [sys.executable, "-m", "vanilla_transformer", *map(str, train(*flags))]
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, process_group=0)
    try:
        journal = tmp_path / "run" / "metrics.jsonl"
        wait_until(lambda: process.poll() is not None or (journal.exists() and read_journal(journal)), 200)
        assert process.poll() is None, log.read_text()
        process.terminate()
        assert process.wait(timeout=100) == 143, log.read_text()
    finally:
        process.kill()
        process.wait()
    (checkpoint,) = list_checkpoints(tmp_path / "run" / "checkpoints")
    assert fault_of(checkpoint) is None
    assert "and saved; continue with --resume." in log.read_text()
    assert '"processes": 2' in (tmp_path / "run" / "run.json").read_text()
