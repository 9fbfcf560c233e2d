"""What fused layers compute between matrix products, in C++: one pass over the elements instead of several.

The functions of `training_kernels.cpp` give the same results as the torch operations of `training/cpu/fused_layers.py`
up to rounding, with the same dropout masks. Their results do not depend on the number of threads.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch.autograd.function import once_differentiable

from .dropout import SMALLEST_WORD, draw_words
from .library import constants_of_layout, constants_of_outcomes, load_library
from .threads import TensorPointer, check, run_in_threads


_SOURCES = tuple(Path(__file__).parent / name for name in ("training_kernels.cpp", "simd.h"))
# Elements of a SIMD vector.
_WIDTH = 16
# Rows whose sums are added up together.
_BLOCK_ROWS = 128
# Positions of the longest sentences that were measured; up to this length C++ is faster than torch's products.
LONGEST = 512


@cache
def why_no_kernels() -> str | None:
    """The reason why these functions do not work on this machine, as a clause; `None` if they do."""
    try:
        _library()
    except OSError as error:
        return str(error)
    return None


def can_attend(dtype: torch.dtype, longest: int, d_k: int, d_v: int) -> bool:
    """Whether `ShortAttention` computes this attention.

    Args:
        dtype: Type of the projections.
        longest: Largest number of positions of a sentence.
        d_k: Elements of a query or key in each head.
        d_v: Elements of a value in each head.
    """
    return (
        dtype == torch.bfloat16
        and longest <= LONGEST
        and d_k % _WIDTH == d_v % _WIDTH == 0
        and why_no_kernels() is None
    )


def can_add_and_norm(output: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `AddAndNorm` takes a sub-layer's output and input [..., D] and a norm's weight [D]."""
    return (
        output.dtype == residual.dtype == torch.bfloat16
        and output.shape == residual.shape
        and weight.dtype == torch.float32
        and weight.shape == output.shape[-1:]
        and output.shape[-1] % _WIDTH == 0
        and why_no_kernels() is None
    )


def can_relu(activations: torch.Tensor) -> bool:
    """Whether `relu_backward_` takes these activations [N, D]."""
    return activations.dtype == torch.bfloat16 and activations.shape[-1] % _WIDTH == 0 and why_no_kernels() is None


class _Sizes(ctypes.Structure):
    """`Sizes` of the C++ file."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "heads", "key_width", "value_width", "query_row", "key_row", "mask_sentence", "mask_row", "causal"
        )
    ]  # fmt: skip


class _Starts(ctypes.Structure):
    """`Starts` of the C++ file."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("queries", "keys", "weights")]


