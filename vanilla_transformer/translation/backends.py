"""Two ways from source ids to translations: this package's search, and `generate` for models of other classes.

Shapes: S sentences, T source positions.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from vanilla_transformer.data.collation import pad
from vanilla_transformer.errors import UserError
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.translation.decoders.choice import ModelDecoder
from vanilla_transformer.translation.decoders.plain_models import unwrapped
from vanilla_transformer.translation.decoders.through_modules import PlainDecoder
from vanilla_transformer.translation.search.hypotheses import Hypothesis
from vanilla_transformer.translation.search.search import SpecialTokens, search

from .options import Quantization, SearchOptions


class Backend(Protocol):
    """Translates batches of ids."""

    @property
    def takes_threads(self) -> bool:
        """Whether several threads may translate at the same time."""
        ...

    def renew(self) -> None:
        """Notice changes of the model since the last call."""
        ...

    def translate(
        self,
        sources: Sequence[np.ndarray],
        *,
        prefixes: Sequence[Sequence[int]] | None,
        places: Sequence[int],
        with_scores: bool,
    ) -> list[list[Hypothesis]]:
        """Translate a batch.

        Args:
            sources: Ids of each sentence.
            prefixes: For each sentence the ids that its translations begin with; `None` for none.
            places: As for `search`.
            with_scores: As for `search`.

        Returns:
            For each sentence its translations, the best first.
        """
        ...


def make_backend(
    model: PreTrainedModel, pad_token_id: int, options: SearchOptions, *, quantization: Quantization | None = None
) -> Backend:
    """Choose how a model translates.

    Args:
        model: A model that generates text, in any wrapper that `unwrapped` removes.
        pad_token_id: Id that fills sources.
        options: Options of the search.
        quantization: As for `make_decoder`.

    Returns:
        The backend.

    Raises:
        UserError: The model's class cannot do what the options ask for.
    """
    inner = unwrapped(model)
    if isinstance(inner, VanillaTransformerForConditionalGeneration):
        return SearchBackend(inner, pad_token_id, options, ModelDecoder(model, quantization=quantization))
    if options.sample or options.banned_tokens or options.rules == "transformers" or quantization is not None:
        raise UserError(
            f"{type(inner).__name__} translates with its own `generate`, which has no `sample`, `rules`, "
            "`quantization` or banned tokens here; leave them out."
        )
    return GenerateBackend(inner, pad_token_id, options)


def options_for(model: PreTrainedModel, given: dict[str, Any]) -> SearchOptions:
    """Complete options of a search from the model's generation configuration, and then with the paper's values.

    Args:
        model: A model that generates text.
        given: Fields of `SearchOptions`; `None` as if left out.

    Returns:
        The options.

    Raises:
        UserError: A value is out of range, or values do not fit together.
    """
    config = model.generation_config
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("sample"):
        given.setdefault("num_beams", 1)
    defaults = {
        name: getattr(config, name) for name in ("num_beams", "length_penalty") if getattr(config, name) is not None
    }
    if isinstance(model, VanillaTransformerForConditionalGeneration):
        if "banned_tokens" not in given:
            given["banned_tokens"] = banned_tokens_of(config)
        if model.config.position_embedding_type == "learned":
            bound = model.config.max_position_embeddings
            given["max_length"] = min(bound, given.get("max_length", bound))
    return SearchOptions(**{**defaults, **given})


def banned_tokens_of(config: GenerationConfig) -> tuple[int, ...]:
    """Tokens that a generation configuration bans.

    Args:
        config: The configuration.

    Returns:
        Ids of `suppress_tokens` and `bad_words_ids`.

    Raises:
        UserError: A bad word has several tokens.
    """
    words = config.bad_words_ids or ()
    if any(len(word) != 1 for word in words):
        raise UserError(
            "`bad_words_ids` bans words of several tokens, but this search bans single tokens only; leave such words "
            "out of the generation configuration."
        )
    return (*(config.suppress_tokens or ()), *(word[0] for word in words))


def special_tokens_of(config: GenerationConfig) -> SpecialTokens:
    """The tokens that a model's translations start from and end with."""
    ends = config.eos_token_id
    return SpecialTokens(config.decoder_start_token_id, tuple(ends) if isinstance(ends, Sequence) else (ends,))


