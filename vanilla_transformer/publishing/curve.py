"""Draws the learning curve as SVG, without a plotting library."""

import math
from html import escape

from .facts import Curve


_WIDTH, _HEIGHT = 720, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 44, 52
# The colours are legible on white; dashes tell the lines apart without colour.
_LINES = (("train", "#4c78a8", "training text, with dropout", "4 3"), ("valid", "#d1495b", "validation text", ""))


def draw(curve: Curve, title: str) -> str:
    """Draw negative log-likelihood over updates.

    Args:
        curve: At least one point.
        title: Title of the picture.

    Returns:
        The text of an SVG file.
    """
    points = [*curve.train, *curve.valid]
    right = max(update for update, _ in points)
    ticks_y = _ticks(min(value for _, value in points), max(value for _, value in points))
    ticks_x = [tick for tick in _ticks(0, right) if tick <= right]
    low, high = ticks_y[0], ticks_y[-1]

    def x(update: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * update / right, 1)

    def y(value: float) -> float:
        return round(_TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - value) / (high - low), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" font-family="sans-serif" font-size="13" fill="#333">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
    ]
    for tick in ticks_y:
        parts.append(f'<path d="M{_LEFT} {y(tick)}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(tick) + 4}" text-anchor="end">{tick:g}</text>')
    for tick in ticks_x:
        parts.append(f'<text x="{x(tick)}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{tick:,g}</text>')
    middle = _TOP + (_HEIGHT - _TOP - _BOTTOM) / 2
    parts.append(f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">updates</text>')
    parts.append(
        f'<text transform="translate(18 {middle}) rotate(-90)" text-anchor="middle">nats per target token</text>'
    )
    left = _LEFT
    for name, colour, label, dashes in _LINES:
        values = getattr(curve, name)
        if not values:
            continue
        style = f'stroke="{colour}" stroke-width="2"' + (f' stroke-dasharray="{dashes}"' if dashes else "")
        path = "L".join(f"{x(update)} {y(value)}" for update, value in values)
        parts.append(f'<path d="M{path}" fill="none" {style} stroke-linejoin="round"/>')
        if not dashes:
            parts += [f'<circle cx="{x(update)}" cy="{y(value)}" r="3" fill="{colour}"/>' for update, value in values]
        parts.append(f'<path d="M{left} 22h28" {style}/>')
        parts.append(f'<text x="{left + 36}" y="26">{label}</text>')
        left += 60 + 7 * len(label)
    return "\n".join([*parts, "</svg>\n"])


def _ticks(low: float, high: float) -> list[float]:
    """Four to nine round numbers that enclose a range."""
    extent = (high - low) or 1.0
    step = 10.0 ** math.floor(math.log10(extent / 4))
    for factor in (5, 2.5, 2):
        if extent / (step * factor) >= 4:
            step *= factor
            break
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(index * step, 10) for index in range(first, max(last, first + 1) + 1)]
