"""What a search asks of logits: what is permitted, which tokens are best, and how probable they are.

Shapes: R rows, V vocabulary entries.
"""

from collections.abc import Sequence

import numpy as np
import torch


class Vocabulary:
    """What is known of tokens: which end a translation, and which are forbidden."""

    def __init__(
        self,
        size: int,
        device: torch.device,
        *,
        ends: Sequence[int],
        banned: Sequence[int] = (),
        min_length: int = 0,
    ):
        self.size = size
        self.ends = np.zeros(size, dtype=bool)
        self.ends[list(ends)] = True
        self.min_length = min_length
        self._device = device
        self._banned = np.array(sorted(banned), dtype=np.int64)
        self._banned_or_end = np.array(sorted({*banned, *ends}), dtype=np.int64)

    def forbidden(self, position: int) -> np.ndarray:
        """Ids of the tokens that are forbidden at a position."""
        return self._banned_or_end if position < self.min_length else self._banned

    def permit(self, logits: torch.Tensor, position: int) -> torch.Tensor:
        """Logits [R, V] where tokens that are forbidden at a position have no probability."""
        forbidden = self.forbidden(position)
        if not len(forbidden):
            return logits
        return logits.index_fill_(1, torch.from_numpy(forbidden).to(self._device), -torch.inf)


def best_tokens(
    logits: torch.Tensor, count: int, *, with_log_probs: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The most probable next tokens of each row.

    Args:
        logits: [R, V].
        count: How many, at most V.
        with_log_probs: Whether their log-probabilities are computed.

    Returns:
        Ids [R, count], the most probable first, and log-probabilities [R, count] in float32 or wider, or `None`.
    """
    # The order of logits is that of probabilities, so that only the sum is needed of the softmax.
    values, ids = logits.max(dim=-1, keepdim=True) if count == 1 else logits.topk(count, dim=-1)
    if not with_log_probs:
        return ids, None
    wide = torch.promote_types(logits.dtype, torch.float32)
    return ids, values.to(wide) - logits.to(wide).logsumexp(dim=-1, keepdim=True)


def log_probs_of(logits: torch.Tensor, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Log-probabilities [N] of given tokens [N] in rows [N] of logits [R, V]."""
    rows, tokens = (torch.from_numpy(part).to(logits.device) for part in (rows, tokens))
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits[rows].to(wide).log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0].cpu().numpy()
