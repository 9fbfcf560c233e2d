"""`average`: average the last checkpoints of a run."""

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from vanilla_transformer.errors import UserError
from vanilla_transformer.files import MANIFEST
from vanilla_transformer.training.options import option
from vanilla_transformer.training.preparation.output_folder import MODEL_FILES, check_new_files, check_writable
from vanilla_transformer.training.records.leases import reading


@dataclass(kw_only=True)
class AverageOptions:
    """Options of `average`."""

    checkpoints: tuple[Path, ...] = option(
        (),
        "Checkpoints, none of which may be damaged; or a run's folder. Of checkpoints with a moving average of the "
        "weights, that is taken.",
        positional=True,
    )
    last: int = option(
        5,
        "How many checkpoints of a run's folder to take: the last ones, as train does for its result. Those that were "
        "written because the run was stopped or at its best do not count, and damaged ones are passed over.",
    )
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
    from vanilla_transformer.loading import WEIGHTS, check_whole
    from vanilla_transformer.training.records.averaging import average_checkpoints
    from vanilla_transformer.training.records.checkpoints import fault_of

    from .session import start

    start()
    of_run = _of_run(options.checkpoints[0], options.last) if len(options.checkpoints) == 1 else []
    checkpoints = of_run or list(options.checkpoints)
    for path in checkpoints:
        # Before the output folder is made.
        if not (path / WEIGHTS).is_file():
            raise UserError(f"{path} is not a checkpoint: it lacks {WEIGHTS}; give checkpoints, or a run's folder.")
    check_new_files(options.output_dir, MODEL_FILES)
    with ExitStack() as leases:
        for path in checkpoints:
            # Other folders of models have no digests to compare with, and no run that might delete them.
            if (path / MANIFEST).is_file():
                leases.enter_context(reading(path))
                if not of_run and (fault := fault_of(path)) is not None:
                    raise UserError(f"{path} is damaged ({fault}); leave it out, or restore it.")
        # The others are compared with it.
        check_whole(checkpoints[-1])
        check_writable(options.output_dir)
        average_checkpoints(checkpoints, options.output_dir)
    print(f"{options.output_dir}: mean of {', '.join(str(path) for path in checkpoints)}")
    return 0


def _of_run(folder: Path, count: int) -> list[Path]:
    """The last checkpoints of a run, as many as are asked for; none if the folder is not a run's."""
    from vanilla_transformer.training.records.checkpoints import checkpoints_of_mean, list_checkpoints

    if not list_checkpoints(folder / "checkpoints"):
        return []
    chosen = checkpoints_of_mean(folder / "checkpoints", count, lambda text: print(text, file=sys.stderr))
    if len(chosen) < count:
        raise UserError(
            f"{folder} holds {len(chosen)} checkpoints that count, and --last is {count}; lower --last, or name "
            "checkpoints one by one."
        )
    return chosen
