"""A terminal that is lost, as with a connection, does not lose a run."""

import os
import select
import subprocess

import pytest
from users import ONE_PROCESS, SHORT

from vanilla_transformer.training.records.checkpoints import fault_of, list_checkpoints, update_of
from vanilla_transformer.training.records.journal import read_journal


pty = pytest.importorskip("pty")
fcntl, termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")


def lose_terminal(user, *flags: str, controlling: bool) -> int:
    """Train in a terminal that goes away after some updates; returns the exit status."""
    ours, theirs = pty.openpty()

    def take_control():
        if controlling:
            fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    command = [*ONE_PROCESS, *SHORT, *flags]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    with user.start(command, preexec_fn=take_control, pass_fds=[theirs], **streams) as process:
        os.close(theirs)
        journal = user.file("metrics.jsonl")
        while not (journal.exists() and len(read_journal(journal)) > 5):
            assert process.poll() is None
            if select.select([ours], [], [], 0.05)[0]:
                os.read(ours, 1 << 16)
        os.close(ours)
        try:
            return process.wait(timeout=100)
        except subprocess.TimeoutExpired:
            pytest.fail("The run goes on.")


@pytest.mark.parametrize("number", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_run_of_the_terminal_saves_and_stops(user, number):
    flags = ["--max_updates", "1000000", "--save_every", "1000000", "--num_processes", number]
    assert lose_terminal(user, *flags, controlling=True) == 129
    checkpoint = list_checkpoints(user.file("checkpoints"))[-1]
    assert fault_of(checkpoint) is None
    assert read_journal(user.file("metrics.jsonl"))[-1]["update"] == update_of(checkpoint)


def test_a_run_in_the_background_goes_on(user):
    # The shell has left it alone: it hears of nothing, and can write nothing.
    assert lose_terminal(user, "--max_updates", "60", controlling=False) == 0
    assert read_journal(user.file("metrics.jsonl"))[-1]["update"] == 60
    assert user.file("model.safetensors").is_file()
