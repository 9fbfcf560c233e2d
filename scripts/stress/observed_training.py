"""The verb `train`, which notes where it is and on which batches it works.

Notes outlive a SIGKILL, since each is one system call:

    phase-RANK        number of the update, number of the batch within it, and what is being done; written over
    plan-RANK.jsonl   a line for each update that was begun: its number and the pairs of each batch
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path

from tqdm import tqdm

from vanilla_transformer.cli import main
from vanilla_transformer.training.engine import TrainingRun
from vanilla_transformer.training.step.loss import SmoothedTranslationLoss
from vanilla_transformer.training.watching.validation import Validation


class Notes:
    """Where a process is.

    Args:
        folder: Folder of the notes of all processes.
        rank: Number of this process.
    """

    def __init__(self, folder: Path, rank: int):
        self._phases = os.open(folder / f"phase-{rank}", os.O_WRONLY | os.O_CREAT)
        self._plans = os.open(folder / f"plan-{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.update = self.batch = 0
        self.phase = "start"

    def enter(self, phase: str) -> None:
        self.phase = phase
        os.pwrite(self._phases, f"{self.update:8} {self.batch:4} {phase:16}\n".encode(), 0)

    def plan(self, update: int, batches: list[list[int]]) -> None:
        os.write(self._plans, (json.dumps([update, batches]) + "\n").encode())


def observe(notes: Notes, limit: int | None) -> None:
    """Have the engine's methods say when they begin and end; before the update `limit`, wait to be killed."""

    def during(phase: str, method: Callable) -> Callable:
        @wraps(method)
        def noted(*arguments, **options):
            outer = notes.phase
            notes.enter(phase)
            try:
                return method(*arguments, **options)
            finally:
                notes.enter(outer if outer != "start" else "loop")

        return noted

    step, forward = TrainingRun.step, SmoothedTranslationLoss.forward

    @wraps(step)
    def planned_step(run, update, number, *arguments, **options):
        notes.update, notes.batch = number, 0
        notes.enter(notes.phase)
        while number == limit:
            time.sleep(1.0)
        notes.plan(number, [batch.tolist() for batch in update.batches])
        return during("step", step)(run, update, number, *arguments, **options)

    @wraps(forward)
    def counted_forward(*arguments, **options):
        if notes.phase == "step":
            notes.batch += 1
            notes.enter("step")
        return forward(*arguments, **options)

    TrainingRun.step, SmoothedTranslationLoss.forward = planned_step, counted_forward
    Validation.__call__ = during("validation", Validation.__call__)
    TrainingRun.save = during("checkpoint", TrainingRun.save)


def train_observed(flags: list[str], notes: Path, log: Path, environment: dict[str, str], limit: int | None) -> None:
    """Train in a process of its own, at the head of a process group.

    Args:
        flags: What `vanilla-transformer train` is given.
        notes: Folder of the notes.
        log: Receives what the run prints.
        environment: What a launcher would tell this process.
        limit: Number of the update before which to wait to be killed, however late the kill comes.
    """
    os.setpgid(0, 0)
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    # tqdm's own is one that a killed process leaves behind.
    tqdm.set_lock(threading.RLock())
    observe(Notes(notes, int(environment.get("RANK", "0"))), limit)
    sys.exit(main(["train", *flags]))
