"""Training speed of this engine beside its peers': `python scripts/benchmarks/training.py --sizes tiny base`.

All variants train the same dimensions on the same text with the same vocabulary. They take turns, several rounds in
random order, in one process (or, with --separate, in one process each), pinned to as many cores as they have threads.
Large tensors lie in huge pages for all, as `train` has them. Rates count source and target tokens without padding. MFU
is the model FLOPs utilisation that `vanilla_transformer/training/utilization.py` defines, against the highest rate of
matrix products that was measured, by CPU time on CPUs. On CPUs ratios of CPU time are the ones to trust: they do not
depend on what else the machine does.
"""

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import torch
from report import CLOCKS, check_parameters, print_tables, rate, ratios, summarise
from variants import VARIANTS
from worker import Setting, Worker

from vanilla_transformer.errors import UserError
from vanilla_transformer.training.cpu.memory import prefer_huge_pages
from vanilla_transformer.training.preparation.texts import check_texts


SAMPLE = Path(__file__).parents[2] / "vanilla_transformer" / "quickstart" / "sample"
SIZES = ("tiny", "base", "big")
DEFAULT_VARIANTS = (
    "engine-bf16", "engine-fp32", "trainer-fp32", "trainer-bf16", "marian-fp32", "marian-bf16", "marian-bf16-eager",
    "torch-fp32", "torch-bf16", "torch-bf16-math",
)  # fmt: skip
PACKAGES = ("vanilla-transformer", "torch", "transformers", "accelerate", "datasets", "tokenizers", "numpy")


def compare(setting: Setting, arguments: argparse.Namespace, entry: dict, save: Callable[[], None]) -> None:
    """Measure all variants of one setting, and print the tables.

    Args:
        setting: What to measure.
        arguments: What the command line says.
        entry: The setting's part of the JSON record, to be filled.
        save: Writes the record; called after each measurement, so that an interrupted benchmark leaves what it has.
    """
    print(f"\n{setting}", flush=True)
    entry.update(setting=setting.as_dict(), measurements=[])
    measurements = entry["measurements"]
    for measured in take_turns(setting, arguments):
        measurements.append(measured)
        save()
    check_parameters(measurements)
    memory = dict.fromkeys(arguments.variants)
    if setting.device == "cuda":
        for name in memory:
            memory[name] = max(measured["peak_memory"] for measured in measurements if measured["variant"] == name)
    elif arguments.memory:
        memory = measure_memory(setting, arguments)
    show("")
    entry.update(summary=summarise(measurements, memory), ratios=ratios(measurements))
    save()
    print_tables(setting, entry["summary"], measurements)


def take_turns(setting: Setting, arguments: argparse.Namespace) -> Iterator[dict]:
    """Measure every variant once in each round, in random order."""
    names = list(arguments.variants)
    if arguments.separate:
        workers = {name: Worker(setting, shared=False) for name in names}
    else:
        workers = dict.fromkeys(names, Worker(setting, shared=True))
    order = random.Random(arguments.seed)
    extent = {"warmup": arguments.warmup, "seconds": arguments.seconds, "updates": arguments.updates}
    for number in range(arguments.rounds):
        order.shuffle(names)
        for name in names:
            measured = workers[name].measure(name, seed=arguments.seed + number, **extent)
            yield {"round": number, **measured}
            speeds = " and ".join(f"{rate(measured, clock):,.0f} tokens per {clock} second" for clock in CLOCKS)
            show(f"round {number + 1} of {arguments.rounds}: {name}, {speeds}")
    for worker in set(workers.values()):
        worker.close()


def measure_memory(setting: Setting, arguments: argparse.Namespace) -> dict[str, int | None]:
    """Peak memory of a few updates of each variant, in a process of its own, since one process has but one peak."""
    memory = {}
    for name in arguments.variants:
        worker = Worker(setting, shared=False)
        measured = worker.measure(name, seed=arguments.seed, warmup=1, seconds=0.0, updates=2)
        worker.close()
        memory[name] = measured["peak_memory"]
        show(f"memory of {name}")
    return memory


