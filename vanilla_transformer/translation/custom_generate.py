"""The paper's beam search inside `generate` of transformers."""

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import (
    EosTokenCriteria,
    GenerateBeamEncoderDecoderOutput,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from vanilla_transformer.errors import UserError
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.translation.decoders.through_modules import PlainDecoder
from vanilla_transformer.translation.search.hypotheses import Hypothesis
from vanilla_transformer.translation.search.search import search_from

from .backends import banned_tokens_of, special_tokens_of
from .options import SearchOptions


# The classes that `generate` makes for options that this search has as well.
_PROCESSORS = (
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    SuppressTokensLogitsProcessor,
)
_CRITERIA = (MaxLengthCriteria, EosTokenCriteria)
# The default of `generate`.
_DEFAULT_LENGTH_PENALTY = 1.0


def paper_beam_search(
    model: VanillaTransformerForConditionalGeneration,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    alpha: float | None = None,
    extra_length: int = 50,
    **model_kwargs,
) -> torch.Tensor | GenerateBeamEncoderDecoderOutput:
    """The paper's beam search (§6.1) for the argument `custom_generate` of `generate`.

    The call or the generation configuration sets the beam size, the number of returned sequences, suppressed tokens,
    the smallest length and the decoder inputs, which are a forced prefix. A translation has at most `extra_length`
    tokens more than its own source, and at most `max_new_tokens` if that is given. These options have no effect:
    `early_stopping`; `max_length`, which `generate` sets to 21 if nobody sets it; `streamer` and `assistant_model`,
    which `generate` does not pass on.

    Args:
        model: The model that `generate` was called on.
        input_ids: Decoder inputs [sentences * beams, length], repeated for each beam. `generate` passes this and all
            other arguments except `alpha` and `extra_length`.
        logits_processor: Made by `generate` from its options.
        stopping_criteria: Made by `generate` from its options.
        generation_config: Made by `generate` from its options.
        alpha: Exponent of the length penalty ((5 + length) / 6)^alpha. `None` takes `length_penalty` of the call, or
            else of the model's generation configuration, or else 0.6. If the model's configuration has none, a call
            with `length_penalty=1.0` looks like transformers' default; pass `alpha=1.0` instead.
        extra_length: A translation has at most this many tokens more than its source.
        **model_kwargs: The encoder's output and its mask, repeated for each beam.

    Returns:
        Ids as `generate` returns them; with `return_dict_in_generate`, an output that also has `sequences_scores`.

    Raises:
        UserError: The call sets an option that this search does not support.

    Example:
        >>> from vanilla_transformer import paper_beam_search
        >>> ids = model.generate(**batch, custom_generate=paper_beam_search)  # doctest: +SKIP
    """
    _check(model, logits_processor, stopping_criteria, generation_config, model_kwargs.get("decoder_attention_mask"))
    if alpha is None:
        alpha = generation_config.length_penalty
        if alpha == _DEFAULT_LENGTH_PENALTY and model.generation_config.length_penalty is None:
            alpha = SearchOptions().length_penalty
    options = SearchOptions(
        num_beams=generation_config.num_beams,
        num_hypotheses=generation_config.num_return_sequences,
        length_penalty=alpha,
        extra_length=extra_length,
        # `min_length` of transformers counts the token that decoding starts from.
        min_length=max(0, (generation_config.min_length or 0) - 1),
        banned_tokens=banned_tokens_of(generation_config),
    )
    copies = max(options.num_beams, options.num_hypotheses)
    hidden_states = model_kwargs["encoder_outputs"].last_hidden_state[::copies]
    attention_mask = model_kwargs.get("attention_mask")
    if attention_mask is None:
        attention_mask = hidden_states.new_ones(hidden_states.shape[:2], dtype=torch.int64)
    else:
        attention_mask = attention_mask[::copies]
    caps = attention_mask.sum(dim=1).cpu().numpy() + extra_length
    prompt_length = input_ids.shape[1]
    if generation_config.max_new_tokens is not None:
        caps = np.minimum(caps, generation_config.max_new_tokens + prompt_length - 1)
    if model.config.position_embedding_type == "learned":
        caps = np.minimum(caps, model.config.max_position_embeddings)
    special_tokens = special_tokens_of(generation_config)
    decoder = PlainDecoder(model)
    found = search_from(
        decoder,
        decoder.start_encoded(hidden_states, attention_mask),
        caps,
        hidden_states.device,
        special_tokens,
        options,
        prefixes=input_ids[::copies, 1:].tolist(),
    )
    return _as_generated(found, input_ids[::copies, 0], options, generation_config)


def _check(
    model: VanillaTransformerForConditionalGeneration,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    decoder_attention_mask: torch.Tensor | None,
) -> None:
    if not isinstance(model, VanillaTransformerForConditionalGeneration):
        raise UserError(
            f"paper_beam_search got a {type(model).__name__}; call it on VanillaTransformerForConditionalGeneration."
        )
    asked = {
        "do_sample": generation_config.do_sample,
        "output_scores": generation_config.output_scores,
        "output_logits": generation_config.output_logits,
        "output_attentions": generation_config.output_attentions,
        "output_hidden_states": generation_config.output_hidden_states,
        "a decoder_attention_mask with zeros": decoder_attention_mask is not None and not decoder_attention_mask.all(),
    }
    unknown = [name for name, is_asked in asked.items() if is_asked]
    unknown += [type(part).__name__ for part in logits_processor if not isinstance(part, _PROCESSORS)]
    unknown += [type(part).__name__ for part in stopping_criteria if not isinstance(part, _CRITERIA)]
    if unknown:
        raise UserError(
            f"paper_beam_search does not support what was asked for: {', '.join(unknown)}; leave it out, or call "
            "`generate` without `custom_generate`."
        )


def _as_generated(
    found: list[list[Hypothesis]], start: torch.Tensor, options: SearchOptions, generation_config: GenerationConfig
) -> torch.Tensor | GenerateBeamEncoderDecoderOutput:
    """Ids [sentences * sequences, 1 + length], padded on the right; the first column is `start` [sentences]."""
    count = options.num_hypotheses
    # A small vocabulary may allow fewer translations than were asked for; the other rows stay empty.
    missing = Hypothesis((), -np.inf, -np.inf, False)
    rows = [hypothesis for own in found for hypothesis in [*own, *[missing] * (count - len(own))]]
    length = max(len(hypothesis.tokens) for hypothesis in rows)
    ids = torch.full((len(rows), 1 + length), generation_config.pad_token_id)
    ids[:, 0] = start.repeat_interleave(count).cpu()
    for row, hypothesis in zip(ids, rows, strict=True):
        row[1 : 1 + len(hypothesis.tokens)] = torch.tensor(hypothesis.tokens)
    ids = ids.to(start.device)
    if not generation_config.return_dict_in_generate:
        return ids
    scores = torch.tensor([hypothesis.score for hypothesis in rows], device=start.device)
    return GenerateBeamEncoderDecoderOutput(sequences=ids, sequences_scores=scores)
