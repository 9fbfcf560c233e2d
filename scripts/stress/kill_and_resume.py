"""Kill a training run with SIGKILL many times, and compare its result with that of an uninterrupted run.

    python scripts/stress/kill_and_resume.py --kills 50 --processes 1
    python scripts/stress/kill_and_resume.py --kills 15 -- --mixed_precision bf16 --d_k 16 --d_v 16 --batching random

Trains a model of 9,000 parameters on generated text, once without a break and once with `--kills` kills, each followed
by `--resume` (or by a new start if there is no checkpoint yet). What follows `--` goes to `train`. Losses, batches,
weights and Adam's moments must be equal bit for bit; nothing that a kill left may remain. Prints where the kills
landed. Exit status 1 on any difference.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from observed_training import train_observed
from tqdm import tqdm

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.training.records.checkpoints import checkpoint_name, list_checkpoints, update_of
from vanilla_transformer.training.records.journal import read_journal


# Forks processes that have imported everything: most of what a start takes is importing torch.
SERVER = multiprocessing.get_context("forkserver")
SAVE_EVERY = 5
# A start survives for 5 to 15 updates, of which those since the last checkpoint are lost.
UPDATES_PER_KILL = 12
# A kill waits at most this many updates for the moment that it aims at; every moment occurs within them.
PATIENCE = 8
# What kills aim at, by frequency. "one process" applies to several processes.
AIMS = {"moment": 6, "accumulation": 4, "checkpoint": 6, "validation": 1, "after SIGTERM": 3, "start": 1}
SETTINGS = {
    "max_length": 100,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "tokens_per_batch": 300,
    "tokens_per_update": 900,
    "warmup_steps": 400,
    "save_every": SAVE_EVERY,
    "validate_every": 7,
    "valid_bleu_sentences": 0,
    "log_every": 3,
    "keep_last": 3,
    "average_last": 2,
    "device": "cpu",
    # Every start writes a file of events of its own.
    "trackers": "none",
}


@dataclass(frozen=True, slots=True)
class Position:
    """Where the main process is, according to its notes."""

    update: int
    batch: int
    phase: str


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds to a run's first update, and of an update with its share of checkpoints and validations."""

    start: float
    update: float