def show(text: str) -> None:
    """Show a line that the next one replaces."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one sentence."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}; --help lists the options.\n")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read and check the options."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    cpu_count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    add = parser.add_argument
    add("--sizes", nargs="+", choices=SIZES, default=["tiny", "base"], help="dimensions; default: tiny base")
    add("--vocabularies", nargs="+", type=at_least(1), default=[10_000], help="entries; default: 10000")
    add(
        "--variants",
        nargs="+",
        choices=sorted(VARIANTS),
        default=list(DEFAULT_VARIANTS),
        metavar="VARIANT",
        help=f"of {', '.join(sorted(VARIANTS))}; default: {', '.join(DEFAULT_VARIANTS)}",
    )
    add(
        "--train_files",
        nargs="+",
        type=Path,
        default=[SAMPLE / "train.en", SAMPLE / "train.de"],
        help="source and target text, or one tab-separated file; default: the shipped sample",
    )
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--threads", nargs="+", type=at_least(1), help="numbers of CPU threads; default: 1, and 2 where there are 2")
    add(
        "--tokens_per_batch",
        type=at_least(1),
        default=4096,
        help="padded tokens on either side of a batch of the engine and the loops; default: 4096",
    )
    add("--rounds", type=at_least(1), default=5, help="default: 5")
    add(
        "--seconds",
        type=at_least(0),
        default=20,
        help="measure each variant in each round so long, in CPU time on CPUs; default: 20",
    )
    add("--updates", type=at_least(1), default=3, help="and at least so many updates; default: 3")
    add("--warmup", type=at_least(1), default=2, help="updates before the clock starts; default: 2")
    add("--seed", type=at_least(0), default=1, help="of the order of variants and of the text; default: 1")
    add("--separate", action="store_true", help="a process for each variant, with an allocator of its own")
    add("--no-memory", dest="memory", action="store_false", help="skip the peak memory on CPUs")
    add("--cache_dir", type=Path, help="folder that keeps vocabularies and encoded text; default: none is kept")
    add("--output", type=Path, help="JSON file for everything that was measured")
    arguments = parser.parse_args(argv)
    arguments.variants = list(dict.fromkeys(arguments.variants))
    if arguments.device == "cuda":
        if not torch.cuda.is_available():
            parser.error("--device is cuda, but torch sees no GPU")
        if arguments.threads is not None:
            parser.error("--threads is for --device cpu")
        arguments.threads = [None]
    elif arguments.threads is None:
        arguments.threads = [1, 2][:cpu_count]
    elif max(arguments.threads) > cpu_count:
        parser.error(f"--threads is {max(arguments.threads)}, but this process may use {cpu_count} cores")
    if arguments.output is not None and not arguments.output.parent.is_dir():
        parser.error(f"--output is {arguments.output}, but {arguments.output.parent} is not a folder")
    return arguments


def at_least(smallest: int):
    """A reader of whole numbers from `smallest` on."""

    def read(text: str) -> int:
        number = int(text) if text.isascii() and text.isdigit() else smallest - 1
        if number < smallest:
            raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least {smallest}")
        return number

    return read


def surroundings() -> dict:
    """Machine, versions and commit, for the JSON record."""
    root = Path(__file__).parents[2]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    return {
        "machine": platform.platform(),
        "processor": processor(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "commit": commit.stdout.strip() or None,
    }


def processor() -> str:
    """Name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and write the JSON record."""
    arguments = parse(argv)
    prefer_huge_pages()
    with tempfile.TemporaryDirectory() as folder:
        cache_dir = arguments.cache_dir or Path(folder)
        cache_dir.mkdir(parents=True, exist_ok=True)
        settings = [
            Setting(
                size,
                vocabulary,
                threads,
                arguments.device,
                tuple(arguments.train_files),
                arguments.tokens_per_batch,
                cache_dir,
            )
            for vocabulary in arguments.vocabularies
            for size in arguments.sizes
            for threads in arguments.threads
        ]
        record = {
            "arguments": {name: str(value) for name, value in vars(arguments).items()},
            **surroundings(),
            "settings": [],
        }

        def save() -> None:
            if arguments.output is not None:
                arguments.output.write_text(json.dumps(record, indent=2), encoding="utf-8")

        try:
            check_texts(settings[0].options())
            for setting in settings:
                record["settings"].append({})
                compare(setting, arguments, record["settings"][-1], save)
        except UserError as error:
            print(f"training.py: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
