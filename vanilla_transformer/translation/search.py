"""The paper's beam search (§6.1), over any decoder that works step by step.

Shapes: S sentences, T source positions, R rows (hypotheses, the same number for each sentence), V vocabulary entries.
"""

from typing import Protocol, TypeVar

import torch


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
            input_ids: Source ids [S, T], padded on the right.
            attention_mask: [S, T], 1 for tokens and 0 for padding.

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
