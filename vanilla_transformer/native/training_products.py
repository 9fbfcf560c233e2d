"""Matrix products of training in bfloat16, by the tiles of AMX.

In torch, rounding float32 weights to bfloat16 is a pass of its own, each product lays out its factors for the tiles
anew, a product with a transposed left factor runs at half the rate, and gradients of weights come out in bfloat16. The
functions of `training_products.cpp` read float32 or bfloat16, row-major or transposed, lay out each factor once, and
write float32 or bfloat16. Their results do not depend on the number of threads.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import nn

from .library import constants_of_outcomes, load_library
from .threads import TensorPointer, run_in_threads


_SOURCES = tuple(Path(__file__).parent / name for name in ("training_products.cpp", "simd.h"))
# Rows of a left panel, columns of a right panel, and elements of either in a step along the depth.
_EDGE = 32
# Elements of a panel in a step.
_BLOCK = _EDGE * _EDGE
# Bits of `Kind` in the C++ file: write float32; write the transpose; add to what is there; apply ReLU.
_WIDE, _TRANSPOSED, _ADDED, _RELU = 1, 2, 4, 8


@cache
def why_no_products() -> str | None:
    """The reason why these products do not work on this machine, as a clause; `None` if they do."""
    try:
        _library()
    except OSError as error:
        return str(error)
    return None


def can_multiply(dtype: torch.dtype, weights: Sequence[torch.Tensor]) -> bool:
    """Whether `RightFactor.stack` takes these weights for products in this type.

    Args:
        dtype: Type of the products.
        weights: Matrices [A_i, B] to be stacked.
    """
    return (
        dtype == torch.bfloat16
        # Other tensor classes, such as DTensor or FakeTensor, may hold no elements in memory.
        and all(type(weight) in (torch.Tensor, nn.Parameter) for weight in weights)
        and all(weight.dtype == torch.float32 and weight.device.type == "cpu" for weight in weights)
        # Each matrix of the stack must start with a new panel.
        and all(len(weight) % _EDGE == 0 for weight in weights[:-1])
        and why_no_products() is None
    )


@dataclass(frozen=True, slots=True)
class RightFactor:
    """The right factor [depth, columns] of products in bfloat16, laid out for the tiles by `stack` or `of_rows`.

    Args:
        panels: Its elements, padded to whole panels and steps.
        depth: Number of rows.
        columns: Number of columns.
    """

    panels: torch.Tensor
    depth: int
    columns: int

    @classmethod
    def stack(cls, weights: Sequence[torch.Tensor], *, transposed: bool) -> "RightFactor":
        """Stack matrices [A_i, B] in float32, for which `can_multiply` holds.

        Args:
            weights: The matrices.
            transposed: Whether the factor is the transpose of the stack [B, sum of A_i], or the stack
                [sum of A_i, B] itself.
        """
        height, width = sum(len(weight) for weight in weights), weights[0].shape[1]
        factor = cls._empty(*((width, height) if transposed else (height, width)))
        start = 0
        for weight in weights:
            factor._lay_out(weight.detach(), start, transposed)
            start += len(weight)
        return factor

    @classmethod
    def of_rows(cls, matrix: torch.Tensor) -> "RightFactor":
        """A matrix [depth, columns] in bfloat16, with any strides."""
        factor = cls._empty(*matrix.shape)
        factor._lay_out(matrix, 0, False)
        return factor

    @classmethod
    def _empty(cls, depth: int, columns: int) -> "RightFactor":
        size = _panels(columns) * _panels(depth) * _BLOCK
        return cls(torch.empty(size, dtype=torch.bfloat16), depth, columns)

    def _lay_out(self, matrix: torch.Tensor, start: int, transposed: bool) -> None:
        """Fill the columns (if `transposed`) or the rows of the factor from `start` on with the rows of a matrix."""
        matrix = _with_rows(matrix)
        panel = _panels(self.depth) * _BLOCK
        columns, depth = matrix.shape if transposed else matrix.shape[::-1]
        place = start // _EDGE * (panel if transposed else _BLOCK)
        run_in_threads(
            _library().lay_out_right, _panels(columns), matrix, matrix.stride(0), transposed,
            matrix.dtype == torch.float32, columns, depth, (self.panels, place), panel,
        )  # fmt: skip


def multiply(
    left: torch.Tensor,
    right: RightFactor,
    *,
    bias: torch.Tensor | None = None,
    relu: bool = False,
    out: torch.Tensor | None = None,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute left right + bias in bfloat16, and ReLU of it.

    Args:
        left: [N, depth], in bfloat16.
        right: The right factor [depth, columns].
        bias: [columns].
        relu: Whether negative results become zero.
        out: Receives the product in its first columns [N, columns or more], in bfloat16 with contiguous rows. `None`
            makes a new tensor.
        add_to: Tensor to which the product is added in place, likewise; takes precedence over `out`.

    Returns:
        `add_to`, `out` or the new tensor.

    Raises:
        ValueError: Shapes, types or strides do not fit.
    """
    if add_to is not None:
        out = add_to
    elif out is None:
        out = left.new_empty(len(left), right.columns)
    _multiply(left, right, bias, (_RELU if relu else 0) | (_ADDED if add_to is not None else 0), out)
    return out


