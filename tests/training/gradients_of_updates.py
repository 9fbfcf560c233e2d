"""The gradients of single updates, as one or several processes compute them."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from runs import make_run
from safetensors.torch import save_file

from vanilla_transformer.data.batching import Update
from vanilla_transformer.training.engine import TrainingRun
from vanilla_transformer.training.options import TrainingOptions


@dataclass(frozen=True)
class Case:
    """An update.

    Args:
        name: Name of the case.
        batches: Pair numbers of each batch.
        options: Options of the run.
        number: Number of the update.
    """

    name: str
    batches: tuple[tuple[int, ...], ...]
    options: TrainingOptions
    number: int = 1


def gradients_of(run: TrainingRun, case: Case) -> dict[str, torch.Tensor]:
    """What the optimiser receives, by name, and as `sums` the two summed losses of this process."""
    gradients = {}

    def read(*_):
        gradients.update((name, parameter.grad.clone()) for name, parameter in run.model.named_parameters())

    batches = tuple(np.array(batch) for batch in case.batches)
    tokens = int(sum(run.data.train.target_lengths[batch].sum() for batch in batches))
    run.optimizer.optimizer.register_step_pre_hook(read)
    sums = run.step(Update(batches, tokens), case.number)
    return {**gradients, "sums": sums}


def compute(folder: Path, cases: list[Case], rank: int, processes: int) -> None:
    """Compute every case as one of several processes, and write `CASE.RANK.safetensors`.

    Args:
        folder: Receives the files.
        cases: The cases.
        rank: Number of this process.
        processes: Number of processes.
    """
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    for case in cases:
        run = make_run(case.options)
        assert run.accelerator.num_processes == processes
        assert (type(run.loss).__name__ == "DistributedDataParallel") == (processes > 1)
        save_file(gradients_of(run, case), folder / f"{case.name}.{rank}.safetensors")
    if processes > 1:
        torch.distributed.destroy_process_group()


def compute_as_process(rank: int, processes: int, port: int, folder: Path, cases: list[Case]) -> None:
    """`compute` as one of the processes that a launcher would start."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    compute(folder, cases, rank, processes)