@dataclass(frozen=True, slots=True)
class Sentences:
    """Where the sentences of a packed batch start: queries attend only to the keys of their own sentence.

    Args:
        queries: Index of each sentence's first query, then the number of all queries [B + 1], in int64.
        keys: The same for the keys [B + 1]; equal to `queries` in self-attention.
        causal: Whether a query attends only to the keys up to its own position.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    causal: bool = False


class ShortAttention(torch.autograd.Function):
    """Attention of short sentences, the same as `_Attention` of `training/cpu/fused_layers.py`."""

    @staticmethod
    def forward(
        ctx,
        joined: torch.Tensor,
        memory: torch.Tensor | None,
        mask: torch.Tensor | Sentences | None,
        num_heads: int,
        d_k: int,
        scaling: float,
    ) -> torch.Tensor:
        """Compute attention in all heads.

        Args:
            ctx: Keeps what `backward` needs.
            joined: Queries, keys and values side by side [B, T, H (2 K + V)], or with `memory` only the queries
                [B, T, H K]; in bfloat16.
            memory: Keys and values side by side [B, S, H (K + V)], or `None` for self-attention.
            mask: Added to the scores, expandable to [B, 1, T, S], in bfloat16; or, for a packed batch, in which B is
                1, its `Sentences`.
            num_heads: H.
            d_k: K.
            scaling: Factor of the scores.

        Returns:
            The heads side by side [B, T, H V].

        Raises:
            ValueError: The operands have other shapes or types.
        """
        joined, memory = joined.contiguous(), None if memory is None else memory.contiguous()
        width = num_heads * d_k
        keys_values = joined if memory is None else memory
        # The first column of the keys.
        start = width if memory is None else 0
        d_v = (keys_values.shape[-1] - start) // num_heads - d_k
        (batch_size, num_queries, _), num_keys = joined.shape, keys_values.shape[1]
        if isinstance(mask, Sentences):
            sentences, mask = mask, None
            _check_starts(sentences.queries, batch_size * num_queries)
            _check_starts(sentences.keys, len(keys_values) * num_keys)
        else:
            bounds = torch.arange(batch_size + 1)
            sentences = Sentences(bounds * num_queries, bounds * num_keys)
        _check_attention(joined, memory, mask, d_k, d_v)
        if mask is not None:
            mask = mask.contiguous().expand(batch_size, 1, num_queries, num_keys)
        sizes = _Sizes(
            num_heads, d_k, d_v, joined.shape[-1], keys_values.shape[-1],
            0 if mask is None else mask.stride(0), 0 if mask is None else mask.stride(2), sentences.causal,
        )  # fmt: skip
        padded = (sentences.keys.diff() + _WIDTH - 1) // _WIDTH * _WIDTH
        sizes_of_weights = num_heads * sentences.queries.diff() * padded
        weight_starts = torch.cat([sizes_of_weights.new_zeros(1), sizes_of_weights.cumsum(0)])
        weights = torch.empty(int(weight_starts[-1]), dtype=joined.dtype)
        output = torch.empty(batch_size, num_queries, num_heads * d_v, dtype=joined.dtype)
        starts = _starts(sentences, weight_starts)
        run_in_threads(
            _library().attend, len(padded) * num_heads, sizes, starts, scaling, joined, (keys_values, start),
            (keys_values, start + width), mask, weights, output,
        )  # fmt: skip
        ctx.save_for_backward(joined, memory, weights)
        ctx.sizes, ctx.sentences, ctx.weight_starts = sizes, sentences, weight_starts
        ctx.scaling, ctx.start, ctx.width = scaling, start, width
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        """The gradients of `joined` and `memory`, given that of the output [B, T, H V]."""
        joined, memory, weights = ctx.saved_tensors
        grad = grad.contiguous()
        grad_joined = torch.empty_like(joined)
        grad_memory = None if memory is None else torch.empty_like(memory)
        keys_values = joined if memory is None else memory
        grad_keys_values = grad_joined if memory is None else grad_memory
        keys, values = ctx.start, ctx.start + ctx.width
        starts = _starts(ctx.sentences, ctx.weight_starts)
        run_in_threads(
            _library().attend_backward, (len(ctx.weight_starts) - 1) * ctx.sizes.heads, ctx.sizes, starts,
            ctx.scaling, joined, (keys_values, keys), (keys_values, values), weights, grad, grad_joined,
            (grad_keys_values, keys), (grad_keys_values, values),
        )  # fmt: skip
        return grad_joined, grad_memory, None, None, None, None


def _check_attention(
    joined: torch.Tensor, memory: torch.Tensor | None, mask: torch.Tensor | None, d_k: int, d_v: int
) -> None:
    """Refuse operands with which C++, which checks nothing, would read or write out of bounds."""
    keys_values = joined if memory is None else memory
    if (
        d_k % _WIDTH
        or d_v % _WIDTH
        or joined.dtype != torch.bfloat16
        or keys_values.dtype != torch.bfloat16
        or len(keys_values) != len(joined)
        or (mask is not None and (mask.dtype != torch.bfloat16 or mask.shape[-1] != keys_values.shape[1]))
    ):
        shapes = [tuple(each.shape) for each in (joined, memory, mask) if each is not None]
        raise ValueError(
            f"There is no attention in C++ for `joined`, `memory` and `mask` of {shapes} in {joined.dtype} with heads "
            f"of {d_k} and {d_v} elements."
        )


def _check_starts(starts: torch.Tensor, positions: int) -> None:
    """Refuse starts [B + 1] that do not end at the number of positions."""
    if starts.dtype != torch.int64 or not starts.is_contiguous() or int(starts[-1]) != positions:
        raise ValueError(
            f"Sentences start at {starts}, but the last entry must be the number of positions, {positions}."
        )


def _starts(sentences: Sentences, weights: torch.Tensor) -> _Starts:
    """Addresses of where queries, keys and attention weights of each sentence start, all [B + 1]."""
    starts = _Starts(sentences.queries.data_ptr(), sentences.keys.data_ptr(), weights.data_ptr())
    # The structure holds addresses only: keep the tensors alive as long as it.
    starts.tensors = sentences.queries, sentences.keys, weights
    return starts


class AddAndNorm(torch.autograd.Function):
    """LayerNorm(x + Dropout(Sublayer(x))), the same as `_AddAndNorm` of `training/cpu/fused_layers.py`."""

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
        """Normalise the sum of residual and dropped-out output.

        Args:
            ctx: Keeps what `backward` needs.
            output: The sub-layer's output [..., D], in bfloat16; the sum is written over it.
            residual: The sub-layer's input [..., D], in bfloat16.
            weight: Of the normalisation [D], in float32.
            bias: Of the normalisation [D], in float32.
            eps: Epsilon of the normalisation.
            num_dropped: As in `draw_kept`; 0 drops nothing.

        Returns:
            The normalised sum [..., D].
        """
        # Safe in place: only this function holds the sub-layer's output.
        total, residual = output.detach().contiguous(), residual.contiguous()
        weight, bias = weight.contiguous(), bias.contiguous()
        width = total.shape[-1]
        num_rows = total.numel() // width
        words = kept = None
        if num_dropped > 0:
            words = draw_words(total.numel())
            kept = torch.empty(total.numel() // _WIDTH, dtype=torch.int16)
        normed = torch.empty_like(total)
        mean, factor = torch.empty(num_rows), torch.empty(num_rows)
        ctx.scale = 2**16 / (2**16 - num_dropped)
        run_in_threads(
            _library().add_and_norm, _num_blocks(num_rows), num_rows, width, ctx.scale, num_dropped, eps,
            total, residual, words, kept, weight, bias, normed, mean, factor,
        )  # fmt: skip
        ctx.save_for_backward(total, kept, weight, mean, factor)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        """The gradients of output, residual, weight and bias, given that of the result [..., D]."""
        total, kept, weight, mean, factor = ctx.saved_tensors
        grad, width = grad.contiguous(), total.shape[-1]
        num_rows = len(mean)
        grad_output, grad_total = torch.empty_like(total), torch.empty_like(total)
        sums = torch.zeros(_num_blocks(num_rows), 2, width)
        run_in_threads(
            _library().add_and_norm_backward, len(sums), num_rows, width, ctx.scale, grad, total, kept, weight, mean,
            factor, grad_output, grad_total, sums,
        )  # fmt: skip
        grad_weight, grad_bias = _add_blocks(sums)
        return grad_output, grad_total, grad_weight, grad_bias, None, None


def relu_backward_(grad: torch.Tensor, activations: torch.Tensor) -> torch.Tensor:
    """Set a gradient to zero where ReLU's output is zero.

    Args:
        grad: [N, D], in bfloat16, contiguous; changed in place.
        activations: ReLU's output, likewise.

    Returns:
        The column sums of the changed `grad` [D], in float32.

    Raises:
        ValueError: The shapes differ, or a tensor is not contiguous.
    """
    num_rows, width = grad.shape
    if grad.shape != activations.shape or not (grad.is_contiguous() and activations.is_contiguous()):
        raise ValueError(
            f"`grad` of {tuple(grad.shape)} cannot pass through ReLU with `activations` of "
            f"{tuple(activations.shape)}; both must be contiguous and of the same shape."
        )
    sums = torch.zeros(_num_blocks(num_rows), width)
    run_in_threads(_library().relu_backward, len(sums), num_rows, width, activations, grad, sums)
    return _add_blocks(sums)


def _add_blocks(sums: torch.Tensor) -> torch.Tensor:
    """The sum of the blocks [num_blocks, ...], in their order."""
    total = torch.empty_like(sums[0])
    check(_library().add_blocks(len(sums), total.numel(), sums, total))
    return total


def _num_blocks(num_rows: int) -> int:
    return -(-num_rows // _BLOCK_ROWS)


@cache
def _library() -> ctypes.CDLL:
    """The C++ functions, compiled if they are not in the cache.

    Raises:
        OSError: There is no compiler, or it or its result does not work; the message is a clause with the reason.
    """
    number, real, tensor, sizes, starts = (
        ctypes.c_int64, ctypes.c_float, TensorPointer, ctypes.POINTER(_Sizes), ctypes.POINTER(_Starts)
    )  # fmt: skip
    arguments = {
        "attend": [sizes, starts, real, *[tensor] * 6, number, number],
        "attend_backward": [sizes, starts, real, *[tensor] * 8, number, number],
        "add_and_norm": [number, number, real, number, real, *[tensor] * 9, number, number],
        "add_and_norm_backward": [number, number, real, *[tensor] * 9, number, number],
        "relu_backward": [number, number, *[tensor] * 3, number, number],
        "add_blocks": [number, number, tensor, tensor],
    }
    constants = {
        "width": _WIDTH,
        "block_rows": _BLOCK_ROWS,
        "smallest_word": SMALLEST_WORD,
        **constants_of_outcomes(),
        **constants_of_layout(_Sizes),
        **constants_of_layout(_Starts),
    }
    return load_library(
        "kernels",
        _SOURCES,
        {name: (ctypes.c_int, types) for name, types in arguments.items()},
        constants,
        supported_by=("supports_kernels", "this processor lacks AVX-512"),
    )
