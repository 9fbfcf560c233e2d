"""The parts of the C++ engine that this machine can run, told without asking the engine.

A test of a part that is missing is skipped only where processor, system and compiler do not offer what the part needs.
Everywhere else the test fails: the engine is broken, and a skipped suite would hide that.
"""

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest


_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
# Processor flags that each part needs, by their names in /proc/cpuinfo.
NEEDED = {
    "kernels": _AVX512,
    "products": {*_AVX512, "avx512_bf16", "amx_tile", "amx_bf16"},
    "decoder float32": set(),
    "decoder bfloat16": {"avx512f", "avx512_bf16"},
    "decoder int8": {"avx512f", "avx512_vnni"},
}
# `arch_prctl` and its request for the tiles of AMX, for which Linux has to make room in each thread's state.
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


def require(part: str, reason: str | None) -> None:
    """Skip a test without the part that it needs; fail it where this machine can run the part.

    Args:
        part: A key of `NEEDED`.
        reason: Why the engine does not offer the part, as a clause; `None` if it does.
    """
    if reason is None:
        return
    missing = why_impossible(part)
    if missing is None:
        pytest.fail(f"This machine can run the {part} in C++, but the engine refuses: {reason}.", pytrace=False)
    pytest.skip(f"the {part} in C++ cannot run here, because {missing}")


def why_impossible(part: str) -> str | None:
    """Why this machine cannot run a part, as a clause; `None` if it can."""
    needed, flags, macros = NEEDED[part], processor_flags(), compiler_macros()
    if macros is None:
        return "there is no C++ compiler that works"
    if lacking := needed - flags:
        return f"the processor lacks {', '.join(sorted(lacking))}"
    if unknown := {flag for flag in needed if _macro(flag) not in macros}:
        return f"the compiler does not know {', '.join(sorted(unknown))}"
    # Where there are tiles, the decoder rounds with them alone.
    may_need_tiles = part not in ("kernels", "decoder float32")
    if may_need_tiles and "amx_tile" in flags and "__AMX_TILE__" in macros and not tiles_permitted():
        return "the system does not permit AMX"
    return None


def _macro(flag: str) -> str:
    """The macro that a compiler defines for a flag of /proc/cpuinfo."""
    name = flag.upper() if flag.startswith("amx") else flag.upper().replace("_", "")
    return f"__{name}__"


@cache
def processor_flags() -> set[str]:
    """Instruction sets that processor and system offer, by their names in /proc/cpuinfo; none where it is missing."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())


@cache
def compiler_macros() -> set[str] | None:
    """Macros that the C++ compiler defines for this processor; `None` without a compiler that works."""
    command = shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or shutil.which("clang++") or ""]
    if os.name != "posix" or shutil.which(command[0]) is None:
        return None
    result = subprocess.run(
        [*command, "-march=native", "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, text=True, timeout=60
    )
    return {line.split()[1] for line in result.stdout.splitlines()} if result.returncode == 0 else None


@cache
def tiles_permitted() -> bool:
    """Whether Linux permits this process the tiles of AMX."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0
