"""Chooses the fastest decoder for a model on this machine."""

import logging
from threading import Lock
from typing import Any

import torch

from vanilla_transformer.errors import UserError
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.native.incremental_decoder import NativeDecoder, why_not_native
from vanilla_transformer.translation.options import Quantization

from .packed_weights import can_pack
from .plain_models import Snapshot, unwrapped, why_not_plain
from .through_modules import PlainDecoder
from .torch_packed import PackedDecoder


logger = logging.getLogger(__name__)


class ModelDecoder:
    """The decoder of a model, made anew when the model has changed.

    Args:
        model: The model, in any wrapper that `unwrapped` removes.
        quantization: As for `make_decoder`.

    Attributes:
        current: The decoder as it was made last.

    Raises:
        UserError: As `make_decoder` and `unwrapped`.
    """

    def __init__(self, model: Any, *, quantization: Quantization | None = None):
        self._model = model
        self._quantization = quantization
        self._lock = Lock()
        self._snapshot: Snapshot | None = None
        self._reason: str | None = None
        self.current: NativeDecoder | PackedDecoder | PlainDecoder
        self.renew()

    def renew(self) -> None:
        """Make the decoder anew if the model has changed; `Snapshot` says which changes are noticed.

        Raises:
            UserError: As the class.
        """
        model = unwrapped(self._model)
        with self._lock:
            if self._snapshot is not None and self._snapshot.holds():
                return
            reason = why_not_plain(model)
            if reason is None:
                # Before the weights are read, so that a change in the meantime is noticed by the next call.
                snapshot = Snapshot(model)
                self.current = make_fast_decoder(model, quantization=self._quantization)
            else:
                snapshot = None
                self.current = make_plain_decoder(model, reason, quantization=self._quantization)
                if reason != self._reason:
                    logger.warning(
                        "The model translates through its own modules, without the faster decoders: %s.", reason
                    )
            self._snapshot, self._reason = snapshot, reason


def make_decoder(
    model: VanillaTransformerForConditionalGeneration, *, quantization: Quantization | None = None
) -> NativeDecoder | PackedDecoder | PlainDecoder:
    """Make the fastest decoder that computes what the model does, as precisely as asked.

    Args:
        model: The model.
        quantization: `int8` rounds both factors of each GEMM to 8 bits; `None` rounds nothing.

    Returns:
        The decoder.

    Raises:
        UserError: There is no such quantisation of the model, or on its device.
    """
    return ModelDecoder(model, quantization=quantization).current


def make_plain_decoder(
    model: VanillaTransformerForConditionalGeneration, reason: str, *, quantization: Quantization | None
) -> PlainDecoder:
    """Make the decoder that calls the model.

    Args:
        model: The model.
        reason: Why no other decoder computes what the model does, as a clause.
        quantization: `None`; any other value is refused.

    Returns:
        The decoder.

    Raises:
        UserError: A quantisation was asked for.
    """
    if quantization is not None:
        raise UserError(f"`quantization` {quantization} is not possible here, because {reason}; leave it out.")
    return PlainDecoder(model)


def make_fast_decoder(
    model: VanillaTransformerForConditionalGeneration, *, quantization: Quantization | None = None
) -> NativeDecoder | PackedDecoder:
    """Make the fastest decoder that reads weights, for a model that `why_not_plain` has no reason against.

    On CPUs, that is the decoder in C++ if it can be compiled and the processor has the instructions that it needs, or
    else the one made of torch's operators. A model in bfloat16 is computed in float32 if the processor has no
    instructions for bfloat16, which would then be slower.

    Args:
        model: The model; the decoder computes in its dtype, except as said above.
        quantization: As for `make_decoder`.

    Returns:
        The decoder.

    Raises:
        UserError: There is no such quantisation on the model's device.
    """
    if quantization is not None:
        reason = why_not_native(model, "int8")
        if reason is None:
            return NativeDecoder(model, precision="int8")
        if model.device.type == "cpu" and can_pack("int8"):
            return PackedDecoder(model, dtype=torch.float32, packing="int8")
        raise UserError(f"`quantization` {quantization} is not possible here, because {reason}; leave it out.")
    if model.device.type != "cpu" or model.dtype == torch.float64:
        return PackedDecoder(model, dtype=model.dtype)
    if model.dtype == torch.bfloat16:
        if why_not_native(model, "bfloat16") is None:
            return NativeDecoder(model, precision="bfloat16")
        if can_pack("onednn"):
            return PackedDecoder(model, dtype=torch.bfloat16)
    if why_not_native(model, "float32") is None:
        return NativeDecoder(model, precision="float32")
    return PackedDecoder(model, dtype=torch.float32)
