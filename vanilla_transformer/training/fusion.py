"""Fewer and larger operations for the same results, where a model is trained on a CPU in half precision.

The network's own file stays plain; this replaces two methods of a model in memory, whose parameters and their names
stay what they were.
"""

from functools import cache
from types import MethodType

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from vanilla_transformer.modeling_vanilla_transformer import (
    VanillaTransformerAttention,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerLayer,
)


def fuse_operations(model: VanillaTransformerForConditionalGeneration) -> None:
    """Let attention project its input by one product, and ReLU feed-forward networks run as one operation.

    Both act under autocast only, and on a CPU; elsewhere the model computes as before.

    Args:
        model: Changed in place.
    """
    for module in model.modules():
        if isinstance(module, VanillaTransformerAttention):
            module.project = MethodType(_project, module)
        elif isinstance(module, VanillaTransformerLayer) and isinstance(module.activation_fn, nn.ReLU):
            module.feed_forward = MethodType(_feed_forward, module)


def _project(self: VanillaTransformerAttention, hidden_states: torch.Tensor, *projections: nn.Linear):
    """`project` with the projections as rows of one matrix, which also sums their gradients in one product."""
    if not torch.is_autocast_enabled("cpu") or len(projections) == 1:
        return VanillaTransformerAttention.project(self, hidden_states, *projections)
    dtype = torch.get_autocast_dtype("cpu")
    weight = torch.cat([projection.weight.to(dtype) for projection in projections])
    bias = None
    if projections[0].bias is not None:
        bias = torch.cat([projection.bias.to(dtype) for projection in projections])
    joined = nn.functional.linear(hidden_states, weight, bias)
    parts = joined.split([projection.out_features for projection in projections], dim=-1)
    return [part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts]


def _feed_forward(self: VanillaTransformerLayer, hidden_states: torch.Tensor) -> torch.Tensor:
    """`feed_forward` with bias and ReLU inside the first product."""
    if not torch.is_autocast_enabled("cpu") or (self.training and self.activation_dropout.p > 0.0):
        return VanillaTransformerLayer.feed_forward(self, hidden_states)
    dtype = torch.get_autocast_dtype("cpu")
    parameters = (self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)
    rows = hidden_states.to(dtype).flatten(0, -2)
    return _FeedForward.apply(rows, *(parameter.to(dtype) for parameter in parameters)).view(hidden_states.shape)


class _FeedForward(torch.autograd.Function):
    """max(0, x W_1 + b_1) W_2 + b_2 (§3.3, Eq. 2) for rows x [N, D]."""

    @staticmethod
    def forward(ctx, rows, weight1, bias1, weight2, bias2):
        inner = _linear(rows, weight1, bias1, relu=True)
        ctx.save_for_backward(rows, inner, weight1, weight2)
        return _linear(inner, weight2, bias2)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        rows, inner, weight1, weight2 = ctx.saved_tensors
        grad_inner = torch.ops.aten.threshold_backward(grad @ weight2, inner, 0)
        return grad_inner @ weight1, grad_inner.T @ rows, grad_inner.sum(0), grad.T @ inner, grad.sum(0)


def _linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, relu: bool = False) -> torch.Tensor:
    if _has_linear_pointwise(rows.dtype):
        return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "relu" if relu else "none", [], "")
    output = nn.functional.linear(rows, weight, bias)
    return output.relu_() if relu else output


@cache
def _has_linear_pointwise(dtype: torch.dtype) -> bool:
    """Whether torch's operator for products with bias and ReLU, which is not public, is there and does as expected."""
    rows, weight = torch.eye(3, 4, dtype=dtype), torch.tensor([[1, -2, 3, 4], [-5, 6, 7, -8]], dtype=dtype)
    bias = torch.tensor([1, -1], dtype=dtype)
    try:
        output = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "relu", [], "")
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(output, nn.functional.linear(rows, weight, bias).relu())
