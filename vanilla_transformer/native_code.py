"""Compiles what is written in C++ when it is first used, by the compiler that is found, into the user's cache."""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path


_FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC")
_COMPILE_SECONDS = 300


def compile_library(sources: Sequence[Path], name: str) -> Path:
    """Compile a library, if it is not in the cache.

    Args:
        sources: The file to compile, and then those of ours that it includes.
        name: What the library is, in one word.

    Returns:
        Its file, in the user's cache.

    Raises:
        OSError: There is no compiler, or it does not work; the message is a clause that says so.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise OSError("there is no C++ compiler (g++ or clang++)")
    # Another processor, compiler or version of the source needs another library.
    identity = hashlib.sha256()
    surroundings = f"{compiler} {_FLAGS} {_processor()}".encode()
    for part in (*(source.read_bytes() for source in sources), surroundings):
        identity.update(part + b"\0")
    cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "vanilla_transformer"
    path = cache_dir / f"{name}-{identity.hexdigest()[:16]}.so"
    if path.is_file():
        return path
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir) as folder:
        output = Path(folder) / path.name
        command = [compiler, *_FLAGS, "-o", str(output), str(sources[0])]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
        except (subprocess.SubprocessError, OSError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            raise OSError(f"{compiler} does not compile the {name} ({said[0] if said else 'no message'})") from error
        # At once, so that another process finds a whole library or none.
        os.replace(output, path)
    return path


def _processor() -> str:
    """What a library for this processor depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor() + platform.machine()
