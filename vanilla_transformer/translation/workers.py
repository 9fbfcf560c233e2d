"""Whole batches side by side, each on a core of its own.

Products of one batch are too small to be shared among cores; batches need nothing of each other.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TypeVar

import torch


Item = TypeVar("Item")
Result = TypeVar("Result")


def map_side_by_side(function: Callable[[Item], Result], items: Sequence[Item], *, workers: int) -> Iterator[Result]:
    """Apply a function to several items at a time.

    Args:
        function: What is done with an item; it leaves Python's lock for most of its time.
        items: Items.
        workers: How many at a time, each in a thread in which torch uses one core.

    Yields:
        The results, in the order of the items. No new item is begun once the caller stops.
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
        # What one thread sets holds for the process, and for threads that begin later.
        torch.set_num_threads(threads)
