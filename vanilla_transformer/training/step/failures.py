"""Turns failures that the user can remedy, of memory and disk, into one sentence with the remedy."""

from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from vanilla_transformer.data.encoding import EncodedCorpus
from vanilla_transformer.errors import UserError
from vanilla_transformer.training.records.checkpoints import list_checkpoints


@contextmanager
def naming_batch(where: str, batch: np.ndarray, corpus: EncodedCorpus, tokens_per_batch: int):
    """Turn running out of memory into an error that names the batch and the option to change.

    Args:
        where: What is being computed, such as `update 7`.
        batch: Pair numbers [B].
        corpus: Corpus of the pairs.
        tokens_per_batch: The option's value.

    Raises:
        UserError: The memory ran out.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and "can't allocate" not in str(error):
            raise
        raise UserError(
            f"Out of memory in {where}, on a batch of {len(batch)} pairs with up to "
            f"{corpus.source_lengths[batch].max()} source and {corpus.target_lengths[batch].max()} target tokens; "
            f"lower `tokens_per_batch` (it is {tokens_per_batch}), or use `gradient_checkpointing`."
        ) from error


@contextmanager
def naming_disk(what: str, folder: Path, checkpoints: Path):
    """Turn a failure to write into an error that names what could not be written, and why.

    Args:
        what: What is being written, as the sentence's subject.
        folder: The folder that it is written to.
        checkpoints: Folder of the checkpoints.

    Raises:
        UserError: Writing failed.
    """
    try:
        yield
    except Exception as error:
        # safetensors and tokenizers raise exceptions of their own for errors of the system.
        if not isinstance(error, OSError) and "os error" not in str(error):
            raise
        remedy = (
            "what was saved before is intact: make room, then use `resume`"
            if list_checkpoints(checkpoints)
            else "nothing was saved before: make room, then start again"
        )
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{what} cannot be written to {folder} ({reason}); {remedy}.") from error