class Attempt:
    """The processes of one start of a run.

    Args:
        folder: Working folder: holds the text, the notes and the runs.
        name: Name of the run's folder in it.
        processes: Number of processes.
        updates: Length of the run.
        options: Further options of `train`.
        survives: For how many updates the run goes on before it waits to be killed; `None` lets it go on to its end.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        processes: int,
        updates: int,
        options: Sequence[str],
        survives: int | None = None,
    ):
        self.run, self.notes, self.log = folder / name, folder / f"{name}-notes", folder / f"{name}.log"
        self.notes.mkdir(exist_ok=True)
        for path in (self.log, *self.notes.glob("phase-*")):
            path.unlink(missing_ok=True)
        # As a user would: there is nothing to resume before the first checkpoint.
        checkpoints = list_checkpoints(self.run / "checkpoints")
        self.resumes = bool(checkpoints)
        self.limit = None
        if survives is not None:
            self.limit = (update_of(checkpoints[-1]) if checkpoints else 0) + survives + 1
        settings = {**SETTINGS, "output_dir": self.run, "tokenizer": folder / "tokenizer", "max_updates": updates}
        flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
        for side in ("train", "valid"):
            flags += [f"--{side}_files", folder / f"{side}.en", folder / f"{side}.de"]
        flags += ["--resume", *options] if self.resumes else options
        environments: list[dict[str, str]] = [{}]
        if processes > 1:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            common = {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            common["WORLD_SIZE"] = str(processes)
            environments = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
        self.processes = [
            SERVER.Process(
                target=train_observed, args=([*map(str, flags)], self.notes, self.log, environment, self.limit)
            )
            for environment in environments
        ]
        for process in self.processes:
            process.start()

    def running(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def position(self) -> Position:
        try:
            update, batch, phase = (self.notes / "phase-0").read_text().split(maxsplit=2)
        except (FileNotFoundError, ValueError):
            return Position(0, 0, "start")
        return Position(int(update), int(batch), phase.strip())

    def wait_until(self, condition) -> bool:
        """Whether the condition on the position came true before the run ended."""
        while self.running():
            if condition(self.position()):
                return True
            time.sleep(0.0005)
        return False

    def send(self, number: int) -> None:
        """Send a signal to all processes and whatever they started."""
        for process in self.processes:
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                # It has ended, or does not lead its group yet.
                if process.is_alive():
                    os.kill(process.pid, number)

    def wait(self) -> None:
        """Wait for the end of all processes; where one was killed or failed, the others must end, too."""
        while self.running():
            time.sleep(0.01)
        for process in self.processes:
            process.join(timeout=120)
            if process.is_alive():
                raise TimeoutError(f"A process goes on without its peer:\n{self.log.read_text()}")

    def killed(self) -> bool:
        return any(process.exitcode == -signal.SIGKILL for process in self.processes)

    def failed(self) -> bool:
        return any(process.exitcode != 0 for process in self.processes)


def write_material(folder: Path) -> None:
    """Sentences of random letters, and a vocabulary of bytes."""
    generator = random.Random(0)

    def sentence() -> str:
        words = ("".join(generator.choices("abcdefgh", k=generator.randint(2, 6))) for _ in range(99))
        return " ".join(word for word, _ in zip(words, range(generator.randint(1, 12)), strict=False))

    for name, size in (("train", 120), ("valid", 10)):
        for language in ("en", "de"):
            text = "".join(sentence() + "\n" for _ in range(size))
            (folder / f"{name}.{language}").write_text(text, encoding="utf-8")
    VanillaTransformerTokenizer().save_pretrained(folder / "tokenizer")


def strike(attempt: Attempt, aim: str, generator: random.Random, pace: Pace) -> str | None:
    """Kill a run at a moment of the kind that is aimed at; say what it was doing, or `None` if it ended before."""
    if aim == "start":
        time.sleep(generator.uniform(0.0, pace.start))
    else:
        if not attempt.wait_until(lambda position: position.update > 0):
            return None
        target = attempt.limit - PATIENCE
        moments = {
            "checkpoint": lambda now: now.phase == "checkpoint",
            "validation": lambda now: now.phase == "validation",
            "accumulation": lambda now: now.phase == "step" and now.batch > 1,
        }
        is_moment = moments.get(aim, lambda now: True)
        if not attempt.wait_until(
            lambda now: now.update >= attempt.limit or (now.update >= target and is_moment(now))
        ):
            return None
        if aim == "after SIGTERM":
            attempt.send(signal.SIGTERM)
        # Writing a checkpoint takes twice as long as an update, deleting one half as long.
        updates = {"checkpoint": 2.5, "after SIGTERM": 4.0, "accumulation": 0.3, "validation": 0.5}
        time.sleep(generator.uniform(0.0, pace.update * updates.get(aim, 1.5)))
    # Its peers notice that it is gone, unless they wait to be killed.
    if aim == "one process" and attempt.position().update < attempt.limit - 1:
        generator.choice(attempt.processes).kill()
    else:
        attempt.send(signal.SIGKILL)
    attempt.wait()
    return describe(attempt) if attempt.killed() else None


def describe(attempt: Attempt) -> str:
    """What a killed run was doing, by its notes and by what it left."""
    position = attempt.position()
    if position.phase == "start" or position.update == 0:
        return "start" if attempt.resumes else "first start"
    if position.phase == "checkpoint":
        left = {path.name for path in (attempt.run / "checkpoints").glob("partial-*")}
        if f"partial-{checkpoint_name(position.update)}" in left:
            return "writing a checkpoint"
        return "deleting a checkpoint" if left else "before or after a checkpoint's files"
    if position.phase == "step":
        return "first batch of an update" if position.batch < 2 else "accumulation"
    return {"loop": "between updates"}.get(position.phase, position.phase)


def plan_of(notes: Path) -> dict[int, set[str]]:
    """The batches that processes worked on, by update; a set of several is a contradiction."""
    plans: dict[int, set[str]] = {}
    for path in notes.glob("plan-*.jsonl"):
        for line in path.read_text().splitlines():
            update, batches = json.loads(line)
            plans.setdefault(update, set()).add(json.dumps(batches))
    return plans


def differences(actual: Path, expected: Path) -> list[str]:
    """All differences between two runs, except in times."""
    found = []
    journals = [
        [
            {**record, "tokens_per_second": None, "model_flops_utilization": None, "seconds": None}
            for record in read_journal(run / "metrics.jsonl")
        ]
        for run in (actual, expected)
    ]
    if journals[0] != journals[1]:
        first = next((pair for pair in zip(*journals, strict=False) if pair[0] != pair[1]), "their number")
        found.append(f"metrics.jsonl: {first}")
    plans = [plan_of(run.with_name(f"{run.name}-notes")) for run in (actual, expected)]
    if plans[0] != plans[1]:
        updates = sorted(u for u in plans[0].keys() | plans[1].keys() if plans[0].get(u) != plans[1].get(u))
        found.append(f"batches of updates {updates}")
    files = [
        {str(path.relative_to(run)): path for path in run.rglob("*") if path.is_file() and "cache" not in path.parts}
        for run in (actual, expected)
    ]
    if files[0].keys() != files[1].keys():
        found.append(f"files: {sorted(files[0].keys() ^ files[1].keys())}")
    for name in sorted(files[0].keys() & files[1].keys()):
        if Path(name).suffix == ".safetensors" and files[0][name].read_bytes() != files[1][name].read_bytes():
            found.append(name)
        if Path(name).name == "training_state.json":
            states = [json.loads(each[name].read_text()) for each in files]
            for state in states:
                state["window"].pop("seconds")
            if states[0] != states[1]:
                found.append(name)
    names = (str(path.relative_to(actual)) for path in actual.rglob("*"))
    leftovers = sorted(name for name in names if "partial" in name or "replaced" in name)
    if leftovers:
        found.append(f"leftovers: {leftovers}")
    return found


def run_without_a_break(folder: Path, processes: int, updates: int, options: Sequence[str]) -> Pace:
    """Train the reference."""
    started = time.perf_counter()
    attempt = Attempt(folder, "reference", processes, updates, options)
    attempt.wait_until(lambda position: position.update > 0)
    began = time.perf_counter()
    attempt.wait()
    if attempt.failed():
        sys.exit(f"The run without a break failed:\n{attempt.log.read_text()}")
    return Pace(began - started, (time.perf_counter() - began) / updates)


def stress(folder: Path, kills: int, processes: int, seed: int, options: Sequence[str]) -> int:
    generator = random.Random(seed)
    write_material(folder)
    updates = UPDATES_PER_KILL * (kills + 5)
    print(f"Training {updates} updates without a break.", file=sys.stderr)
    pace = run_without_a_break(folder, processes, updates, options)
    aims = AIMS | ({"one process": 4} if processes > 1 else {})
    landed: Counter[str] = Counter()
    finished = False
    with tqdm(total=kills, desc="Killing", unit="kill", dynamic_ncols=True, disable=False) as progress:
        while not finished:
            survives = PATIENCE + generator.randrange(2 * SAVE_EVERY) if landed.total() < kills else None
            attempt = Attempt(folder, "killed", processes, updates, options, survives)
            try:
                place = None
                if landed.total() < kills:
                    (aim,) = generator.choices(list(aims), weights=list(aims.values()))
                    place = strike(attempt, aim, generator, pace)
                attempt.wait()
            finally:
                attempt.send(signal.SIGKILL)
            log = attempt.log.read_text(errors="replace")
            # A kill of the process leaves every checkpoint sound; only a machine that stops could damage one.
            if "damaged" in log or (place is None and attempt.failed() and aim != "after SIGTERM"):
                print(f"After {landed.total()} kills:\n{log}", file=sys.stderr)
                return 1
            if place is not None:
                landed[place] += 1
                progress.update()
                progress.set_postfix_str(f"update {attempt.position().update}, {place}")
            finished = place is None and not attempt.failed()
    print(f"{landed.total()} kills with {processes} process{'es' if processes > 1 else ''}:")
    for place, count in landed.most_common():
        print(f"{count:5}  {place}")
    found = differences(folder / "killed", folder / "reference")
    if landed.total() < kills:
        found.append(f"only {landed.total()} of {kills} kills before the run had ended")
    for difference in found:
        print(f"Differs: {difference}")
    if not found:
        print(f"Equal to the run without a break: {updates} updates, their losses, batches, weights and moments.")
    return 1 if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments of the kills")
    parser.add_argument("options", nargs="*", help="further options of `train`, behind --")
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    SERVER.set_forkserver_preload(["vanilla_transformer.cli.session", "vanilla_transformer.training.engine"])
    folder = Path(tempfile.mkdtemp(prefix="kill-and-resume-"))
    status = stress(folder, arguments.kills, arguments.processes, arguments.seed, arguments.options)
    if status == 0:
        shutil.rmtree(folder)
    else:
        print(f"Everything is left in {folder}.")
    return status


if __name__ == "__main__":
    sys.exit(main())
