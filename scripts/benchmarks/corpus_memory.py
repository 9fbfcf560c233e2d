"""Memory of training's data path, from text files to batches, at a small and at a large number of pairs.

Each corpus is prepared in fresh processes: one trains the vocabulary, one encodes the text, begins two epochs and
reads some of their updates. Anonymous memory is what the process holds itself; mapped files, which the system takes
back when it wants to, are counted in the total alone. The vocabulary is trained on `--vocabulary_pairs` at most, so
that its memory grows up to these; a small corpus of as many or more pairs shows what further ones cost.

    python scripts/benchmarks/corpus_memory.py --pairs 2000000 --json corpus_memory.json
    python scripts/benchmarks/corpus_memory.py --pairs 200000 --bpe_dropout 0.1
"""

import argparse
import json
import multiprocessing
import re
import resource
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np


WORD_TYPES = 1_000_000
PHASES = ("vocabulary", "encoding", "beginning two epochs", "reading updates")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--pairs", type=int, default=2_000_000, help="size of the large corpus")
    parser.add_argument("--baseline_pairs", type=int, default=20_000, help="size of the small corpus")
    parser.add_argument("--vocab_size", type=int, default=8000)
    parser.add_argument("--vocabulary_pairs", type=int, default=1_000_000, help="as `train` has it")
    parser.add_argument("--bpe_dropout", type=float, default=0.0, help="as `train` has it")
    parser.add_argument("--updates", type=int, default=1000, help="updates read in the second epoch")
    parser.add_argument("--work_dir", type=Path, help="where text and ids are written; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.work_dir) as folder:
        small, large = (
            measure(Path(folder) / str(pairs), pairs, arguments)
            for pairs in (arguments.baseline_pairs, arguments.pairs)
        )
    options = {name: value for name, value in vars(arguments).items() if name not in ("work_dir", "json")}
    report = {"options": options, "baseline": small, "corpus": large, "bytes_per_pair": growth(small, large)}
    print(f"{'':22}{'anonymous MiB':>22}{'total MiB':>22}{'seconds':>18}{'bytes a pair':>14}")
    for phase in PHASES:
        one, other = small["phases"][phase], large["phases"][phase]
        print(
            f"{phase:22}"
            + "".join(f"{one[key] / 2**20:11,.0f}{other[key] / 2**20:11,.0f}" for key in ("anonymous", "total"))
            + f"{one['seconds']:9,.1f}{other['seconds']:9,.1f}{report['bytes_per_pair'][phase]:14.1f}"
        )
    print(f"from {small['pairs']:,} to {large['pairs']:,} pairs; peaks; growth of anonymous memory")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def measure(folder: Path, pairs: int, arguments: argparse.Namespace) -> dict:
    """Write a corpus of so many pairs, prepare it in fresh processes, and return the peaks of each phase."""
    folder.mkdir()
    text_bytes = write_text(folder, pairs)
    phases = {}
    for target in (train_vocabulary, encode_and_plan):
        phases.update(in_fresh_process(target, folder, arguments))
    return {"pairs": pairs, "text_bytes": text_bytes, "phases": phases}


def growth(small: dict, large: dict) -> dict[str, float]:
    """Bytes of anonymous memory that each further pair costs, by phase."""
    more = large["pairs"] - small["pairs"]
    return {
        phase: (large["phases"][phase]["anonymous"] - small["phases"][phase]["anonymous"]) / more for phase in PHASES
    }


def write_text(folder: Path, pairs: int) -> int:
    """Write sentences of 20 words on average, drawn from a Zipf distribution; return the size in bytes."""
    generator = np.random.default_rng(0)
    words = [word_of(index) for index in range(WORD_TYPES)]
    cumulated = np.cumsum(1.0 / np.arange(1, WORD_TYPES + 1))
    paths = [folder / f"train.{side}" for side in ("source", "target")]
    with paths[0].open("w", encoding="utf-8") as source, paths[1].open("w", encoding="utf-8") as target:
        for start in range(0, pairs, 10_000):
            number = min(10_000, pairs - start)
            lengths = np.clip(generator.lognormal(2.85, 0.55, number), 1, 100)
            for file, side in ((source, lengths), (target, lengths * generator.lognormal(0.0, 0.2, number))):
                counts = np.maximum(1, side.astype(int))
                drawn = iter(np.searchsorted(cumulated, generator.random(counts.sum()) * cumulated[-1]).tolist())
                file.writelines(" ".join(words[i] for i in islice(drawn, count)) + "\n" for count in counts.tolist())
    return sum(path.stat().st_size for path in paths)


def word_of(index: int) -> str:
    letters = []
    index += 1
    while index:
        index, letter = divmod(index, 26)
        letters.append("etaoinshrdlucmfwypvbgkjqxz"[letter])
    return "".join(letters)


def in_fresh_process(target: Callable, *arguments: object) -> dict:
    """Call a function that returns figures in a fresh process, in which nothing was imported or allocated."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=send, args=(theirs, target, arguments))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join()


def send(connection, target: Callable, arguments: tuple) -> None:
    connection.send(target(*arguments))


def train_vocabulary(folder: Path, arguments: argparse.Namespace) -> dict:
    from vanilla_transformer.training.preparation.vocabulary_and_ids import train_vocabulary

    phases = {}
    with Peak(phases, "vocabulary"):
        train_vocabulary(*options_for(folder, arguments), folder / "cache")
    return phases


def encode_and_plan(folder: Path, arguments: argparse.Namespace) -> dict:
    from vanilla_transformer.data.epochs import EpochPlan
    from vanilla_transformer.training.preparation.vocabulary_and_ids import prepare

    _, options = options_for(folder, arguments)
    phases = {}
    with Peak(phases, "encoding"):
        corpus = prepare(options, folder / "cache").train
    with Peak(phases, "beginning two epochs"):
        plan = EpochPlan(
            corpus,
            tokens_per_batch=options.tokens_per_batch,
            batches_per_update=options.batches_per_update,
            seed=options.seed,
        )
        # The engine holds the last update of an epoch while the next begins.
        done = plan.updates_per_epoch
        held = plan.update(done - 1)
        plan.update(done)
        del held
    with Peak(phases, "reading updates"):
        for number in range(done, done + min(arguments.updates, done)):
            for batch in plan.update(number).batches:
                corpus.rows(batch)
    return phases


def options_for(folder: Path, arguments: argparse.Namespace):
    from vanilla_transformer.training.options import TrainingOptions
    from vanilla_transformer.training.preparation.texts import check_texts

    options = TrainingOptions(
        train_files=(folder / "train.source", folder / "train.target"),
        vocab_size=arguments.vocab_size,
        vocabulary_pairs=arguments.vocabulary_pairs,
        bpe_dropout=arguments.bpe_dropout,
        max_length=512,
    )
    return check_texts(options)[0], options


class Peak:
    """Measures a phase: the largest anonymous memory in bytes, sampled, the largest total since the start, seconds."""

    def __init__(self, phases: dict, name: str):
        self._phases = phases
        self._name = name
        self._done = threading.Event()
        self._largest = 0
        self._sampler = threading.Thread(target=self._sample)

    def __enter__(self) -> None:
        self._started = time.perf_counter()
        self._sampler.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._sampler.join()
        self._phases[self._name] = {
            "anonymous": self._largest,
            "total": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "seconds": time.perf_counter() - self._started,
        }

    def _sample(self) -> None:
        while True:
            status = Path("/proc/self/status").read_text(encoding="ascii")
            self._largest = max(self._largest, int(re.search(r"RssAnon:\s+(\d+)", status).group(1)) * 1024)
            if self._done.wait(0.002):
                return


if __name__ == "__main__":
    main()
