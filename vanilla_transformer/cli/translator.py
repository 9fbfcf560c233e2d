"""What `translate` and `evaluate` share: options that name a model and its search, and the translator they make."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vanilla_transformer.training.configuration import option
from vanilla_transformer.translation.arguments import check_model_id, check_search


if TYPE_CHECKING:
    from vanilla_transformer.translation.translator import Translator


@dataclass(kw_only=True)
class TranslatorOptions:
    """Options that make a translator."""

    model: str = option(..., "Model folder, or name on the Hub.")
    num_beams: int | None = option(None, "Beam size; default: the model's generation configuration.")
    length_penalty: float | None = option(None, "Power of the length that divides scores; default: likewise.")
    tokens_per_batch: int = option(4096, "Largest padded number of source tokens of a batch.")


def load_translator(options: TranslatorOptions) -> "Translator":
    """Load the model with its tokenizer.

    Args:
        options: Model and search.

    Returns:
        The translator.

    Raises:
        UserError: There is no such model, or an option is out of range.
    """
    search = {
        "num_beams": options.num_beams,
        "length_penalty": options.length_penalty,
        "tokens_per_batch": options.tokens_per_batch,
    }
    # Before seconds of imports.
    check_search(**search)
    check_model_id(options.model)
    from vanilla_transformer.translation.translator import Translator

    from .session import start

    start()
    return Translator.from_pretrained(options.model, **search)
