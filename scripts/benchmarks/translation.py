"""Speed of translation beside peers with the same weights: `python scripts/benchmarks/translation.py MODEL ...`.

All systems get the same token ids in the same batches and give token ids back, so that tokenisation is outside. They
take turns, several rounds in random order, in one process that is pinned to as many cores as batches are translated at
once. Before they are timed their translations are compared. On CPUs ratios of CPU time are the ones to trust: they do
not depend on what else the machine does.
"""

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from measuring import peak_memory, synchronize
from report import CLOCKS, cells, print_columns, spread
from sacrebleu import corpus_bleu, corpus_chrf
from systems import SYSTEMS, Translate, enlarge
from training import Parser, at_least, show, surroundings
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.utils import logging

from vanilla_transformer.data.batching import TokenBatches
from vanilla_transformer.data.utf8 import decode_lines


DEFAULT_SYSTEMS = ("ours-int8", "ours-bf16", "ours-fp32", "marian-fp32", "marian-bf16", "ct2-fp32", "ct2-int8")
# Smallest chrF between two systems' ids: that of greedy search in float32, and that of all that rounds or searches by
# other rules.
LEAST_CHRF_BETWEEN = {"fp32": 97.0, "rounded": 70.0}


@dataclass(frozen=True, slots=True)
class Setting:
    """The setting of one table.

    Args:
        model: Folder of the checkpoint.
        vocabulary: Number of entries; `None` leaves it as it is.
        beams: Beam size.
        batch: Number of sentences, or `tokens` for batches of so many source tokens with padding.
        workers: Number of batches that are translated at once.
        device: `cpu` or `cuda`.
    """

    model: str
    vocabulary: int | None
    beams: int
    batch: str
    workers: int
    device: str

    def __str__(self) -> str:
        vocabulary = "" if self.vocabulary is None else f", vocabulary {self.vocabulary:,}"
        search = "greedy" if self.beams == 1 else f"beam {self.beams}"
        return f"{self.model}{vocabulary}, {search}, batch {self.batch}, {self.workers} at once, {self.device}"


