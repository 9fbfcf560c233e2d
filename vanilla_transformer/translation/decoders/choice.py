"""Which decoder a model gets on the machine at hand."""

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
        model: The model, which the wrappers that `unwrapped` knows may be around.
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
        """Make the decoder anew if the model has changed; see `Snapshot` for what is noticed.

        Raises:
            UserError: As the class.
        """
        model = unwrapped(self._model)
        with self._lock:
            if self._snapshot is not None and self._snapshot.holds():
                return
            reason = why_not_plain(model)
            if reason is None:
                # Before the weights are read, so that what changes meanwhile is noticed the next time.
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
        quantization: `int8` rounds matrices, and what is multiplied with them, to 8 bits; `None` rounds nothing.

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
        reason: Why no other decoder computes what it does, a clause.
        quantization: `None`, or the mistake that is refused.

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

    On CPUs that is the one in C++ where it can be compiled and the processor has what it needs, else the one of
    torch's operators. Models in bfloat16 are computed in float32 where the processor has no instructions for them,
    because bfloat16 would be slower there.

    Args:
        model: The model; its dtype is what is computed in.
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
