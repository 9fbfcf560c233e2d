"""The decoder in C++: one call takes a step through all layers, and reordering hypotheses copies no keys and values.

`library.py` compiles it when it is first used. Without a compiler, or on a processor without the instructions,
`translation/decoders/torch_packed.py` does the same in torch.
"""

import ctypes
import weakref
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import nn

from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.native import library
from vanilla_transformer.native.library import Outcome


Precision = Literal["float32", "bfloat16", "int8"]

_PRECISIONS = {"float32": 0, "bfloat16": 1, "int8": 2}
_SOURCES = tuple(
    Path(__file__).parent / name for name in ("incremental_decoder.cpp", "prepacked_products.h", "simd.h")
)
# Elements of a SIMD vector.
_WIDTH = 16


class _Dimensions(ctypes.Structure):
    """`Dimensions` of the C++ file."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "precision", "model", "encoder_layers", "decoder_layers", "encoder_ffn", "decoder_ffn",
            "source_vocabulary", "vocabulary", "pre_norm", "encoder_heads", "encoder_key", "encoder_value",
            "decoder_heads", "decoder_key", "decoder_value",
        )
    ]  # fmt: skip


def why_not_native(model: VanillaTransformerForConditionalGeneration, precision: Precision) -> str | None:
    """The reason why C++ cannot decode with a model on this machine, as a clause; `None` if it can.

    Args:
        model: The model.
        precision: Precision of the matrix products.
    """
    if model.device.type != "cpu":
        return f"the model is on {model.device}"
    for side in (model.model.encoder, model.model.decoder):
        for layer in side.layers:
            if not isinstance(layer.activation_fn, nn.ReLU):
                return f"its activation is {model.config.activation_function}"
            attention = layer.self_attn
            if attention.d_k % _WIDTH or attention.d_v % _WIDTH or model.config.d_model % _WIDTH:
                return f"one of its widths is not a multiple of {_WIDTH}"
    try:
        library = load_library()
    except OSError as error:
        return str(error)
    if not library.supports_precision(_PRECISIONS[precision]):
        return f"this processor lacks instructions for {precision}"
    return None


class NativeState:
    """The rows of a search: its hypotheses, with their keys and values.

    Args:
        decoder: The decoder that made the state; the state keeps it alive and uses its weights.
        handle: Address of the C++ object.
        num_rows: Number of rows R.
    """

    def __init__(self, decoder: "NativeDecoder", handle: int, num_rows: int):
        self.decoder = decoder
        self.handle = handle
        self.num_rows = num_rows
        self.length = 0
        # Not at exit: another thread may still use the state then, and the system frees the memory anyway.
        weakref.finalize(self, load_library().delete_state, handle).atexit = False


class NativeDecoder:
    """Decodes step by step in C++. A call uses one thread; several threads may call at the same time.

    Args:
        model: The model, on the CPU. Its matrices are copied; embeddings and normalisations in float32 are shared.
        precision: Precision of the matrix products. `float32` gives the model's logits up to rounding. `bfloat16`
            rounds weights and activations. `int8` rounds each row of both to 8 bits on its own scale. In both, sums,
            normalisations and softmax are in float32, and keys and values are stored in bfloat16.

    Raises:
        MemoryError: There is no memory for the weights.
        ValueError: The weights do not have the sizes of the configuration, or this processor lacks the instructions.
    """

    def __init__(self, model: VanillaTransformerForConditionalGeneration, *, precision: Precision):
        config = model.config
        self.vocab_size = config.decoder_vocab_size
        self.device = torch.device("cpu")
        self._source_vocab_size = config.vocab_size
        self._library = load_library()
        self._tensors = [None if tensor is None else _plain(tensor) for tensor in tensors_of(model)]
        self._positions = _Positions(model.model.encoder), _Positions(model.model.decoder)
        encoder_heads, decoder_heads = config.encoder_attention_heads, config.decoder_attention_heads
        dimensions = _Dimensions(
            precision=_PRECISIONS[precision],
            model=config.d_model,
            encoder_layers=config.encoder_layers,
            decoder_layers=config.decoder_layers,
            encoder_ffn=config.encoder_ffn_dim,
            decoder_ffn=config.decoder_ffn_dim,
            source_vocabulary=config.vocab_size,
            vocabulary=config.decoder_vocab_size,
            pre_norm=config.norm_position == "pre",
            encoder_heads=encoder_heads,
            encoder_key=config.d_k or config.d_model // encoder_heads,
            encoder_value=config.d_v or config.d_model // encoder_heads,
            decoder_heads=decoder_heads,
            decoder_key=config.d_k or config.d_model // decoder_heads,
            decoder_value=config.d_v or config.d_model // decoder_heads,
        )
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in self._tensors]
        sizes = [0 if tensor is None else tensor.numel() for tensor in self._tensors]
        handle = ctypes.c_void_p()
        outcome = self._library.new_model(
            ctypes.byref(dimensions),
            (ctypes.c_float * 2)(
                *(stack.embed_tokens.embed_scale for stack in (model.model.encoder, model.model.decoder))
            ),
            config.layer_norm_eps,
            (ctypes.c_void_p * len(pointers))(*pointers),
            (ctypes.c_int64 * len(sizes))(*sizes),
            len(pointers),
            ctypes.byref(handle),
        )
        if outcome == Outcome.NO_MEMORY:
            raise MemoryError("There is no memory left for the weights of the decoder in C++.")
        if outcome == Outcome.BAD_ARGUMENT:
            raise ValueError(
                "The weights of `model` do not have the sizes of its configuration, or this processor lacks the "
                f"instructions for `precision` {precision}."
            )
        self._check(outcome)
        self._model = handle.value
        weakref.finalize(self, self._library.delete_model, self._model).atexit = False

    def start(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> NativeState:
        """Encode sources [B, S] with their mask [B, S], one row each; see `IncrementalDecoder`."""
        present = attention_mask.numpy() != 0
        lengths = present.sum(1)
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        ids = np.ascontiguousarray(input_ids.numpy()[present], dtype=np.int64)
        positions = self._positions[0].up_to(int(lengths.max(initial=0)))
        handle = ctypes.c_void_p()
        outcome = self._library.new_state(
            self._model, ids.ctypes.data, offsets.ctypes.data, len(lengths), positions.data_ptr(), ctypes.byref(handle)
        )
        if outcome == Outcome.UNKNOWN_TOKEN:
            raise IndexError(f"A source token is not among the model's {self._source_vocab_size}.")
        self._check(outcome)
        return NativeState(self, handle.value, len(lengths))

    def step(self, state: NativeState, tokens: torch.Tensor) -> torch.Tensor:
        """Append a token to each row [R], and return the logits [R, V]; see `IncrementalDecoder`."""
        logits = torch.empty(state.num_rows, self.vocab_size)
        tokens, position = self._one_a_row(state, tokens.numpy()), self._position(state)
        outcome = self._library.step_logits(state.handle, tokens.ctypes.data, position.data_ptr(), logits.data_ptr())
        self._check(outcome)
        return logits

    def step_best(
        self, state: NativeState, tokens: np.ndarray, count: int, forbidden: np.ndarray, *, with_log_probs: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """Append a token to each row [R], and find the `count` likeliest next tokens; see `ChoosingDecoder`.

        Returns:
            Their ids and log-probabilities, or logits without `with_log_probs`, both [R, count].
        """
        tokens, position = self._one_a_row(state, tokens), self._position(state)
        forbidden = np.ascontiguousarray(forbidden, dtype=np.int64)
        values = np.empty((state.num_rows, count), dtype=np.float32)
        ids = np.empty((state.num_rows, count), dtype=np.int64)
        outcome = self._library.step_best(
            state.handle, tokens.ctypes.data, position.data_ptr(), forbidden.ctypes.data, len(forbidden), count,
            with_log_probs, values.ctypes.data, ids.ctypes.data,
        )  # fmt: skip
        self._check(outcome)
        return ids, values

    def select(self, state: NativeState, sentences: torch.Tensor | None, rows: torch.Tensor) -> None:
        """Keep some sentences [B'] and continue some rows [R']; see `IncrementalDecoder`."""
        rows = rows.to(torch.int64).contiguous()
        if sentences is None:
            outcome = self._library.select_rows(state.handle, None, 0, rows.data_ptr(), len(rows))
        else:
            sentences = sentences.to(torch.int64).contiguous()
            outcome = self._library.select_rows(
                state.handle, sentences.data_ptr(), len(sentences), rows.data_ptr(), len(rows)
            )
        self._check(outcome)
        state.num_rows = len(rows)

    @staticmethod
    def _one_a_row(state: NativeState, tokens: np.ndarray) -> np.ndarray:
        if tokens.shape != (state.num_rows,):
            raise ValueError(
                f"`tokens` has the shape {tokens.shape}, but there are {state.num_rows} rows; give each row one token."
            )
        return np.ascontiguousarray(tokens, dtype=np.int64)

    def _check(self, outcome: int) -> None:
        if outcome == Outcome.NO_MEMORY:
            raise MemoryError("There is no memory left to translate a batch; lower `tokens_per_batch`.")
        if outcome == Outcome.UNKNOWN_TOKEN:
            raise IndexError(f"A target token is not among the model's {self.vocab_size}.")
        if outcome == Outcome.BAD_ARGUMENT:
            raise ValueError("A source has no tokens, or `rows` or `sentences` names one that does not exist.")
        if outcome != Outcome.DONE:
            raise RuntimeError(f"The decoder in C++ failed with status {outcome} in this step or an earlier one.")

    def _position(self, state: NativeState) -> torch.Tensor:
        """Count a step, and return its position vector [D], a view that keeps its table alive."""
        state.length += 1
        return self._positions[1].up_to(state.length)[state.length - 1]


class _Positions:
    """A stack's table of position vectors, which grows when a longer sequence needs it."""

    def __init__(self, stack: nn.Module):
        self._module = stack.embed_positions
        self._table = torch.empty(0, stack.config.d_model)

    def up_to(self, length: int) -> torch.Tensor:
        """The vectors of at least `length` positions [>= length, D], in float32."""
        # Another thread may replace the table at any time: read it once. The caller's reference keeps it alive.
        table = self._table
        if len(table) < length:
            bound = getattr(self._module, "num_embeddings", 2**31)
            if length > bound:
                raise IndexError(f"The model has {bound} learned positions, but position {length} was asked for.")
            size = min(max(2 * length, 256), bound)
            with torch.inference_mode():
                table = self._module(torch.arange(size), torch.float32).contiguous()
            self._table = table
        return table


