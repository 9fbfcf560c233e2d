"""Matrix products with weights that were packed once, by operators of torch that are not all public."""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Literal

import torch
from torch import nn


Product = Callable[[torch.Tensor], torch.Tensor]
Packing = Literal["plain", "onednn", "int8"]

# Rows from which oneDNN's product of 8-bit integers is faster than FBGEMM's.
_ROWS_FOR_ONEDNN = 8


def pack(weight: torch.Tensor, bias: torch.Tensor | None, packing: Packing, *, relu: bool = False) -> Product:
    """Prepare a product with a matrix.

    Args:
        weight: Matrix [out, in] in the dtype of what it is multiplied with.
        bias: Vector [out], or `None`.
        packing: `plain` is torch's own; `onednn` keeps bfloat16 weights in the order that the processor's matrix units
            read, where torch would order them anew at each call; `int8` rounds them to 8 bits, each row on a scale of
            its own, and what is multiplied with them at each call, on one scale.
        relu: Whether negative results become 0.

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
    """Whether this torch, on this machine, has a packing's operators, and they give the right results."""
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
    # A missing operator is an AttributeError, one that lacks a kernel a RuntimeError.
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(outputs, torch.cat([expected, expected[:1]]), atol=0.2, rtol=0.02)


def _pack_onednn(weight: torch.Tensor, bias: torch.Tensor | None, relu: bool) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    activation = "relu" if relu else "none"
    linear = torch.ops.mkldnn._linear_pointwise

    def multiply(rows: torch.Tensor) -> torch.Tensor:
        return linear(rows, packed, bias, activation, [], "")

    return multiply


def _pack_int8(weight: torch.Tensor, bias: torch.Tensor | None, relu: bool) -> Product:
    scales = weight.abs().amax(1).clamp(min=1e-8) / 127
    rounded = (weight / scales[:, None]).round().to(torch.int8)
    zeros = torch.zeros(len(weight), dtype=torch.long)
    packed = {}
    engine = torch.backends.quantized.engine
    try:
        with warnings.catch_warnings():
            # torch advises against quantised tensors, and has no other way to these operators.
            warnings.simplefilter("ignore")
            quantized = torch._make_per_channel_quantized_tensor(rounded, scales.double(), zeros, 0)
            for name in {"fbgemm", "onednn"} & {*torch.backends.quantized.supported_engines}:
                torch.backends.quantized.engine = name
                packed[name] = torch.ops.quantized.linear_prepack(quantized, bias)
    finally:
        torch.backends.quantized.engine = engine
    if not packed:
        raise RuntimeError("torch has no products of 8-bit integers here")
    some = next(iter(packed.values()))
    few, many = packed.get("fbgemm", some), packed.get("onednn", some)
    linear = torch.ops.quantized.linear_relu_dynamic if relu else torch.ops.quantized.linear_dynamic

    def multiply(rows: torch.Tensor) -> torch.Tensor:
        return linear(rows, few if len(rows) < _ROWS_FOR_ONEDNN else many, False)

    return multiply
