"""The model at the start of a run."""

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from vanilla_transformer.loading import load_model
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.native.dropout import use_sixteen_bit_dropout
from vanilla_transformer.training.cpu.fused_layers import fuse_operations
from vanilla_transformer.training.options import TrainingOptions

from .vocabulary_and_ids import check_positions, model_configuration
from .warm_start import starting_configuration, starting_folder


def make_model(
    options: TrainingOptions, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> VanillaTransformerForConditionalGeneration:
    """Build the model that the options describe, with weights drawn by the seed, or those of `init_from`.

    Args:
        options: Training options.
        tokenizer: Gives the vocabulary's size and the special tokens.
        device: Device of the training; decides the attention implementation if the options say auto.

    Returns:
        The model, on the CPU.

    Raises:
        UserError: The hyper-parameters do not fit together, or the model of `init_from` cannot be used.
    """
    start = starting_folder(options)
    if start is None:
        config = model_configuration(options, tokenizer)
        torch.manual_seed(options.seed)
        model = VanillaTransformerForConditionalGeneration(config)
    else:
        config = starting_configuration(options, start)
        check_positions(config, options)
        # Train in the default dtype, whatever type the weights were saved in.
        model = load_model(start, config=config, dtype=torch.get_default_dtype())
    attention = options.attention
    if attention == "auto":
        attention = "eager" if device.type == "cpu" else "sdpa"
    model.set_attn_implementation(attention)
    if device.type == "cpu":
        use_sixteen_bit_dropout(model)
        fuse_operations(model)
    if options.gradient_checkpointing:
        # transformers 5.23 renamed this method and warns about the old name.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
    beam_search = {"num_beams": options.num_beams}
    if options.num_beams > 1:
        # transformers refuses to save these options with greedy search.
        beam_search.update(length_penalty=options.length_penalty, early_stopping=True)
    # The paper's cap, source length + 50 (§6.1), for the longest source that the model was trained on.
    max_length = options.max_length + 50
    if config.position_embedding_type == "learned":
        max_length = min(max_length, config.max_position_embeddings)
    model.generation_config = GenerationConfig(
        max_length=max_length,
        **beam_search,
        pad_token_id=config.pad_token_id,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
    )
    return model
