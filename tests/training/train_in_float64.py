"""The verb `train` in float64, which rounds so little that runs on one and on several processes can be compared."""

import os
import sys

import torch
from torch.distributed.tensor import DTensor

from vanilla_transformer.cli import main
from vanilla_transformer.training.engine import TrainingRun


def report_process(run):
    """Have a run print this process's id, what it calls in place of the model, and what became of the parameters."""

    def report_and_run(self):
        sharded = [isinstance(parameter, DTensor) for parameter in self.model.parameters()]
        held = "all" if all(sharded) else "some" if any(sharded) else "none"
        # One system call: lines that several processes print may be cut into each other.
        os.write(1, f"process {os.getpid()} trains a {type(self.loss).__name__}, {held} sharded\n".encode())
        return run(self)

    return report_and_run


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    TrainingRun.run = report_process(TrainingRun.run)
    sys.exit(main(["train", *sys.argv[1:]]))
