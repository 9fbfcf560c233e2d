"""Compiles what is written in C++ when it is first used, by the compiler that is found, and keeps it for this user.

A library is code that runs with this user's rights: one of the cache is loaded only if folder and file belong to this
user, nobody else may write them, and the file has the SHA-256 that its name says. It gets this name when it is whole
and on the disk, so that several processes may compile the same library at once, and a damaged one is recognised.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from vanilla_transformer.files import replacing


_log = logging.getLogger(__name__)

_FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC")
# The largest source takes 3 seconds on a core of 2024, and 7 beside a busy neighbour on the same core.
_COMPILE_SECONDS = 120.0
# After so long a user is told what the process waits for.
_QUIET_SECONDS = 1.0
# Compilers that did not end in time, which this process does not wait for again.
_hanging: set[tuple[str, ...]] = set()
# Runs a command whose group of processes ends with ours: the pipe to `read` closes when this process dies of anything.
_BOUND_TO_US = 'exec 3<&0 </dev/null; { read -r _ <&3; rm -rf "$TMPDIR"; kill -KILL 0; } & "$@" 3<&-'


def load_library(
    name: str,
    sources: Sequence[Path],
    functions: Mapping[str, tuple[type | None, Sequence[type]]],
    constants: Mapping[str, int],
    *,
    supported_by: tuple[str, str] | None = None,
) -> ctypes.CDLL:
    """Load a library, compiled if it is not in the cache or is damaged there.

    Args:
        name: What the library is, in one word.
        sources: The file to compile, and then those of ours that it includes.
        functions: Type of the result and of the arguments of each function that is called.
        constants: What Python and C++ both have written down, by name. The library's `shared_constants` returns the
            address of their number and of their values, in this order, as 64-bit integers.
        supported_by: A function that tells whether the library works on this machine, and the clause for where it does
            not; other functions may then be missing.

    Returns:
        The library, whose functions have their types.

    Raises:
        OSError: There is no compiler, it or the result does not work, or there is no safe place for the result; the
            message is a clause that says so.
    """
    if os.name != "posix":
        raise OSError(f"the {name} is not compiled on {platform.system()}")
    try:
        folder = _private_folder()
        compiler = _find_compiler(name)
        stem = f"{name}-{_identity(sources, compiler, name)}"

        def load(path: Path) -> ctypes.CDLL:
            return _load(name, path, functions, constants, supported_by)

        for path in sorted(folder.glob(f"{stem}-*.so")):
            try:
                _verify(path)
                return load(path)
            except _DamagedError:
                path.unlink(missing_ok=True)
        path = _keep(_compile(sources[0], compiler, name), folder, stem)
        try:
            return load(path)
        except _DamagedError:
            path.unlink(missing_ok=True)
            raise
    except OSError as error:
        if error.errno is None:
            raise
        place = f" ({error.filename})" if error.filename else ""
        raise OSError(f"the {name} cannot be compiled and kept: {error.strerror}{place}") from error


class _DamagedError(OSError):
    """A library is not what was compiled, or does not fit this version of Python's side."""


def _private_folder() -> Path:
    """The folder that libraries are kept in, which nobody else may write."""
    # Paths that depend on the working directory are to be ignored, says the XDG specification.
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        home = os.environ.get("HOME", "")
        if not os.path.isabs(home):
            home = _home_of_the_user()
        base = os.path.join(home, ".cache")
    folder = Path(base) / "vanilla_transformer" / "libraries"
    remedy = "set XDG_CACHE_HOME to a folder of yours"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"{folder} for compiled code cannot be made ({error.strerror}); {remedy}") from error
    if not _is_ours(folder.stat()):
        raise OSError(f"{folder} for compiled code belongs to another user or may be written by others; {remedy}")
    return folder


def _home_of_the_user() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        raise OSError("there is no home folder for compiled code; set XDG_CACHE_HOME to a folder of yours") from None


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _find_compiler(name: str) -> tuple[str, ...]:
    """The compiler's command, which may have arguments."""
    chosen = os.environ.get("CXX", "").strip()
    try:
        command = shlex.split(chosen) if chosen else [shutil.which("g++") or shutil.which("clang++") or ""]
    except ValueError as error:
        raise OSError(f"CXX={chosen} is no command ({error})") from error
    if not command[0]:
        raise OSError("there is no C++ compiler (g++ or clang++)")
    if shutil.which(command[0]) is None:
        raise OSError(f"{chosen} does not compile the {name} (there is no program {command[0]})")
    return tuple(command)


