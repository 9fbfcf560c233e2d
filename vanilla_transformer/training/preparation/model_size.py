"""The number of parameters of a model, computed before memory is allocated."""

import os

import torch

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.errors import UserError
from vanilla_transformer.training.cpu.memory import machine_memory


def num_parameters(config: VanillaTransformerConfig) -> int:
    """Number of parameters of a translation model; shared matrices count once.

    Args:
        config: Configuration of the model, of any size.

    Returns:
        The number.
    """
    d, shared, tied = config.d_model, config.share_encoder_decoder_embeddings, config.tie_word_embeddings
    vocabularies = config.vocab_size + config.decoder_vocab_size * (int(not shared) + int(not tied))
    learned = 2 * config.max_position_embeddings if config.position_embedding_type == "learned" else 0
    last_norms = 2 if config.norm_position == "pre" else 0
    encoder = _attention(config, config.encoder_attention_heads) + _feed_forward(d, config.encoder_ffn_dim) + 4 * d
    decoder = 2 * _attention(config, config.decoder_attention_heads) + _feed_forward(d, config.decoder_ffn_dim) + 6 * d
    layers = config.encoder_layers * encoder + config.decoder_layers * decoder
    return (vocabularies + learned + 2 * last_norms) * d + layers


def check_size(config: VanillaTransformerConfig) -> None:
    """Refuse a model that cannot fit into the memory of the machine.

    Args:
        config: Configuration of the model.

    Raises:
        UserError: The weights do not fit; or, in a single process on a CPU, weights, gradients and Adam's two moments
            do not fit.
    """
    memory = machine_memory()
    if memory is None:
        return
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1 and not torch.accelerator.is_available()
    count = num_parameters(config)
    needed = count * torch.get_default_dtype().itemsize * (4 if is_alone else 1)
    if needed > memory:
        what = "weights, gradients and Adam's two moments" if is_alone else "weights"
        raise UserError(
            f"The model would have {count:,} parameters, whose {what} take {needed / 2**30:,.0f} GiB; this machine "
            f"has {memory / 2**30:,.0f} GiB, so choose smaller dimensions or fewer layers."
        )


def _attention(config: VanillaTransformerConfig, heads: int) -> int:
    keys = heads * (config.d_k or config.d_model // heads)
    values = heads * (config.d_v or config.d_model // heads)
    biases = 2 * keys + values + config.d_model if config.attention_bias else 0
    return 2 * config.d_model * (keys + values) + biases


def _feed_forward(d_model: int, width: int) -> int:
    return 2 * d_model * width + width + d_model
