"""Translates several batches at the same time, each on its own core.

The GEMMs of one batch are too small to be shared by several cores, and batches are independent.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TypeVar

import torch


Item = TypeVar("Item")
Result = TypeVar("Result")


def map_side_by_side(function: Callable[[Item], Result], items: Sequence[Item], *, workers: int) -> Iterator[Result]:
    """Apply a function to several items at the same time.

    Args:
        function: The function; it releases Python's global interpreter lock most of the time.
        items: Its arguments.
        workers: Number of threads. In each of them, torch uses one core.

    Yields:
        The results, in the order of the items. Once the caller stops, no further item is begun.
    """
    if workers == 1 or len(items) < 2:
        yield from map(function, items)
        return
    threads = torch.get_num_threads()
    try:
        with (
            ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool,
            closing(pool.map(function, items)) as results,
        ):
            yield from results
    finally:
        # `set_num_threads` in one thread also acts on the process and on threads that start later.
        torch.set_num_threads(threads)
