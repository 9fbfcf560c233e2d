"""What a folder must be for a run, or anything else, to be written there; it imports nothing heavy."""

import os
from pathlib import Path

from vanilla_transformer.errors import UserError

from .configuration import TrainingOptions


def check_output_dir(options: TrainingOptions) -> None:
    """Refuse an output folder that holds another run, lacks the one to resume, or cannot be written.

    Args:
        options: Training options.

    Raises:
        UserError: As said.
    """
    folder = options.output_dir
    # A checkpoint that was being replaced when the run was killed counts: it is put back before it is read.
    has_checkpoints = any(any((folder / "checkpoints").glob(name)) for name in ("update-*", "replaced-update-*"))
    if options.resume and not has_checkpoints:
        raise UserError(f"--resume was given, but {folder} holds no checkpoints; leave --resume out to start.")
    if not options.resume and (has_checkpoints or (folder / "model.safetensors").exists()):
        raise UserError(f"{folder} already holds a run; continue it with --resume, or name another --output_dir.")
    check_writable(folder)


def check_writable(folder: Path) -> None:
    """Make a folder, and refuse one that cannot be written.

    Args:
        folder: Folder, made with its parents if it does not exist.

    Raises:
        UserError: The path is a file, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write-probe-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except FileExistsError as error:
        raise UserError(f"{folder} is a file; give a folder for the output.") from error
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror}); choose another folder or correct its permissions."
        ) from error
