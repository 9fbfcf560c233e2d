"""Runs functions of compiled libraries in as many threads as torch uses."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache

import torch


def run_in_threads(function: Callable[..., None], count: int, *arguments) -> None:
    """Call a function with ranges that make up `count`.

    Args:
        function: Function of a `ctypes` library, which lets other threads work meanwhile.
        count: Number of parts of the work.
        arguments: What the function takes before the first and the last part of its range.
    """
    num_threads = max(min(torch.get_num_threads(), count), 1)
    bounds = [count * i // num_threads for i in range(num_threads + 1)]
    others: list[Future] = []
    try:
        for i in range(1, num_threads):
            others.append(_pool().submit(function, *arguments, *bounds[i : i + 2]))
        function(*arguments, *bounds[:2])
    finally:
        # They use memory that the caller may free.
        wait(others)
    for other in others:
        other.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="kernels")


if hasattr(os, "register_at_fork"):
    # The child of a fork has none of the threads.
    os.register_at_fork(after_in_child=_pool.cache_clear)
