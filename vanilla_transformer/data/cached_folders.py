"""Folders of the cache: whole or absent, compared with their digests before they are used again.

What killed writers left of one is cleared away.
"""

import errno
import json
import os
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from vanilla_transformer.files import MANIFEST, describe, lock, write_manifest


# What a vocabulary, an encoded text or an epoch of one is called while it is written.
_PARTIAL = re.compile(r"(?:(?:vocabulary-)?[0-9a-f]{32}|\d+)\.partial-[0-9a-f]{32}")


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
        write_manifest(partial, "blake2b")
        try:
            partial.rename(folder)
        except OSError:
            # Another process may have finished the same folder first.
            if not folder.exists():
                raise


def _fault_of(folder: Path) -> str | None:
    """What is wrong with a folder by its manifest; `None` if nothing is."""
    name = MANIFEST
    try:
        if not (folder / MANIFEST).exists():
            return f"it lacks {MANIFEST}, which this version writes"
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for name, expected in manifest.items():
            if describe(folder / name, "blake2b") != expected:
                return f"{name} was changed after it was written"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    except (ValueError, AttributeError, RecursionError):
        return f"{MANIFEST} was changed after it was written"
    return None


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
    """Delete unfinished folders that nobody is writing, where folders can be locked."""
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
            try:
                stack.enter_context(_locked(partial))
            except (BlockingIOError, FileNotFoundError):
                # Another process took it for a leftover before it was locked.
                continue
            except OSError:
                # Windows and some network file systems lock no folders; nobody can then lock this one to delete it.
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
        BlockingIOError: Another process holds it, or the folder was deleted or renamed meanwhile.
        FileNotFoundError: The folder was deleted or renamed before.
        OSError: Folders cannot be locked here.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if not lock(descriptor, path):
            raise BlockingIOError(errno.EAGAIN, "The folder is in use", str(path))
        yield
    finally:
        os.close(descriptor)
