"""The files that verbs read and write: whole lines in, whole files out."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from vanilla_transformer.data.utf8 import decode_lines
from vanilla_transformer.errors import UserError
from vanilla_transformer.files import replacing
from vanilla_transformer.translation.files.text_files import is_model_file


def read_lines(path: Path) -> list[str]:
    """Read a text file's lines without their ends.

    Args:
        path: File in UTF-8, or a pipe, which is read once.

    Returns:
        The lines.

    Raises:
        UserError: The file is missing, empty or not UTF-8, or has a NUL character.
    """
    try:
        with path.open("rb") as file:
            lines = list(decode_lines(file, path))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check the path.") from error
    if lines in ([], [""]):
        raise UserError(f"{path} is empty; give at least one line.")
    return lines


def check_output_file(path: Path, taken: Sequence[Path] = (), model: str | None = None) -> None:
    """Refuse a file that `write_lines` could not write, before there is work to lose.

    Args:
        path: File to write; what it holds is left as it is.
        taken: Files that must not be overwritten.
        model: The model that is read, whose own files must not be overwritten either.

    Raises:
        UserError: The path is a folder, nothing can be written there, or it is one of `taken` or of the model's files.
    """
    try:
        real = path.resolve()
    # The latter for links that lead to each other, before Python 3.13.
    except (OSError, RuntimeError) as error:
        raise UserError(f"{path} cannot be written ({error}); name another file for the output.") from error
    if real in [other.resolve() for other in taken]:
        raise UserError(f"{path} was given twice, and would be overwritten; name another file for the output.")
    if model is not None and is_model_file(path, model):
        raise UserError(f"{path} is a file of the model, and would be overwritten; name another one for the output.")
    if path.is_dir():
        raise UserError(f"{path} is a folder; give a file for the output.")
    folder = real.parent
    if not folder.is_dir():
        raise UserError(f"{path} cannot be written: its folder does not exist; make it first.")
    # A file is replaced by a new one of its folder.
    needed = [path, folder] if path.is_file() else [path if path.exists() else folder]
    if not all(os.access(place, os.W_OK) for place in needed):
        raise UserError(f"{path} cannot be written; choose another file or correct its permissions.")


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write a text file whole or not at all: a file that exists is replaced once the new one is complete.

    Args:
        path: File to write. A link stays, and the file that it names is replaced; a device or a pipe, such as
            `/dev/null`, is written to and stays.
        lines: Lines without their ends.
    """
    if path.exists() and not path.is_file():
        _write_lines(path, lines)
        return
    path = path.resolve()
    with replacing(path, path.with_name(f"{path.name}.partial-{os.getpid()}")) as aside:
        _write_lines(aside, lines)


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
