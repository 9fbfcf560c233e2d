"""What fused layers compute between matrix products, in C++: one pass over the elements instead of several.

The functions of `training_kernels.cpp` give the results of the operations of `training/cpu/fused_layers.py` to
rounding, with the same masks of dropout. Their results do not depend on the number of threads.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch.autograd.function import once_differentiable

from .dropout import draw_words
from .library import load_library
from .threads import DONE, FAILED, NO_MEMORY, TensorPointer, check, run_in_threads


_SOURCES = tuple(Path(__file__).parent / name for name in ("training_kernels.cpp", "simd.h"))
# Numbers that are worked on together, and rows whose sums are kept together, as in the C++ files.
_WIDTH = 16
_ROWS_OF_PART = 128
# Positions of the longest sentences that were measured; until there, the products of torch are slower.
LONGEST = 512


@cache
def why_no_kernels() -> str | None:
    """The reason why nothing can be computed in C++ here, as a clause; `None` if it can."""
    try:
        _library()
    except OSError as error:
        return str(error)
    return None


def can_attend(dtype: torch.dtype, longest: int, d_k: int, d_v: int) -> bool:
    """Whether `ShortAttention` takes projections to heads of `d_k` and `d_v` numbers, of sentences so long at most."""
    return (
        dtype == torch.bfloat16
        and longest <= LONGEST
        and d_k % _WIDTH == d_v % _WIDTH == 0
        and why_no_kernels() is None
    )


def can_add_and_norm(output: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `AddAndNorm` takes these operands."""
    return (
        output.dtype == residual.dtype == torch.bfloat16
        and output.shape == residual.shape
        and weight.dtype == torch.float32
        and weight.shape == output.shape[-1:]
        and output.shape[-1] % _WIDTH == 0
        and why_no_kernels() is None
    )


def can_relu(activations: torch.Tensor) -> bool:
    """Whether `relu_backward_` takes these activations."""
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
    """Which queries of a batch belong to which keys, where sentences lie one behind the other without padding.

    Args:
        queries: Number of the first query of each sentence, and of all queries [B + 1], in int64.
        keys: The same of the keys; attention of sentences to themselves has the same starts.
        causal: Whether a query sees the keys up to its own position alone.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    causal: bool = False


class ShortAttention(torch.autograd.Function):
    """Attention of sentences that are short; see `fusion._Attention`."""

    @staticmethod
    def forward(ctx, joined, memory, mask, num_heads, d_k, scaling):
        """The heads side by side [B, T, H V].

        Instead of a mask there may be `Sentences`; then B is 1.
        """
        joined, memory = joined.contiguous(), None if memory is None else memory.contiguous()
        width = num_heads * d_k
        keys_values = joined if memory is None else memory
        # Where keys begin in a row.
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
    def backward(ctx, grad):
        """The gradients of the projections, in their layout."""
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


def _check_attention(joined, memory, mask, d_k: int, d_v: int) -> None:
    """Refuse what C++ would trust in."""
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
        raise ValueError(f"There is no attention in C++ for {shapes} in {joined.dtype} with heads of {d_k} and {d_v}.")


def _check_starts(starts: torch.Tensor, positions: int) -> None:
    if starts.dtype != torch.int64 or not starts.is_contiguous() or int(starts[-1]) != positions:
        raise ValueError(f"Sentences begin at {starts}, and there are {positions} positions.")


def _starts(sentences: Sentences, weights: torch.Tensor) -> _Starts:
    starts = _Starts(sentences.queries.data_ptr(), sentences.keys.data_ptr(), weights.data_ptr())
    # Its memory must stay as long as it is used.
    starts.tensors = sentences.queries, sentences.keys, weights
    return starts


class AddAndNorm(torch.autograd.Function):
    """LayerNorm(x + Dropout(Sublayer(x))); see `fusion._AddAndNorm`."""

    @staticmethod
    def forward(ctx, output, residual, weight, bias, eps, num_dropped):
        """The normalised sum; the sum itself is written over `output`."""
        # Nothing else has the sub-layer's output, so that its place can be used.
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
            _library().add_and_norm, _num_parts(num_rows), num_rows, width, ctx.scale, num_dropped, eps,
            total, residual, words, kept, weight, bias, normed, mean, factor,
        )  # fmt: skip
        ctx.save_for_backward(total, kept, weight, mean, factor)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """The gradients of output, residual, weight and bias."""
        total, kept, weight, mean, factor = ctx.saved_tensors
        grad, width = grad.contiguous(), total.shape[-1]
        num_rows = len(mean)
        grad_output, grad_total = torch.empty_like(total), torch.empty_like(total)
        sums = torch.zeros(_num_parts(num_rows), 2, width)
        run_in_threads(
            _library().add_and_norm_backward, len(sums), num_rows, width, ctx.scale, grad, total, kept, weight, mean,
            factor, grad_output, grad_total, sums,
        )  # fmt: skip
        grad_weight, grad_bias = _add_parts(sums)
        return grad_output, grad_total, grad_weight, grad_bias, None, None


def relu_backward_(grad: torch.Tensor, activations: torch.Tensor) -> torch.Tensor:
    """Set a gradient to zero where ReLU was.

    Args:
        grad: [N, D], in bfloat16, row by row.
        activations: ReLU's output, of the same form.

    Returns:
        The sums of `grad`'s columns [D], in float32.
    """
    num_rows, width = grad.shape
    if grad.shape != activations.shape or not (grad.is_contiguous() and activations.is_contiguous()):
        raise ValueError(f"A gradient of {tuple(grad.shape)} cannot pass through ReLU of {tuple(activations.shape)}.")
    sums = torch.zeros(_num_parts(num_rows), width)
    run_in_threads(_library().relu_backward, len(sums), num_rows, width, activations, grad, sums)
    return _add_parts(sums)


def _add_parts(sums: torch.Tensor) -> torch.Tensor:
    """The sum over the first dimension, in the order of the parts."""
    total = torch.empty_like(sums[0])
    check(_library().add_parts(len(sums), total.numel(), sums, total))
    return total


def _num_parts(num_rows: int) -> int:
    return -(-num_rows // _ROWS_OF_PART)


@cache
def _library() -> ctypes.CDLL:
    """The C++ functions, compiled if they are not in the cache.

    Raises:
        OSError: There is no compiler, or it or the result does not work; the message is a clause that says so.
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
        "add_parts": [number, number, tensor, tensor],
    }
    constants = {
        "width": _WIDTH, "rows_of_part": _ROWS_OF_PART, "done": DONE, "no_memory": NO_MEMORY, "failed": FAILED,
        **_layout(_Sizes), **_layout(_Starts),
    }  # fmt: skip
    return load_library(
        "kernels",
        _SOURCES,
        {name: (ctypes.c_int, types) for name, types in arguments.items()},
        constants,
        supported_by=("supports_kernels", "this processor lacks AVX-512"),
    )


def _layout(structure: type[ctypes.Structure]) -> dict[str, int]:
    """Where the fields of a structure begin, and its size."""
    places = {f"{structure.__name__}.{name}": getattr(structure, name).offset for name, _ in structure._fields_}
    return {**places, structure.__name__: ctypes.sizeof(structure)}
