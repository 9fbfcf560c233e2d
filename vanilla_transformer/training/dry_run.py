"""Estimates the time and memory of a run from a few of its batches."""

import resource
import sys
import tempfile
import time
from pathlib import Path

import torch

from vanilla_transformer.data.batching import Update
from vanilla_transformer.training.preparation.texts import check_texts
from vanilla_transformer.training.preparation.vocabulary_and_ids import prepare
from vanilla_transformer.training.step.process import accelerating

from .engine import TrainingRun
from .options import TrainingOptions


def dry_run(options: TrainingOptions) -> dict[str, float | int | str]:
    """Estimate a run: prepare the text, then measure time and memory of a few batches. Keeps only a given `cache_dir`.

    Args:
        options: Training options.

    Returns:
        Named figures, in the order in which they should be printed.

    Raises:
        UserError: As for `train`.
    """
    options.check()
    check_texts(options)
    with accelerating(options) as accelerator, tempfile.TemporaryDirectory() as folder:
        data = prepare(options, options.cache_dir or Path(folder))
        run = TrainingRun(options, accelerator, data, None)
        batches = run.batches.batches(0)
        largest = max(batches, key=run.batches.tokens if run.packs else run.batches.padded_tokens)
        sample = [largest, *batches[:3]]
        seconds, tokens = [], []
        for number, batch in enumerate(sample, start=1):
            started = time.perf_counter()
            target_tokens = int(data.train.target_lengths[batch].sum())
            run.step(Update((batch,), target_tokens), number)
            run.optimizer.zero_grad()
            seconds.append(time.perf_counter() - started)
            tokens.append(target_tokens + int(data.train.source_lengths[batch].sum()))
        # The first batch, which warms up, does not count.
        per_token = sum(seconds[1:]) / sum(tokens[1:])
        all_tokens = int(data.train.source_lengths.sum() + data.train.target_lengths.sum())
        num_updates = run.num_updates
        epochs = num_updates / run.plan.updates_per_epoch
        return {
            "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
            "vocabulary entries": len(data.tokenizer),
            "training pairs": len(data.train),
            "dropped": data.train.report["summary"] or "none",
            "batches per epoch": len(batches),
            "updates per epoch": run.plan.updates_per_epoch,
            "updates": num_updates,
            "epochs": round(epochs, 2),
            "share of tokens that are not padding": round(run.fill_rate, 4),
            "tokens per second (source and target)": round(1.0 / per_token),
            "expected time": _duration(per_token * all_tokens * epochs / accelerator.num_processes),
            "expected memory of a process": f"{_peak_memory(accelerator.device) / 2**30:.2f} GiB",
        }


def _peak_memory(device: torch.device) -> int:
    """Peak memory so far in bytes: of the GPU, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # In KiB; on macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return f"{hours:.1f} hours" if hours >= 2 else f"{minutes:.1f} minutes"
