"""Training speed of this engine beside its peers': `python scripts/benchmarks/training.py --sizes tiny base`.

All variants train the same dimensions on the same text with the same vocabulary. They take turns, several rounds in
random order, in one process (or, with --separate, in one process each), pinned to as many cores as they have threads.
Rates count source and target tokens without padding. On CPUs ratios of CPU time are the ones to trust: they do not
depend on what else the machine does.
"""

import argparse
import gc
import json
import multiprocessing
import os
import platform
import random
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch
from accelerate.state import AcceleratorState
from measuring import Meter, count_parameters, current_memory, peak_memory, product_rate
from transformers.utils import logging
from variants import LABEL_SMOOTHING, VARIANTS, Task

from vanilla_transformer.errors import UserError
from vanilla_transformer.training.configuration import TrainingOptions, check_texts
from vanilla_transformer.training.preparation import prepare


SAMPLE = Path(__file__).parents[2] / "vanilla_transformer" / "quickstart" / "sample"
SIZES = ("tiny", "base", "big")
DEFAULT_VARIANTS = (
    "engine-bf16", "engine-fp32", "trainer-fp32", "trainer-bf16", "marian-fp32", "marian-bf16", "marian-bf16-eager",
    "torch-fp32", "torch-bf16", "torch-bf16-math",
)  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PACKAGES = ("vanilla-transformer", "torch", "transformers", "accelerate", "datasets", "tokenizers", "numpy")


@dataclass(frozen=True, slots=True)
class Setting:
    """What one table is about.

    Args:
        size: Name of the dimensions.
        vocabulary: Number of entries.
        threads: Number of threads and cores; `None` leaves both as they are.
        device: `cpu` or `cuda`.
        files: Source and target text.
        tokens_per_batch: Padded tokens on either side of a batch of this engine and of the loops.
        cache_dir: Folder of vocabularies and encoded text.
    """

    size: str
    vocabulary: int
    threads: int | None
    device: str
    files: tuple[Path, ...]
    tokens_per_batch: int
    cache_dir: Path

    def options(self) -> TrainingOptions:
        """This engine's options: its defaults, but for dropout and for one batch an update, as the peers have them."""
        return TrainingOptions(
            output_dir=self.cache_dir / "run",
            train_files=self.files,
            preset=self.size,
            vocab_size=self.vocabulary,
            # A small text has too few frequent neighbours for a large vocabulary.
            min_frequency=1,
            dropout=0.1,
            label_smoothing=LABEL_SMOOTHING,
            tokens_per_batch=self.tokens_per_batch,
            tokens_per_update=self.tokens_per_batch,
            device="cpu" if self.device == "cpu" else "auto",
        )

    def __str__(self) -> str:
        threads = "" if self.threads is None else f", {self.threads} thread{'s'[: self.threads > 1]}"
        return f"{self.size}, vocabulary {self.vocabulary:,}, {self.device}{threads}"


class Bench:
    """Measures variants, each newly built, in the process that it lives in."""

    def __init__(self, setting: Setting):
        if setting.threads is not None:
            torch.set_num_threads(setting.threads)
        logging.set_verbosity_error()
        options = setting.options()
        options.check()
        self.device = torch.device(setting.device)
        self.task = Task(options, prepare(options, setting.cache_dir), self.device)

    def measure(self, name: str, *, seed: int, warmup: int, seconds: float, updates: int) -> dict:
        """Train a variant for a while.

        Args:
            name: Of the variant.
            seed: Decides which part of the text is trained on.
            warmup: Number of first updates that do not count.
            seconds: Measure at least so long.
            updates: Measure at least so many updates.

        Returns:
            What was measured, for the JSON record.
        """
        gc.collect()
        environment = dict(os.environ)
        rate = product_rate(self.device, DTYPES[precision_of(name)])
        before = current_memory(self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            # Trainer and engine set up Accelerate differently, and it keeps the first set-up of a process.
            AcceleratorState._reset_state(reset_partial_state=True)
            torch.manual_seed(seed)
            variant = VARIANTS[name](self.task)
            meter = Meter(self.device, warmup=warmup, seconds=seconds, updates=updates)
            variant.train(meter, seed)
        finally:
            os.environ.clear()
            os.environ.update(environment)
        return {
            "variant": name,
            "parameters": count_parameters(variant.model),
            **meter.counts(self.task.config),
            "product_rate": rate,
            "memory_before": before,
            "peak_memory": peak_memory(self.device),
        }


class Worker:
    """A process with a `Bench` in it, which works only while it is asked to.

    Args:
        setting: What to measure.

    Raises:
        UserError: The text cannot be used for it.
    """

    def __init__(self, setting: Setting):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, setting), daemon=True)
        if setting.threads is not None:
            # Read when the process imports torch.
            os.environ["OMP_NUM_THREADS"] = str(setting.threads)
        self._process.start()
        theirs.close()
        self._receive()

    def measure(self, name: str, **arguments: float) -> dict:
        """What `Bench.measure` returns."""
        self._connection.send((name, arguments))
        return self._receive()

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join()

    def _receive(self) -> dict | None:
        try:
            kind, result = self._connection.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"The measuring process ended with status {self._process.exitcode}.") from None
        if kind == "mistake":
            raise UserError(result)
        if kind == "defect":
            raise RuntimeError(result)
        return result


