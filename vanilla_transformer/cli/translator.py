"""What `translate` and `evaluate` share: options that name a model and its search, and the translator they make."""

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
        False, "Run Python code that comes with the model; only for sources that you trust. Default: never."
    )
    device: str | None = option(None, "Where to run, such as cpu or cuda:1; default: a GPU if there is one.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Floating-point type of the weights; auto: as they were saved."
    )
    quantization: Quantization | None = option(None, "Round the weights; default: not at all.")
    target_language: str | None = option(
        None,
        "Language to translate to, for models with a tag for each; default: the one that the model was saved with.",
    )
    num_beams: int | None = option(
        None, "Beam size, 1 for greedy search; default: the model's generation configuration."
    )
    length_penalty: float | None = option(
        None, "Power of the length penalty ((5 + length) / 6) that divides scores; default: likewise, else 0.6."
    )
    rules: SearchRules | None = option(
        None, 'The paper\'s beam search, or that of transformers, generate(early_stopping="never"); default: paper.'
    )
    extra_length: int | None = option(None, "Largest number of tokens beyond the source's; default: 50.")
    min_length: int | None = option(None, "Smallest number of tokens; default: 0.")
    long_texts: LongTexts = option(
        "split", "Texts longer than the model was trained for: split at ends of sentences, refuse or translate whole."
    )
    max_source_tokens: int | None = option(None, "How long that is; default: as saved with the model.")
    tokens_per_batch: int = option(4096, "Largest padded number of source tokens of a batch.")
    workers: int | None = option(
        None, "Batches that are translated at once, each on one core; default: a core for each, and one on a GPU."
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
