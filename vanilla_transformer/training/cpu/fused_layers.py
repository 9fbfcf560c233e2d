"""Fused layers: fewer and faster operations with the same results, for training on a CPU in half precision.

The modeling file stays plain. `fuse_operations` replaces the `forward` of the layers of a model in memory; parameters
and their names stay. A pass over activations costs as much as a product, so the fused layers work inside a product or
in place where they can.

A layer runs its plain `forward` without autocast, on other devices than CPUs, with other attention than "eager", when
attention weights are dropped (`attention_dropout` in training mode), and when it decodes with a cache. Otherwise its
operations run in C++ where the conditions of this table hold, and else in torch. "kernels" are those of
`native/training_kernels.py`, which need a compiler and AVX-512; "products" are those of `native/training_products.py`,
which need a compiler and AMX. Both compute in bfloat16 alone: in float16 everything runs in torch.

=================================  ====================================================================================
Operation                          Way
=================================  ====================================================================================
attention between its projections  kernels if d_k and d_v are multiples of 16 and no sentence of the batch has more
                                   than `kernels.LONGEST` positions, and always for packed batches (`can_pack` checks
                                   the same before); else torch, `_Attention`
projections, and the gradients of  products if the weights are ordinary float32 tensors on the CPU and all but the last
their inputs                       of a stack have a multiple of 32 rows; else torch
gradients of projection weights    products; else torch
dropout, residual sum and norm     kernels if sub-layer and residual are bfloat16, the norm is float32 and d_model is a
                                   multiple of 16; else torch, `_AddAndNorm`; but as in the plain layer if the model is
                                   pre-norm or its dropout is not `SixteenBitDropout`
feed-forward network               `_FeedForward` if the activation is ReLU and is not dropped (`activation_dropout` in
                                   training mode), else as in the plain layer; products as for projections
bias and ReLU of its first layer   inside the product in C++; in torch inside oneDNN's, if torch has the operator
gradient of its ReLU               kernels if the inner width is a multiple of 16; else torch
=================================  ====================================================================================

Three facts about torch's products on CPUs shape what runs in torch. A product with a transposed left matrix runs at
half the rate of one with a row-major left matrix: for a gradient of weights, the narrower matrix is transposed by a
copy first. A product over more than `_DEPTH` elements is faster as a sum of products whose matrices fit into a core's
cache. Products of several heads need each head's elements contiguous: they are moved once, not for each operation.
"""

from collections.abc import Callable, Sequence
from functools import cache
from types import MethodType

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import Cache

from vanilla_transformer.modeling_vanilla_transformer import (
    VanillaTransformerAttention,
    VanillaTransformerDecoderLayer,
    VanillaTransformerEncoderLayer,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerLayer,
)
from vanilla_transformer.native import training_kernels as kernels
from vanilla_transformer.native import training_products as products
from vanilla_transformer.native.dropout import SixteenBitDropout, draw_kept
from vanilla_transformer.native.training_products import RightFactor


# Rows that are transposed at a time: few enough that their cache lines stay in the cache until all of it is copied.
_ROWS_AT_A_TIME = 64
# Largest depth of one product. The sum of several products is rounded after each of them.
_DEPTH = 1024


def fuse_operations(model: VanillaTransformerForConditionalGeneration) -> None:
    """Make attention, feed-forward networks, and dropout with residual sum and norm one operation each.

    The module's docstring says when they act; else the model computes as before. A fused attention returns no weights.

    Args:
        model: Changed in place.
    """
    for module in model.modules():
        if isinstance(module, VanillaTransformerEncoderLayer):
            module.forward = MethodType(_encoder_layer, module)
        elif isinstance(module, VanillaTransformerDecoderLayer):
            module.forward = MethodType(_decoder_layer, module)


def operations_of(model: VanillaTransformerForConditionalGeneration, precision: str, device: torch.device) -> str:
    """Describe for the log what computes a model's layers in training.

    Args:
        model: The model, on which `fuse_operations` acted if it is on a CPU.
        precision: Precision of training: `no`, `bf16` or `fp16`.
        device: Device of training.

    Returns:
        A clause.
    """
    if device.type != "cpu" or precision == "no" or model.config._attn_implementation != "eager":
        return "plain operations"
    if precision != "bf16":
        return "fused operations"
    if (reason := kernels.why_no_kernels()) is not None:
        return f"fused operations without C++, because {reason}"
    if (reason := products.why_no_products()) is not None:
        return f"fused operations in C++ and torch's matrix products, because {reason}"
    return "fused operations and, where their shapes allow, matrix products in C++"


