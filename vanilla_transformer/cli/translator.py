"""What `translate` and `evaluate` share: options for model and search, and the translator built from them."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from vanilla_transformer.cores import check_side_by_side
from vanilla_transformer.training.options import option
from vanilla_transformer.translation.options import (
    LongTexts,
    Quantization,
    SearchOptions,
    SearchRules,
    check_model_id,
    check_search,
)


if TYPE_CHECKING:
    from vanilla_transformer.translation.translator import Translator


@dataclass(kw_only=True)
class TranslatorOptions:
    """Options that make a translator."""

    model: str = option(..., "Model folder, or name on the Hub.")
    trust_remote_code: bool = option(
        False, "Run the Python code that comes with the model; only for sources that you trust."
    )
    device: str | None = option(None, "Device to run on, such as cpu or cuda:1. Default: a GPU if there is one.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Floating-point type of the weights; auto is the type they were saved in."
    )
    quantization: Quantization | None = option(None, "Quantise the weights. Default: no quantisation.")
    target_language: str | None = option(
        None,
        "Language to translate to, for models with language tags. Default: the one saved with the model.",
    )
    num_beams: int | None = option(
        None, "Beam size; 1 is greedy search. Default: from the model's generation configuration."
    )
    length_penalty: float | None = option(
        None,
        "Power of the length penalty (5 + length) / 6, which divides scores. Default: likewise, else 0.6.",
    )
    rules: SearchRules | None = option(
        None, 'The beam search of the paper, or of transformers: generate(early_stopping="never"). Default: paper.'
    )
    extra_length: int | None = option(
        None, "A translation may have this many tokens more than its source. Default: 50."
    )
    min_length: int | None = option(None, "Smallest number of tokens of a translation. Default: 0.")
    long_texts: LongTexts = option(
        "split",
        "What to do with texts of more than `max_source_tokens`: split them at ends of sentences, refuse them, or "
        "translate them as they are.",
    )
    max_source_tokens: int | None = option(
        None, "Number of tokens up to which a text is translated as a whole. Default: saved with the model."
    )
    tokens_per_batch: int = option(4096, "Largest number of source tokens in a batch, padding included.")
    workers: int | None = option(
        None, "Number of batches translated at the same time, each on one core. Default: all cores; 1 on a GPU."
    )


def load_translator(options: TranslatorOptions) -> "Translator":
    """Load the model with its tokenizer.

    Args:
        options: Model and search: every field that has the name of one of `SearchOptions` is that.

    Returns:
        The translator.

    Raises:
        UserError: There is no such model, or an option is out of range.
    """
    search = {each.name: getattr(options, each.name) for each in fields(SearchOptions) if hasattr(options, each.name)}
    others = {each.name: getattr(options, each.name) for each in fields(TranslatorOptions) if each.name != "model"}
    # Before seconds of imports.
    check_search(search, tokens_per_batch=options.tokens_per_batch, max_source_tokens=options.max_source_tokens)
    check_side_by_side("workers", options.workers)
    check_model_id(options.model)
    from vanilla_transformer.translation.translator import Translator

    from .session import start

    start()
    return Translator.from_pretrained(options.model, **(others | search))
