"""What a translator is made from, checked without torch, so that the command line answers mistakes at once."""

import math
import re
from pathlib import Path

from vanilla_transformer.errors import UserError


MODEL_FILES = ("config.json", "tokenizer.json")


def check_search(*, num_beams: int | None, length_penalty: float | None, tokens_per_batch: int) -> None:
    """Check the options of the search.

    Args:
        num_beams: Beam size, at least 1, or `None`.
        length_penalty: A finite number, or `None`; below 0 it prefers short translations.
        tokens_per_batch: At least 1.

    Raises:
        UserError: A value is out of range.
    """
    for name, value in (("num_beams", num_beams), ("tokens_per_batch", tokens_per_batch)):
        if value is not None and value < 1:
            raise UserError(f"--{name} is {value}; it must be at least 1.")
    if length_penalty is not None and not math.isfinite(length_penalty):
        raise UserError(f"--length_penalty is {length_penalty}; it must be a finite number.")


def check_model_id(model_id: str | Path) -> None:
    """Check that a model can be meant, without asking the Hub.

    Args:
        model_id: A model's folder, or its name on the Hub, `user/name`.

    Raises:
        UserError: The folder is not a model's, or there is no such folder and no model on the Hub has such a name.
    """
    folder = Path(model_id)
    if folder.is_dir():
        for name in MODEL_FILES:
            if not (folder / name).is_file():
                raise UserError(
                    f"{model_id} is not a model folder: it lacks {name}; give a folder that `train` finished, or one "
                    "of its checkpoints."
                )
    elif folder.exists():
        raise UserError(f"{model_id} is a file; give a model folder, or a name on the Hub.")
    elif not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(model_id)):
        raise UserError(
            f"There is no folder {model_id}; give a model folder, or a name on the Hub, which has the form user/name."
        )