def _serve(connection, setting: Setting) -> None:
    if setting.threads is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: setting.threads])
    try:
        bench = Bench(setting)
        connection.send(("ready", None))
        while True:
            name, arguments = connection.recv()
            connection.send(("result", bench.measure(name, **arguments)))
    except EOFError:
        pass
    except UserError as error:
        connection.send(("mistake", str(error)))
    except Exception:
        connection.send(("defect", traceback.format_exc()))


def precision_of(name: str) -> str:
    """`bf16` or `fp32`, from a variant's name."""
    return name.split("-")[1]


def compare(setting: Setting, arguments: argparse.Namespace) -> dict:
    """Measure all variants of one setting, and print the table.

    Returns:
        The setting's part of the JSON record.
    """
    print(f"\n{setting}", flush=True)
    names = list(arguments.variants)
    if arguments.separate:
        workers = {name: Worker(setting) for name in names}
    else:
        workers = dict.fromkeys(names, Worker(setting))
    order = random.Random(arguments.seed)
    measurements = []
    extent = {"warmup": arguments.warmup, "seconds": arguments.seconds, "updates": arguments.updates}
    for number in range(arguments.rounds):
        order.shuffle(names)
        for name in names:
            measured = workers[name].measure(name, seed=arguments.seed + number, **extent)
            measurements.append({"round": number, **measured})
            progress(f"round {number + 1} of {arguments.rounds}: {name}, {rate(measured, 'wall'):,.0f} tokens/s")
    for worker in set(workers.values()):
        worker.close()
    check_parameters(measurements)
    memory = {}
    if setting.device == "cuda":
        for measured in measurements:
            memory[measured["variant"]] = max(memory.get(measured["variant"], 0), measured["peak_memory"])
    elif arguments.memory:
        for name in arguments.variants:
            worker = Worker(setting)
            memory[name] = worker.measure(name, seed=arguments.seed, warmup=1, seconds=0.0, updates=2)["peak_memory"]
            worker.close()
            progress(f"memory of {name}")
    progress("")
    summary = summarise(arguments.variants, measurements, memory)
    print_table(setting, summary, measurements)
    return {
        "size": setting.size,
        "vocabulary": setting.vocabulary,
        "threads": setting.threads,
        "device": setting.device,
        "summary": summary,
        "ratios": ratios(arguments.variants, measurements),
        "rounds": measurements,
    }


def check_parameters(measurements: list[dict]) -> None:
    """Refuse to compare models that differ in more than biases."""
    counts = {
        measured["variant"]: (measured["parameters"]["matrices"], measured["parameters"]["scales"])
        for measured in measurements
    }
    if len(set(counts.values())) > 1:
        raise RuntimeError(f"The variants are not the same model: (matrices, scales) are {counts}.")


def rate(measured: dict, clock: str) -> float:
    """Tokens without padding per second of `wall` or `cpu` time."""
    return measured["real_tokens"] / measured[f"{clock}_seconds"]


def summarise(names: list[str], measurements: list[dict], memory: dict[str, int | None]) -> dict[str, dict]:
    """Median and range of each variant's rates, and its shares of real tokens and of the device's rate."""
    summary = {}
    for name in names:
        mine = [measured for measured in measurements if measured["variant"] == name]
        row = {"parameters": sum(mine[0]["parameters"].values()), "peak_memory": memory.get(name)}
        for clock in ("wall", "cpu"):
            rates = [rate(measured, clock) for measured in mine]
            row[f"tokens_per_{clock}_second"] = {"median": median(rates), "range": [min(rates), max(rates)]}
            possible = max(
                measured["product_rate"][clock]
                for measured in measurements
                if precision_of(measured["variant"]) == precision_of(name)
            )
            done = median(measured["operations"] / measured[f"{clock}_seconds"] for measured in mine)
            row[f"share_of_products_per_{clock}_second"] = done / possible
        row["fill_rate"] = sum(m["real_tokens"] for m in mine) / sum(m["padded_tokens"] for m in mine)
        summary[name] = row
    return summary


