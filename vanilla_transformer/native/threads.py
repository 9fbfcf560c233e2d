"""Runs functions of the C++ libraries in as many threads as torch uses."""

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache

import torch

from .library import Outcome


class TensorPointer(ctypes.c_void_p):
    """Argument type of C++ functions that take a pointer into a tensor.

    In Python the argument is a tensor, a tensor with the number of elements to skip, or `None`. A call that runs in
    another thread so holds the tensor, not only its address: the memory stays until the call returns, even if the
    thread that waits for it is interrupted.
    """

    @classmethod
    def from_param(cls, given: torch.Tensor | tuple[torch.Tensor, int] | None):
        """The address of the tensor's first element that is not skipped."""
        if given is None:
            return None
        if type(given) is tuple:
            tensor, start = given
            return ctypes.c_void_p(tensor.data_ptr() + start * tensor.element_size())
        return ctypes.c_void_p(given.data_ptr())


def run_in_threads(function: Callable[..., int], count: int, *arguments) -> None:
    """Divide `count` work items into ranges, and call a function with each range in a thread of its own.

    Args:
        function: Function of a `ctypes` library, which releases the GIL and returns an outcome. Its last two arguments
            are the first item of its range and the one after the last.
        count: Number of work items.
        arguments: The arguments before the range. They hold the tensors that the function uses, see `TensorPointer`.

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
        # The other threads write into tensors that the caller uses next.
        _wait(others)
    check(outcome, *(other.result() for other in others))


def _wait(others: list[Future]) -> None:
    """Wait until all are done, even if a signal handler raises an exception meanwhile; raise it afterwards."""
    try:
        wait(others)
    except BaseException:
        _wait(others)
        raise


def check(*outcomes: int) -> None:
    """Raise an error if a C++ function has failed.

    Args:
        outcomes: What the functions returned.

    Raises:
        MemoryError: There is no memory for the work.
        RuntimeError: A function failed in another way.
    """
    if Outcome.NO_MEMORY in outcomes:
        raise MemoryError("There is no memory left for the C++ functions of training; use smaller batches.")
    if any(outcome != Outcome.DONE for outcome in outcomes):
        raise RuntimeError(f"A C++ function of training failed with status {max(outcomes)}.")


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="kernels")


if hasattr(os, "register_at_fork"):
    # A forked child has none of its parent's threads.
    os.register_at_fork(after_in_child=_pool.cache_clear)
