"""Tests of what becomes of freed memory."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vanilla_transformer.training.cpu import memory
from vanilla_transformer.training.cpu.memory import FreedMemory, resident_memory


MEBIBYTE = 2**20


@pytest.fixture
def freed_memory():
    freed_memory = FreedMemory()
    memory.return_freed_memory()
    freed_memory.update_done()
    return freed_memory


def allocate(count: int) -> list[torch.Tensor]:
    """Tensors of a mebibyte, all of it in memory."""
    return [torch.ones(MEBIBYTE // 4) for _ in range(count)]


def tensors_between_gaps() -> list[torch.Tensor]:
    """As many tensors as double what this process has, at least 400; all but each tenth are freed."""
    return allocate(max(400, resident_memory() // MEBIBYTE))[::10]


needs_glibc = pytest.mark.skipif(memory._glibc() is None, reason="memory is not managed by glibc")


@needs_glibc
def test_gaps_are_given_back_once_memory_has_grown_by_half(freed_memory):
    before = resident_memory()
    kept = tensors_between_gaps()
    grown = resident_memory()
    assert grown > 1.5 * before
    freed_memory.update_done()
    # What is kept, and a third of what was freed.
    assert resident_memory() < before + (len(kept) + 3 * len(kept)) * MEBIBYTE


@needs_glibc
def test_what_is_freed_is_kept_until_then(freed_memory):
    before = resident_memory()
    size = int(before * 0.3 / MEBIBYTE)
    allocate(size)
    freed_memory.update_done()
    assert resident_memory() > before + 0.8 * size * MEBIBYTE


@needs_glibc
def test_the_bound_rises_with_what_updates_need(freed_memory, monkeypatch):
    returned = []
    monkeypatch.setattr(memory, "return_freed_memory", lambda: returned.append(None))
    counts = []
    for resident in (100, 160, 140, 200, 215, 140):
        monkeypatch.setattr(memory, "resident_memory", lambda resident=resident: resident * MEBIBYTE)
        if not counts:
            freed_memory._needed = None
        freed_memory.update_done()
        counts.append(len(returned))
    assert counts == [0, 1, 1, 1, 2, 2]


def test_a_system_that_does_not_tell_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_STATISTICS", tmp_path / "missing")
    returned = []
    monkeypatch.setattr(memory, "return_freed_memory", lambda: returned.append(None))
    freed_memory = FreedMemory()
    for _ in range(3):
        freed_memory.update_done()
    assert resident_memory() is None and not returned


def test_without_glibc_nothing_is_asked_of_it(monkeypatch):
    calls = []

    class Library:
        def __getattr__(self, name):
            return lambda *arguments: calls.append(name)

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    for platform, expected in (("linux", ["mallopt", "mallopt", "malloc_trim"]), ("darwin", [])):
        calls.clear()
        monkeypatch.setattr(sys, "platform", platform)
        FreedMemory()
        memory.return_freed_memory()
        assert calls == expected


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[madvise]" not in HUGE_PAGES.read_text(), reason="huge pages are not for those who ask"
)
@pytest.mark.parametrize("environment", [{}, {"THP_MEM_ALLOC_ENABLE": "0"}])
def test_large_tensors_lie_in_huge_pages_unless_the_environment_says_otherwise(environment):
    program = (
        "import torch\n"
        "from vanilla_transformer.training.cpu.memory import prefer_huge_pages\n"
        "prefer_huge_pages()\n"
        "tensor = torch.ones(2**24)\n"
        "lines = open('/proc/self/smaps_rollup').read().splitlines()\n"
        "print(next(line.split()[1] for line in lines if line.startswith('AnonHugePages')))"
    )
    inherited = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=inherited | environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    tensor = 2**26
    assert (int(result.stdout) * 1024 > tensor / 2) == (not environment)
