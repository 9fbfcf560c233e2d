"""Training on padding-free (packed) batches: the sentences follow one another in one row [1, N].

The attention kernels take the start of each sentence, so that no sentence attends to another.
"""

import torch

from vanilla_transformer import VanillaTransformerForConditionalGeneration, VanillaTransformerModel
from vanilla_transformer.native import training_kernels as kernels
from vanilla_transformer.training.options import TrainingOptions


def can_pack(
    model: VanillaTransformerForConditionalGeneration, options: TrainingOptions, device: torch.device
) -> bool:
    """Whether training can use packed batches: their attention has no other way than the kernels in C++.

    Args:
        model: A model with fused layers.
        options: Training options.
        device: Device of training.
    """
    config, layer = model.config, model.model.decoder.layers[0]
    return (
        device.type == "cpu"
        and options.mixed_precision == "bf16"
        and config._attn_implementation == "eager"
        and config.attention_dropout == 0.0
        and all(
            kernels.can_attend(torch.bfloat16, options.max_length, attention.d_k, attention.d_v)
            for attention in (layer.self_attn, layer.encoder_attn, model.model.encoder.layers[0].self_attn)
        )
    )


def last_hidden_states(
    model: VanillaTransformerModel,
    input_ids: torch.Tensor,
    source_starts: torch.Tensor,
    decoder_input_ids: torch.Tensor,
    target_starts: torch.Tensor,
) -> torch.Tensor:
    """Run encoder and decoder on a packed batch of B pairs.

    Args:
        model: Encoder and decoder with fused layers, under autocast.
        input_ids: Source ids [1, S].
        source_starts: Index of each source's first token, then the number of all tokens [B + 1], in int64.
        decoder_input_ids: Target ids [1, T], shifted right.
        target_starts: The same for the targets [B + 1].

    Returns:
        The decoder's hidden states [1, T, D].
    """
    encoder, decoder = model.encoder, model.decoder
    memory = encoder.embed(input_ids, None, _positions(source_starts))[0]
    within_source = kernels.Sentences(source_starts, source_starts)
    for layer in encoder.layers:
        memory = layer(memory, within_source)
    if encoder.layer_norm is not None:
        memory = encoder.layer_norm(memory)
    hidden_states = decoder.embed(decoder_input_ids, None, _positions(target_starts))[0]
    within_target = kernels.Sentences(target_starts, target_starts, causal=True)
    to_source = kernels.Sentences(target_starts, source_starts)
    for layer in decoder.layers:
        hidden_states = layer(hidden_states, within_target, memory, encoder_attention_mask=to_source)
    if decoder.layer_norm is not None:
        hidden_states = decoder.layer_norm(hidden_states)
    return hidden_states


def _positions(starts: torch.Tensor) -> torch.Tensor:
    """The position of each token in its sentence [1, N], given the starts [B + 1]."""
    return (torch.arange(int(starts[-1])) - starts[:-1].repeat_interleave(starts.diff()))[None]