def _encoder_layer(
    self: VanillaTransformerEncoderLayer,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | kernels.Sentences | None = None,
    **kwargs,
) -> torch.Tensor:
    """`forward` of an encoder layer, from and to [B, S, D]."""
    if not _fits(self.self_attn):
        return VanillaTransformerEncoderLayer.forward(self, hidden_states, attention_mask, **kwargs)
    mask = _narrow(attention_mask)
    hidden_states = _sublayer(
        self, hidden_states, self.self_attn_layer_norm, lambda states: _attend(self.self_attn, states, None, mask)
    )
    return _sublayer(self, hidden_states, self.final_layer_norm, lambda states: _feed_forward(self, states))


def _decoder_layer(
    self: VanillaTransformerDecoderLayer,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | kernels.Sentences | None = None,
    encoder_hidden_states: torch.Tensor | None = None,
    encoder_attention_mask: torch.Tensor | kernels.Sentences | None = None,
    past_key_values: Cache | None = None,
    **kwargs,
) -> torch.Tensor:
    """`forward` of a decoder layer, from and to [B, T, D], with the encoder's output [B, S, D]."""
    if past_key_values is not None or not _fits(self.self_attn):
        return VanillaTransformerDecoderLayer.forward(
            self,
            hidden_states,
            attention_mask,
            encoder_hidden_states,
            encoder_attention_mask,
            past_key_values,
            **kwargs,
        )
    mask, encoder_mask = _narrow(attention_mask), _narrow(encoder_attention_mask)
    hidden_states = _sublayer(
        self, hidden_states, self.self_attn_layer_norm, lambda states: _attend(self.self_attn, states, None, mask)
    )
    hidden_states = _sublayer(
        self,
        hidden_states,
        self.encoder_attn_layer_norm,
        lambda states: _attend(self.encoder_attn, states, encoder_hidden_states, encoder_mask),
    )
    return _sublayer(self, hidden_states, self.final_layer_norm, lambda states: _feed_forward(self, states))


def _fits(attention: VanillaTransformerAttention) -> bool:
    """Whether the fused layer computes the same as the plain one with this attention."""
    return (
        torch.is_autocast_enabled("cpu")
        and attention.config._attn_implementation == "eager"
        and not (attention.training and attention.attention_dropout > 0.0)
    )


def _narrow(mask: torch.Tensor | kernels.Sentences | None) -> torch.Tensor | kernels.Sentences | None:
    """A mask in autocast's type; clamped, because the smallest float32 would become -inf there."""
    if not isinstance(mask, torch.Tensor):
        return mask
    dtype = torch.get_autocast_dtype("cpu")
    return mask.clamp_min(torch.finfo(dtype).min).to(dtype)


