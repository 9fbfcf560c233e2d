"""Settings of memory allocation: freed memory in glibc, and huge pages."""

import ctypes
import os
import sys
from pathlib import Path


# Memory may grow to this multiple of what an update needs before its gaps are given back.
_GROWTH = 1.5
_STATISTICS = Path("/proc/self/statm")


class FreedMemory:
    """Has glibc keep the memory of freed tensors, and return it when gaps have made the process grow too large.

    Otherwise a small model would spend much of its time on asking the kernel for memory. But keeping it needs a limit:
    batches have many shapes, and for each shape oneDNN keeps small allocations among the tensors. The memory of a base
    model would grow to several times what its updates need.
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

    Passes over activations then wait less for address translation. Call it before torch makes its first tensor, when
    it reads the setting.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def keep_freed_memory() -> None:
    """Have glibc keep memory that is freed from now on, for later allocations."""
    libc = _glibc()
    if libc is not None:
        trim_threshold, mmap_threshold = -1, -3
        libc.mallopt(mmap_threshold, 1 << 25)
        libc.mallopt(trim_threshold, 1 << 30)


def return_freed_memory() -> None:
    """Have glibc return all free memory to the kernel, including gaps between allocations."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def resident_memory() -> int | None:
    """Resident memory of this process in bytes; `None` where the system does not report it."""
    try:
        return int(_STATISTICS.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def machine_memory() -> int | None:
    """Memory of this machine in bytes; `None` where the system does not report it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
