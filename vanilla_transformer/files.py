"""What the package does with files: replace them whole, put them on the disk, describe them, and lock them."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Literal


# States size and digest of every other file of its folder.
MANIFEST = "manifest.json"

DigestName = Literal["sha256", "blake2b"]

_DIGESTS = {"sha256": hashlib.sha256, "blake2b": partial(hashlib.blake2b, digest_size=32)}


def sync(path: Path) -> None:
    """Have the operating system put a file or a folder's entries on the disk.

    Args:
        path: File or folder.
    """
    if path.is_dir() and os.name == "nt":
        # Windows opens no folders, and writes their entries by itself.
        return
    # Windows syncs only what was opened for writing.
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path, aside: Path | None = None) -> Iterator[Path]:
    """Write a file so that its name always leads to the old content or to the whole new one, after a crash too.

    Args:
        path: File to write or replace.
        aside: File of the same folder that holds the new content until it is complete; by default `partial-NAME`. It
            is deleted if writing fails.

    Yields:
        `aside`, for the block to write and close.

    Example:
        Writing a file of JSON::

            with replacing(path) as aside:
                aside.write_text(json.dumps(record), encoding="utf-8")
    """
    aside = path.with_name(f"partial-{path.name}") if aside is None else aside
    try:
        yield aside
        sync(aside)
        aside.replace(path)
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise
    # A folder may be writable but not readable; then it cannot be opened, and its entries wait for the system.
    with suppress(PermissionError):
        sync(path.parent)


def describe(path: Path, digest: DigestName) -> dict[str, int | str]:
    """Size and digest of a file.

    Args:
        path: The file.
        digest: `sha256`, or `blake2b`, which is faster where the processor has no instructions for SHA-256.

    Returns:
        `size` in bytes, and the digest in hexadecimal under its name.
    """
    with path.open("rb") as file:
        found = hashlib.file_digest(file, _DIGESTS[digest])
        return {"size": os.fstat(file.fileno()).st_size, digest: found.hexdigest()}


def write_manifest(folder: Path, digest: DigestName) -> None:
    """Describe all files of a folder in its `manifest.json`.

    Args:
        folder: The folder, without subfolders.
        digest: As for `describe`.
    """
    manifest = {path.name: describe(path, digest) for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def lock(descriptor: int, path: Path) -> bool:
    """Try to lock an open file or folder exclusively; its closing or the death of the process ends the lock.

    The lock is that of the file itself: no other file is made that would stay behind.

    Args:
        descriptor: The open file or folder.
        path: The path that it was opened by.

    Returns:
        Whether this process holds the lock, and the path still leads to what is locked: the process that held the lock
        before may have renamed or deleted it.

    Raises:
        OSError: The file system has no such locks.
    """
    # Imported here, because the command line answers --help and mistyped options without libraries.
    from filelock import lock_descriptor

    if not lock_descriptor(descriptor, blocking=False):
        return False
    try:
        # Windows renames and deletes nothing that is open.
        return os.name == "nt" or os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
