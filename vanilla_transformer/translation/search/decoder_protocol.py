"""What a search asks of a decoder, which works step by step.

Shapes: S sentences, T source positions, R rows (hypotheses, the same number for each sentence), V vocabulary entries.
"""

from typing import Protocol, TypeVar

import numpy as np
import torch

from .candidates import Vocabulary, best_tokens


State = TypeVar("State")


class IncrementalDecoder(Protocol[State]):
    """A model that scores the next token of several hypotheses of several sentences.

    Rows are hypotheses. Every sentence of the batch has the same number of rows, which lie side by side: rows
    s * beams to (s + 1) * beams - 1 belong to sentence s. Keys and values of the source belong to sentences and are
    never repeated for their rows. All state is in the object that `start` returns, so that several searches can run on
    one decoder at once, in threads.

    Attributes:
        vocab_size: V.
    """

    vocab_size: int

    def start(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> State:
        """Encode sources; each sentence has one row, which holds no token yet.

        Args:
            input_ids: Source ids [S, T], padded on either side.
            attention_mask: [S, T], 1 for tokens and 0 for padding; a token's position is the number of tokens before
                it.

        Returns:
            The state of the search's rows.
        """
        ...

    def step(self, state: State, tokens: torch.Tensor) -> torch.Tensor:
        """Append a token to each row.

        Args:
            state: What `start` returned; its caches grow by one position.
            tokens: Ids [R]; the first are the token that decoding starts from.

        Returns:
            Logits [R, V] of the token that follows, before the softmax, in any floating-point dtype. The caller may
            change them in place.
        """
        ...

    def select(self, state: State, sentences: torch.Tensor | None, rows: torch.Tensor) -> None:
        """Keep some sentences, and make their rows continue some of the present rows.

        The first call after the first step may widen each sentence from one row to several.

        Args:
            state: What `start` returned; changed in place.
            sentences: Indices [S'] of the sentences that stay, ascending; `None` means all.
            rows: For each row from now on, the index [R'] of the present row that it continues, which belongs to the
                same sentence. R' is a multiple of S'.
        """
        ...


class ChoosingDecoder(IncrementalDecoder[State], Protocol[State]):
    """A decoder that finds the likeliest tokens itself, without handing out all logits."""

    def step_best(
        self, state: State, tokens: np.ndarray, count: int, forbidden: np.ndarray, *, with_log_probs: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """Append a token to each row, and find the likeliest tokens that follow.

        Args:
            state: What `start` returned; its caches grow by one position.
            tokens: Ids [R].
            count: How many are wanted, at most V.
            forbidden: Ids that get no probability.
            with_log_probs: Whether log-probabilities are wanted, and not logits.

        Returns:
            Ids [R, count], the likeliest first and of equally likely ones the lowest, and their log-probabilities or
            logits [R, count]. The first of a row is not finite if any permitted logit is NaN or infinite, or none is
            permitted.
        """
        ...


class Step:
    """One step of a decoder, which is taken when it is known what is wanted of it.

    Args:
        decoder: What decodes.
        state: Its rows.
        tokens: What is appended to each row [R].
        device: Where the decoder takes tokens.
        vocabulary: What is permitted.
        position: Number of tokens before the one that is looked for.
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
        """Logits [R, V], where what is forbidden has no probability."""
        if self._logits is None:
            logits = self._decoder.step(self._state, torch.from_numpy(self._tokens).to(self._device))
            self._logits = self._vocabulary.permit(logits, self._position)
        return self._logits

    def best(self, count: int, *, with_log_probs: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """As `ChoosingDecoder.step_best`, which is called if the decoder has it and logits were not asked for."""
        if self._logits is None and hasattr(self._decoder, "step_best"):
            forbidden = self._vocabulary.forbidden(self._position)
            return self._decoder.step_best(self._state, self._tokens, count, forbidden, with_log_probs=with_log_probs)
        return best_tokens(self.logits(), count, with_log_probs=with_log_probs)
