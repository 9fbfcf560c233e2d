"""Which decoder a model gets on the machine at hand."""

import torch

from vanilla_transformer.errors import UserError
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

from .arguments import Quantization
from .decoder import PackedDecoder
from .native import NativeDecoder, why_not_native
from .packing import can_pack


def make_decoder(
    model: VanillaTransformerForConditionalGeneration, *, quantization: Quantization | None = None
) -> NativeDecoder | PackedDecoder:
    """Make the fastest decoder that computes as precisely as asked.

    On CPUs that is the one in C++ where it can be compiled and the processor has what it needs, else the one of
    torch's operators. Models in bfloat16 are computed in float32 where the processor has no instructions for them,
    because bfloat16 would be slower there.

    Args:
        model: The model, in evaluation mode; its dtype is what is computed in.
        quantization: `int8` rounds matrices, and what is multiplied with them, to 8 bits; `None` rounds nothing.

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
        raise UserError(f"--quantization {quantization} is not possible here, because {reason}; leave it out.")
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
