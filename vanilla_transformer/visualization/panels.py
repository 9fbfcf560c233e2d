"""Pictures as data: panels that a page draws in the browser, and matplotlib for papers.

A picture's numbers are in its arrays, too, for those who want to draw it themselves.
"""

import base64
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from .page import page


@dataclass(frozen=True, slots=True)
class Series:
    """One curve.

    Args:
        name: What the legend calls it.
        x: Where its points lie [N].
        y: Their values [N].
        dashed: Whether the curve is dashed.
        colour: Number of its colour; curves of one run share it.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False
    colour: int = 0


@dataclass(frozen=True, slots=True)
class Lines:
    """Curves over one axis.

    Args:
        title: What the panel shows.
        note: How to read it.
        x_label: Name of the horizontal axis.
        y_label: Name of the vertical axis.
        series: The curves.
        logarithmic: Whether the vertical axis is; values are above 0 then.
    """

    title: str
    note: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    logarithmic: bool = False


@dataclass(frozen=True, slots=True)
class Heatmap:
    """A matrix as shades, of one colour from 0 on, or of two where there are values below 0.

    Args:
        title: What the panel shows.
        note: How to read it.
        x_label: What its columns are.
        y_label: What its rows are.
        values: [rows, columns], finite.
    """

    title: str
    note: str
    x_label: str
    y_label: str
    values: np.ndarray


@dataclass(frozen=True, slots=True)
class Bars:
    """Numbers side by side.

    Args:
        title: What the panel shows.
        note: How to read it.
        labels: Names of the bars.
        values: Their lengths, at least 0.
        y_label: What is counted.
    """

    title: str
    note: str
    labels: tuple[str, ...]
    values: tuple[float, ...]
    y_label: str


@dataclass(frozen=True, slots=True)
class Pieces:
    """A text that is cut into pieces.

    Args:
        title: What the panel shows.
        note: How to read it.
        labels: The pieces.
        ids: Their numbers.
        words: For each piece the number of its word.
    """

    title: str
    note: str
    labels: tuple[str, ...]
    ids: tuple[int, ...]
    words: tuple[int, ...]


Panel = Lines | Heatmap | Bars | Pieces


@dataclass(frozen=True, slots=True)
class Picture:
    """Panels that belong together.

    Args:
        title: Title of the page.
        about: One or two sentences on what is shown.
        panels: What is drawn.
        arrays: The numbers behind it, by name.
    """

    title: str
    about: str
    panels: tuple[Panel, ...]
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


def picture_page(picture: Picture, *, refresh: float | None = None) -> str:
    """Build the page of a picture.

    Args:
        picture: What is shown.
        refresh: Seconds after which the page reads its own file anew; `None` for a page that stays.

    Returns:
        The text of an HTML file.
    """
    data = {
        "about": picture.about,
        "panels": [{"kind": type(panel).__name__, **_plain(_shown(panel))} for panel in picture.panels],
        "refresh": refresh,
    }
    return page(picture.title, data, ["common.js", "charts.js"])


def _shown(panel: Panel) -> dict[str, Any]:
    """What the page's script is told of a panel: matrices in 16 bits, relative to their largest value."""
    told = asdict(panel)
    if isinstance(panel, Heatmap):
        largest = float(np.abs(panel.values).max()) or 1.0
        steps = np.rint(panel.values / largest * 32767).astype("<i2")
        shape = panel.values.shape
        told["values"] = {
            "shape": shape,
            "largest": largest,
            "steps": base64.b64encode(steps.tobytes()).decode("ascii"),
        }
    return told


def _plain(value: Any) -> Any:
    """Numbers as JSON holds them: rounded to what a picture shows, and `None` for what is not finite."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, float | np.floating):
        return float(f"{value:.6g}") if np.isfinite(value) else None
    return value.item() if isinstance(value, np.generic) else value