class SearchBackend:
    """Translates with this package's search.

    Args:
        model: The model; only its special tokens are read.
        pad_token_id: Id that fills sources.
        options: Options of the search.
        decoder: Scores tokens.
    """

    def __init__(
        self,
        model: VanillaTransformerForConditionalGeneration,
        pad_token_id: int,
        options: SearchOptions,
        decoder: ModelDecoder,
    ):
        self._special_tokens = special_tokens_of(model.generation_config)
        self._pad_token_id = pad_token_id
        self._options = options
        self._decoder = decoder

    @property
    def takes_threads(self) -> bool:
        """As `Backend.takes_threads`: not if the model is called, because its hooks may not be thread-safe."""
        return not isinstance(self._decoder.current, PlainDecoder)

    def renew(self) -> None:
        """As `Backend.renew`."""
        self._decoder.renew()

    def translate(
        self,
        sources: Sequence[np.ndarray],
        *,
        prefixes: Sequence[Sequence[int]] | None,
        places: Sequence[int],
        with_scores: bool,
    ) -> list[list[Hypothesis]]:
        """As `Backend.translate`."""
        input_ids, attention_mask = pad(sources, self._pad_token_id)
        decoder = self._decoder.current
        return search(
            decoder,
            input_ids.to(decoder.device),
            attention_mask.to(decoder.device),
            self._special_tokens,
            self._options,
            prefixes=prefixes,
            places=places,
            with_scores=with_scores,
        )


class GenerateBackend:
    """`generate` of a model of another class, with transformers' penalty and stop rule.

    Args:
        model: The model.
        pad_token_id: Id that fills sources.
        options: The kind of search; the caps are those of the longest source of a batch.
    """

    def __init__(self, model: PreTrainedModel, pad_token_id: int, options: SearchOptions):
        self._model = model
        self._pad_token_id = pad_token_id
        self._options = options

    @property
    def takes_threads(self) -> bool:
        """As `Backend.takes_threads`: no, because `generate` does not promise to be thread-safe."""
        return False

    def renew(self) -> None:
        """As `Backend.renew`: nothing to do, because `generate` calls the model."""

    @torch.inference_mode()
    def translate(
        self,
        sources: Sequence[np.ndarray],
        *,
        prefixes: Sequence[Sequence[int]] | None,
        places: Sequence[int],
        with_scores: bool,
    ) -> list[list[Hypothesis]]:
        """As `Backend.translate`, without prefixes."""
        if prefixes is not None and any(prefixes):
            raise UserError(f"{type(self._model).__name__} takes no forced prefix here; leave prefixes out.")
        options = self._options
        input_ids, attention_mask = pad(sources, self._pad_token_id)
        max_new_tokens = min(input_ids.shape[1] + options.extra_length, options.max_length or 1 << 31)
        # Options of beam search in the generation configuration do not apply to greedy search.
        rules = {"length_penalty": options.length_penalty} if options.num_beams > 1 else {"length_penalty": None}
        if options.num_beams == 1:
            rules["early_stopping"] = None
        if options.min_length:
            rules["min_new_tokens"] = options.min_length
        output = self._model.generate(
            input_ids=input_ids.to(self._model.device),
            attention_mask=attention_mask.to(self._model.device),
            max_new_tokens=max_new_tokens,
            max_length=None,
            num_beams=options.num_beams,
            num_return_sequences=options.num_hypotheses,
            return_dict_in_generate=True,
            output_scores=with_scores,
            logits_processor=[_refuse_nan],
            **rules,
        )
        log_probs = np.full(len(output.sequences), np.nan)
        if with_scores:
            transitions = self._model.compute_transition_scores(
                output.sequences,
                output.scores,
                getattr(output, "beam_indices", None),
                normalize_logits=options.num_beams == 1,
            )
            log_probs = transitions.nan_to_num(neginf=0.0).sum(dim=1).cpu().numpy()
        ends = {*special_tokens_of(self._model.generation_config).ends}
        found = []
        for row, log_prob in zip(output.sequences[:, 1:].tolist(), log_probs.tolist(), strict=True):
            length = next((index + 1 for index, token in enumerate(row) if token in ends), len(row))
            score = log_prob / length**options.length_penalty
            found.append(Hypothesis(tuple(row[:length]), log_prob, score, row[length - 1] in ends))
        size = options.num_hypotheses
        return [found[start : start + size] for start in range(0, len(found), size)]


def _refuse_nan(_input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Hand on scores [rows, V], which `generate` would rank even where they are NaN.

    Raises:
        UserError: One of them is NaN.
    """
    if scores.isnan().any():
        raise UserError("The model's scores are NaN: its weights are not finite; repair them.")
    return scores