def tensors_of(model: VanillaTransformerForConditionalGeneration) -> Iterator[torch.Tensor | None]:
    """A model's tensors in the order in which the C++ decoder reads them; `None` for a missing bias."""

    def parameters(*modules: nn.Module) -> Iterator[torch.Tensor | None]:
        for module in modules:
            yield module.weight
            yield module.bias

    def attention_in(attention: nn.Module) -> Iterator[torch.Tensor | None]:
        return parameters(attention.q_proj, attention.k_proj, attention.v_proj)

    for stack in (model.model.encoder, model.model.decoder):
        yield stack.embed_tokens.weight
        for layer in stack.layers:
            yield from attention_in(layer.self_attn)
            yield from parameters(layer.self_attn.out_proj, layer.self_attn_layer_norm)
            if stack is model.model.decoder:
                yield from attention_in(layer.encoder_attn)
                yield from parameters(layer.encoder_attn.out_proj, layer.encoder_attn_layer_norm)
            yield from parameters(layer.fc1, layer.fc2, layer.final_layer_norm)
        if stack.layer_norm is not None:
            yield from parameters(stack.layer_norm)
    yield model.lm_head.weight
    yield model.final_logits_bias


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.float32).contiguous()


@cache
def load_library() -> ctypes.CDLL:
    """Load the C++ decoder, compiled if it is not in the cache.

    Returns:
        The library, with the types of its functions.

    Raises:
        OSError: There is no compiler, or it or its result does not work; the message is a clause with the reason.
    """
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    functions = {
        "supports_precision": (ctypes.c_int, [number]),
        "new_model": (ctypes.c_int, [pointer, pointer, ctypes.c_float, pointer, pointer, number, pointer]),
        "delete_model": (None, [pointer]),
        "new_state": (ctypes.c_int, [*[pointer] * 3, number, pointer, pointer]),
        "delete_state": (None, [pointer]),
        "step_logits": (ctypes.c_int, [pointer] * 4),
        "step_best": (ctypes.c_int, [*[pointer] * 4, number, number, ctypes.c_int, pointer, pointer]),
        "select_rows": (ctypes.c_int, [pointer, pointer, number, pointer, number]),
    }
    constants = {
        "width": _WIDTH,
        **_PRECISIONS,
        **library.constants_of_outcomes(),
        **library.constants_of_layout(_Dimensions),
    }
    return library.load_library("decoder", _SOURCES, functions, constants)
