"""What runs measured, from the records in their folders, while they go on, too."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vanilla_transformer.errors import UserError

from .panels import Lines, Picture, Series


# Points of a curve on a page; of longer ones every so many are shown.
_POINTS = 2000
# Name of the array, title of the panel, its vertical axis, and where its curves come from: kind of records, name in
# them, and what the legend says.
_CURVES = (
    (
        "loss",
        "Loss",
        "nats per target token",
        (("train", "nll", "training text, with dropout"), ("valid", "loss", "validation text")),
    ),
    ("perplexity", "Perplexity", "perplexity", (("valid", "perplexity", "validation text"),)),
    ("bleu", "BLEU", "BLEU of validation sentences", (("valid", "bleu", "greedy search"),)),
    ("speed", "Throughput", "tokens per second", (("train", "tokens_per_second", "both sides"),)),
    ("gradient_norm", "Gradient norm", "norm before clipping", (("train", "gradient_norm", "last update"),)),
    ("learning_rate", "Learning rate", "learning rate", (("train", "learning_rate", "as it was used"),)),
)


@dataclass(frozen=True, slots=True)
class Run:
    """What a run has measured so far.

    Args:
        name: Name of its folder.
        records: Records of `metrics.jsonl`, in their order.
        is_over: Whether it has a result.
    """

    name: str
    records: tuple[dict[str, Any], ...]
    is_over: bool

    def curve(self, kind: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Updates [N] and values [N] of a measurement, where it was taken and is finite.

        Args:
            kind: Kind of the records, `train` or `valid`.
            name: The measurement's name in them.
        """
        points = [
            (record["update"], record[name])
            for record in self.records
            if record.get("kind") == kind
            and isinstance(record.get(name), int | float)
            and math.isfinite(record[name])
            and isinstance(record.get("update"), int)
        ]
        updates, values = zip(*points, strict=True) if points else ((), ())
        return np.array(updates, dtype=np.int64), np.array(values, dtype=np.float64)


def read_run(folder: Path) -> Run:
    """Read what a run measured; a line that is being written is left out.

    Args:
        folder: The run's folder.

    Returns:
        Its records.

    Raises:
        UserError: There is no such folder, or no record in it.
    """
    path = folder / "metrics.jsonl"
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give the folder of a run of `train`.") from error
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    if not records:
        raise UserError(f"{path} has no measurement yet; wait for the first, which `train` writes after some updates.")
    return Run(folder.resolve().name, tuple(records), _has_result(folder))


def run_picture(runs: Sequence[Run]) -> Picture:
    """Curves of one or several runs.

    Args:
        runs: At least one; of equal names each gets a number.

    Returns:
        The picture, without panels of what no run measured.
    """
    panels, arrays = [], {}
    names = _distinct([run.name for run in runs])
    for key, title, y_label, sources in _CURVES:
        series = []
        for colour, (run, name) in enumerate(zip(runs, names, strict=True)):
            for number, (kind, measured, label) in enumerate(sources):
                updates, values = run.curve(kind, measured)
                if not len(updates):
                    continue
                array = key if len(sources) == 1 else f"{key}/{kind}"
                arrays[f"{name}/{array}"] = np.stack([updates, values])
                step = math.ceil(len(updates) / _POINTS)
                # The last point stays.
                updates, values = updates[::-1][::step][::-1], values[::-1][::step][::-1]
                legend = label if len(runs) == 1 else f"{name}, {label}" if len(sources) > 1 else name
                dashed = len(sources) > 1 and number == 0
                series.append(Series(legend, updates, values, dashed=dashed, colour=colour))
        if series:
            panels.append(Lines(title, _note(key), "update", y_label, tuple(series), logarithmic=key == "perplexity"))
    about = " ".join(_sentence(run, name) for run, name in zip(runs, names, strict=True))
    return Picture("Training of " + ", ".join(names), about, tuple(panels), arrays)


def best_of(run: Run, measured: str, *, less_is_better: bool) -> tuple[int, float] | None:
    """Update and value of the best validation, the earlier one of equals; `None` if it was never measured."""
    updates, values = run.curve("valid", measured)
    if not len(updates):
        return None
    at = int(values.argmin() if less_is_better else values.argmax())
    return int(updates[at]), float(values[at])


def _sentence(run: Run, name: str) -> str:
    last = max((record["update"] for record in run.records if isinstance(record.get("update"), int)), default=0)
    text = f"{name}: {last:,} updates{'' if run.is_over else ' so far'}"
    loss, bleu = best_of(run, "loss", less_is_better=True), best_of(run, "bleu", less_is_better=False)
    if loss is not None:
        text += f", best validation loss {loss[1]:.4f} at update {loss[0]:,}"
    if bleu is not None:
        text += f", best BLEU {bleu[1]:.1f} at update {bleu[0]:,}"
    return text + "."


def _note(key: str) -> str:
    return {
        "loss": "Negative log-likelihood without label smoothing, so that both curves and runs compare.",
        "perplexity": "exp(loss) per token, on a logarithmic axis: runs compare only if they share their vocabulary.",
        "bleu": "Of some validation sentences.",
        "speed": "Padding is not counted.",
        "gradient_norm": "Of the whole gradient.",
        "learning_rate": "Equation 3 of the paper.",
    }[key]


def _distinct(names: list[str]) -> list[str]:
    return [
        f"{name} ({names[: at + 1].count(name)})" if names.count(name) > 1 else name for at, name in enumerate(names)
    ]


def _has_result(folder: Path) -> bool:
    try:
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and isinstance(record.get("result"), dict)
