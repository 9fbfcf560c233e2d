"""Greedy search and sampling, whose hypotheses do not compete.

Shapes: S sentences, B hypotheses of a sentence, R = S * B rows, V vocabulary entries.
"""

from collections.abc import Sequence

import numpy as np
import torch

from vanilla_transformer.translation.options import SearchOptions

from .candidates import Vocabulary, log_probs_of
from .decoder_protocol import Step
from .hypotheses import Choice, Hypothesis


class Paths:
    """The hypothesis of greedy search, or samples, of each sentence."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        caps: np.ndarray,
        forced: np.ndarray,
        options: SearchOptions,
        places: Sequence[int] | None,
        with_scores: bool,
    ):
        self._vocabulary = vocabulary
        self._options = options
        self._forced = forced
        self._caps = caps
        self._with_scores = with_scores
        self._has_scores = with_scores or options.sample
        self._sentences = np.arange(len(caps))
        shape = (len(caps), options.num_hypotheses)
        self._tokens = np.zeros((*shape, int(caps.max())), dtype=np.int32)
        self._log_probs = np.full(shape, 0.0 if self._has_scores else np.nan)
        self._lengths = np.zeros(shape, dtype=np.int64)
        self._finished = np.zeros(shape, dtype=bool)
        self._failed = np.zeros(len(caps), dtype=bool)
        self._position = 0
        if options.sample:
            # One random number a position, so that a draw depends only on the sentence's place and the seed.
            self._chances = np.stack(
                [
                    np.random.Generator(np.random.Philox(key=[options.seed, place])).random(
                        (int(caps.max()), options.num_hypotheses)
                    )
                    for place in (range(len(caps)) if places is None else places)
                ]
            )

    def advance(self, step: Step) -> Choice | None:
        """Choose the next token of every hypothesis; `None` when all sentences are done."""
        num_sentences, width = len(self._sentences), self._options.num_hypotheses
        forced = self._position < self._forced.shape[1]
        rows = None
        if self._options.sample or forced:
            logits = step.logits()
            if self._position == 0 and width > 1:
                rows = np.repeat(np.arange(num_sentences), width)
                logits = logits.repeat_interleave(width, dim=0)
        if self._options.sample:
            chances = self._chances[self._sentences, self._position].ravel()
            tokens, log_probs = draw(logits, torch.from_numpy(chances).to(logits.device), self._options)
            tokens, log_probs = tokens.cpu().numpy(), log_probs.cpu().numpy()
        else:
            tokens, log_probs = step.best(1, with_log_probs=self._with_scores)
        tokens, log_probs = (part.reshape(num_sentences, width) for part in (tokens, log_probs))
        failed = ~np.isfinite(log_probs)
        if forced:
            wanted = np.repeat(self._forced[self._sentences, self._position, None], width, axis=1)
            tokens = np.where(wanted >= 0, wanted, tokens)
            if self._has_scores:
                rows_of_wanted = (wanted.ravel() >= 0).nonzero()[0]
                log_probs[wanted >= 0] = log_probs_of(logits, rows_of_wanted, wanted.ravel()[rows_of_wanted])
        open_before = ~self._finished[self._sentences]
        self._tokens[self._sentences, :, self._position] = tokens
        self._position += 1
        if self._has_scores:
            self._log_probs[self._sentences] += np.where(open_before, log_probs, 0.0)
        self._lengths[self._sentences] += open_before
        self._finished[self._sentences] |= self._vocabulary.ends[tokens]
        self._failed[self._sentences] |= (failed & open_before).any(axis=1)
        done = self._finished[self._sentences].all(axis=1) | (self._caps[self._sentences] <= self._position)
        done |= self._failed[self._sentences]
        if not done.any():
            return Choice(tokens.ravel(), None, rows)
        kept = (~done).nonzero()[0]
        if not len(kept):
            return None
        self._sentences = self._sentences[kept]
        rows = np.arange(num_sentences * width) if rows is None else rows
        return Choice(tokens[kept].ravel(), kept, rows.reshape(num_sentences, width)[kept].ravel())

    def results(self) -> list[list[Hypothesis]]:
        """The hypotheses of every sentence, as `search` returns them."""
        scores = self._log_probs / self._options.penalty(self._lengths)
        parts = (self._tokens, self._lengths, self._log_probs, scores, self._finished)
        found = []
        for failed, tokens, *rest in zip(self._failed, *(part.tolist() for part in parts), strict=True):
            if failed:
                found.append([])
                continue
            hypotheses = [
                Hypothesis(tuple(own[:length]), log_prob, score, finished)
                for own, length, log_prob, score, finished in zip(tokens, *rest, strict=True)
            ]
            found.append(sorted(hypotheses, key=lambda hypothesis: -hypothesis.score))
        return found


def draw(logits: torch.Tensor, chances: torch.Tensor, options: SearchOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token for each row.

    Args:
        logits: [R, V].
        chances: Random numbers in [0, 1) that decide which token is drawn [R].
        options: `temperature`, `top_k` and `top_p`.

    Returns:
        Ids [R], and their log-probabilities [R] by the given logits, without temperature, `top_k` and `top_p`.
    """
    log_probs = logits.to(torch.float64).log_softmax(dim=-1)
    ordered, ids = log_probs.sort(dim=-1, descending=True, stable=True)
    if options.top_k:
        ordered, ids = ordered[:, : options.top_k], ids[:, : options.top_k]
    sums = (ordered / options.temperature).softmax(dim=-1).cumsum(dim=-1)
    # Kept are the tokens up to the one that reaches `top_p`. Rounded sums may end just below 1, hence the clamps.
    kept = (sums < options.top_p).sum(dim=-1, keepdim=True).clamp(max=sums.shape[-1] - 1)
    chosen = torch.searchsorted(sums, chances[:, None] * sums.gather(1, kept), right=True).clamp(max=kept)
    return ids.gather(1, chosen)[:, 0], ordered.gather(1, chosen)[:, 0]
