"""The mean of several checkpoints (§6.1), in safetensors."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vanilla_transformer.errors import UserError
from vanilla_transformer.files import replacing
from vanilla_transformer.loading import WEIGHTS, architecture_of, load_config

from .checkpoints import EMA_WEIGHTS


# What a model's folder holds beside the weights; the newest checkpoint's copies accompany the mean.
COMPANIONS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def average_checkpoints(checkpoints: Sequence[Path], output_dir: Path) -> None:
    """Write the mean of the checkpoints' weights as a model folder that `from_pretrained` loads.

    Of checkpoints that hold a moving average of the weights, that is what counts. Tied weights are one tensor in a
    checkpoint, and so in the mean. Sums are formed in float64.

    Args:
        checkpoints: Model folders of one architecture, oldest first; at least one.
        output_dir: Folder to write; made if it does not exist.

    Raises:
        UserError: There is no checkpoint, one is not a model folder, or they differ in architecture or in whether
            they hold a moving average, or `output_dir` is one of them.
    """
    if not checkpoints:
        raise UserError("No checkpoint was given to average; name at least one model folder.")
    if output_dir.resolve() in [checkpoint.resolve() for checkpoint in checkpoints]:
        raise UserError(f"{output_dir} is one of the checkpoints to average; give another folder for the mean.")
    following = [(checkpoint / EMA_WEIGHTS).is_file() for checkpoint in checkpoints]
    if any(following) != all(following):
        raise UserError(
            f"{checkpoints[following.index(True)]} holds a moving average of its weights ({EMA_WEIGHTS}) and "
            f"{checkpoints[following.index(False)]} none; average checkpoints of one run."
        )
    sums: dict[str, torch.Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    for checkpoint in checkpoints:
        tensors = _read_weights(checkpoint)
        if not sums:
            dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        if all(following):
            tensors.update(_read_tensors(checkpoint / EMA_WEIGHTS))
        if not sums:
            sums = {name: tensor.to(torch.float64) for name, tensor in tensors.items()}
            continue
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        expected = {name: tuple(tensor.shape) for name, tensor in sums.items()}
        if shapes != expected:
            different = sorted(name for name in shapes.keys() | expected if shapes.get(name) != expected.get(name))
            raise UserError(
                f"{checkpoint} and {checkpoints[0]} are of different architectures ({different[0]} is "
                f"{shapes.get(different[0], 'absent')} and {expected.get(different[0], 'absent')}); average "
                "checkpoints of one run."
            )
        _check_same_function(checkpoint, checkpoints[0])
        for name, tensor in tensors.items():
            sums[name] += tensor
    mean = {name: (total / len(checkpoints)).to(dtypes[name]) for name, total in sums.items()}
    output_dir.mkdir(parents=True, exist_ok=True)
    for name in COMPANIONS:
        if (checkpoints[-1] / name).is_file():
            shutil.copyfile(checkpoints[-1] / name, output_dir / name)
    with replacing(output_dir / WEIGHTS) as aside:
        save_file(mean, aside, metadata={"format": "pt"})


def _read_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    if not (checkpoint / WEIGHTS).is_file() or not (checkpoint / "config.json").is_file():
        raise UserError(
            f"{checkpoint} is not a checkpoint: it lacks {WEIGHTS} or config.json; give a folder that train or "
            "save_pretrained wrote."
        )
    return _read_tensors(checkpoint / WEIGHTS)


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(f"{path} is damaged ({error}); use another checkpoint.") from error


def _check_same_function(checkpoint: Path, first: Path) -> None:
    """Refuse weights of like shapes that are not of one kind of model, such as of other numbers of heads."""
    here, there = (architecture_of(load_config(folder)) for folder in (checkpoint, first))
    different = sorted(
        name
        for name in here.keys() | there
        if not name.endswith("dropout") and here.get(name, "absent") != there.get(name, "absent")
    )
    if different:
        raise UserError(
            f"{checkpoint} and {first} are of different architectures ({different[0]} is {here.get(different[0])} and "
            f"{there.get(different[0])}); average checkpoints of one run."
        )
