"""Beam search: the hypotheses of a sentence compete for the places of its beam.

Shapes: S sentences, B hypotheses of a sentence, C candidates of a sentence, R = S * B rows, V vocabulary entries.
"""

from dataclasses import dataclass

import numpy as np

from vanilla_transformer.translation.options import SearchOptions

from .candidates import Vocabulary, log_probs_of
from .decoder_protocol import Step
from .hypotheses import Choice, Hypothesis, Tree


@dataclass(frozen=True, slots=True)
class _Ending:
    """The last token of a finished hypothesis, and the row of the hypothesis that it ends."""

    score: float
    log_prob: float
    length: int
    parent: int
    token: int


class Beams:
    """Beam search as in the authors' code (tensor2tensor, `beam_search.py` of June 2017).

    That code stops once no alive hypothesis can still beat the worst finished one. This class stops once none can beat
    the finished one of rank `num_hypotheses`, which gives the same best hypothesis. If none is finished, that code
    returns the alive hypotheses; here they also fill up a list with too few finished ones.
    """

    def __init__(self, vocabulary: Vocabulary, caps: np.ndarray, forced: np.ndarray, options: SearchOptions):
        self._vocabulary = vocabulary
        self._options = options
        self._forced = forced
        self._caps = caps
        self._sentences = np.arange(len(caps))
        self._alive = np.zeros((len(caps), 1))
        self._tree = Tree(len(caps), int(caps.max()), options.num_beams)
        self._finished: list[list[_Ending]] = [[] for _ in caps]
        self._worst_finished = np.full(len(caps), -np.inf)
        self._unfinished: list[list[Hypothesis]] = [[] for _ in caps]
        self._failed = np.zeros(len(caps), dtype=bool)
        self._position = 0

    def advance(self, step: Step) -> Choice | None:
        """Choose the next tokens of every sentence's hypotheses; `None` when all sentences are done."""
        beams, options = self._options.num_beams, self._options
        scores, tokens, parents = self._candidates(step)
        self._position += 1
        ends = self._vocabulary.ends[tokens]
        capped = self._caps[self._sentences] <= self._position
        self._finish(scores, tokens, parents, ends, capped)
        # The best of the candidates that do not end.
        if ends.any():
            order = ends.argsort(axis=1, kind="stable")[:, :beams]
            scores, tokens, parents = (np.take_along_axis(x, order, 1) for x in (scores, tokens, parents))
            scores[np.take_along_axis(ends, order, 1)] = -np.inf
        else:
            scores, tokens, parents = scores[:, :beams], tokens[:, :beams], parents[:, :beams]
        self._tree.grow(self._sentences, self._position - 1, tokens, parents)
        # An upper bound of the score of what an alive hypothesis becomes: all further tokens have probability 1.
        length = self._caps[self._sentences] if options.length_penalty > 0.0 else self._position + 1
        reachable = scores[:, 0] / options.penalty(length)
        done = capped | (self._worst_finished[self._sentences] > reachable) | (scores[:, 0] == -np.inf)
        done |= self._failed[self._sentences]
        rows = parents + np.arange(len(parents))[:, None] * self._alive.shape[1]
        self._alive = scores
        if not done.any():
            return Choice(tokens.ravel(), None, rows.ravel())
        self._collect_unfinished(done)
        kept = (~done).nonzero()[0]
        if not len(kept):
            return None
        self._sentences, self._alive = self._sentences[kept], scores[kept]
        return Choice(tokens[kept].ravel(), kept, rows[kept].ravel())

    def _candidates(self, step: Step) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Log-probability, last token and preceding row of each sentence's best continuations, each [S, C]."""
        num_sentences, width = self._alive.shape
        count = min(2 * self._options.num_beams, self._vocabulary.size)
        forced = self._position < self._forced.shape[1]
        if forced:
            logits = step.logits()
        ids, log_probs = step.best(count)
        failed = ~np.isfinite(log_probs[:, 0]).reshape(num_sentences, width) & (self._alive > -np.inf)
        self._failed[self._sentences] |= failed.any(axis=1)
        if forced:
            wanted = np.repeat(self._forced[self._sentences, self._position], width)
            rows = (wanted >= 0).nonzero()[0]
            ids[rows, 0] = wanted[rows]
            log_probs[rows, 0] = log_probs_of(logits, rows, wanted[rows])
            log_probs[rows, 1:] = -np.inf
        scores = self._alive[:, :, None] + log_probs.reshape(num_sentences, width, count)
        # A hypothesis of log-probability -inf fills an empty place; what follows it may be NaN.
        scores[self._alive == -np.inf] = -np.inf
        scores = scores.reshape(num_sentences, -1)
        order = (-scores).argsort(axis=1, kind="stable")[:, : 2 * self._options.num_beams]
        tokens = np.take_along_axis(ids.reshape(num_sentences, -1), order, 1)
        return np.take_along_axis(scores, order, 1), tokens, order // count

    def _finish(
        self, scores: np.ndarray, tokens: np.ndarray, parents: np.ndarray, ends: np.ndarray, capped: np.ndarray
    ) -> None:
        """Add the candidates that end to the finished hypotheses of their sentences."""
        if self._options.rules == "transformers":
            # transformers counts a hypothesis that is cut off as finished.
            ends = ends | capped[:, None]
            ends[:, self._options.num_beams :] = False
        if not ends.any():
            return
        wanted = self._options.num_hypotheses if self._options.rules == "paper" else self._options.num_beams
        penalty = self._options.penalty(self._position)
        for sentence, candidate in zip(*(ends & (scores > -np.inf)).nonzero(), strict=True):
            number = self._sentences[sentence]
            finished = self._finished[number]
            log_prob = float(scores[sentence, candidate])
            parent, token = int(parents[sentence, candidate]), int(tokens[sentence, candidate])
            finished.append(_Ending(log_prob / penalty, log_prob, self._position, parent, token))
            finished.sort(key=lambda ending: -ending.score)
            del finished[wanted:]
            if len(finished) == wanted:
                self._worst_finished[number] = finished[-1].score

    def _collect_unfinished(self, done: np.ndarray) -> None:
        """Keep the alive hypotheses of sentences that are done with too few finished ones."""
        penalty = self._options.penalty(self._position)
        for sentence in done.nonzero()[0]:
            number = self._sentences[sentence]
            missing = self._options.num_hypotheses - len(self._finished[number])
            self._unfinished[number] = [
                Hypothesis(
                    tuple(self._tree.path(number, self._position, row)),
                    float(log_prob),
                    float(log_prob / penalty),
                    False,
                )
                for row, log_prob in enumerate(self._alive[sentence][: max(missing, 0)])
                if log_prob > -np.inf
            ]

    def results(self) -> list[list[Hypothesis]]:
        """The hypotheses of every sentence, as `search` returns them."""
        return [
            []
            if self._failed[number]
            else [
                Hypothesis(
                    (*self._tree.path(number, ending.length - 1, ending.parent), ending.token),
                    ending.log_prob,
                    ending.score,
                    bool(self._vocabulary.ends[ending.token]),
                )
                for ending in finished[: self._options.num_hypotheses]
            ]
            + self._unfinished[number]
            for number, finished in enumerate(self._finished)
        ]
