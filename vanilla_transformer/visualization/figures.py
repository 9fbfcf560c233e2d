"""Figures for papers, by matplotlib, which is an extra: PNG, SVG and PDF of the same panels that the pages draw."""

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vanilla_transformer.errors import UserError

from .panels import Bars, Heatmap, Lines, Panel, Picture, Pieces


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .attention import Attention


SUFFIXES = (".png", ".svg", ".pdf")
_TITLES = {
    "encoder": "encoder self-attention",
    "decoder": "decoder self-attention",
    "cross": "attention to the source",
}


def check_matplotlib() -> None:
    """Refuse figures where matplotlib is not installed.

    Raises:
        UserError: It is not, with the name of the extra that brings it.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UserError(
            "Figures need matplotlib, which is not installed; install the extra: "
            'pip install "vanilla-transformer[visualization]", or write .html or .npz, which need nothing.'
        ) from error


def save_figure(figure: "Figure", path: Path) -> list[str]:
    """Write a figure; the same figure gives the same SVG.

    Args:
        figure: The figure.
        path: File to write; its suffix says how.

    Returns:
        What is wrong with it, such as characters that the font lacks; normally nothing.
    """
    import matplotlib

    suffix = path.suffix.lower()
    metadata = {"Date": None} if suffix == ".svg" else {"CreationDate": None} if suffix == ".pdf" else None
    # Letters stay letters in an SVG, which the viewer's fonts show.
    with (
        matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "vanilla-transformer"}),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        figure.savefig(path, format=suffix[1:], dpi=200, bbox_inches="tight", metadata=metadata)
    missing = {str(warning.message) for warning in caught if "Glyph" in str(warning.message)}
    if missing and suffix != ".svg":
        return [
            f"{path}: the font lacks {len(missing)} of the characters, which are shown as boxes; an SVG keeps them."
        ]
    return []


def picture_figure(picture: Picture) -> "Figure":
    """Draw a picture's panels, two side by side.

    Args:
        picture: What is drawn.

    Returns:
        The figure.
    """
    columns = 1 if len(picture.panels) == 1 else 2
    rows = math.ceil(len(picture.panels) / columns)
    figure = _figure(6.0 * columns, 4.0 * rows)
    for number, panel in enumerate(picture.panels, start=1):
        draw_panel(figure.add_subplot(rows, columns, number), panel)
    return figure


def draw_panel(axes: "Axes", panel: Panel) -> None:
    """Draw one panel.

    Args:
        axes: Where.
        panel: What.
    """
    axes.set_title(panel.title, fontsize=10, parse_math=False)
    if isinstance(panel, Lines):
        for series in panel.series:
            marker = "o" if len(series.x) < 40 and not series.dashed else None
            style = "--" if series.dashed else "-"
            axes.plot(
                series.x, series.y, style, label=series.name, marker=marker, markersize=3, linewidth=1.4,
                color=f"C{series.colour}",
            )  # fmt: skip
        axes.set_yscale("log" if panel.logarithmic else "linear")
        axes.set_xlabel(panel.x_label)
        axes.set_ylabel(panel.y_label)
        axes.grid(alpha=0.3)
        if len(panel.series) > 1:
            for text in axes.legend(fontsize=8).get_texts():
                text.set_parse_math(False)
    elif isinstance(panel, Heatmap):
        largest = float(np.abs(panel.values).max()) or 1.0
        signed = panel.values.min() < 0.0
        image = axes.imshow(
            panel.values, cmap="RdBu_r" if signed else "Blues", vmin=-largest if signed else 0.0, vmax=largest,
            aspect="auto" if panel.values.shape[0] != panel.values.shape[1] else "equal", interpolation="nearest",
        )  # fmt: skip
        axes.figure.colorbar(image, ax=axes, shrink=0.8)
        axes.set_xlabel(panel.x_label)
        axes.set_ylabel(panel.y_label)
    elif isinstance(panel, Bars):
        bars = axes.bar(range(len(panel.values)), panel.values, color="#1f5fb4")
        axes.bar_label(bars, [f"{value:,.4g}" for value in panel.values], fontsize=8)
        axes.set_xticks(range(len(panel.labels)), panel.labels, parse_math=False)
        axes.set_ylabel(panel.y_label)
    else:
        _draw_pieces(axes, panel)


def attention_figure(
    attention: "Attention", part: str, *, layer: int | None = None, head: int | None = None
) -> "Figure":
    """Draw attention weights: a small matrix for every head of every layer, or one layer or head with its tokens.

    Args:
        attention: Weights of a sentence pair.
        part: `encoder`, `decoder` or `cross`.
        layer: Number of the layer, from 0 on; `None` for all.
        head: Number of the head, from 0 on; `None` for all.

    Returns:
        The figure.
    """
    weights, rows, columns = attention.parts[part]
    chosen = weights if layer is None else weights[layer : layer + 1]
    chosen = chosen if head is None else chosen[:, head : head + 1]
    layers, heads = chosen.shape[:2]
    with_tokens = layers == 1 and heads <= 8
    across = heads if layers > 1 else min(heads, 4)
    down = layers if layers > 1 else math.ceil(heads / across)
    size = max(2.4, 0.19 * max(len(rows), len(columns)) + 0.9) if with_tokens else 1.1
    figure = _figure(size * across, size * down)
    for number, matrix in enumerate(chosen.reshape(-1, *chosen.shape[2:])):
        axes = figure.add_subplot(down, across, number + 1)
        axes.imshow(np.sqrt(matrix), cmap="Blues", vmin=0.0, vmax=1.0, interpolation="nearest", aspect="equal")
        own_layer, own_head = divmod(number, heads)
        name = f"layer {own_layer + 1 + (layer or 0)}, head {own_head + 1 + (head or 0)}"
        axes.set_title(name if with_tokens else name.replace("layer ", "").replace(", head ", "."), fontsize=8)
        if with_tokens:
            axes.set_xticks(range(len(columns)), columns.labels, rotation=90, fontsize=7, parse_math=False)
            axes.set_yticks(range(len(rows)), rows.labels, fontsize=7, parse_math=False)
        else:
            axes.set_xticks([])
            axes.set_yticks([])
    figure.suptitle(f"{_TITLES[part]}; rows look at columns, shade ∝ √weight", fontsize=9)
    return figure


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    # Without pyplot, which would keep every figure alive and choose a screen to show it on.
    figure = Figure(figsize=(min(width, 40.0), min(height, 40.0)), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.1, w_pad=0.06)
    return figure


def _draw_pieces(axes: "Axes", panel: Pieces) -> None:
    """Pieces in lines of sixty characters."""
    lines: list[list[tuple[str, int]]] = [[]]
    for label, word in zip(panel.labels, panel.words, strict=True):
        if sum(len(text) + 1 for text, _ in lines[-1]) + len(label) > 60:
            lines.append([])
        lines[-1].append((label, word))
    axes.set_axis_off()
    _place(axes, lines)


def _place(axes: "Axes", lines: Sequence[Sequence[tuple[str, int]]]) -> None:
    for row, line in enumerate(lines):
        at = 0.0
        for label, word in line:
            axes.text(
                at, -row, label, family="monospace", fontsize=9, parse_math=False,
                bbox={"facecolor": "#dbe7f8" if word % 2 else "#ffffff", "edgecolor": "#8090a0", "pad": 1.5},
            )  # fmt: skip
            at += len(label) + 1.0
    axes.set_xlim(0, 62)
    axes.set_ylim(-max(len(lines), 4), 1)
