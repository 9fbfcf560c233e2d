"""Runs that start from the weights of another model."""

import copy
from pathlib import Path

from huggingface_hub import snapshot_download
from transformers import PreTrainedTokenizerBase

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.errors import UserError
from vanilla_transformer.loading import load_config
from vanilla_transformer.training.options import TrainingOptions
from vanilla_transformer.training.records.checkpoints import newest_sound


# Hyper-parameters that a new run may change, because the weights do not depend on them.
_FREE = ("dropout", "attention_dropout", "activation_dropout")


def starting_folder(options: TrainingOptions) -> Path | None:
    """The folder of the model that a run starts from.

    Args:
        options: Training options.

    Returns:
        `None` without `init_from`, else the folder of that model, downloaded if it is a name on the Hub. A resumed run
        uses its newest sound checkpoint instead, so that the other model is not needed any more.

    Raises:
        UserError: There is no such model.
    """
    if options.init_from is None:
        return None
    if options.resume:
        return newest_sound(options.output_dir / "checkpoints", lambda text: None)
    folder = Path(options.init_from)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(options.init_from, allow_patterns=["*.json", "*.safetensors"]))
        except (OSError, ValueError) as error:
            # Names in backticks are read as our caller's arguments; these are the Hub client's.
            reason = " ".join(str(error).split()).replace("`", "'")
            raise UserError(
                f"`init_from` is {options.init_from}, neither a folder nor a model on the Hub that can be reached "
                f"({reason}); correct it."
            ) from error
    if not (folder / "config.json").is_file():
        raise UserError(
            f"`init_from` is {folder}, which holds no config.json; give a folder that train or save_pretrained wrote."
        )
    return folder


def starting_configuration(options: TrainingOptions, folder: Path) -> VanillaTransformerConfig:
    """The configuration of the model that a run starts from, with the dropout that the options choose.

    Args:
        options: Training options.
        folder: Folder of the model.

    Returns:
        The configuration.

    Raises:
        UserError: The model is of another kind, or the options describe another architecture.
    """
    config = load_config(folder)
    if not isinstance(config, VanillaTransformerConfig):
        raise UserError(
            f"`init_from` is {folder}, a model of type {config.model_type}; it must be a "
            f"{VanillaTransformerConfig.model_type}."
        )
    if config.decoder_start_token_id is None:
        raise UserError(f"The model of `init_from` {folder} has no decoder_start_token_id; use one that defines it.")
    wanted = options.model_settings()
    different = [
        f"{name} ({getattr(config, name)!r} there, {value!r} in the options)"
        for name, value in wanted.items()
        if name not in _FREE and getattr(config, name) != value
    ]
    if different:
        raise UserError(
            f"The model of `init_from` {folder} and the options differ in {', '.join(different)}; leave these options "
            "out, for the architecture comes from the model."
        )
    config = copy.deepcopy(config)
    for name in _FREE:
        if name in wanted:
            setattr(config, name, wanted[name])
    return config


def check_vocabulary(config: VanillaTransformerConfig, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Refuse a vocabulary that does not fit the model's embeddings.

    Args:
        config: Configuration of the model.
        tokenizer: The vocabulary.
        folder: Folder of the model.

    Raises:
        UserError: Sizes or special tokens differ.
    """
    names = ("pad_token_id", "bos_token_id", "eos_token_id")
    different = [
        f"{name} ({there!r} there, {here!r} in the vocabulary)"
        for name, there, here in (
            ("vocab_size", config.vocab_size, len(tokenizer)),
            *((name, getattr(config, name), getattr(tokenizer, name)) for name in names),
        )
        if there != here
    ]
    if different:
        raise UserError(
            f"The model of `init_from` {folder} and the vocabulary differ in {', '.join(different)}; leave "
            "`tokenizer` out to use the model's own, or give one that fits."
        )
