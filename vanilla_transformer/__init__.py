"""The original Transformer (Vaswani et al., 2017) for training translation models with the Hugging Face tools.

Importing this package registers its configuration, models and tokenizer with the Auto classes of transformers.
"""

import os
import sys
from importlib import import_module


__version__ = "0.1.0"

_HOMES = {
    "TokenBatchSeq2SeqTrainer": "training.seq2seq_trainer",
    "TranslationPipeline": "pipeline_vanilla_transformer",
    "Translator": "translation.translator",
    "VanillaTransformerConfig": "configuration_vanilla_transformer",
    "VanillaTransformerEncoderModel": "modeling_vanilla_transformer",
    "VanillaTransformerForCausalLM": "modeling_vanilla_transformer",
    "VanillaTransformerForConditionalGeneration": "modeling_vanilla_transformer",
    "VanillaTransformerForMaskedLM": "modeling_vanilla_transformer",
    "VanillaTransformerForQuestionAnswering": "modeling_vanilla_transformer",
    "VanillaTransformerForSequenceClassification": "modeling_vanilla_transformer",
    "VanillaTransformerForTokenClassification": "modeling_vanilla_transformer",
    "VanillaTransformerModel": "modeling_vanilla_transformer",
    "VanillaTransformerPreTrainedModel": "modeling_vanilla_transformer",
    "VanillaTransformerTokenizer": "tokenization_vanilla_transformer",
    "paper_beam_search": "translation.custom_generate",
}

__all__ = [*_HOMES]


def register() -> None:
    """Register configuration, models and tokenizer with the Auto classes; a second call does nothing."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from . import modeling_vanilla_transformer as modeling
    from .configuration_vanilla_transformer import VanillaTransformerConfig
    from .tokenization_vanilla_transformer import VanillaTransformerTokenizer

    if VanillaTransformerConfig.model_type in CONFIG_MAPPING:
        return
    transformers.AutoConfig.register(VanillaTransformerConfig.model_type, VanillaTransformerConfig)
    for auto_class, model_class in (
        ("AutoModel", "VanillaTransformerModel"),
        ("AutoModelForCausalLM", "VanillaTransformerForCausalLM"),
        ("AutoModelForMaskedLM", "VanillaTransformerForMaskedLM"),
        ("AutoModelForQuestionAnswering", "VanillaTransformerForQuestionAnswering"),
        ("AutoModelForSeq2SeqLM", "VanillaTransformerForConditionalGeneration"),
        ("AutoModelForSequenceClassification", "VanillaTransformerForSequenceClassification"),
        ("AutoModelForTextEncoding", "VanillaTransformerEncoderModel"),
        ("AutoModelForTokenClassification", "VanillaTransformerForTokenClassification"),
    ):
        getattr(transformers, auto_class).register(VanillaTransformerConfig, getattr(modeling, model_class))
    # Trainer looks here, and not in the registry, to decide whether its label smoothing has to shift the labels.
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[VanillaTransformerConfig.model_type] = "VanillaTransformerForCausalLM"
    transformers.AutoTokenizer.register(VanillaTransformerConfig, tokenizer_class=VanillaTransformerTokenizer)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Importing torch takes seconds. The console script answers --help and mistyped options without it, and registers when
# a verb starts to work.
if os.path.splitext(os.path.basename(sys.argv[0] if sys.argv else ""))[0] != "vanilla-transformer":
    register()
