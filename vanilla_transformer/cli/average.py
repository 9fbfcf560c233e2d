"""`average`: average the last checkpoints of a run."""

from dataclasses import dataclass
from pathlib import Path

from vanilla_transformer.errors import UserError
from vanilla_transformer.training.configuration import option
from vanilla_transformer.training.output_folder import MODEL_FILES, check_new_files, check_writable


@dataclass(kw_only=True)
class AverageOptions:
    """Options of `average`."""

    checkpoints: tuple[Path, ...] = option(
        (), "Checkpoints, or a run's folder, whose last checkpoints are taken.", positional=True
    )
    last: int = option(5, "How many checkpoints of a run's folder to take.")
    output_dir: Path = option(Path("averaged"), "Folder to write.")


OPTIONS = AverageOptions


def run(options: AverageOptions) -> int:
    """Write the mean."""
    if not options.checkpoints:
        raise UserError("No checkpoint was given; name checkpoints, or the folder of a run.")
    if options.last < 1:
        raise UserError(f"--last is {options.last}; it must be at least 1.")
    for path in options.checkpoints:
        if not path.is_dir():
            raise UserError(f"{path} is not a folder; give checkpoints, or the folder of a run.")
    from vanilla_transformer.training.averaging import WEIGHTS, average_checkpoints
    from vanilla_transformer.training.checkpoints import list_checkpoints

    checkpoints = list(options.checkpoints)
    if len(checkpoints) == 1 and (inside := list_checkpoints(checkpoints[0] / "checkpoints")):
        if len(inside) < options.last:
            raise UserError(
                f"{checkpoints[0]} holds {len(inside)} checkpoints, and --last is {options.last}; lower --last."
            )
        checkpoints = inside[-options.last :]
    for path in checkpoints:
        # Before the output folder is made.
        if not (path / WEIGHTS).is_file():
            raise UserError(f"{path} is not a checkpoint: it lacks {WEIGHTS}; give checkpoints, or a run's folder.")
    check_new_files(options.output_dir, MODEL_FILES)
    check_writable(options.output_dir)
    average_checkpoints(checkpoints, options.output_dir)
    print(f"{options.output_dir}: mean of {', '.join(str(path) for path in checkpoints)}")
    return 0
