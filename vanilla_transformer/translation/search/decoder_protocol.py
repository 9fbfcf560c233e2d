"""The interface between a search and a decoder, which works step by step.

Shapes: S sentences, T source positions, R rows (hypotheses, the same number for each sentence), V vocabulary entries.
"""

from typing import Protocol, TypeVar

import numpy as np
import torch

from .candidates import Vocabulary, best_tokens


State = TypeVar("State")


class IncrementalDecoder(Protocol[State]):
    """A model that scores the next token of several hypotheses of several sentences.

    Rows are hypotheses. Every sentence of the batch has the same number of rows, which are adjacent: rows s * beams to
    (s + 1) * beams - 1 belong to sentence s. Keys and values of the source are stored once a sentence, and never
    repeated for its rows. The object that `start` returns holds all state, so that several threads can search with one
    decoder at the same time.

    Attributes:
        vocab_size: V.
    """

    vocab_size: int

    def start(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> State:
        """Encode sources; at first, each sentence has one row without tokens.

        Args:
            input_ids: Source ids [S, T], padded on either side.
            attention_mask: [S, T], 1 for tokens and 0 for padding; a token's position is the number of tokens before
                it, without padding.

        Returns:
            The state of the rows.
        """
        ...

    def step(self, state: State, tokens: torch.Tensor) -> torch.Tensor:
        """Append a token to each row.

        Args:
            state: What `start` returned; its caches grow by one position.
            tokens: Ids [R]; in the first step, the token that decoding starts from.

        Returns:
            Logits [R, V] of the next token, in any floating-point dtype. The caller may change them in place.
        """
        ...

    def select(self, state: State, sentences: torch.Tensor | None, rows: torch.Tensor) -> None:
        """Keep some sentences, and choose which of the present rows each of their rows continues.

        The first call after the first step may widen each sentence from one row to several.

        Args:
            state: What `start` returned; changed in place.
            sentences: Indices [S'] of the sentences that stay, ascending; `None` means all.
            rows: For each new row, the index [R'] of the present row that it continues. Both belong to the same
                sentence. R' is a multiple of S'.
        """
        ...


class ChoosingDecoder(IncrementalDecoder[State], Protocol[State]):
    """A decoder that finds the most probable tokens itself, without returning all logits."""

    def step_best(
        self, state: State, tokens: np.ndarray, count: int, forbidden: np.ndarray, *, with_log_probs: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """Append a token to each row, and find the most probable next tokens.

        Args:
            state: What `start` returned; its caches grow by one position.
            tokens: Ids [R].
            count: Number of tokens of each row, at most V.
            forbidden: Ids that have probability 0.
            with_log_probs: Whether to return log-probabilities; otherwise logits.

        Returns:
            Ids [R, count], the most probable first and the lower id first among equals, and their log-probabilities or
            logits [R, count]. The first value of a row is not finite if a permitted logit is NaN or infinite, or if no
            token is permitted.
        """
        ...


class Step:
    """One step of a decoder, which is computed when the search asks for logits or for the best tokens.

    Args:
        decoder: The decoder.
        state: The state of its rows.
        tokens: Ids that are appended to the rows [R].
        device: Where the decoder takes tokens.
        vocabulary: The tokens that are forbidden.
        position: Number of tokens before the next one.
    """

    def __init__(
        self,
        decoder: IncrementalDecoder[State],
        state: State,
        tokens: np.ndarray,
        device: torch.device,
        vocabulary: Vocabulary,
        position: int,
    ):
        self._decoder = decoder
        self._state = state
        self._tokens = tokens
        self._device = device
        self._vocabulary = vocabulary
        self._position = position
        self._logits: torch.Tensor | None = None

    def logits(self) -> torch.Tensor:
        """Logits [R, V]; those of forbidden tokens are -inf."""
        if self._logits is None:
            logits = self._decoder.step(self._state, torch.from_numpy(self._tokens).to(self._device))
            self._logits = self._vocabulary.permit(logits, self._position)
        return self._logits

    def best(self, count: int, *, with_log_probs: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """As `ChoosingDecoder.step_best`, which is used if the decoder has it and no logits were asked for."""
        if self._logits is None and hasattr(self._decoder, "step_best"):
            forbidden = self._vocabulary.forbidden(self._position)
            return self._decoder.step_best(self._state, self._tokens, count, forbidden, with_log_probs=with_log_probs)
        return best_tokens(self.logits(), count, with_log_probs=with_log_probs)
