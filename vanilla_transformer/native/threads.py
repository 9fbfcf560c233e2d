"""Runs functions of compiled libraries in as many threads as torch uses."""

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache

import torch


# What functions return; `Outcome` of simd.h.
DONE, NO_MEMORY, FAILED = 0, 2, 3


class TensorPointer(ctypes.c_void_p):
    """Type of an argument: an address in C++; in Python a tensor, a tensor and how many elements to skip, or `None`.

    A call in another thread so holds the tensor itself: its memory stays until the call returns, even where whoever
    waits for it is interrupted.
    """

    @classmethod
    def from_param(cls, given: torch.Tensor | tuple[torch.Tensor, int] | None):
        """The address."""
        if given is None:
            return None
        if type(given) is tuple:
            tensor, start = given
            return ctypes.c_void_p(tensor.data_ptr() + start * tensor.element_size())
        return ctypes.c_void_p(given.data_ptr())


def run_in_threads(function: Callable[..., int], count: int, *arguments) -> None:
    """Call a function with ranges that make up `count`.

    Args:
        function: Function of a `ctypes` library, which lets other threads work meanwhile and returns an outcome.
        count: Number of parts of the work.
        arguments: What the function takes before the first and the last part of its range. They, and not only their
            addresses, keep alive what the function uses.

    Raises:
        MemoryError: There is no memory for the work.
        RuntimeError: The function failed in another way.
    """
    num_threads = max(min(torch.get_num_threads(), count), 1)
    bounds = [count * i // num_threads for i in range(num_threads + 1)]
    others: list[Future] = []
    try:
        for i in range(1, num_threads):
            others.append(_pool().submit(function, *arguments, *bounds[i : i + 2]))
        outcome = function(*arguments, *bounds[:2])
    finally:
        # They write what the caller goes on to use.
        _wait(others)
    check(outcome, *(other.result() for other in others))


def _wait(others: list[Future]) -> None:
    """Wait until all are done, whatever the handlers of signals raise meanwhile."""
    try:
        wait(others)
    except BaseException:
        _wait(others)
        raise


def check(*outcomes: int) -> None:
    """Raise what outcomes of C++ functions mean.

    Args:
        outcomes: What the functions returned.

    Raises:
        MemoryError: There is no memory for the work.
        RuntimeError: A function failed in another way.
    """
    if NO_MEMORY in outcomes:
        raise MemoryError("There is no memory left for the C++ functions of training; use smaller batches.")
    if any(outcome != DONE for outcome in outcomes):
        raise RuntimeError(f"A C++ function of training failed with status {max(outcomes)}.")


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="kernels")


if hasattr(os, "register_at_fork"):
    # The child of a fork has none of the threads.
    os.register_at_fork(after_in_child=_pool.cache_clear)
