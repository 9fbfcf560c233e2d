"""The paper's beam search (§6.1), greedy search and sampling, over any decoder that works step by step.

The decoder scores tokens on its device. The choice of hypotheses is in NumPy, whose small operations cost least.

Shapes: S sentences, T source positions, R rows (hypotheses, the same number for each sentence), V vocabulary entries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch

from vanilla_transformer.errors import UserError
from vanilla_transformer.translation.options import SearchOptions

from .beams import Beams
from .candidates import Vocabulary
from .decoder_protocol import IncrementalDecoder, State, Step
from .greedy_and_samples import Paths
from .hypotheses import Hypothesis


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Ids of the tokens that begin and end translations.

    Args:
        start: The token that decoding starts from.
        ends: The tokens that end a translation, at least one.
    """

    start: int
    ends: tuple[int, ...]


@torch.inference_mode()
def search(
    decoder: IncrementalDecoder,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    special_tokens: SpecialTokens,
    options: SearchOptions,
    *,
    prefixes: Sequence[Sequence[int]] | None = None,
    places: Sequence[int] | None = None,
    with_scores: bool = True,
) -> list[list[Hypothesis]]:
    """Translate a batch of sentences.

    A sentence's result does not depend on the other sentences, except through the decoder's rounding. A sentence
    leaves the batch once its result is certain.

    Args:
        decoder: Scores tokens.
        input_ids: Source ids [S, T], padded on either side, on the decoder's device.
        attention_mask: [S, T], 1 for tokens and 0 for padding.
        special_tokens: Start and ends of translations.
        options: Options of the search.
        prefixes: For each sentence the ids that its translations begin with, possibly none.
        places: For each sentence a number that, with the seed, decides its samples; `None` numbers sentences from 0.
        with_scores: Whether greedy search computes scores, which costs a softmax; other searches always do.

    Returns:
        For each sentence at most `options.num_hypotheses` translations, ordered by score. Beam search by the paper's
        rules puts those that were cut off behind the finished ones, which the authors' code prefers. A sentence has no
        translation if a logit was not finite or no token was permitted.

    Raises:
        UserError: A prefix is longer than translations may be, or holds a banned token.
    """
    state = decoder.start(input_ids, attention_mask)
    caps = attention_mask.sum(dim=1).cpu().numpy() + options.extra_length
    if options.max_length is not None:
        caps = np.minimum(caps, options.max_length)
    return search_from(
        decoder, state, caps, input_ids.device, special_tokens, options,
        prefixes=prefixes, places=places, with_scores=with_scores,
    )  # fmt: skip


@torch.inference_mode()
def search_from(
    decoder: IncrementalDecoder[State],
    state: State,
    caps: np.ndarray,
    device: torch.device,
    special_tokens: SpecialTokens,
    options: SearchOptions,
    *,
    prefixes: Sequence[Sequence[int]] | None = None,
    places: Sequence[int] | None = None,
    with_scores: bool = True,
) -> list[list[Hypothesis]]:
    """Translate sentences that are encoded already.

    Args:
        decoder: Scores tokens.
        state: What `decoder.start` returned.
        caps: The largest number of tokens of each sentence's translation [S], at least 1.
        device: Device of the decoder's tokens and logits.
        special_tokens: As for `search`.
        options: As for `search`; `caps` replaces `extra_length` and `max_length`.
        prefixes: As for `search`.
        places: As for `search`.
        with_scores: As for `search`.

    Returns:
        As `search`.

    Raises:
        UserError: As `search`.
    """
    vocabulary = Vocabulary(
        decoder.vocab_size,
        device,
        ends=special_tokens.ends,
        banned=options.banned_tokens,
        min_length=options.min_length,
    )
    forced = _forced_tokens(prefixes, caps, options)
    if options.sample or options.num_beams == 1:
        paths = Paths(vocabulary, caps, forced, options, places, with_scores)
    else:
        paths = Beams(vocabulary, caps, forced, options)
    tokens = np.full(len(caps), special_tokens.start)
    for position in count():
        choice = paths.advance(Step(decoder, state, tokens, device, vocabulary, position))
        if choice is None:
            return paths.results()
        if choice.rows is not None:
            sentences = None if choice.sentences is None else torch.from_numpy(choice.sentences).to(device)
            decoder.select(state, sentences, torch.from_numpy(choice.rows).to(device))
        tokens = choice.tokens


def _forced_tokens(prefixes: Sequence[Sequence[int]] | None, caps: np.ndarray, options: SearchOptions) -> np.ndarray:
    """Forced ids of every sentence [S, length of the longest prefix], -1 after the end of a prefix."""
    prefixes = [[] for _ in caps] if prefixes is None else prefixes
    forced = np.full((len(caps), max((len(prefix) for prefix in prefixes), default=0)), -1)
    for row, prefix, cap in zip(forced, prefixes, caps, strict=True):
        if len(prefix) > cap:
            raise UserError(
                f"A forced prefix has {len(prefix)} tokens, and the translation at most {cap}; shorten the prefix or "
                "raise `extra_length` or `max_length`."
            )
        if banned := {*prefix} & {*options.banned_tokens}:
            raise UserError(f"A forced prefix holds the banned token {min(banned)}; allow it or change the prefix.")
        row[: len(prefix)] = prefix
    return forced
