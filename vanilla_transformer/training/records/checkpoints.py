"""Checkpoints that are whole or absent: written aside, digested, renamed; verified before they are used.

A checkpoint is a folder `update-00001000` that `from_pretrained` loads, with the optimiser's state beside the model:

    config.json, generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json
    ema.safetensors         the moving average of the weights, if one is kept
    optimizer.safetensors   Adam's two moments of every parameter, `exp_avg.NAME` and `exp_avg_sq.NAME`
    training_state.json     counters, options and fingerprints
    manifest.json           size and SHA-256 of every other file
"""

import json
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from vanilla_transformer.errors import UserError
from vanilla_transformer.files import MANIFEST, describe, sync, write_manifest

from .leases import rename_unless_read
from .tensors import part_for, whole


# Where a checkpoint keeps the moving average of the weights.
EMA_WEIGHTS = "ema.safetensors"
_NAME = re.compile(r"update-(\d+)")
# What a run is resumed from; a manifest that leaves one of these out vouches for nothing.
_NEEDED = ("config.json", "model.safetensors", "optimizer.safetensors", "training_state.json")
# Beginning of the name of a checkpoint while another one of the same update takes its place.
_REPLACED = "replaced-"


def checkpoint_name(update: int) -> str:
    """Folder name of the checkpoint after so many optimiser steps."""
    return f"update-{update:08d}"


def update_of(folder: Path) -> int:
    """Number of optimiser steps that a checkpoint's folder name states."""
    return int(_NAME.fullmatch(folder.name).group(1))


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in a folder, oldest first; unfinished ones have other names and are left out."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=update_of)


def write_checkpoint(folder: Path, update: int, write: Callable[[Path], None]) -> Path:
    """Write a checkpoint so that it appears whole or not at all, whenever the process or the machine stops.

    Args:
        folder: Folder of the checkpoints.
        update: Number of optimiser steps done.
        write: Writes the checkpoint's files into the folder that it is given.

    Returns:
        The checkpoint.

    Raises:
        OSError: The disk is full or cannot be written; what was there before stays.
    """
    final = folder / checkpoint_name(update)
    partial = _partial(final)
    _remove(partial)
    partial.mkdir(parents=True)
    try:
        write(partial)
        write_manifest(partial, "sha256")
        for path in partial.iterdir():
            sync(path)
        sync(partial)
        replaced = folder / f"{_REPLACED}{final.name}"
        if final.exists():
            final.rename(replaced)
        partial.rename(final)
        sync(folder)
        _remove(replaced)
    except BaseException:
        _remove(partial)
        _put_back(folder)
        if not any(folder.iterdir()):
            # An empty folder of checkpoints would pass for a run.
            folder.rmdir()
        raise
    return final


def fault_of(checkpoint: Path) -> str | None:
    """Compare a checkpoint with its manifest.

    Args:
        checkpoint: Folder of the checkpoint.

    Returns:
        `None` if every file has the size and digest that the manifest states, else what is wrong.
    """
    name = MANIFEST
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        for name in _NEEDED:
            if name not in manifest:
                return f"{MANIFEST} does not state {name}"
        for name, expected in manifest.items():
            path = checkpoint / name
            if not path.is_file():
                return f"{name} is {'not a file' if path.exists() else 'missing'}"
            if path.stat().st_size != expected["size"]:
                return f"{name} has {path.stat().st_size:,} bytes instead of {expected['size']:,}"
            if describe(path, "sha256") != expected:
                return f"{name} was changed after it was written"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    return None


