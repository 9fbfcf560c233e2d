"""What a search computes from logits: forbidden tokens, the best tokens and their log-probabilities.

Shapes: R rows, V vocabulary entries.
"""

from collections.abc import Sequence

import numpy as np
import torch


class Vocabulary:
    """The tokens that end a translation, and those that are forbidden."""

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
        """Set the logits [R, V] of tokens that are forbidden at a position to -inf, in place; returns the logits."""
        forbidden = self.forbidden(position)
        if not len(forbidden):
            return logits
        return logits.index_fill_(1, torch.from_numpy(forbidden).to(self._device), -torch.inf)


def best_tokens(logits: torch.Tensor, count: int, *, with_log_probs: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """The most probable next tokens of each row.

    Args:
        logits: [R, V].
        count: Number of tokens of each row, at most V.
        with_log_probs: Whether to compute their log-probabilities.

    Returns:
        Ids [R, count], the most probable first and the lower id first among equals, and their log-probabilities (or
        logits) [R, count] in float32 or wider. The first value of a row is NaN if any logit of the row is NaN.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    # Logits have the order of probabilities, so that of the softmax only the denominator is needed.
    if count == 1:
        # Among equal logits, `max` finds the first.
        values, ids = logits.max(dim=-1, keepdim=True)
        values, ids = values.to(wide), ids.cpu().numpy()
    else:
        values, ids = _largest(logits, count)
        values = values.to(wide)
    if with_log_probs:
        values = values - logits.to(wide).logsumexp(dim=-1, keepdim=True)
    return ids, values.cpu().numpy()


def _largest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, np.ndarray]:
    """The largest logits of each row [R, count] and their ids [R, count], the lower id first among equal logits.

    `topk` returns equal logits in any order, and any of those that are equal to the smallest one that it returns.
    """
    # One more than asked for shows whether further logits are equal to the last.
    values, ids = logits.topk(min(count + 1, logits.shape[-1]), dim=-1)
    known, numbers = values.to(torch.float64).cpu().numpy(), ids.cpu().numpy()
    equal = known[:, 1:] == known[:, :-1]
    rows = equal[:, count - 1 :].any(axis=1).nonzero()[0]
    values, known, numbers = values[:, :count], known[:, :count], numbers[:, :count]
    if len(rows):
        lowest = _lowest_equal(logits, torch.from_numpy(rows).to(logits.device), values[:, -1:], count)
        places = np.arange(count) - (known[rows] > known[rows, -1:]).sum(axis=1, keepdims=True)
        lowest = np.take_along_axis(lowest, places.clip(min=0), axis=1)
        numbers[rows] = np.where(places < 0, numbers[rows], lowest)
    if equal.any():
        numbers = np.take_along_axis(numbers, np.lexsort((numbers, -known), axis=1), axis=1)
    return values, numbers


def _lowest_equal(logits: torch.Tensor, rows: torch.Tensor, wanted: torch.Tensor, count: int) -> np.ndarray:
    """The lowest ids [N, count] in rows [N] whose logits are equal to the wanted value of the row, from [R, 1]."""
    ranks = torch.arange(logits.shape[-1], 0, -1, device=logits.device, dtype=torch.int32)
    return torch.where(logits[rows] == wanted[rows], ranks, 0).topk(count, dim=-1).indices.cpu().numpy()


def log_probs_of(logits: torch.Tensor, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Log-probabilities [N] of given tokens [N] in rows [N] of logits [R, V]."""
    rows, tokens = (torch.from_numpy(part).to(logits.device) for part in (rows, tokens))
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits[rows].to(wide).log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0].cpu().numpy()
