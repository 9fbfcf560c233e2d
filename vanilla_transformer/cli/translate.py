"""`translate`: translate arguments, a file or standard input."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vanilla_transformer.errors import UserError
from vanilla_transformer.training.configuration import option

from .files import check_output_file, read_lines, write_lines
from .translator import TranslatorOptions, load_translator


@dataclass(kw_only=True)
class TranslateOptions(TranslatorOptions):
    """Options of `translate`."""

    texts: tuple[str, ...] = option((), "Texts to translate; without any, --input or standard input.", positional=True)
    input: Path | None = option(None, "File of sentences, one a line.")
    output: Path | None = option(None, "File to write; default: standard output.")


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
        check_output_file(options.output, [options.input] if options.input is not None else [])
    lines = read_lines(options.input) if options.input is not None else list(options.texts)
    if not lines and sys.stdin is None:
        raise UserError("No text was given, and standard input is closed; give texts, or --input FILE.")
    translator = load_translator(options)
    if lines:
        _write(translator.translate(lines, show_progress=options.input is not None), options.output)
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


def _write(translations: Iterable[str], output: Path | None) -> None:
    if output is not None:
        write_lines(output, translations)
        return
    for line in translations:
        print(line, flush=True)