def _identity(sources: Sequence[Path], compiler: tuple[str, ...], name: str) -> str:
    """What is not the same for another processor, compiler or version of the source."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        version = _run((*compiler, "--version"), compiler, Path(folder), name)
    identity = hashlib.sha256()
    surroundings = f"{shlex.join(compiler)}\0{version}\0{_FLAGS}\0{_processor()}".encode()
    for part in (*(source.read_bytes() for source in sources), surroundings):
        identity.update(part + b"\0")
    return identity.hexdigest()[:16]


def _processor() -> str:
    """What a library for this processor depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor() + platform.machine()


def _compile(source: Path, compiler: tuple[str, ...], name: str) -> bytes:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        output = Path(folder) / f"{name}.so"
        _run((*compiler, *_FLAGS, "-o", str(output), str(source)), compiler, Path(folder), name)
        try:
            return output.read_bytes()
        except FileNotFoundError:
            raise OSError(f"{shlex.join(compiler)} does not compile the {name} (it writes no library)") from None


def _run(command: tuple[str, ...], compiler: tuple[str, ...], folder: Path, name: str) -> str:
    """Run a compiler, which ends with this process and leaves nothing outside a folder.

    Returns:
        What it writes to standard output.
    """
    said, complained = folder / "output", folder / "errors"
    bound, text = _compile_seconds(), shlex.join(compiler)
    too_long = f"{text} does not compile the {name} (it takes longer than {bound:g} seconds)"
    if compiler in _hanging:
        raise OSError(too_long)
    begun = time.monotonic()
    with said.open("wb") as output, complained.open("wb") as errors:
        process = subprocess.Popen(
            ["/bin/sh", "-c", _BOUND_TO_US, "sh", *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
            env={**os.environ, "TMPDIR": str(folder)},
            start_new_session=True,
        )
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(min(_QUIET_SECONDS, bound))
        if process.poll() is None:
            _log.warning("Compiling the %s in C++ (%s), which is done once; at most %g seconds.", name, text, bound)
            process.wait(max(bound - (time.monotonic() - begun), 0.0))
    except subprocess.TimeoutExpired:
        _hanging.add(compiler)
        raise OSError(too_long) from None
    finally:
        # The shell watches until it is ended; so may what the compiler started.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()
    if process.returncode != 0:
        lines = complained.read_text(errors="replace").strip().splitlines()
        raise OSError(f"{text} does not compile the {name} ({lines[0] if lines else _ending(process.returncode)})")
    return said.read_text(errors="replace")


def _ending(status: int) -> str:
    # A shell adds 128 to the number of the signal that ended a command.
    number = -status if status < 0 else status - 128
    return f"ended by signal {number}" if number > 0 else f"exit status {status}"


def _compile_seconds() -> float:
    given = os.environ.get("VANILLA_TRANSFORMER_COMPILE_SECONDS")
    if not given:
        return _COMPILE_SECONDS
    with suppress(ValueError):
        if 0.0 < (seconds := float(given)) < float("inf"):
            return seconds
    raise OSError(f"VANILLA_TRANSFORMER_COMPILE_SECONDS is {given}, and must be a number of seconds above 0")


def _keep(content: bytes, folder: Path, stem: str) -> Path:
    """Put a library on the disk, and then under its name."""
    path = folder / f"{stem}-{hashlib.sha256(content).hexdigest()}.so"
    descriptor, partial = tempfile.mkstemp(dir=folder, prefix=f"{stem}-", suffix=".partial")
    with replacing(path, Path(partial)), open(descriptor, "wb") as file:
        file.write(content)
    return path


def _verify(path: Path) -> None:
    """Check that a file of the cache is what was written there."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or not _is_ours(status):
                raise _DamagedError(f"{path} is not a file that only this user may write")
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _DamagedError(str(error)) from error
    if digest != path.stem.rpartition("-")[2]:
        raise _DamagedError(f"{path} has changed")


def _load(
    name: str,
    path: Path,
    functions: Mapping[str, tuple[type | None, Sequence[type]]],
    constants: Mapping[str, int],
    supported_by: tuple[str, str] | None,
) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise _DamagedError(f"the compiled {name} cannot be loaded ({error})") from error
    try:
        if supported_by is not None and not getattr(library, supported_by[0])():
            raise OSError(supported_by[1])
        library.shared_constants.restype = ctypes.POINTER(ctypes.c_int64)
        for function, (result, arguments) in functions.items():
            getattr(library, function).restype = result
            getattr(library, function).argtypes = arguments
    except AttributeError as error:
        raise _DamagedError(f"the compiled {name} lacks a function ({error})") from error
    table = library.shared_constants()
    if table[0] != len(constants) or table[1 : 1 + len(constants)] != [*constants.values()]:
        raise _DamagedError(f"C++ and Python disagree on the {name}'s constants")
    return library
