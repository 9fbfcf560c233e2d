"""Folders of the cache: each appears whole or not at all, and what killed writers left of one is cleared away."""

import os
import re
import shutil
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


def write_whole(folder: Path, write: Callable[[Path], object]) -> None:
    """Write a folder so that it appears whole or not at all; leave one that is already there.

    What killed processes left unfinished beside it is deleted.

    Args:
        folder: The folder.
        write: Writes its files into the folder that it is given.
    """
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(folder.parent)
    with _new_partial(folder) as partial:
        write(partial)
        try:
            partial.rename(folder)
        except OSError:
            # Another process may have finished the same folder first.
            if not folder.exists():
                raise


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
