"""What becomes of the memory that tensors leave, where glibc manages it."""

import ctypes
import os
import sys
from pathlib import Path


# Memory may grow to so many times what updates need before gaps in it are given back.
_GROWTH = 1.5
_STATISTICS = Path("/proc/self/statm")


class FreedMemory:
    """Has glibc keep freed tensors' memory, and give it back where it lies in gaps that no tensor fits into.

    A small model would spend much of its time asking the kernel for memory. But batches have many shapes, and for each
    shape oneDNN keeps small pieces of its own among the tensors: the memory of a base model would grow to several
    times what its updates need.
    """

    def __init__(self) -> None:
        self._needed: int | None = None
        keep_freed_memory()

    def update_done(self) -> None:
        """Give memory back if it has grown by half since the first update after it was last given back."""
        resident = resident_memory()
        if resident is None:
            return
        if self._needed is None:
            self._needed = resident
        elif resident > _GROWTH * self._needed:
            return_freed_memory()
            self._needed = None


def prefer_huge_pages() -> None:
    """Have torch ask Linux for pages of 2 MiB for large tensors, unless the environment says otherwise.

    Training's passes over activations wait less for addresses then. torch looks when it makes its first tensor.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def keep_freed_memory() -> None:
    """Have glibc keep what is freed, from now on, for what is asked of it next."""
    libc = _glibc()
    if libc is not None:
        trim_threshold, mmap_threshold = -1, -3
        libc.mallopt(mmap_threshold, 1 << 25)
        libc.mallopt(trim_threshold, 1 << 30)


def return_freed_memory() -> None:
    """Have glibc give the kernel back what is free, wherever it lies."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def resident_memory() -> int | None:
    """Bytes of this process that are in memory; `None` where the system does not tell."""
    try:
        return int(_STATISTICS.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def machine_memory() -> int | None:
    """Bytes of memory that this machine has; `None` where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
