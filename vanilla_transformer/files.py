"""What a run asks of the disk."""

import os
from pathlib import Path


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
