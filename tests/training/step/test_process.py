import signal
import subprocess
import sys

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from vanilla_transformer.errors import UserError
from vanilla_transformer.training.options import TrainingOptions
from vanilla_transformer.training.step.process import (
    OUT_OF_TIME,
    catch_signals,
    check_devices,
    make_accelerator,
    most_pressing,
)


OPTIONS = TrainingOptions()


@pytest.mark.parametrize("name", ["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_processes_that_do_not_know_of_one_another_are_refused(monkeypatch, name):
    # Made without the launcher's knowledge, as on a device whose processes Accelerate does not join.
    Accelerator(cpu=True)
    monkeypatch.setenv(name, "2")
    with pytest.raises(UserError, match=rf"started 2 processes \({name}\), but on cpu Accelerate joins 1;"):
        make_accelerator(OPTIONS)


def test_one_process_needs_no_group(monkeypatch):
    assert make_accelerator(OPTIONS).num_processes == 1
    monkeypatch.setenv("WORLD_SIZE", "1")
    AcceleratorState._reset_state(reset_partial_state=True)
    assert make_accelerator(OPTIONS).num_processes == 1


def test_every_process_needs_a_device_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    check_devices(OPTIONS, 2)
    with pytest.raises(UserError, match=r"--num_processes is 3; it must be at most 2, .* \(cuda\)"):
        check_devices(OPTIONS, 3)
    check_devices(TrainingOptions(device="cpu"), 3)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    check_devices(OPTIONS, 3)


def test_a_signal_presses_more_than_time_and_time_more_than_nothing():
    assert most_pressing([0, 0]) == 0
    assert most_pressing([OUT_OF_TIME, 0]) == most_pressing([OUT_OF_TIME]) == OUT_OF_TIME
    for number in (signal.SIGHUP, signal.SIGTERM):
        assert most_pressing([OUT_OF_TIME, 0, number]) == number


def test_signals_are_caught_and_given_back():
    received = []
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with catch_signals(received.append):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(number)
    assert received == [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    assert [signal.getsignal(number) for number in received] == before


def test_a_hangup_that_is_ignored_stays_ignored():
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    received = []
    try:
        with catch_signals(received.append):
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)
    assert received == []


def test_systems_without_hangups():
    program = "import signal; del signal.SIGHUP; from vanilla_transformer.signals import stopping_signals as signals; "
    program += "assert signals() == [signal.SIGINT, signal.SIGTERM]"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
