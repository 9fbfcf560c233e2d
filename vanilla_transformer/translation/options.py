"""Options of a translator, checked without importing torch, so that the command line answers mistakes at once."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from vanilla_transformer.errors import UserError


MODEL_FILES = ("config.json", "tokenizer.json")

SearchRules = Literal["paper", "transformers"]
LongTexts = Literal["split", "refuse", "translate"]
Quantization = Literal["int8"]


# The search allocates memory for all hypotheses and tokens before it begins.
_LARGEST = {"num_hypotheses": 10_000, "num_beams": 10_000, "extra_length": 100_000}


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """Options of the search for a translation; the defaults are the paper's (§6.1).

    Lengths are numbers of tokens. They include `</s>`, but not the token that decoding starts from.

    Args:
        num_beams: Beam size, 1 to 10,000; 1 is greedy search.
        num_hypotheses: Number of translations of each sentence: at most `num_beams`; with `sample`, at most 10,000.
        length_penalty: Exponent of the length penalty, -10 to 10. The log-probability of a translation is divided by
            the penalty; below 0, short translations win.
        rules: `paper` divides by ((5 + length) / 6)^`length_penalty` (Wu et al., 2016) and lets any of the
            2 x `num_beams` best candidates end; `transformers` divides by length^`length_penalty`, and only the best
            `num_beams` candidates may end, as in `generate(early_stopping="never")`.
        extra_length: A translation has at most this many tokens more than its source, 0 to 100,000.
        max_length: A translation has at most this many tokens, whatever its source; at least 1. `None` sets no bound.
        min_length: A translation has at least this many tokens before `</s>`.
        banned_tokens: Ids of tokens that no translation contains. The softmax leaves them out.
        sample: Whether to draw each token by its probability, instead of searching for the best translation.
        temperature: Divides the logits before a token is drawn, above 0.
        top_k: Draw only from this many most probable tokens; 0 for all.
        top_p: Draw only from the smallest set of most probable tokens whose probabilities add up to this, in (0, 1].
        seed: Seed of the draws, at least 0 and below 2^63. A draw depends on the seed and on the position of the text
            among all texts, not on the batch.

    Raises:
        UserError: A value is out of range, or values do not fit together.
    """

    num_beams: int = 4
    num_hypotheses: int = 1
    length_penalty: float = 0.6
    rules: SearchRules = "paper"
    extra_length: int = 50
    max_length: int | None = None
    min_length: int = 0
    banned_tokens: tuple[int, ...] = ()
    sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        for name, smallest in (("num_beams", 1), ("num_hypotheses", 1), ("max_length", 1)):
            check_at_least(name, getattr(self, name), smallest)
        for name in ("extra_length", "min_length", "top_k", "seed"):
            check_at_least(name, getattr(self, name), 0)
        for name, largest in _LARGEST.items():
            if getattr(self, name) is not None and getattr(self, name) > largest:
                raise UserError(f"`{name}` is {getattr(self, name)}; it must be at most {largest}.")
        if self.seed >= 1 << 63:
            raise UserError(f"`seed` is {self.seed}; it must be below 2**63.")
        # Larger powers of lengths overflow float32.
        if not abs(self.length_penalty) <= 10.0:
            raise UserError(f"`length_penalty` is {self.length_penalty}; it must be a number from -10 to 10.")
        if self.rules not in get_args(SearchRules):
            raise UserError(f"`rules` is {self.rules}; it must be one of {', '.join(get_args(SearchRules))}.")
        if not 0.0 < self.temperature < math.inf:
            raise UserError(f"`temperature` is {self.temperature}; it must be above 0.")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"`top_p` is {self.top_p}; it must be above 0 and at most 1.")
        if self.sample and self.num_beams != 1:
            raise UserError(f"`num_beams` is {self.num_beams}, but `sample` needs `num_beams` 1.")
        if not self.sample and self.num_hypotheses > self.num_beams:
            raise UserError(
                f"`num_hypotheses` is {self.num_hypotheses}; it must be at most `num_beams`, {self.num_beams}."
            )
        if not self.sample:
            for name, unset in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0)):
                if getattr(self, name) != unset:
                    raise UserError(f"`{name}` was given without `sample`; it applies to sampling only.")

    def penalty(self, length):
        """The length penalty, by which the log-probability of a translation is divided.

        Args:
            length: Number of tokens, or an array of numbers of tokens.

        Returns:
            The penalty, or an array of penalties of the same shape.
        """
        base = (5.0 + length) / 6.0 if self.rules == "paper" else length * 1.0
        return base**self.length_penalty


def check_at_least(name: str, value: int | None, smallest: int) -> None:
    """Refuse an option below its smallest value.

    Args:
        name: Name of the option.
        value: Its value; `None` passes.
        smallest: Smallest value.

    Raises:
        UserError: The value is smaller.
    """
    if value is not None and value < smallest:
        raise UserError(f"`{name}` is {value}; it must be at least {smallest}.")


def check_characters(text: str, place: str) -> None:
    """Refuse a text that cannot be encoded as UTF-8.

    Args:
        text: The text.
        place: What the text is, or where it stands, for the error message.

    Raises:
        UserError: The text holds a lone surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{place}, holds the lone surrogate {text[error.start]!a}; correct it.") from error


def check_search(search: dict[str, Any], *, tokens_per_batch: int, max_source_tokens: int | None = None) -> None:
    """Check those options of a translator that can be checked without its model.

    Args:
        search: Fields of `SearchOptions`; `None` takes the value of the model's generation configuration.
        tokens_per_batch: At least 1.
        max_source_tokens: At least 1, or `None`.

    Raises:
        UserError: A value is out of range, or values do not fit together.
    """
    check_at_least("tokens_per_batch", tokens_per_batch, 1)
    check_at_least("max_source_tokens", max_source_tokens, 1)
    given = {name: value for name, value in search.items() if value is not None}
    if "num_beams" not in given:
        given["num_beams"] = 1 if given.get("sample") else max(1, given.get("num_hypotheses", 1))
    SearchOptions(**given)


def check_model_id(model_id: str | Path) -> None:
    """Check that this is a model's folder, or has the form of a name on the Hub; the Hub is not asked.

    Args:
        model_id: A model's folder, or its name on the Hub, `user/name`.

    Raises:
        UserError: The folder lacks a model's files, or this is neither a folder nor a possible name.
    """
    folder = Path(model_id)
    if folder.is_dir():
        for name in MODEL_FILES:
            if not (folder / name).is_file():
                raise UserError(
                    f"{model_id} is not a model folder: it lacks {name}; give a folder that `train` finished, or one "
                    "of its checkpoints."
                )
    elif folder.exists():
        raise UserError(f"{model_id} is a file; give a model folder, or a name on the Hub.")
    elif not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(model_id)):
        raise UserError(
            f"There is no folder {model_id}; give a model folder, or a name on the Hub, which has the form user/name."
        )