def newest_sound(folder: Path, report: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that its manifest confirms.

    Args:
        folder: Folder of the checkpoints.
        report: Receives a sentence about every damaged checkpoint that is passed over.

    Returns:
        The checkpoint, or `None` if the folder holds none at all.

    Raises:
        UserError: There are checkpoints, and all are damaged.
    """
    _put_back(folder)
    checkpoints = list_checkpoints(folder)
    sound = last_sound(checkpoints, 1, report)
    if checkpoints and not sound:
        raise UserError(f"Every checkpoint in {folder} is damaged; start again in another --output_dir.")
    return sound[0] if sound else None


def last_sound(checkpoints: Sequence[Path], count: int, report: Callable[[str], None]) -> list[Path]:
    """The last of these checkpoints that their manifests confirm.

    Args:
        checkpoints: Checkpoints, oldest first.
        count: Number of checkpoints wanted.
        report: Receives a sentence about every damaged checkpoint that is passed over.

    Returns:
        So many checkpoints, oldest first, or all sound ones if there are fewer.
    """
    sound: list[Path] = []
    for checkpoint in reversed(checkpoints):
        if len(sound) == count:
            break
        fault = fault_of(checkpoint)
        if fault is None:
            sound.insert(0, checkpoint)
        else:
            report(f"{checkpoint} is damaged ({fault}) and passed over.")
    return sound


def last_checkpoints(folder: Path) -> list[Path]:
    """The newest checkpoint and all that the schedule of saving has, oldest first.

    Others were written because the run was stopped there or was at its best; a longer run does not have them here.
    """
    checkpoints = list_checkpoints(folder)
    return [path for path in checkpoints if path == checkpoints[-1] or not _is_out_of_schedule(path)]


def checkpoints_of_mean(folder: Path, count: int, report: Callable[[str], None]) -> list[Path]:
    """The checkpoints whose mean is the model of a run.

    They are the last sound ones; those that were written because the run was stopped there or was at its best do not
    count, unless it is the newest.

    Args:
        folder: Folder of the checkpoints.
        count: Number of checkpoints wanted.
        report: Receives a sentence about every damaged checkpoint that is passed over.

    Returns:
        So many checkpoints, oldest first, or all that count if there are fewer.
    """
    return last_sound(last_checkpoints(folder), count, report)


def rotate(folder: Path, keep: int, best: Collection[int] = ()) -> None:
    """Delete all but the last and the best checkpoints, and what an interrupted write or deletion left.

    A checkpoint that is being read stays, for a later call to delete.

    Args:
        folder: Folder of the checkpoints.
        keep: Number of last checkpoints to keep.
        best: Numbers of optimiser steps of the best checkpoints.
    """
    for leftover in (*folder.glob("partial-*"), *folder.glob(f"{_REPLACED}*")):
        _remove(leftover)
    last = last_checkpoints(folder)[-keep:]
    discard(path for path in list_checkpoints(folder) if path not in last and update_of(path) not in best)


def discard(checkpoints: Iterable[Path]) -> None:
    """Delete checkpoints, but none that is being read.

    Args:
        checkpoints: Folders of the checkpoints.
    """
    for checkpoint in checkpoints:
        # Renamed first, so that a checkpoint never stands there half deleted.
        doomed = _partial(checkpoint)
        _remove(doomed)
        if rename_unless_read(checkpoint, doomed):
            _remove(doomed)


def moments_of(
    optimizer: torch.optim.Optimizer, parameters: Iterable[tuple[str, torch.nn.Parameter]]
) -> dict[str, torch.Tensor]:
    """Adam's moments under their parameters' names, as a checkpoint holds them.

    Args:
        optimizer: Adam after at least one step.
        parameters: Names and parameters; if they are sharded, every process must call this.

    Returns:
        `exp_avg.NAME` and `exp_avg_sq.NAME`, whole and on the CPU.
    """
    return {
        f"{key}.{name}": whole(optimizer.state[parameter][key]).detach().cpu().contiguous()
        for name, parameter in parameters
        for key in ("exp_avg", "exp_avg_sq")
    }


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: Iterable[tuple[str, torch.nn.Parameter]],
    path: Path,
    update: int,
) -> None:
    """Read the moments of a checkpoint.

    Args:
        optimizer: Adam that has not stepped yet.
        parameters: Names and parameters, sharded or not.
        path: File to read.
        update: Number of steps that the optimiser had done.
    """
    tensors = load_file(path)
    for name, parameter in parameters:
        moments = {key: part_for(tensors[f"{key}.{name}"], parameter) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(float(update), dtype=torch.float32), **moments}
        if optimizer.param_groups[0].get("fused"):
            optimizer.state[parameter]["step"] = optimizer.state[parameter]["step"].to(parameter.device)


def _put_back(folder: Path) -> None:
    """Give a checkpoint its name back that was to be replaced by another, which never came."""
    for replaced in folder.glob(f"{_REPLACED}*"):
        final = replaced.with_name(replaced.name.removeprefix(_REPLACED))
        if not final.exists():
            replaced.rename(final)


def _is_out_of_schedule(checkpoint: Path) -> bool:
    try:
        return json.loads((checkpoint / "training_state.json").read_text(encoding="utf-8")).get("stopgap", False)
    except (OSError, ValueError, AttributeError):
        # Damaged; it stays until its turn comes.
        return False


def _partial(checkpoint: Path) -> Path:
    """What a checkpoint is called while it is written or deleted."""
    return checkpoint.with_name(f"partial-{checkpoint.name}")


def _remove(path: Path) -> None:
    """Delete a folder, or the link or file that someone put in its place."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
