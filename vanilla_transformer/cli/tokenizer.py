"""`tokenizer`: train a vocabulary on text files."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vanilla_transformer.errors import UserError
from vanilla_transformer.training.configuration import option
from vanilla_transformer.training.output_folder import check_writable


@dataclass(kw_only=True)
class TokenizerOptions:
    """Options of `tokenizer`."""

    files: tuple[Path, ...] = option((), "Text files of both languages, one sentence a line.", positional=True)
    output_dir: Path = option(Path("tokenizer"), "Folder to write.")
    vocab_size: int = option(37000, "Entries of the vocabulary, special tokens and 256 bytes included.")
    min_frequency: int = option(2, "How often two tokens must be neighbours to be merged.")


OPTIONS = TokenizerOptions


def run(options: TokenizerOptions) -> int:
    """Train and save."""
    if not options.files:
        raise UserError("No text was given; name one file or more.")
    for path in options.files:
        if not path.is_file():
            raise UserError(f"{path} does not exist or is a folder; give text files.")
        if path.stat().st_size == 0:
            raise UserError(f"{path} is empty; give text files of at least one sentence.")
    if (options.output_dir / "model.safetensors").exists():
        raise UserError(f"{options.output_dir} holds a model with its own vocabulary; name another --output_dir.")
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


def _lines(files: tuple[Path, ...]) -> Iterator[str]:
    for path in files:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                except UnicodeDecodeError as error:
                    raise UserError(
                        f"{path}, line {number:,}, byte {error.start + 1}: the text is not UTF-8; convert the file."
                    ) from error
