"""Positions as the network adds them: sinusoids, their products, the map that shifts them, and learned ones.

Shapes: N positions, D d_model.
"""

import numpy as np
import torch

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.errors import UserError
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerSinusoidalPositions

from .panels import Heatmap, Lines, Picture, Series


# A picture of more is a grey area.
MOST_POSITIONS = 1024
MOST_CHANNELS = 64


def sinusoids(config: VanillaTransformerConfig, length: int) -> np.ndarray:
    """The vectors that the network adds for the first positions [N, D], in float64.

    Args:
        config: Width, layout and exponent.
        length: N.
    """
    positions = VanillaTransformerSinusoidalPositions(config)
    return positions(torch.arange(length)[None], torch.float64)[0].numpy()


def shift_map(config: VanillaTransformerConfig, shift: int) -> np.ndarray:
    """The matrix M with PE(pos + k) = M PE(pos) for every position (§3.5).

    Each pair of a sine and a cosine is turned by k times its frequency, whatever the position.

    Args:
        config: Width, layout and exponent.
        shift: k, which may be negative.

    Returns:
        [D, D], a rotation of each pair of channels.
    """
    width, pairs = config.d_model, config.d_model // 2
    # PE(1) holds the sine of each pair's frequency, which lies between 0 and 1.
    one = sinusoids(config, 2)[1]
    if config.sinusoidal_layout == "interleaved":
        sines, cosines = np.arange(0, width, 2), np.arange(1, width, 2)
    else:
        sines, cosines = np.arange(pairs), np.arange(pairs, width)
    angles = shift * np.arctan2(one[sines], one[cosines])
    matrix = np.zeros((width, width))
    matrix[sines, sines] = matrix[cosines, cosines] = np.cos(angles)
    matrix[sines, cosines] = np.sin(angles)
    matrix[cosines, sines] = -np.sin(angles)
    return matrix


def positions_picture(
    config: VanillaTransformerConfig,
    *,
    length: int = 128,
    shift: int = 5,
    trained_length: int | None = None,
    learned: np.ndarray | None = None,
    model_name: str = "",
) -> Picture:
    """What positions look like.

    Args:
        config: Width, layout and exponent of the sinusoids.
        length: Number of positions to show, from 2 to 1,024.
        shift: By how many positions the linear map shifts, in -length to length.
        trained_length: Length of the longest training texts, beyond which positions are new to the network.
        learned: Learned vectors [max_position_embeddings, D] to show beside the sinusoids.
        model_name: Whose they are.

    Returns:
        The picture.

    Raises:
        UserError: A number is out of range.
    """
    if not 2 <= length <= MOST_POSITIONS:
        raise UserError(f"--length is {length}; it must be at least 2 and at most {MOST_POSITIONS}.")
    if config.d_model % 2:
        raise UserError(f"The model's width is {config.d_model}; sinusoids, which come in pairs, need an even one.")
    if not -length < shift < length:
        raise UserError(f"--shift is {shift}; it must lie between the positions, {1 - length} to {length - 1}.")
    table = sinusoids(config, length)
    matrix = shift_map(config, shift)
    first, last = max(0, -shift), min(length, length - shift)
    error = np.abs(table[first:last] @ matrix.T - table[first + shift : last + shift]).max()
    products = table @ table.T
    arrays = {"sinusoids": table, "products": products, "shift_map": matrix, "shift_error": np.array(error)}
    panels = [
        Heatmap(
            "Sinusoids", "Row: position; column: channel. The wavelength grows from 2π to the right.",
            "channel", "position", table,
        ),
        Heatmap(
            "Dot products",
            "Of every position with every other one: they depend on the distance alone.",
            "position", "position", products,
        ),
        Lines(
            "Dot product by distance",
            f"Of position {length // 2} with all others; d_model / 2 = {config.d_model // 2} with itself.",
            "distance", "dot product",
            (Series("sinusoidal", np.arange(length) - length // 2, products[length // 2]),),
        ),
        Heatmap(
            f"The linear map that shifts by {shift}",
            f"M with M · PE(pos) = PE(pos {shift:+d}) for every position: a rotation of each pair of sine and cosine. "
            f"It misses by at most {error:.1e}.{_which(config.d_model)}",
            "channel", "channel", matrix[:MOST_CHANNELS, :MOST_CHANNELS],
        ),
    ]  # fmt: skip
    if learned is not None:
        extra, more = _learned(table, learned, length, model_name)
        panels += extra
        arrays |= more
    panels += _beyond(config, length, trained_length, learned)
    about = f"Width: {config.d_model}; layout: {config.sinusoidal_layout}; exponent: {config.sinusoidal_exponent}."
    return Picture("Positions", about, tuple(panels), arrays)


def _learned(
    table: np.ndarray, learned: np.ndarray, length: int, name: str
) -> tuple[list[Heatmap | Lines], dict[str, np.ndarray]]:
    """Learned vectors, and how alike they are, beside sinusoids."""
    shown = learned[:length]
    panels: list[Heatmap | Lines] = [
        Heatmap(
            f"Learned positions of {name}", "As above; channels have no order here.", "channel", "position", shown
        ),
        Heatmap(
            "Cosines of learned positions", "Of every position with every other one.", "position", "position",
            cosines(shown),
        ),
    ]  # fmt: skip
    middle = len(shown) // 2
    panels.append(
        Lines(
            "Likeness by distance",
            f"Cosine of position {middle} with all others.",
            "distance",
            "cosine",
            (
                Series("sinusoidal", np.arange(len(shown)) - middle, cosines(table[: len(shown)])[middle]),
                Series("learned", np.arange(len(shown)) - middle, cosines(shown)[middle], dashed=True, colour=1),
            ),
        )
    )
    return panels, {"learned": shown, "learned_cosines": cosines(shown)}


def _beyond(
    config: VanillaTransformerConfig, length: int, trained_length: int | None, learned: np.ndarray | None
) -> list[Lines]:
    """How far each position is from those that were seen in training."""
    if trained_length is None or trained_length >= length:
        return []
    table = sinusoids(config, length)
    series = [Series("sinusoidal", np.arange(length), _nearest(table, trained_length))]
    note = (
        f"Cosine of a position with the most alike of the {trained_length} that training texts reach. Sinusoids exist "
        "for every position, and beyond the training length they are new combinations of angles that were seen."
    )
    if learned is not None:
        shown = learned[:length]
        series.append(Series("learned", np.arange(len(shown)), _nearest(shown, trained_length), dashed=True, colour=1))
        note += (
            f" Learned ones exist up to {len(learned)}; beyond the training length they are still what they were "
            "initialised with, and a longer text is refused."
        )
    return [Lines("Beyond the training length", note, "position", "cosine", tuple(series))]


def _which(width: int) -> str:
    return "" if width <= MOST_CHANNELS else f" The first {MOST_CHANNELS} channels are shown."


def cosines(vectors: np.ndarray) -> np.ndarray:
    """Cosines [N, N] of vectors [N, D]; 0 where a vector is zero."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.where(norms == 0.0, 1.0, norms)
    return unit @ unit.T


def _nearest(vectors: np.ndarray, trained: int) -> np.ndarray:
    return cosines(vectors)[:, :trained].max(axis=1)
