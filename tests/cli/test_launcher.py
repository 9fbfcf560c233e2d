"""What the launcher hands on; its workers are small programs, but for one run that is real."""

import errno
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from vanilla_transformer.cli import launcher
from vanilla_transformer.errors import UserError
from vanilla_transformer.training.records.checkpoints import fault_of, list_checkpoints
from vanilla_transformer.training.records.journal import read_journal


# Programs import the launcher by its path, and the package as an empty one: all of it takes longer than the tests.
EMPTY = """
import sys, types
package = sys.modules["vanilla_transformer"] = types.ModuleType("vanilla_transformer")
package.__path__ = [sys.argv[-1]]
"""
# Writes its process id, waits for the answer that its signal deserves, and takes a while to give it.
WORKER = f"""{EMPTY}
import os, pathlib, runpy, signal, time
from vanilla_transformer.signals import stopping_signals
runpy.run_path(sys.argv[2])["bind_to_launcher"]()
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
def stop(number, frame):
    time.sleep(0.3)
    with (folder / f"saved-{{rank}}").open("a") as file:
        file.write(f"{{number}} ")
    sys.exit(128 + number)
for number in stopping_signals():
    signal.signal(number, stop)
(folder / f"pid-{{rank}}").write_text(str(os.getpid()))
time.sleep(100)
"""
LAUNCHER = f"""{EMPTY}
import runpy
launch = runpy.run_path(sys.argv[3])["launch"]
launch.__globals__["_WORKER"] = sys.argv[1]
sys.exit(launch(sys.argv[2:], 2))
"""


@pytest.fixture
def launched(tmp_path):
    """A launcher in a process group of its own, and its two workers' process ids."""
    with launching(tmp_path) as running:
        yield running


@contextmanager
def launching(folder, *before):
    """Start the launcher, behind a command that starts others."""
    module = Path(launcher.__file__)
    command = [*before, sys.executable, "-c", LAUNCHER, WORKER, folder, module, module.parents[1]]
    process = subprocess.Popen(command, process_group=0)
    try:
        paths = [folder / f"pid-{rank}" for rank in (0, 1)]
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


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("target", ["launcher", "group"])
def test_a_signal_reaches_every_worker_once_and_their_status_comes_back(launched, tmp_path, number, status, target):
    process, workers = launched
    (os.kill if target == "launcher" else os.killpg)(process.pid, number)
    assert process.wait(timeout=60) == status
    assert not any(map(is_running, workers))
    for rank in (0, 1):
        assert (tmp_path / f"saved-{rank}").read_text().split()[0] == str(int(number))


def test_a_terminal_that_is_lost_does_not_end_what_nohup_started(tmp_path):
    with launching(tmp_path, "nohup") as (process, workers):
        os.killpg(process.pid, signal.SIGHUP)
        for worker in workers:
            os.kill(worker, signal.SIGHUP)
        time.sleep(0.5)
        assert process.poll() is None and all(map(is_running, workers))
        process.terminate()
        assert process.wait(timeout=60) == 143
    assert (tmp_path / "saved-0").read_text() == (tmp_path / "saved-1").read_text() == "15 "


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_ends_the_starting_too(tmp_path, monkeypatch, number):
    started, start = [], launcher._start

    def start_and_stop(*arguments):
        # While the second process is being started, and is not among the others yet.
        started.append(start(*arguments))
        if len(started) == 2:
            signal.raise_signal(number)
        return started[-1]

    monkeypatch.setattr(launcher, "_WORKER", "import time; time.sleep(100)")
    monkeypatch.setattr(launcher, "_start", start_and_stop)
    assert launcher.launch([], 100) == 128 + number
    assert [process.returncode for process in started] == [-signal.SIGTERM] * 2


def test_processes_that_the_system_does_not_start(monkeypatch):
    started, start = [], launcher._start

    def start_few(*arguments):
        if len(started) == 2:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(start(*arguments))
        return started[-1]

    monkeypatch.setattr(launcher, "_WORKER", "import time; time.sleep(100)")
    monkeypatch.setattr(launcher, "_start", start_few)
    with pytest.raises(UserError, match="--num_processes is 4, but only 2 could be started"):
        launcher.launch([], 4)
    assert [process.wait(timeout=60) for process in started] == [-signal.SIGKILL] * 2


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
