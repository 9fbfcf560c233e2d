"""`tokenizer`: train a vocabulary on text files."""

import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vanilla_transformer.data.utf8 import decode_lines
from vanilla_transformer.errors import UserError
from vanilla_transformer.training.options import LARGEST_VOCABULARY, check_range, option
from vanilla_transformer.training.preparation.output_folder import (
    TOKENIZER_FILES,
    check_decodable,
    check_new_files,
    check_writable,
)


@dataclass(kw_only=True)
class TokenizerOptions:
    """Options of `tokenizer`."""

    files: tuple[Path, ...] = option((), "Text files of both languages, one sentence per line.", positional=True)
    output_dir: Path = option(Path("tokenizer"), "Folder to write.")
    vocab_size: int = option(37000, "Size of the vocabulary, including the special tokens and the 256 bytes.")
    min_frequency: int = option(2, "Merge two tokens only if they are neighbours at least this often.")


OPTIONS = TokenizerOptions


def run(options: TokenizerOptions) -> int:
    """Train and save."""
    if not options.files:
        raise UserError("No text was given; name one file or more.")
    check_range("vocab_size", options.vocab_size, 1, LARGEST_VOCABULARY)
    check_range("min_frequency", options.min_frequency, 1)
    for path in options.files:
        _check_file(path)
    check_new_files(options.output_dir, (*TOKENIZER_FILES, "model.safetensors"))
    check_decodable(options.output_dir)
    check_writable(options.output_dir)
    from .session import start

    start()
    from vanilla_transformer.tokenization_vanilla_transformer import VanillaTransformerTokenizer

    try:
        tokenizer = VanillaTransformerTokenizer.train_from_iterator(
            _lines(options.files), options.vocab_size, min_frequency=options.min_frequency, show_progress=True
        )
    except ValueError as error:
        raise error if isinstance(error, UserError) else UserError(str(error)) from error
    tokenizer.save_pretrained(options.output_dir)
    print(f"{options.output_dir}: {len(tokenizer):,} entries")
    return 0


def _check_file(path: Path) -> None:
    """Refuse a file that is empty or cannot be read; a pipe is not opened, since it can be read only once."""
    try:
        found = path.stat()
        if stat.S_ISREG(found.st_mode):
            path.open("rb").close()
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist; give text files.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give text files.") from error
    if stat.S_ISDIR(found.st_mode):
        raise UserError(f"{path} is a folder; give text files.")
    if stat.S_ISREG(found.st_mode) and found.st_size == 0:
        raise UserError(f"{path} is empty; give text files of at least one sentence.")


def _lines(files: tuple[Path, ...]) -> Iterator[str]:
    has_text = False
    for path in files:
        with path.open("rb") as file:
            for line in decode_lines(file, path):
                has_text = has_text or not line.isspace()
                yield line
    if not has_text:
        raise UserError(f"{', '.join(map(str, files))} hold only white space; give text.")
