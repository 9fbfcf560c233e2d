"""The verb `train` in float64, which rounds so little that runs on one and on several processes can be compared."""

import os
import sys

import torch
from accelerate import Accelerator

from vanilla_transformer.cli import main


def report_process(prepare):
    """Have `Accelerator.prepare` print this process's id and the class that wraps the model."""

    def prepare_and_report(self, *arguments, **options):
        prepared = prepare(self, *arguments, **options)
        # One system call: lines that several processes print may be cut into each other.
        os.write(1, f"process {os.getpid()} trains a {type(prepared[0]).__name__}\n".encode())
        return prepared

    return prepare_and_report


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    Accelerator.prepare = report_process(Accelerator.prepare)
    sys.exit(main(["train", *sys.argv[1:]]))
