"""Checks of output folders before anything is written to them. Nothing heavy is imported here."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vanilla_transformer.errors import UserError
from vanilla_transformer.training.options import TrainingOptions


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", *TOKENIZER_FILES)
# Files that a run writes from its start; a run that was killed before its first checkpoint leaves them behind.
_RECORDS = ("run.json", "options.yaml", "metrics.jsonl", "samples.jsonl", "trackers.json", "tensorboard")


def check_output_dir(options: TrainingOptions, more: Sequence[str] = ()) -> None:
    """Refuse an output folder that holds another run, lacks the run to resume, or cannot be written.

    A new run also refuses to overwrite files that no run wrote.

    Args:
        options: Training options.
        more: Names of files that will be written there besides those of the run.

    Raises:
        UserError: As said.
    """
    folder = options.output_dir
    # A checkpoint that was being replaced when the run was killed counts, because it is restored before reading.
    has_checkpoints = any(any((folder / "checkpoints").glob(name)) for name in ("update-*", "replaced-update-*"))
    if options.resume and not has_checkpoints:
        raise UserError(f"`resume` was given, but {folder} holds no checkpoints; leave `resume` out to start.")
    if not options.resume and (has_checkpoints or (folder / "model.safetensors").exists()):
        raise UserError(f"{folder} already holds a run; continue it with `resume`, or name another `output_dir`.")
    if not options.resume:
        is_ours = "fingerprints" in read_run_record(folder)
        check_new_files(folder, (*MODEL_FILES, *more, *(() if is_ours else _RECORDS)))
    check_decodable(folder)
    check_writable(folder)
    if options.cache_dir is not None:
        check_decodable(options.cache_dir)
        check_writable(options.cache_dir, "the encoded text")


def check_new_files(folder: Path, names: Sequence[str]) -> None:
    """Refuse a folder that holds files of these names, which would be overwritten.

    Args:
        folder: The folder, which need not exist.
        names: Names of the files that will be written there.

    Raises:
        UserError: One of them exists.
    """
    taken = [name for name in names if os.path.lexists(folder / name)]
    if taken:
        raise UserError(
            f"{folder} holds {', '.join(taken)}, which would be overwritten; name another `output_dir`, or move "
            f"{'it' if len(taken) == 1 else 'them'} away."
        )


def read_run_record(folder: Path) -> dict[str, Any]:
    """Read `run.json`; a folder without one, or with a damaged one, has an empty record."""
    try:
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def check_writable(folder: Path, purpose: str = "the output") -> None:
    """Make a folder, and check that files can be written to it.

    Args:
        folder: Folder, made with its parents if it does not exist.
        purpose: What the folder is for, used in the error message.

    Raises:
        UserError: The path is a file, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write-probe-{os.getpid()}"
        probe.write_bytes(b"")
        # Processes on other machines may have the same id and delete it first.
        probe.unlink(missing_ok=True)
    except FileExistsError as error:
        found = "a link that leads nowhere" if folder.is_symlink() else "a file"
        raise UserError(f"{folder} is {found}; give a folder for {purpose}.") from error
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror}); choose another folder or correct its permissions."
        ) from error


def check_decodable(folder: Path) -> None:
    """Refuse a path that is not UTF-8, which Arrow and the tokenizers' Rust library cannot open.

    Args:
        folder: Folder, which need not exist.

    Raises:
        UserError: Its absolute path is not UTF-8.
    """
    try:
        str(folder.absolute()).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"The path {folder} is not UTF-8; rename the folder, or name another one.") from error
