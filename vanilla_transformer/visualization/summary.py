"""What a run ends with in a terminal: its curve as text, its best and last scores, and where its files are."""

from pathlib import Path

import numpy as np

from vanilla_transformer.errors import UserError

from .runs import Run, best_of, read_run


_HEIGHT, _WIDTH = 8, 60
# Two dots side by side and four below each other make a character.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def run_summary(folder: Path, *, unicode: bool = True) -> str:
    """Sum up a run in a picture of text.

    Args:
        folder: The run's folder.
        unicode: Whether the terminal shows braille dots; else the curve is drawn in ASCII.

    Returns:
        Lines of at most 79 characters, but for paths; empty if the run has measured nothing.
    """
    try:
        run = read_run(folder)
    except UserError:
        return ""
    kind, name, what = "valid", "loss", "validation loss"
    updates, values = run.curve(kind, name)
    if len(updates) < 2:
        kind, name, what = "train", "nll", "training loss"
        updates, values = run.curve(kind, name)
    parts = []
    if len(updates) >= 2:
        parts += [f"{what}, nats per token", *draw_curve(updates, values, unicode=unicode)]
    parts += _scores(run)
    parts += _files(folder, run)
    return "\n".join(parts)


def draw_curve(updates: np.ndarray, values: np.ndarray, *, unicode: bool = True) -> list[str]:
    """Draw a curve as text.

    Args:
        updates: Where its points lie [N], rising, at least two.
        values: Their values [N].
        unicode: Whether to draw in braille dots; else in asterisks.

    Returns:
        Eight lines of the curve with the largest and the smallest value beside them, and one of the axis below.
    """
    across, down = (2, 4) if unicode else (1, 1)
    columns, rows = _WIDTH * across, _HEIGHT * down
    x = np.linspace(updates[0], updates[-1], columns)
    y = np.interp(x, updates, values)
    low, high = float(y.min()), float(y.max())
    extent = (high - low) or 1.0
    levels = np.rint((high - y) / extent * (rows - 1)).astype(int)
    grid = np.zeros((_HEIGHT, _WIDTH), dtype=int)
    before = levels[0]
    for column, level in enumerate(levels):
        # What lies between neighbours is filled, so that steep parts hang together.
        for row in range(min(before, level), max(before, level) + 1):
            grid[row // down, column // across] |= _DOTS[row % 4][column % 2] if unicode else 1
        before = level
    edge, corner, ground = ("│", "└", "─") if unicode else ("|", "+", "-")
    labels = [f"{high:.3g}", *[""] * (_HEIGHT - 2), f"{low:.3g}"]
    width = max(map(len, labels))
    mark = (lambda dots: chr(0x2800 + dots) if dots else " ") if unicode else (lambda dots: "*" if dots else " ")
    lines = [
        f"{label:>{width}} {edge}{''.join(mark(int(dots)) for dots in row)}".rstrip()
        for label, row in zip(labels, grid, strict=True)
    ]
    first, last = f"{updates[0]:,}", f"{updates[-1]:,} updates"
    axis = f"{' ' * width} {corner}{ground * _WIDTH}"
    return [*lines, axis, f"{' ' * (width + 2)}{first}{last:>{_WIDTH - len(first)}}"]


def _scores(run: Run) -> list[str]:
    lines = []
    for name, title, less_is_better, digits in (
        ("loss", "loss", True, 4),
        ("perplexity", "perplexity", True, 2),
        ("bleu", "BLEU", False, 2),
    ):
        best = best_of(run, name, less_is_better=less_is_better)
        if best is not None:
            _, values = run.curve("valid", name)
            lines.append(
                f"{title:<12}best {best[1]:.{digits}f} (update {best[0]:,}), last {float(values[-1]):.{digits}f}"
            )
    return lines


def _files(folder: Path, run: Run) -> list[str]:
    # A model that lies there before the run has a result is an earlier run's.
    files = [("model", folder)] if run.is_over else []
    files += [("curves", folder / "metrics.jsonl"), ("checkpoints", folder / "checkpoints")]
    return [f"{title:<12}{path}" for title, path in files if path.exists()]
