"""One setting of the training benchmark, and the processes that measure it."""

import gc
import multiprocessing
import os
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
from measuring import Meter, count_parameters, current_memory, matrix_rates, peak_memory
from transformers.utils import logging
from variants import LABEL_SMOOTHING, VARIANTS, Task, own_accelerate

from vanilla_transformer.errors import UserError
from vanilla_transformer.training.cpu.memory import keep_freed_memory
from vanilla_transformer.training.options import TrainingOptions
from vanilla_transformer.training.preparation.vocabulary_and_ids import prepare


_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Setting:
    """The setting of one table.

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

    def as_dict(self) -> dict:
        """The values for the JSON record."""
        return {
            "size": self.size,
            "vocabulary": self.vocabulary,
            "threads": self.threads,
            "device": self.device,
            "tokens_per_batch": self.tokens_per_batch,
        }

    def __str__(self) -> str:
        threads = "" if self.threads is None else f", {self.threads} thread{'s'[: self.threads > 1]}"
        return f"{self.size}, vocabulary {self.vocabulary:,}, {self.device}{threads}"


class Bench:
    """Measures variants, each newly built, in the process that it lives in.

    Args:
        setting: What to measure.
        shared: Whether this process is for several variants.

    Raises:
        UserError: The text cannot be used for it.
    """

    def __init__(self, setting: Setting, *, shared: bool):
        if setting.threads is not None:
            torch.set_num_threads(setting.threads)
        logging.set_verbosity_error()
        options = setting.options()
        options.check()
        self.device = torch.device(setting.device)
        if shared and setting.device == "cpu":
            # The engine sets this for its process, for good: the others have it from their first round on, too.
            keep_freed_memory()
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
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        before = current_memory(self.device)
        torch.manual_seed(seed)
        with own_accelerate():
            variant = VARIANTS[name](self.task)
            meter = Meter(self.device, warmup=warmup, seconds=seconds, updates=updates)
            variant.train(meter, seed)
        peak = peak_memory(self.device)
        return {
            "variant": name,
            "precision": variant.precision,
            "parameters": count_parameters(variant.model),
            **meter.counts(self.task.config),
            "memory_before": before,
            "peak_memory": peak,
            "matrix_rate": matrix_rates(self.device, _DTYPES[variant.precision]),
        }


class Worker:
    """A process with a `Bench` in it, which works only while it is asked to.

    Args:
        setting: What to measure.
        shared: Whether the process is for several variants.

    Raises:
        UserError: The text cannot be used for it.
    """

    def __init__(self, setting: Setting, *, shared: bool):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, setting, shared), daemon=True)
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


def _serve(connection, setting: Setting, shared: bool) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if setting.threads is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: setting.threads])
    try:
        bench = Bench(setting, shared=shared)
        connection.send(("ready", None))
        while True:
            name, arguments = connection.recv()
            connection.send(("result", bench.measure(name, **arguments)))
    except (EOFError, KeyboardInterrupt):
        pass
    except UserError as error:
        connection.send(("mistake", str(error)))
    except Exception:
        connection.send(("defect", traceback.format_exc()))


def _end_with_parent() -> None:
    """Wait for the end of the parent process, then end this one."""
    multiprocessing.parent_process().join()
    os._exit(1)
