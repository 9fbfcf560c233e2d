"""Folders of the cache: written whole or not at all, and verified by digests before they are reused.

Unfinished folders of killed processes are deleted.
"""

import hashlib
import json
import os
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path


try:
    import fcntl
except ImportError:
    # Windows, where what killed writers left stays.
    fcntl = None

# What a vocabulary, an encoded text or an epoch of one is called while it is written.
_PARTIAL = re.compile(r"(?:(?:vocabulary-)?[0-9a-f]{32}|\d+)\.partial-[0-9a-f]{32}")
# Size and digest of every other file of a folder.
_MANIFEST = "manifest.json"


def write_whole(folder: Path, write: Callable[[Path], object]) -> None:
    """Write a folder so that it appears whole or not at all; leave a sound one that is already there.

    One that is there is read once, and compared with the digests that it was written with; BLAKE2 reads a gibibyte in
    0.8 seconds (AMD EPYC), and needs no instructions of its own for that, as SHA-256 does. If it is damaged, a line on
    standard error says so, and it is written anew. What killed processes left unfinished beside it is deleted.

    Args:
        folder: The folder.
        write: Writes its files into the folder that it is given.
    """
    if folder.exists():
        found = folder.stat()
        fault = _fault_of(folder)
        if fault is None:
            return
        print(f"{folder} cannot be used ({fault}); it is made again.", file=sys.stderr)
        _discard(folder, found)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(folder.parent)
    with _new_partial(folder) as partial:
        write(partial)
        _write_manifest(partial)
        try:
            partial.rename(folder)
        except OSError:
            # Another process may have finished the same folder first.
            if not folder.exists():
                raise


def _write_manifest(folder: Path) -> None:
    manifest = {path.name: _describe(path) for path in sorted(folder.iterdir())}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def _fault_of(folder: Path) -> str | None:
    """What is wrong with a folder by its manifest; `None` if nothing is."""
    name = _MANIFEST
    try:
        if not (folder / _MANIFEST).exists():
            return f"it lacks {_MANIFEST}, which this version writes"
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        for name, expected in manifest.items():
            if _describe(folder / name) != expected:
                return f"{name} was changed after it was written"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    except (ValueError, AttributeError, RecursionError):
        return f"{_MANIFEST} was changed after it was written"
    return None


def _describe(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32))
        return {"size": os.fstat(file.fileno()).st_size, "blake2b": digest.hexdigest()}


def _discard(folder: Path, found: os.stat_result) -> None:
    """Delete a damaged folder, unless another process has put a new one in its place meanwhile."""
    doomed = folder.with_name(f"{folder.name}.partial-{uuid.uuid4().hex}")
    with suppress(FileNotFoundError):
        there = folder.stat()
        # The number of a folder that was deleted may be given again.
        if os.path.samestat(there, found) and there.st_mtime_ns == found.st_mtime_ns:
            folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def _clear_leftovers(cache_dir: Path) -> None:
    """Delete unfinished folders that nobody is writing."""
    if fcntl is None:
        return
    for path in cache_dir.iterdir():
        if _PARTIAL.fullmatch(path.name):
            with suppress(OSError), _locked(path):
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _new_partial(folder: Path) -> Iterator[Path]:
    """A locked folder beside the one that it is to become; deleted if it is still there at the end."""
    with ExitStack() as stack:
        while True:
            # Not named after the process: machines that share a file system share the numbers of processes.
            partial = folder.with_name(f"{folder.name}.partial-{uuid.uuid4().hex}")
            partial.mkdir()
            if fcntl is None:
                break
            try:
                stack.enter_context(_locked(partial))
            except (BlockingIOError, FileNotFoundError):
                # Another process took it for a leftover before it was locked.
                continue
            except OSError:
                # Some network file systems lock no folders; nobody can then lock this one to delete it.
                pass
            break
        try:
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a folder, which the operating system releases when the process dies.

    Raises:
        BlockingIOError: Another process holds it.
        FileNotFoundError: The folder was deleted or renamed meanwhile.
        OSError: The file system cannot lock it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.stat()
        yield
    finally:
        os.close(descriptor)
