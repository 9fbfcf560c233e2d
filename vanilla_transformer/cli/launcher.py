"""Starts the processes of a run on this machine, and hands on what they are told and what they answer.

torchrun and `accelerate launch` end with status 1 whatever the processes' own status was, and kill them 30 seconds
after a signal. Here a run that saved and stopped ends with 143 or 130, and has the time that saving takes.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence


# How long the other processes may go on after one has failed: they may wait for it for ever.
GRACE_SECONDS = 60.0
_WORKER = "import sys; from vanilla_transformer.cli.launcher import work; sys.exit(work(sys.argv[1:]))"
_PARENT = "VANILLA_TRANSFORMER_LAUNCHER"


def is_launched() -> bool:
    """Whether a launcher, ours or another, has started this process as one of several."""
    return "LOCAL_RANK" in os.environ or "RANK" in os.environ


def launch(arguments: Sequence[str], num_processes: int) -> int:
    """Run the command line in several processes, until all have ended.

    SIGINT and SIGTERM are passed on to all of them. If one fails, the others are ended. None outlives this process,
    however it ends: on Linux the kernel sends them SIGTERM when it is killed.

    Args:
        arguments: Arguments of the command line, the verb first.
        num_processes: Number of processes.

    Returns:
        The status of the first process that ended with another than 0, with 128 + n for one killed by signal n; or 0.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {
        # As torchrun has it, but with all of the cores.
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
    workers: list[subprocess.Popen] = []

    def pass_on(number: int, _frame: object = None) -> None:
        for worker in workers:
            if worker.poll() is None:
                worker.send_signal(number)

    previous = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for rank in range(num_processes):
            # In a process group of its own, so that a Ctrl-C reaches it once, through `pass_on`.
            workers.append(
                subprocess.Popen(
                    [sys.executable, "-c", _WORKER, *arguments],
                    env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    process_group=0,
                )
            )
        return _wait(workers, pass_on)
    finally:
        pass_on(signal.SIGKILL)
        for number, handler in previous.items():
            signal.signal(number, handler)


def work(arguments: Sequence[str]) -> int:
    """Be one of the processes: run the command line, and end with the launcher."""
    bind_to_launcher()
    from . import main

    return main(arguments)


def bind_to_launcher() -> None:
    """Have the kernel send this process SIGTERM when the launcher dies, on Linux."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
        if os.getppid() != int(os.environ[_PARENT]):
            # It has died already.
            sys.exit(128 + signal.SIGTERM)


def _wait(workers: Sequence[subprocess.Popen], pass_on) -> int:
    """Wait for all processes, and end them all when one has failed."""
    status, deadline = 0, float("inf")
    while None in (returncodes := [worker.poll() for worker in workers]):
        failed = [returncode for returncode in returncodes if returncode]
        if failed and status == 0:
            status, deadline = _status(failed[0]), time.monotonic() + GRACE_SECONDS
            pass_on(signal.SIGTERM)
        if time.monotonic() > deadline:
            pass_on(signal.SIGKILL)
        time.sleep(0.05)
    return status or next((_status(worker.returncode) for worker in workers if worker.returncode), 0)


def _status(returncode: int) -> int:
    return returncode if returncode > 0 else 128 - returncode
