"""The results of a search, and the tokens of all hypotheses while it runs.

Shapes: S sentences, B hypotheses of a sentence, R rows, which are all hypotheses.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One translation of a sentence.

    Args:
        tokens: Ids with the final `</s>`, without the token that decoding starts from.
        log_prob: Sum of the tokens' log-probabilities, including a forced prefix; NaN if no scores were asked for.
        score: `log_prob` divided by the length penalty; hypotheses are ranked by it.
        finished: Whether the translation ends with `</s>`, and was not cut off at the largest length.
    """

    tokens: tuple[int, ...]
    log_prob: float
    score: float
    finished: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """How the search goes on after a step.

    Args:
        tokens: The next tokens [R'].
        sentences: As for `IncrementalDecoder.select`.
        rows: As for `IncrementalDecoder.select`; `None` if nothing changes.
    """

    tokens: np.ndarray
    sentences: np.ndarray | None
    rows: np.ndarray | None


class Tree:
    """The tokens of all hypotheses of all sentences, each with the row of its predecessor."""

    def __init__(self, num_sentences: int, length: int, width: int):
        self._tokens = np.zeros((num_sentences, length, width), dtype=np.int32)
        self._parents = np.zeros_like(self._tokens)

    def grow(self, sentences: np.ndarray, position: int, tokens: np.ndarray, parents: np.ndarray) -> None:
        """Append tokens [S, B] to the hypotheses in the rows `parents` [S, B]."""
        width = tokens.shape[1]
        self._tokens[sentences, position, :width] = tokens
        self._parents[sentences, position, :width] = parents

    def path(self, sentence: int, length: int, row: int) -> list[int]:
        """The first `length` tokens of the hypothesis that is in a row after `length` positions."""
        tokens = []
        for position in range(length - 1, -1, -1):
            tokens.append(int(self._tokens[sentence, position, row]))
            row = self._parents[sentence, position, row]
        return tokens[::-1]