def product_over_rows(left: torch.Tensor, right: torch.Tensor, *, add_to: torch.Tensor | None = None) -> torch.Tensor:
    """Compute left^T right in float32.

    Args:
        left: [N, A], in bfloat16.
        right: [N, B], in bfloat16.
        add_to: Tensor [A, B] with contiguous rows to which the product is added in place. `None` makes a new tensor.

    Returns:
        `add_to` or the new tensor [A, B].

    Raises:
        ValueError: Shapes, types or strides do not fit.
    """
    out = left.new_empty(left.shape[1], right.shape[1], dtype=torch.float32) if add_to is None else add_to
    kind = _WIDE | (0 if add_to is None else _ADDED)
    # The right factor is laid out completely and read again for each section of the left one: the smaller is cheaper.
    if left.shape[1] < right.shape[1]:
        _multiply(right.T, RightFactor.of_rows(left), None, kind | _TRANSPOSED, out)
    else:
        _multiply(left.T, RightFactor.of_rows(right), None, kind, out)
    return out


def _multiply(left: torch.Tensor, right: RightFactor, bias: torch.Tensor | None, kind: int, out: torch.Tensor) -> None:
    """Check the operands and multiply in C++, which checks nothing; `out` receives what the bits of `kind` say."""
    shape = (len(left), right.columns)
    rows, columns = reversed(shape) if kind & _TRANSPOSED else shape
    if (
        left.dtype != torch.bfloat16
        or left.shape[1] != right.depth
        or right.depth == 0
        or out.dtype != (torch.float32 if kind & _WIDE else torch.bfloat16)
        or len(out) != rows
        or out.shape[1] < columns
        or (out.stride(1) != 1 and out.shape[1] > 1)
        or (bias is not None and bias.numel() != right.columns)
    ):
        raise ValueError(
            f"A product of {tuple(left.shape)} in {left.dtype} and {right.depth, right.columns} cannot be written to "
            f"{tuple(out.shape)} in {out.dtype} with strides {out.stride()}."
        )
    down = left.stride(-1) != 1
    left = _with_rows(left.T if down else left)
    rows, depth = left.shape[::-1] if down else left.shape
    if bias is not None:
        bias = bias.float().contiguous()
    run_in_threads(
        _library().multiply, _panels(rows), left, left.stride(0), down, rows, depth, right.panels, right.columns,
        bias, kind, out, out.stride(0),
    )  # fmt: skip


def _with_rows(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix itself if the elements of its rows are contiguous, else a copy."""
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


def _panels(count: int) -> int:
    return -(-count // _EDGE)


@cache
def _library() -> ctypes.CDLL:
    """The C++ functions, compiled if they are not in the cache.

    Raises:
        OSError: There is no compiler, or it or its result does not work; the message is a clause with the reason.
    """
    number, tensor = ctypes.c_int64, TensorPointer
    bounds = [number, number]
    functions = {
        "lay_out_right": (ctypes.c_int, [tensor, *[number] * 5, tensor, number, *bounds]),
        "multiply": (
            ctypes.c_int, [tensor, *[number] * 4, tensor, number, tensor, number, tensor, number, *bounds]
        ),
    }  # fmt: skip
    constants = {
        "edge": _EDGE, "block": _BLOCK, "wide": _WIDE, "transposed": _TRANSPOSED, "added": _ADDED, "relu": _RELU,
        **constants_of_outcomes(),
    }  # fmt: skip
    supported_by = "supports_products", "processor, compiler or system does not offer AMX"
    return load_library("products", _SOURCES, functions, constants, supported_by=supported_by)