def ratios(names: list[str], measurements: list[dict]) -> dict[str, dict]:
    """How many times as fast this engine is as each peer: median and range of the rounds' ratios."""
    of = {(measured["variant"], measured["round"]): measured for measured in measurements}
    rounds = sorted({number for _, number in of})
    result = {}
    for ours in (name for name in names if name.startswith("engine")):
        for peer in (name for name in names if not name.startswith("engine")):
            for clock in ("wall", "cpu"):
                values = [rate(of[ours, number], clock) / rate(of[peer, number], clock) for number in rounds]
                entry = result.setdefault(f"{ours} / {peer}", {})
                entry[clock] = {"median": median(values), "range": [min(values), max(values)]}
    return result


def print_table(setting: Setting, summary: dict[str, dict], measurements: list[dict]) -> None:
    """Print rates and ratios of one setting."""
    clock = "wall" if setting.device == "cuda" else "cpu"
    for precision in sorted({precision_of(name) for name in summary}):
        best = max(m["product_rate"][clock] for m in measurements if precision_of(m["variant"]) == precision)
        print(f"Matrix products in {precision}: {best / 1e9:,.0f} GFLOP/s per {clock} second.")
    heads = ("variant", "parameters", "tokens/s", "tokens/CPU-s", "range", "fill", "of products", "peak memory")
    rows = [heads]
    for name, row in summary.items():
        cpu = row["tokens_per_cpu_second"]
        rows.append((
            name,
            f"{row['parameters']:,}",
            f"{row['tokens_per_wall_second']['median']:,.0f}",
            f"{cpu['median']:,.0f}",
            f"{cpu['range'][0]:,.0f} to {cpu['range'][1]:,.0f}",
            f"{row['fill_rate']:.1%}",
            f"{row[f'share_of_products_per_{clock}_second']:.1%}",
            "" if row["peak_memory"] is None else f"{row['peak_memory'] / 2**30:.2f} GiB",
        ))  # fmt: skip
    print_columns(rows)
    rows = [("times as fast", "CPU time", "range", "wall time", "range")]
    for name, clocks in ratios(list(summary), measurements).items():
        row = [name]
        for entry in (clocks["cpu"], clocks["wall"]):
            row += [f"{entry['median']:.2f}", f"{entry['range'][0]:.2f} to {entry['range'][1]:.2f}"]
        rows.append(tuple(row))
    print()
    print_columns(rows)


def print_columns(rows: list[tuple[str, ...]]) -> None:
    """Print rows with the first column left and the others right aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
        print("  ".join([first.ljust(widths[0]), *cells]))
    sys.stdout.flush()


def progress(text: str) -> None:
    """Show a line that the next one replaces."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


class Parser(argparse.ArgumentParser):
    """Says in one sentence what is wrong."""

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
    add("--seconds", type=float, default=20.0, help="measure each variant in each round so long; default: 20")
    add("--updates", type=at_least(1), default=3, help="and at least so many updates; default: 3")
    add("--warmup", type=at_least(1), default=2, help="updates before the clock starts; default: 2")
    add("--seed", type=at_least(0), default=1, help="of the order of variants and of the text; default: 1")
    add("--separate", action="store_true", help="a process for each variant, with an allocator of its own")
    add("--no-memory", dest="memory", action="store_false", help="skip the peak memory on CPUs")
    add("--cache_dir", type=Path, help="folder that keeps vocabularies and encoded text; default: none is kept")
    add("--output", type=Path, help="JSON file for everything that was measured")
    arguments = parser.parse_args(argv)
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
        try:
            check_texts(settings[0].options())
            for setting in settings:
                record["settings"].append(compare(setting, arguments))
                # After each, so that an interrupted benchmark leaves what it has.
                if arguments.output is not None:
                    arguments.output.write_text(json.dumps(record, indent=2), encoding="utf-8")
        except UserError as error:
            print(f"training.py: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
