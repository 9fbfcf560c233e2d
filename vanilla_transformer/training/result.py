"""The result of a run: its model, and how the run ended."""

import sys
from dataclasses import dataclass
from pathlib import Path

from transformers import GenerationConfig

from vanilla_transformer.errors import UserError
from vanilla_transformer.training.records.averaging import average_checkpoints
from vanilla_transformer.training.records.checkpoints import (
    checkpoint_name,
    checkpoints_of_mean,
    last_sound,
    update_of,
)
from vanilla_transformer.training.step.failures import naming_disk

from .options import TrainingOptions
from .run_record import note_result


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """How a run ended.

    Args:
        output_dir: The run's folder, a model folder unless the run was interrupted.
        updates: Number of optimiser steps done.
        interrupted_by: Number of the signal that stopped the run, or `None`.
        out_of_time: Whether `max_time` stopped it.
    """

    output_dir: Path
    updates: int
    interrupted_by: int | None
    out_of_time: bool

    @property
    def is_complete(self) -> bool:
        """Whether the run did all of its updates and wrote its model."""
        return self.interrupted_by is None and not self.out_of_time


def write_result(
    options: TrainingOptions, checkpoints: Path, best_updates: list[int], generation_config: GenerationConfig
) -> None:
    """Write the run's model: the mean of the last or the best checkpoints, of weights or of their moving averages.

    Damaged checkpoints are skipped, and named on standard error.

    Args:
        options: Training options.
        checkpoints: Folder of the checkpoints.
        best_updates: Numbers of optimiser steps of the best checkpoints, best first.
        generation_config: Written with the model; a resumed run may have changed it since the checkpoints.

    Raises:
        UserError: All of these checkpoints are damaged, or the disk is full.
    """

    def report(text: str) -> None:
        print(text, file=sys.stderr)

    if options.result == "best":
        best = [checkpoints / checkpoint_name(update) for update in reversed(best_updates)]
        chosen = last_sound(best, options.num_averaged, report)
    else:
        chosen = checkpoints_of_mean(checkpoints, options.num_averaged, report)
    if not chosen:
        raise UserError(
            f"Every checkpoint in {checkpoints} that a `result` of {options.result} may take is damaged; resume the "
            "run with another `result`."
        )
    with naming_disk("The model", options.output_dir, checkpoints):
        note_result(options.output_dir, None)
        average_checkpoints(chosen, options.output_dir)
        generation_config.save_pretrained(options.output_dir)
        note_result(options.output_dir, [update_of(checkpoint) for checkpoint in chosen])
    print(f"The model in {options.output_dir} is {_description(options, chosen, best_updates)}.", file=sys.stderr)


def _description(options: TrainingOptions, checkpoints: list[Path], best_updates: list[int]) -> str:
    updates = ", ".join(f"{update_of(checkpoint):,}" for checkpoint in checkpoints)
    what = f"the mean of the checkpoints of updates {updates}" if len(checkpoints) > 1 else f"update {updates}"
    if options.ema_decay > 0.0:
        what = f"the moving average of the weights at {what}"
    if options.result == "best":
        what += f", which has the best {options.best_metric}"
        if update_of(checkpoints[0]) != best_updates[0]:
            what += " of those that are not damaged"
    return what
