"""Tests of calls in several threads: interrupted ones, and what their outcomes mean."""

import ctypes
import gc
import threading
import weakref

import pytest
import torch

from vanilla_transformer.native import threads
from vanilla_transformer.native.library import Outcome
from vanilla_transformer.native.threads import TensorPointer, check, run_in_threads


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_other_threads_are_waited_for_however_often_that_is_interrupted(monkeypatch):
    begun, leave = threading.Event(), threading.Event()
    finished = []

    def work(start: int, end: int) -> int:
        if start == 0:
            begun.wait()
            return Outcome.DONE
        begun.set()
        leave.wait()
        finished.append(start)
        return Outcome.DONE

    wait, interruptions = threads.wait, []

    def interrupted(others):
        if len(interruptions) < 3:
            interruptions.append(len(finished))
            raise KeyboardInterrupt
        leave.set()
        return wait(others)

    monkeypatch.setattr(threads, "wait", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_in_threads(work, 2)
        assert interruptions == [0, 0, 0] and finished == [1]
    finally:
        leave.set()


@pytest.mark.usefixtures("two_threads")
def test_a_call_keeps_its_tensors_alive(monkeypatch):
    """Even where nobody waits for it."""
    begun, leave = threading.Event(), threading.Event()
    seen = []

    def work(tensor: torch.Tensor, start: int, end: int) -> int:
        if start == 0:
            begun.wait()
            return Outcome.DONE
        begun.set()
        leave.wait()
        seen.append(tensor.sum().item())
        return Outcome.DONE

    def call() -> weakref.ref:
        tensor = torch.ones(7)
        run_in_threads(work, 2, tensor)
        return weakref.ref(tensor)

    futures = []
    monkeypatch.setattr(threads, "_wait", futures.extend)
    monkeypatch.setattr(threads, "check", lambda *_: None)
    monkeypatch.setattr(threads.Future, "result", lambda self: Outcome.DONE)
    try:
        tensor = call()
        gc.collect()
        assert tensor() is not None
    finally:
        leave.set()
    monkeypatch.undo()
    threads.wait(futures)
    assert seen == [7.0]


def test_tensors_are_addresses_in_cpp():
    tensor = torch.arange(6, dtype=torch.int64)
    function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(lambda address: address or 0)
    function.argtypes = [TensorPointer]
    assert function(tensor) == tensor.data_ptr() and function((tensor, 2)) == tensor.data_ptr() + 16
    assert function(None) == 0
    with pytest.raises((ctypes.ArgumentError, AttributeError)):
        function(17)


def test_outcomes_that_are_no_success_are_errors():
    check(Outcome.DONE, Outcome.DONE)
    with pytest.raises(MemoryError, match="no memory left"):
        check(Outcome.DONE, Outcome.NO_MEMORY)
    with pytest.raises(RuntimeError, match="failed with status 3"):
        check(Outcome.DONE, Outcome.FAILED)