class Bench:
    """The text, the model and the systems of a setting.

    Args:
        setting: What to measure.
        arguments: What the command line says.
        names: Of the systems.
    """

    def __init__(self, setting: Setting, arguments: argparse.Namespace, names: Sequence[str]):
        torch.set_num_threads(1)
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.setting = setting
        self.device = torch.device(setting.device)
        self.tokenizer = AutoTokenizer.from_pretrained(setting.model, trust_remote_code=False, local_files_only=True)
        model = AutoModelForSeq2SeqLM.from_pretrained(
            setting.model, dtype=torch.float32, trust_remote_code=False, local_files_only=True
        ).eval()
        if setting.vocabulary is not None and setting.vocabulary > model.config.vocab_size:
            enlarge(model, setting.vocabulary)
        self.vocabulary = model.config.vocab_size
        model.to(self.device)
        sources, self.references = (read(path, arguments.sentences) for path in arguments.text)
        ids = self.tokenizer(sources, return_attention_mask=False, verbose=False)["input_ids"]
        self.sources = [np.asarray(row) for row in ids]
        self.batches = self.plan(arguments.tokens_per_batch)
        self.systems = {name: SYSTEMS[name](model, self.tokenizer, setting.workers) for name in names}

    def plan(self, tokens_per_batch: int) -> list[list[int]]:
        """Numbers of the sentences of each batch, the longest first."""
        lengths = np.array([len(source) for source in self.sources])
        if self.setting.batch == "tokens":
            plan = TokenBatches(lengths, lengths, tokens_per_batch=tokens_per_batch, shuffle=False).batches(0)
            return [list(batch) for batch in plan][::-1]
        size = int(self.setting.batch)
        order = (-lengths).argsort(kind="stable")
        return [list(order[start : start + size]) for start in range(0, len(order), size)]

    def translate(self, system: Translate) -> list[list[int]]:
        """Translate all sentences once, whole batches at once."""
        found: list[list[int]] = [[] for _ in self.sources]
        beams = self.setting.beams

        def translate(batch: list[int]) -> None:
            for number, tokens in zip(batch, system([self.sources[i] for i in batch], beams), strict=True):
                found[number] = tokens

        if self.setting.workers == 1:
            for batch in self.batches:
                translate(batch)
        else:
            with ThreadPoolExecutor(self.setting.workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                list(pool.map(translate, self.batches))
        return found

    def measure(self, name: str) -> dict:
        """Translate, timed; what was measured, for the JSON record."""
        synchronize(self.device)
        wall, cpu = time.perf_counter(), time.process_time()
        found = self.translate(self.systems[name])
        synchronize(self.device)
        return {
            "system": name,
            "wall_seconds": time.perf_counter() - wall,
            "cpu_seconds": time.process_time() - cpu,
            "sentences": len(found),
            "tokens": sum(map(len, found)),
            "bleu": self.bleu(found),
        }

    def bleu(self, found: list[list[int]]) -> float:
        """BLEU of translations."""
        texts = self.tokenizer.batch_decode(found, skip_special_tokens=True)
        return corpus_bleu(texts, [self.references], force=True).score

    def compare(self) -> dict[str, dict]:
        """Translate once by each system, before the clock starts, and compare with one that computes in float32.

        Raises:
            RuntimeError: Translations differ too much for the same weights.
        """
        found = {name: self.translate(system) for name, system in self.systems.items()}
        anchor = next((name for name in found if "fp32" in name), next(iter(found)))
        expected = [[" ".join(map(str, ids)) for ids in found[anchor]]]
        agreement = {}
        for name, translations in found.items():
            same = sum(mine == theirs for mine, theirs in zip(translations, found[anchor], strict=True))
            mine = [" ".join(map(str, ids)) for ids in translations]
            between = corpus_chrf(mine, expected).score
            agreement[name] = {"with": anchor, "same": same, "sentences": len(translations), "chrf_between": between}
            exact = "fp32" in name and self.setting.beams == 1
            if between < LEAST_CHRF_BETWEEN["fp32" if exact else "rounded"]:
                raise RuntimeError(f"{name} translates other than {anchor} ({agreement[name]}).")
        return agreement


def read(path: Path, count: int) -> list[str]:
    """The first lines of a file."""
    with path.open("rb") as file:
        return list(islice(decode_lines(file, path), count))


def run(setting: Setting, arguments: argparse.Namespace) -> dict:
    """Measure one setting, and print its tables; the entry of the JSON record."""
    print(f"\n{setting}", flush=True)
    bench = Bench(setting, arguments, arguments.systems)
    agreement = bench.compare()
    measurements = []
    order, names = random.Random(arguments.seed), list(arguments.systems)
    for number in range(arguments.rounds):
        order.shuffle(names)
        for name in names:
            measurements.append({"round": number, **bench.measure(name)})
            show(f"round {number + 1} of {arguments.rounds}: {name}")
    show("")
    memory = {}
    if arguments.memory:
        context = multiprocessing.get_context("spawn")
        for name in arguments.systems:
            with context.Pool(1) as pool:
                memory[name] = pool.apply(memory_of, (name, setting, arguments))
            show(f"memory of {name}")
        show("")
    summary = summarise(measurements, memory, agreement)
    of_each = ratios(measurements)
    print_tables(summary, of_each)
    return {
        "setting": {**asdict(setting), "vocabulary": bench.vocabulary},
        "measurements": measurements,
        "summary": summary,
        "ratios": of_each,
    }


def memory_of(name: str, setting: Setting, arguments: argparse.Namespace) -> int | None:
    """Peak memory in bytes of a process that loads one system and translates with it."""
    bench = Bench(setting, arguments, [name])
    bench.translate(bench.systems[name])
    return peak_memory(bench.device)


def summarise(measurements: list[dict], memory: dict[str, int | None], agreement: dict[str, dict]) -> dict[str, dict]:
    """Medians and ranges of each system's rates, with its BLEU and memory."""
    summary = {}
    for name in agreement:
        mine = [measured for measured in measurements if measured["system"] == name]
        summary[name] = {
            f"{unit}_per_{clock}_second": spread([each[unit] / each[f"{clock}_seconds"] for each in mine])
            for unit in ("sentences", "tokens")
            for clock in CLOCKS
        }
        summary[name] |= {"bleu": mine[0]["bleu"], "peak_memory": memory.get(name), "agreement": agreement[name]}
    return summary


def ratios(measurements: list[dict]) -> dict[str, dict[str, dict]]:
    """Speed of our systems divided by that of each peer: median and range of the rounds' ratios."""
    of = {(each["system"], each["round"]): each for each in measurements}
    names = list(dict.fromkeys(each["system"] for each in measurements))
    rounds = sorted({number for _, number in of})
    return {
        f"{ours} / {peer}": {
            clock: spread([of[peer, n][f"{clock}_seconds"] / of[ours, n][f"{clock}_seconds"] for n in rounds])
            for clock in CLOCKS
        }
        for ours in sorted(names)
        if ours.startswith("ours")
        for peer in sorted(names)
        if not peer.startswith("ours")
    }


def print_tables(summary: dict[str, dict], of_each: dict[str, dict]) -> None:
    """Print rates and ratios of one setting."""
    rows = [("system", "sent./s", "sent./CPU-s", "range", "tokens/s", "tokens/CPU-s", "BLEU", "same", "memory")]
    for name, row in summary.items():
        memory, agreement = row["peak_memory"], row["agreement"]
        rows.append(
            (
                name,
                cells(row["sentences_per_wall_second"], ",.1f")[0],
                *cells(row["sentences_per_cpu_second"], ",.1f"),
                cells(row["tokens_per_wall_second"], ",.0f")[0],
                cells(row["tokens_per_cpu_second"], ",.0f")[0],
                f"{row['bleu']:.2f}",
                f"{agreement['same']} of {agreement['sentences']}",
                "" if memory is None else f"{memory / 2**30:.2f} GiB",
            )
        )
    print_columns(rows)
    rows = [("times as fast", "wall", "range", "CPU", "range")]
    rows += [(name, *cells(clock["wall"], ".2f"), *cells(clock["cpu"], ".2f")) for name, clock in of_each.items()]
    if len(rows) > 1:
        print()
        print_columns(rows)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read and check the options."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="folders of checkpoints of this package")
    add("--text", nargs=2, type=Path, required=True, metavar=("SOURCE", "REFERENCE"), help="one sentence a line")
    add("--sentences", type=at_least(1), default=1000, help="translate the first so many; default: 1000")
    add(
        "--systems", nargs="+", choices=sorted(SYSTEMS), metavar="SYSTEM",
        help=f"of {', '.join(SYSTEMS)}; default: {', '.join(DEFAULT_SYSTEMS)}, as far as the device has them and "
        "ct2 is installed",
    )  # fmt: skip
    add(
        "--vocabularies", nargs="+", type=at_least(1), default=[None],
        help="give the model so many entries, by copies of one that is not used; default: as many as it has",
    )  # fmt: skip
    add("--beams", nargs="+", type=at_least(1), default=[1, 4], help="beam sizes; default: 1 4")
    add("--batches", nargs="+", default=["tokens", "32", "1"], help="sentences, or `tokens`; default: tokens 32 1")
    add("--tokens_per_batch", type=at_least(1), default=4096, help="with padding; default: 4096")
    add("--workers", nargs="+", type=at_least(1), default=[1], help="batches at once, a core for each; default: 1")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--rounds", type=at_least(1), default=3, help="default: 3")
    add("--seed", type=at_least(0), default=1, help="of the order of systems; default: 1")
    add("--no-memory", dest="memory", action="store_false", help="skip the peak memory")
    add("--output", type=Path, help="JSON file for everything that was measured")
    arguments = parser.parse_args(argv)
    for batch in arguments.batches:
        if batch != "tokens" and not (batch.isascii() and batch.isdigit() and int(batch) > 0):
            parser.error(f"--batches has {batch}, which is neither `tokens` nor a number of sentences")
    for path in arguments.text:
        if not path.is_file():
            parser.error(f"--text names {path}, but there is no such file")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, but torch sees no GPU")
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
        if max(arguments.workers) > cores:
            parser.error(f"--workers is {max(arguments.workers)}, but this process may use {cores} cores")
    if arguments.systems is None:
        arguments.systems = [name for name in DEFAULT_SYSTEMS if why_not(name, arguments.device) is None]
    for name in arguments.systems:
        if (reason := why_not(name, arguments.device)) is not None:
            parser.error(f"--systems names {name}, but {reason}")
    return arguments


def why_not(name: str, device: str) -> str | None:
    """Why a system cannot be measured here; `None` if it can."""
    if name.startswith("ct2") and _version("ctranslate2") is None:
        return "ctranslate2 is not installed"
    if name.startswith("ours-int8") and device != "cpu":
        return f"it rounds weights for CPUs only, and --device is {device}"
    return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and write the JSON record."""
    arguments = parse(argv)
    settings = [
        Setting(model, vocabulary, beams, batch, workers, arguments.device)
        for model in arguments.models
        for vocabulary in arguments.vocabularies
        for workers in arguments.workers
        for batch in arguments.batches
        for beams in arguments.beams
    ]
    record = {
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
        **surroundings(),
        "ctranslate2": _version("ctranslate2"),
        "settings": [],
    }
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    try:
        for setting in settings:
            if cores is not None:
                os.sched_setaffinity(0, cores[: setting.workers])
            record["settings"].append(run(setting, arguments))
            if arguments.output is not None:
                arguments.output.write_text(json.dumps(record, indent=2), encoding="utf-8")
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
