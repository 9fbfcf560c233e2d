"""GEMMs with weights that are packed once; some of the torch operators used are not public."""

from collections.abc import Callable
from functools import cache
from typing import Literal

import torch
from torch import nn


Product = Callable[[torch.Tensor], torch.Tensor]
Packing = Literal["plain", "onednn", "int8"]


def pack(weight: torch.Tensor, bias: torch.Tensor | None, packing: Packing, *, relu: bool = False) -> Product:
    """Pack a weight matrix for GEMMs.

    Args:
        weight: Matrix [out, in], in the dtype of the other factor.
        bias: Vector [out], or `None`.
        packing: `plain` packs nothing. `onednn` keeps bfloat16 weights in the layout that the processor's matrix units
            read, which torch would otherwise produce anew in each call. `int8` rounds the weights once, and the other
            factor in each call, to 8 bits, with one scale for each row.
        relu: Whether to apply ReLU to the result.

    Returns:
        A function of [rows, in] that returns x W^T + b [rows, out].
    """
    if packing == "onednn":
        return _pack_onednn(weight, bias, relu)
    if packing == "int8":
        return _pack_int8(weight.float(), None if bias is None else bias.float(), relu)

    def multiply(rows: torch.Tensor) -> torch.Tensor:
        output = nn.functional.linear(rows, weight, bias)
        return output.relu_() if relu else output

    return multiply


@cache
def can_pack(packing: Packing) -> bool:
    """Whether this torch has the operators of a packing, and they give the right results on this machine."""
    if packing == "plain":
        return True
    if packing == "onednn" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    generator = torch.Generator().manual_seed(0)
    weight, rows = torch.randn(24, 16, generator=generator), torch.randn(9, 16, generator=generator)
    expected = nn.functional.linear(rows, weight).relu()
    if packing == "onednn":
        weight, rows = weight.bfloat16(), rows.bfloat16()
    try:
        product = pack(weight, None, packing, relu=True)
        outputs = torch.cat([product(rows), product(rows[:1])]).float()
    # A missing operator raises AttributeError, one without a kernel for this processor RuntimeError.
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(outputs, torch.cat([expected, expected[:1]]), atol=0.2, rtol=0.02)


def _pack_onednn(weight: torch.Tensor, bias: torch.Tensor | None, relu: bool) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    linear = torch.ops.mkldnn._linear_pointwise

    def multiply(rows: torch.Tensor) -> torch.Tensor:
        # Its own "relu" makes 0 of NaN.
        output = linear(rows, packed, bias, "none", [], "")
        return output.relu_() if relu else output

    return multiply


def _pack_int8(weight: torch.Tensor, bias: torch.Tensor | None, relu: bool) -> Product:
    rounded, scales = _round_rows(weight)
    columns, scales = rounded.T, scales.T

    def multiply(rows: torch.Tensor) -> torch.Tensor:
        rounded, their_scales = _round_rows(rows)
        output = torch._int_mm(rounded, columns).float().mul_(their_scales).mul_(scales)
        if bias is not None:
            output += bias
        return output.relu_() if relu else output

    return multiply


def _round_rows(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrix rounded to int8, and the scale of each row [rows, 1]."""
    scales = matrix.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
    return (matrix / scales).round_().to(torch.int8), scales
