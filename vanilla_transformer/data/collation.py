"""Padding and packing: turns id arrays of different lengths into the tensors for training."""

from collections.abc import Sequence

import numpy as np
import torch


def collate(
    sources: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    *,
    pad_token_id: int,
    decoder_start_token_id: int,
) -> dict[str, torch.Tensor]:
    """Pad a batch on the right and shift the targets.

    Args:
        sources: B arrays of source ids, each ending with `</s>`.
        targets: B arrays of target ids, each ending with `</s>`.
        pad_token_id: Id that fills sources and decoder inputs.
        decoder_start_token_id: Id that decoder inputs begin with.

    Returns:
        `input_ids` [B, S], `attention_mask` [B, S], `decoder_input_ids` [B, T] and `labels` [B, T], whose padding is
        -100. Decoder inputs need no mask: their padding comes after every position that has a loss.
    """
    input_ids, attention_mask = pad(sources, pad_token_id)
    labels, _ = pad(targets, -100)
    started, _ = pad([np.concatenate(([decoder_start_token_id], target)) for target in targets], pad_token_id)
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "decoder_input_ids": started[:, :-1].contiguous(),
        "labels": labels,
    }


def pack(
    sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], *, decoder_start_token_id: int
) -> dict[str, torch.Tensor]:
    """Concatenate the sentences of a batch into a padding-free (packed) batch, and shift the targets.

    Args:
        sources: B arrays of source ids, each ending with `</s>`.
        targets: B arrays of target ids, each ending with `</s>`.
        decoder_start_token_id: Id that decoder inputs begin with.

    Returns:
        `input_ids` [1, S], `decoder_input_ids` and `labels` [1, T]; `source_starts` and `target_starts` [B + 1]: the
        index of the first token of each sentence, and at the end the number of tokens.
    """
    labels = np.concatenate(targets).astype(np.int64)
    target_starts = _starts(targets)
    started = np.roll(labels, 1)
    started[target_starts[:-1]] = decoder_start_token_id
    arrays = {
        "input_ids": np.concatenate(sources).astype(np.int64)[None],
        "source_starts": _starts(sources),
        "decoder_input_ids": started[None],
        "target_starts": target_starts,
        "labels": labels[None],
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _starts(rows: Sequence[np.ndarray]) -> np.ndarray:
    return np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)


def pad(rows: Sequence[np.ndarray], value: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows on the right to the longest; return ids [B, L] and a mask [B, L] that is 1 except on padding."""
    lengths = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))
    mask = np.arange(lengths.max()) < lengths[:, None]
    padded = np.full(mask.shape, value, dtype=np.int64)
    padded[mask] = np.concatenate(rows)
    return torch.from_numpy(padded), torch.from_numpy(mask.astype(np.int64))
