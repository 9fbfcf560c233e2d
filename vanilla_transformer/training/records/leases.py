"""Leases: a checkpoint that is being read is not deleted, and one run at a time writes into a folder."""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vanilla_transformer.errors import UserError
from vanilla_transformer.files import MANIFEST, lock


try:
    import fcntl
except ImportError:
    # Windows, which renames no folder that has an open file in it.
    fcntl = None

# Stays when the run is over: whoever waited for it to be deleted could lock a file that is gone.
_RUN_LOCK = "run.lock"


@contextmanager
def training_in(folder: Path) -> Iterator[None]:
    """Keep a second run from writing into a run's folder, until this one has ended or died.

    Args:
        folder: Folder of the run.

    Raises:
        UserError: Another process trains there.
    """
    path = folder / _RUN_LOCK
    with path.open("ab") as file:
        try:
            is_ours = lock(file.fileno(), path)
        except OSError:
            # Some network file systems have no locks.
            is_ours = True
        if not is_ours:
            raise UserError(
                f"Another process trains in {folder} already; wait for its end, or name another --output_dir."
            )
        yield


@contextmanager
def reading(checkpoint: Path) -> Iterator[Path]:
    """Keep a checkpoint from being deleted while it is read, in this thread, another or another process.

    Training goes on meanwhile, and deletes the checkpoint later. The lease is a lock on the manifest, which the
    operating system releases when its holder dies.

    Args:
        checkpoint: Folder of the checkpoint.

    Yields:
        The checkpoint.

    Raises:
        FileNotFoundError: The checkpoint does not exist, or was deleted just now.

    Example:
        Uploading in the background, while the run goes on::

            def publish(checkpoint: Path) -> None:
                with reading(checkpoint):
                    upload(checkpoint)

            train(options, on_checkpoint=lambda checkpoint: executor.submit(publish, checkpoint))
    """
    path = checkpoint / MANIFEST
    with path.open("rb") as manifest:
        if fcntl is not None:
            # filelock shares no lock of an open file: its read-write locks are databases of SQLite beside it.
            fcntl.flock(manifest, fcntl.LOCK_SH)
        # A deletion may have come between opening and locking.
        if not path.exists() or not os.path.samestat(path.stat(), os.fstat(manifest.fileno())):
            raise FileNotFoundError(errno.ENOENT, "The checkpoint was deleted", str(checkpoint))
        yield checkpoint


def rename_unless_read(checkpoint: Path, target: Path) -> bool:
    """Rename a checkpoint, if nobody is reading it.

    Args:
        checkpoint: Folder of the checkpoint.
        target: Its new path.

    Returns:
        Whether it was renamed.
    """
    if fcntl is None:
        try:
            checkpoint.rename(target)
        except PermissionError:
            return False
        return True
    try:
        # Network file systems lock exclusively only what may be written.
        manifest = (checkpoint / MANIFEST).open("r+b")
    except OSError:
        # Nobody can be reading a checkpoint without its manifest.
        checkpoint.rename(target)
        return True
    with manifest:
        if not lock(manifest.fileno(), checkpoint / MANIFEST):
            return False
        checkpoint.rename(target)
    return True


def hand_out(checkpoint: Path, receive: Callable[[Path], object]) -> None:
    """Give a finished checkpoint to whoever publishes it; a failure there is reported, and not one of the run.

    Args:
        checkpoint: Folder of the checkpoint.
        receive: Receives the folder, which stays at least until it returns.
    """
    try:
        with reading(checkpoint):
            receive(checkpoint)
    except Exception as error:
        print(
            f"on_checkpoint failed on {checkpoint} ({type(error).__name__}: {error}); the run goes on.",
            file=sys.stderr,
        )
