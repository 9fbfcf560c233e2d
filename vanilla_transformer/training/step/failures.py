"""Failures that a user can do something about, each in one sentence that says what."""

from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from vanilla_transformer.data.encoding import EncodedCorpus
from vanilla_transformer.errors import UserError
from vanilla_transformer.training.records.checkpoints import list_checkpoints


@contextmanager
def naming_batch(where: str, batch: np.ndarray, corpus: EncodedCorpus, tokens_per_batch: int):
    """Turn running out of memory into a sentence about the batch and the option to change.

    Args:
        where: What was going on, such as `update 7`.
        batch: Pair numbers [B].
        corpus: Corpus of the pairs.
        tokens_per_batch: The option's value.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and "can't allocate" not in str(error):
            raise
        raise UserError(
            f"Out of memory in {where}, on a batch of {len(batch)} pairs with up to "
            f"{corpus.source_lengths[batch].max()} source and {corpus.target_lengths[batch].max()} target tokens; "
            f"lower --tokens_per_batch (it is {tokens_per_batch}), or use --gradient_checkpointing."
        ) from error


@contextmanager
def naming_disk(what: str, folder: Path, checkpoints: Path):
    """Turn a failure to write into a sentence about the disk.

    Args:
        what: What is being written, as the sentence's subject.
        folder: Where it is written to.
        checkpoints: Folder of the checkpoints.
    """
    try:
        yield
    except Exception as error:
        # safetensors and tokenizers have exceptions of their own for it.
        if not isinstance(error, OSError) and "os error" not in str(error):
            raise
        remedy = (
            "what was saved before is intact: make room, then use --resume"
            if list_checkpoints(checkpoints)
            else "nothing was saved before: make room, then start again"
        )
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{what} cannot be written to {folder} ({reason}); {remedy}.") from error
