"""`evaluate`: translate a test set and score it with BLEU and chrF."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vanilla_transformer.errors import UserError
from vanilla_transformer.training.configuration import option


@dataclass(kw_only=True)
class EvaluateOptions:
    """Options of `evaluate`."""

    model: str = option(..., "Model folder, or name on the Hub.")
    source: Path = option(..., "File of source sentences, one a line.")
    references: Path = option(..., "File of references, one a line.")
    num_beams: int | None = option(None, "Beam size; default: the model's generation configuration.")
    length_penalty: float | None = option(None, "Power of the length that divides scores; default: likewise.")
    tokens_per_batch: int = option(4096, "Largest padded number of source tokens of a batch.")
    tokenize: str = option("13a", "sacreBLEU's tokenisation: 13a, none (text tokenised before), intl, char, zh, ...")
    lowercase: bool = option(False, "Ignore case.")
    translations: Path | None = option(None, "File for the translations.")
    output: Path | None = option(None, "File for the scores as JSON; they are printed in any case.")


OPTIONS = EvaluateOptions


def run(options: EvaluateOptions) -> int:
    """Print the scores as JSON."""
    sources, references = read_lines(options.source), read_lines(options.references)
    taken = [options.source, options.references]
    for path in (options.translations, options.output):
        if path is not None:
            check_output_file(path, taken)
            taken.append(path)
    from .session import start

    start()
    from vanilla_transformer.evaluation import evaluate_model
    from vanilla_transformer.translation.translator import Translator

    translator = Translator.from_pretrained(
        options.model,
        num_beams=options.num_beams,
        length_penalty=options.length_penalty,
        tokens_per_batch=options.tokens_per_batch,
    )
    scores, translations = evaluate_model(
        translator,
        sources,
        references,
        tokenize=options.tokenize,
        lowercase=options.lowercase,
        show_progress=True,
    )
    record = json.dumps(scores.as_dict() | {"model": options.model}, indent=2)
    if options.translations is not None:
        options.translations.write_text("".join(f"{line}\n" for line in translations), encoding="utf-8")
    if options.output is not None:
        options.output.write_text(record + "\n", encoding="utf-8")
    print(record)
    return 0


def check_output_file(path: Path, taken: Sequence[Path] = ()) -> None:
    """Refuse a file that cannot be written, before there is work to lose.

    Args:
        path: File to write; what it holds is left as it is.
        taken: Files that must not be overwritten.

    Raises:
        UserError: The path is a folder, nothing can be written there, or it is one of `taken`.
    """
    if path.resolve() in [other.resolve() for other in taken]:
        raise UserError(f"{path} was given twice, and would be overwritten; name another file for the output.")
    if path.is_dir():
        raise UserError(f"{path} is a folder; give a file for the output.")
    if not path.parent.is_dir():
        raise UserError(f"{path} cannot be written: its folder does not exist; make it first.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"{path} cannot be written; choose another file or correct its permissions.")


def read_lines(path: Path) -> list[str]:
    """Read a text file's lines without their ends.

    Args:
        path: File in UTF-8.

    Returns:
        The lines.

    Raises:
        UserError: The file is missing, empty or not UTF-8.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check the path.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start + 1}); convert it.") from error
    # Only "\n" ends a line; `splitlines` would also split at U+2028.
    lines = text.removesuffix("\n").split("\n")
    if lines == [""]:
        raise UserError(f"{path} is empty; give at least one line.")
    return [line.removesuffix("\r") for line in lines]
