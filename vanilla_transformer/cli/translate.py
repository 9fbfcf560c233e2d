"""`translate`: translate arguments, a file or standard input."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vanilla_transformer.errors import UserError
from vanilla_transformer.training.configuration import option

from .evaluate import check_output_file, read_lines


@dataclass(kw_only=True)
class TranslateOptions:
    """Options of `translate`."""

    texts: tuple[str, ...] = option((), "Texts to translate; without any, --input or standard input.", positional=True)
    model: str = option(..., "Model folder, or name on the Hub.")
    input: Path | None = option(None, "File of sentences, one a line.")
    output: Path | None = option(None, "File to write; default: standard output.")
    num_beams: int | None = option(None, "Beam size; default: the model's generation configuration.")
    length_penalty: float | None = option(None, "Power of the length that divides scores; default: likewise.")
    tokens_per_batch: int = option(4096, "Largest padded number of source tokens of a batch.")


OPTIONS = TranslateOptions


def run(options: TranslateOptions) -> int:
    """Translate, one line of output for one line of input."""
    if options.texts and options.input is not None:
        raise UserError("Texts and --input were both given; give one of them.")
    for text in options.texts:
        # Python reads bytes of the command line that are not UTF-8 as surrogates.
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UserError(f"The text {text!a} is not UTF-8; convert it.")
    if options.output is not None:
        check_output_file(options.output)
    lines = read_lines(options.input) if options.input is not None else list(options.texts)
    from .session import start

    start()
    from vanilla_transformer.translation.translator import Translator

    translator = Translator.from_pretrained(
        options.model,
        num_beams=options.num_beams,
        length_penalty=options.length_penalty,
        tokens_per_batch=options.tokens_per_batch,
    )
    if lines:
        _write(iter(translator.translate(lines, show_progress=options.input is not None)), options.output)
    elif sys.stdin.isatty():
        print("One sentence a line; Ctrl-D ends.", file=sys.stderr)
        _write(translator.translate_lines(_standard_input(), window=1), options.output)
    else:
        _write(translator.translate_lines(_standard_input()), options.output)
    return 0


def _standard_input() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise UserError(f"Standard input, line {number:,}, is not UTF-8; convert it.") from error


def _write(translations: Iterator[str], output: Path | None) -> None:
    if output is None:
        for line in translations:
            print(line, flush=True)
        return
    if output.exists() and not output.is_file():
        # A device or a pipe, such as /dev/null, is written to and never replaced.
        with output.open("w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in translations)
        return
    # A link stays, and the file that it names is replaced.
    output = output.resolve()
    # An output that exists is replaced when the new one is whole, not before.
    partial = output.with_name(f"partial-{output.name}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in translations)
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
