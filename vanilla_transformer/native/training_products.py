"""Matrix products in bfloat16 by the tiles of AMX, where training has them: weights as they are, and any layout.

torch rounds weights into bfloat16 with a pass of their own, and brings every factor into the form of the tiles anew
for each product; a product whose left factor is transposed runs at half the rate, and gradients of weights leave it in
bfloat16. The functions of `training_products.cpp` lay out each factor once, out of float32 or bfloat16, along rows or
columns, and write float32 or bfloat16. Their results do not depend on the number of threads.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import nn

from .library import load_library
from .threads import DONE, FAILED, NO_MEMORY, TensorPointer, run_in_threads


_SOURCES = tuple(Path(__file__).parent / name for name in ("training_products.cpp", "simd.h"))
# Rows of a panel of the left factor, columns of one of the right factor, and numbers of each in a step along the sums.
_EDGE = 32
# Bits of `Kind` in the C++ file.
_WIDE, _TRANSPOSED, _ADDED, _RELU = 1, 2, 4, 8


@cache
def why_no_products() -> str | None:
    """The reason why torch computes the products here, as a clause; `None` if it does not."""
    try:
        _library()
    except OSError as error:
        return str(error)
    return None


def can_multiply(dtype: torch.dtype, weights: Sequence[torch.Tensor]) -> bool:
    """Whether `RightFactor` takes these weights for products in a type.

    Args:
        dtype: Type of the products.
        weights: Matrices that are to be stacked.
    """
    return (
        dtype == torch.bfloat16
        # Other classes of tensors may have no numbers in memory.
        and all(type(weight) in (torch.Tensor, nn.Parameter) for weight in weights)
        and all(weight.dtype == torch.float32 and weight.device.type == "cpu" for weight in weights)
        # The next matrix begins with a panel of its own.
        and all(len(weight) % _EDGE == 0 for weight in weights[:-1])
        and why_no_products() is None
    )


@dataclass(frozen=True, slots=True)
class RightFactor:
    """The right factor of products, in bfloat16 and in the form of the tiles; made by `stack` and `of_rows`.

    Args:
        panels: Its numbers.
        depth: Number of its rows.
        columns: Number of its columns.
    """

    panels: torch.Tensor
    depth: int
    columns: int

    @classmethod
    def stack(cls, weights: Sequence[torch.Tensor], *, transposed: bool) -> "RightFactor":
        """Stack matrices [A_i, B] in float32, each row by row, for which `can_multiply` holds.

        Args:
            weights: The matrices.
            transposed: Whether the factor is their transpose [B, sum of A_i], rather than [sum of A_i, B].
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
        """A matrix [depth, columns] in bfloat16, whose rows lie anywhere."""
        factor = cls._empty(*matrix.shape)
        factor._lay_out(matrix, 0, False)
        return factor

    @classmethod
    def _empty(cls, depth: int, columns: int) -> "RightFactor":
        size = _panels(columns) * _panels(depth) * _EDGE * _EDGE
        return cls(torch.empty(size, dtype=torch.bfloat16), depth, columns)

    def _lay_out(self, matrix: torch.Tensor, start: int, transposed: bool) -> None:
        """Fill the columns from `start` on with rows of the matrix, or rows with rows."""
        matrix = _with_rows(matrix)
        panel = _panels(self.depth) * _EDGE * _EDGE
        columns, depth = matrix.shape if transposed else matrix.shape[::-1]
        place = start // _EDGE * (panel if transposed else _EDGE * _EDGE)
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
    """Compute left right + bias, and max(0, ...) of it.

    Args:
        left: [N, depth], in bfloat16.
        right: The right factor.
        bias: [columns].
        relu: Whether negative sums become zero.
        out: Where the product is written [N, columns or more], row by row, in bfloat16; otherwise a new tensor.
        add_to: What the product is added to, likewise; in its place.

    Returns:
        The result, in the first columns of `out` if that was given.
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
        add_to: What the product is added to [A, B], row by row; in its place. Otherwise a new tensor.

    Returns:
        The result [A, B].
    """
    out = left.new_empty(left.shape[1], right.shape[1], dtype=torch.float32) if add_to is None else add_to
    kind = _WIDE | (0 if add_to is None else _ADDED)
    # What is laid out whole is read again for each part of the other: it had better be the smaller one.
    if left.shape[1] < right.shape[1]:
        _multiply(right.T, RightFactor.of_rows(left), None, kind | _TRANSPOSED, out)
    else:
        _multiply(left.T, RightFactor.of_rows(right), None, kind, out)
    return out


def _multiply(left: torch.Tensor, right: RightFactor, bias: torch.Tensor | None, kind: int, out: torch.Tensor) -> None:
    """Let C++ multiply, which trusts in what is checked here; `out` is the product's transpose if `kind` says so."""
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
    """The matrix itself if its rows have their numbers side by side, or a copy."""
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


def _panels(count: int) -> int:
    return -(-count // _EDGE)


@cache
def _library() -> ctypes.CDLL:
    """The C++ functions, compiled if they are not in the cache.

    Raises:
        OSError: There is no compiler, or it or the result does not work; the message is a clause that says so.
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
        "edge": _EDGE, "wide": _WIDE, "transposed": _TRANSPOSED, "added": _ADDED, "relu": _RELU,
        "done": DONE, "no_memory": NO_MEMORY, "failed": FAILED,
    }  # fmt: skip
    supported_by = "supports_products", "processor, compiler or system does not offer AMX"
    return load_library("products", _SOURCES, functions, constants, supported_by=supported_by)
