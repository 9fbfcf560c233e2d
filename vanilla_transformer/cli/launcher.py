"""Starts the processes of a run on this machine, passes signals on to them, and returns their exit status.

torchrun and `accelerate launch` always exit with status 1 if a process fails, and kill the processes 30 seconds after
a signal. Here a run that saved and stopped exits with 143 or 130, and saving may take as long as it needs.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from vanilla_transformer.errors import UserError
from vanilla_transformer.signals import stopping_signals


# How long the other processes may go on after one has failed; they might wait for it for ever.
GRACE_SECONDS = 60.0
_WORKER = "import sys; from vanilla_transformer.cli.launcher import work; sys.exit(work(sys.argv[1:]))"
_PARENT = "VANILLA_TRANSFORMER_LAUNCHER"


def is_launched() -> bool:
    """Whether a launcher, ours or another, has started this process as one of several."""
    return "LOCAL_RANK" in os.environ or "RANK" in os.environ


def launch(arguments: Sequence[str], num_processes: int) -> int:
    """Run the command line in several processes and wait for all of them.

    SIGINT, SIGTERM and SIGHUP are passed on to all processes. A signal that arrives while they are being started ends
    those that run already. If one process fails, the others are ended. No process outlives this one: on Linux the
    kernel sends them SIGTERM even if this process is killed.

    Args:
        arguments: Arguments of the command line, the verb first.
        num_processes: Number of processes.

    Returns:
        The exit status of the first process that failed, 128 + n if signal n killed it; 0 if none failed.

    Raises:
        UserError: The operating system cannot start that many processes.
    """
    shared = _environment(num_processes)
    workers: list[subprocess.Popen] = []
    with _receiving() as received:
        try:
            while len(workers) < num_processes and not received:
                rank = str(len(workers))
                workers.append(_start(arguments, {**shared, "RANK": rank, "LOCAL_RANK": rank}))
            if len(workers) == num_processes:
                return _wait(workers, received)
            # The started processes would wait for the missing ones.
            status = 128 + received.pop(0)
            _send(workers, signal.SIGTERM)
            _wait(workers, received)
            return status
        except OSError as error:
            raise UserError(
                f"--num_processes is {num_processes}, but only {len(workers)} could be started ({error.strerror}); "
                "lower it."
            ) from error
        finally:
            _send(workers, signal.SIGKILL)


def _environment(num_processes: int) -> dict[str, str]:
    """Environment variables that all processes share."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    return {
        # Like torchrun, but all cores are used.
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // num_processes))
        if hasattr(os, "sched_getaffinity")
        else "1",
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        _PARENT: str(os.getpid()),
    }


def _start(arguments: Sequence[str], environment: dict[str, str]) -> subprocess.Popen:
    # In its own process group, so that Ctrl-C reaches it only through this process.
    return subprocess.Popen([sys.executable, "-c", _WORKER, *arguments], env=environment, process_group=0)


@contextmanager
def _receiving() -> Iterator[list[int]]:
    """Collect signals to pass on later; a handler that passed them on itself could miss a process that is starting."""
    received: list[int] = []
    previous = {
        number: signal.signal(number, lambda number, _frame: received.append(number)) for number in stopping_signals()
    }
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _send(workers: Sequence[subprocess.Popen], number: int) -> None:
    for worker in workers:
        if worker.poll() is None:
            worker.send_signal(number)


def is_worker() -> bool:
    """Whether `launch` has started this process."""
    return _PARENT in os.environ


def work(arguments: Sequence[str]) -> int:
    """Run the command line as one of the processes, and end with the launcher."""
    bind_to_launcher()
    from vanilla_transformer.cli import main

    return main(arguments)


def bind_to_launcher() -> None:
    """Have the kernel send this process SIGTERM when the launcher dies, on Linux."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
        if os.getppid() != int(os.environ[_PARENT]):
            # The launcher died before the call.
            sys.exit(128 + signal.SIGTERM)


def _wait(workers: Sequence[subprocess.Popen], received: list[int]) -> int:
    """Wait for all processes, pass signals on, and end all processes when one has failed."""
    status, deadline = 0, float("inf")
    while None in (returncodes := [worker.poll() for worker in workers]):
        while received:
            _send(workers, received.pop(0))
        failed = [returncode for returncode in returncodes if returncode]
        if failed and status == 0:
            status, deadline = _status(failed[0]), time.monotonic() + GRACE_SECONDS
            _send(workers, signal.SIGTERM)
        if time.monotonic() > deadline:
            _send(workers, signal.SIGKILL)
        time.sleep(0.05)
    return status or next((_status(worker.returncode) for worker in workers if worker.returncode), 0)


def _status(returncode: int) -> int:
    return returncode if returncode > 0 else 128 - returncode