def _sublayer(
    layer: VanillaTransformerLayer,
    hidden_states: torch.Tensor,
    norm: nn.LayerNorm,
    function: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """`sublayer` [B, T, D] for functions that return their output and their input.

    The residual connection goes through the function: so a product adds the two gradients of its input, which else
    would take a pass of its own.
    """
    if layer.pre_norm:
        return hidden_states + layer.dropout(function(norm(hidden_states))[0])
    if not isinstance(layer.dropout, SixteenBitDropout):
        return norm(hidden_states + layer.dropout(function(hidden_states)[0]))
    output, residual = function(hidden_states)
    num_dropped = layer.dropout.num_dropped if layer.training else 0
    operation = kernels.AddAndNorm if kernels.can_add_and_norm(output, residual, norm.weight) else _AddAndNorm
    return operation.apply(output, residual, norm.weight, norm.bias, norm.eps, num_dropped)


def _attend(
    attention: VanillaTransformerAttention,
    hidden_states: torch.Tensor,
    memory: torch.Tensor | None,
    mask: torch.Tensor | kernels.Sentences | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of hidden states [B, T, D] to themselves or to the encoder's output [B, S, D]; both [B, T, D]."""
    if memory is None:
        joined, hidden_states = _project(hidden_states, attention.q_proj, attention.k_proj, attention.v_proj)
    else:
        joined, hidden_states = _project(hidden_states, attention.q_proj)
        memory, _ = _project(memory, attention.k_proj, attention.v_proj)
    num_heads, d_k, d_v = attention.num_heads, attention.d_k, attention.d_v
    longest = max(joined.shape[1], 0 if memory is None else memory.shape[1])
    packed = isinstance(mask, kernels.Sentences)
    operation = kernels.ShortAttention if packed or kernels.can_attend(joined.dtype, longest, d_k, d_v) else _Attention
    heads = operation.apply(joined, memory, mask, num_heads, d_k, attention.scaling)
    return _project(heads, attention.out_proj)[0], hidden_states


def _project(hidden_states: torch.Tensor, *projections: nn.Linear) -> tuple[torch.Tensor, torch.Tensor]:
    """Project hidden states [B, T, D] by several matrices in one product; the outputs side by side, and the input."""
    weights = [projection.weight for projection in projections]
    biases = [projection.bias for projection in projections if projection.bias is not None]
    return _Projection.apply(hidden_states, len(weights), *weights, *biases)


def _feed_forward(layer: VanillaTransformerLayer, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`feed_forward` of hidden states [B, T, D] with bias and ReLU inside the first product, and the input."""
    if not isinstance(layer.activation_fn, nn.ReLU) or (layer.training and layer.activation_dropout.p > 0.0):
        return layer.feed_forward(hidden_states), hidden_states
    return _FeedForward.apply(hidden_states, layer.fc1.weight, layer.fc1.bias, layer.fc2.weight, layer.fc2.bias)


class _Projection(torch.autograd.Function):
    """x W^T + b [B, T, sum of A_i] for x [B, T, D], with W stacked from several weights [A_i, D] and b likewise.

    Also returns x, whose other gradient `backward` adds to that of x W^T.
    """

    @staticmethod
    def forward(ctx, hidden_states: torch.Tensor, num_weights: int, *parameters: torch.Tensor):
        weights, biases = parameters[:num_weights], parameters[num_weights:]
        rows = hidden_states.to(torch.get_autocast_dtype("cpu")).flatten(0, -2)
        matrices = _factors(rows, weights)
        ctx.save_for_backward(rows, *matrices)
        ctx.heights, ctx.has_bias, ctx.dtype = [len(weight) for weight in weights], bool(biases), hidden_states.dtype
        output = _linear(rows, matrices, torch.cat(biases) if biases else None)
        ctx.set_materialize_grads(False)
        return output.view(*hidden_states.shape[:-1], sum(ctx.heights)), hidden_states

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor, grad_residual: torch.Tensor | None):
        rows, *matrices = ctx.saved_tensors
        shape = (*grad.shape[:-1], rows.shape[-1])
        grad = grad.flatten(0, -2)
        grads = _product_over_rows(grad, rows).split(ctx.heights)
        if ctx.has_bias:
            grads += grad.sum(0, dtype=torch.float32).split(ctx.heights)
        return _add_product(grad_residual, grad, matrices).view(shape).to(ctx.dtype), None, *grads


class _FeedForward(torch.autograd.Function):
    """max(0, x W_1 + b_1) W_2 + b_2 (§3.3, Eq. 2) for x [B, T, D]; also returns x, as `_Projection` does."""

    @staticmethod
    def forward(
        ctx,
        hidden_states: torch.Tensor,
        weight1: torch.Tensor,
        bias1: torch.Tensor,
        weight2: torch.Tensor,
        bias2: torch.Tensor,
    ):
        rows = hidden_states.to(torch.get_autocast_dtype("cpu")).flatten(0, -2)
        (matrix1,), (matrix2,) = _factors(rows, [weight1]), _factors(rows, [weight2])
        inner = _linear(rows, [matrix1], bias1, relu=True)
        ctx.save_for_backward(rows, inner, matrix1, matrix2)
        ctx.dtype = hidden_states.dtype
        ctx.set_materialize_grads(False)
        return _linear(inner, [matrix2], bias2).view(hidden_states.shape), hidden_states

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor, grad_residual: torch.Tensor | None):
        rows, inner, matrix1, matrix2 = ctx.saved_tensors
        shape = grad.shape
        grad = grad.flatten(0, -2)
        grad_weight2 = _product_over_rows(grad, inner)
        grad_bias2 = grad.sum(0, dtype=torch.float32)
        grad_inner = _add_product(None, grad, [matrix2])
        if kernels.can_relu(inner):
            grad_bias1 = kernels.relu_backward_(grad_inner, inner)
            grad_weight1 = _product_over_rows(grad_inner, rows)
        else:
            _keep_(grad_inner, torch.gt(inner.view(torch.int16), 0, out=torch.empty_like(inner, dtype=torch.int16)))
            # A row of ones in the left factor makes the column sums a row of the product, almost for free. The bits
            # of a bfloat16 as an integer are above 0 where its value is; NaN is too, unless its sign is set.
            factors = torch.cat([_transpose(rows), rows.new_ones(1, len(rows))])
            product = factors @ grad_inner
            grad_weight1, grad_bias1 = product[:-1].T.contiguous().float(), product[-1].float()
        grad_rows = _add_product(grad_residual, grad_inner, [matrix1]).view(shape).to(ctx.dtype)
        return grad_rows, grad_weight1, grad_bias1, grad_weight2, grad_bias2


class _Attention(torch.autograd.Function):
    """softmax(Q K^T / sqrt(d_k)) V (§3.2.1, Eq. 1) in all heads, from the projections to the input of W^O [B, T, H V].

    `joined` holds queries, keys and values [B, T, H (2 K + V)]; or only the queries [B, T, H K], and `memory` the keys
    and values [B, S, H (K + V)]. The mask [B or 1, 1, T or 1, S] is added to the scores.
    """

    @staticmethod
    def forward(
        ctx,
        joined: torch.Tensor,
        memory: torch.Tensor | None,
        mask: torch.Tensor | None,
        num_heads: int,
        d_k: int,
        scaling: float,
    ) -> torch.Tensor:
        width = num_heads * d_k
        keys_values = joined[..., width:] if memory is None else memory
        d_v = keys_values.shape[-1] // num_heads - d_k
        output = joined.new_empty(*joined.shape[:2], num_heads * d_v)
        queries = _heads_first(joined[..., :width], num_heads)
        keys = _heads_first(keys_values[..., :width], num_heads)
        values = _heads_first(keys_values[..., width:], num_heads)
        scores = torch.bmm(queries, keys.transpose(1, 2)).mul_(scaling)
        if mask is not None:
            scores.unflatten(0, (-1, num_heads)).add_(mask)
        weights = torch.softmax(scores, dim=-1)
        _heads_last_(output, torch.bmm(weights, values), num_heads)
        ctx.save_for_backward(queries, keys, values, weights)
        ctx.shapes = joined.shape, None if memory is None else memory.shape
        ctx.num_heads, ctx.width, ctx.scaling = num_heads, width, scaling
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        queries, keys, values, weights = ctx.saved_tensors
        num_heads, width = ctx.num_heads, ctx.width
        grad_joined = grad.new_empty(ctx.shapes[0])
        grad_memory = None if ctx.shapes[1] is None else grad.new_empty(ctx.shapes[1])
        grad_keys_values = grad_joined[..., width:] if grad_memory is None else grad_memory
        grad_heads = _heads_first(grad, num_heads)
        _heads_last_(grad_keys_values[..., width:], torch.bmm(weights.transpose(1, 2), grad_heads), num_heads)
        grad_weights = torch.bmm(grad_heads, values.transpose(1, 2))
        grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype).mul_(ctx.scaling)
        _heads_last_(grad_joined[..., :width], torch.bmm(grad_scores, keys), num_heads)
        _heads_last_(grad_keys_values[..., :width], torch.bmm(grad_scores.transpose(1, 2), queries), num_heads)
        return grad_joined, grad_memory, None, None, None, None


class _AddAndNorm(torch.autograd.Function):
    """LayerNorm(x + Dropout(Sublayer(x))) (§3.1, §5.4), given the sub-layer's output and x, all [..., D]."""

    @staticmethod
    def forward(
        ctx,
        output: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        num_dropped: int,
    ) -> torch.Tensor:
        kept, scale = None, 2**16 / (2**16 - num_dropped)
        if num_dropped > 0:
            kept = draw_kept(num_dropped, out=torch.empty(output.shape, dtype=torch.int16))
            # Safe in place: only this function holds the sub-layer's output.
            _keep_(output, kept)
        total = torch.add(residual, output, alpha=scale)
        normed, mean, rstd = torch.native_layer_norm(total, total.shape[-1:], weight, bias, eps)
        ctx.save_for_backward(total, kept, weight, bias, mean, rstd)
        ctx.scale = scale
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        total, kept, weight, bias, mean, rstd = ctx.saved_tensors
        grad_total, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
            grad, total, total.shape[-1:], mean, rstd, weight, bias, [True, True, True]
        )
        grad_output = grad_total * ctx.scale
        if kept is not None:
            _keep_(grad_output, kept)
        return grad_output, grad_total, grad_weight, grad_bias, None, None


def _factors(rows: torch.Tensor, weights: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Weights [A_i, B] as the factors of products: themselves for C++, else their stack in the type of the rows."""
    if products.can_multiply(rows.dtype, weights):
        return weights
    return [torch.cat([weight.to(rows.dtype) for weight in weights])]


def _linear(
    rows: torch.Tensor, matrices: Sequence[torch.Tensor], bias: torch.Tensor | None, relu: bool = False
) -> torch.Tensor:
    """Compute x W^T + b, or ReLU of it: rows [N, B], stacked matrices [A_i, B], bias [sum of A_i]."""
    if products.can_multiply(rows.dtype, matrices):
        return products.multiply(rows, RightFactor.stack(matrices, transposed=True), bias=bias, relu=relu)
    (matrix,) = matrices
    bias = None if bias is None else bias.to(rows.dtype)
    if relu:
        return _linear_relu(rows, matrix, bias)
    if matrix.shape[1] > _DEPTH and bias is not None:
        return _add_product(bias.expand(len(rows), -1).contiguous(), rows, [matrix.T])
    return nn.functional.linear(rows, matrix, bias)


def _add_product(total: torch.Tensor | None, left: torch.Tensor, matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Compute left right + total: left [N, sum of A_i], stacked matrices [A_i, B], total [..., B].

    The result [N, B] is written over `total`: safe, because only the calling `backward` holds it.
    """
    if total is not None:
        total = total.flatten(0, -2)
    if products.can_multiply(left.dtype, matrices):
        return products.multiply(left, RightFactor.stack(matrices, transposed=False), add_to=total)
    (right,) = matrices
    depths = [slice(start, start + _DEPTH) for start in range(0, len(right), _DEPTH)]
    if total is None:
        total = left[:, depths[0]] @ right[depths[0]]
        depths = depths[1:]
    for depth in depths:
        total.addmm_(left[:, depth], right[depth])
    return total


def _keep_(values: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Set half-precision elements to 0 where `kept` (int16, same shape) is 0, and leave them where it is 1.

    Multiplying their bits as integers is several times as fast as multiplying them, and exact: 0 or 1 times the bits.
    """
    values.view(torch.int16).mul_(kept)
    return values


def _heads_first(columns: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[B, T, H K] to [B H, T, K], contiguous."""
    return columns.unflatten(-1, (num_heads, -1)).transpose(1, 2).contiguous().flatten(0, 1)


def _heads_last_(columns: torch.Tensor, heads: torch.Tensor, num_heads: int) -> None:
    """Write [B H, T, K] to [B, T, H K]."""
    columns.unflatten(-1, (num_heads, -1)).transpose(1, 2).copy_(heads.unflatten(0, (-1, num_heads)))


def _product_over_rows(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Compute left^T right [A, B] for [N, A] and [N, B], as float32: the sums in C++, a rounded product in torch."""
    if left.dtype == torch.bfloat16 and products.why_no_products() is None:
        return products.product_over_rows(left, right)
    if left.shape[1] == right.shape[1]:
        # The copy would cost as much as the product gains.
        return (left.T @ right).float()
    if left.shape[1] < right.shape[1]:
        return (_transpose(left) @ right).float()
    return (_transpose(right) @ left).T.contiguous().float()


def _transpose(matrix: torch.Tensor) -> torch.Tensor:
    """The transpose of [N, A], contiguous [A, N]."""
    transposed = matrix.new_empty(matrix.shape[::-1])
    for start in range(0, len(matrix), _ROWS_AT_A_TIME):
        rows = slice(start, start + _ROWS_AT_A_TIME)
        transposed[:, rows] = matrix[rows].T
    return transposed


def _linear_relu(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """ReLU of x W^T + b [N, A], for rows [N, B], weight [A, B] and bias [A]."""
    if _has_linear_pointwise(rows.dtype):
        return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "relu", [], "")
    return nn.functional.linear(rows, weight, bias).relu_()


@cache
def _has_linear_pointwise(dtype: torch.dtype) -> bool:
    """Whether torch has its private operator for products with bias and ReLU, and it computes what is expected."""
    rows, weight = torch.eye(3, 4, dtype=dtype), torch.tensor([[1, -2, 3, 4], [-5, 6, 7, -8]], dtype=dtype)
    bias = torch.tensor([1, -1], dtype=dtype)
    try:
        output = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "relu", [], "")
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(output, nn.functional.linear(rows, weight, bias).relu())
