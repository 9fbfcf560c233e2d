"""`translate`: translate arguments, a file, standard input or what is typed at a prompt."""

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vanilla_transformer.data.utf8 import decode_lines
from vanilla_transformer.errors import UserError
from vanilla_transformer.training.options import option
from vanilla_transformer.translation.files.layouts import Layout, LayoutName, layout_of
from vanilla_transformer.translation.files.text_files import InputFile, check_partial, partial_files, translate_file
from vanilla_transformer.translation.options import check_at_least

from .files import check_output_file, write_lines
from .translator import TranslatorOptions, load_translator


if TYPE_CHECKING:
    from vanilla_transformer.translation.translator import Translator


@dataclass(kw_only=True)
class TranslateOptions(TranslatorOptions):
    """Options of `translate`."""

    texts: tuple[str, ...] = option((), "Texts to translate; without any, --input or standard input.", positional=True)
    input: Path | None = option(None, "File of texts, one a line.")
    output: Path | None = option(None, "File to write; default: standard output.")
    resume: bool = option(
        False,
        "Go on with the translation of --input to --output where it was interrupted; a complete one is made anew.",
    )
    format: LayoutName | None = option(
        None, "Lines of the input: text, tsv or jsonl; default: by the name of --input, else text."
    )
    output_format: LayoutName | None = option(
        None, "Lines of the output; default: by the name of --output, else as the input. tsv to tsv adds columns."
    )
    column: int = option(1, "Column of the text in tab-separated lines, from 1.")
    key: str = option("source", "Name of the text in JSON lines.")
    num_hypotheses: int = option(1, "Number of translations of each text; more than 1 come with their scores.")
    scores: bool = option(False, "Write the score behind each translation.")
    sample: bool = option(False, "Draw tokens by their probability instead of searching for the best.")
    temperature: float | None = option(None, "Divides logits before drawing; default: 1.")
    top_k: int | None = option(None, "Draw among so many best tokens; default: all.")
    top_p: float | None = option(None, "Draw among the best tokens of this probability together; default: 1.")
    seed: int = option(0, "Decides what is drawn.")


OPTIONS = TranslateOptions


def run(options: TranslateOptions) -> int:
    """Translate, one line of output for one line of input."""
    layout = _check(options)
    source = None
    if options.input is not None:
        source = InputFile.check(options.input, layout)
    translator = load_translator(options)
    if source is not None and _is_file(options.output):
        try:
            translate_file(
                translator, source, options.output, layout,
                model=options.model, resume=options.resume, show_progress=True,
            )  # fmt: skip
        except KeyboardInterrupt:
            partial, _ = partial_files(options.output)
            print(f"{partial} keeps what is done; --resume goes on with it.", file=sys.stderr)
            raise
    elif source is not None:
        _write(_translated(translator, source.lines(), layout, show_progress=True), options.output)
    elif options.texts:
        _write(_translated(translator, options.texts, layout), options.output)
    else:
        lines = decode_lines(sys.stdin.buffer, "Standard input")
        if sys.stdin.isatty():
            _write(_answers(translator, _prompted(lines), layout), options.output)
        else:
            _write(_translated(translator, lines, layout), options.output)
    return 0


def _check(options: TranslateOptions) -> Layout:
    """Refuse what does not fit together, and return what lines look like."""
    if options.texts and options.input is not None:
        raise UserError("Texts and --input were both given; give one of them.")
    for text in options.texts:
        # Python reads bytes of the command line that are not UTF-8 as surrogates.
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UserError(f"The text {text!a} is not UTF-8; convert it.")
    if options.texts and options.format is not None:
        raise UserError("--format was given with texts; it applies to --input and standard input.")
    if not options.texts and options.input is None and sys.stdin is None:
        raise UserError("No text was given, and standard input is closed; give texts, or --input FILE.")
    check_at_least("column", options.column, 1)
    if options.resume and (options.input is None or not _is_file(options.output)):
        raise UserError("--resume needs --input and an --output that is a file; give both, or leave it out.")
    if options.output is not None:
        check_output_file(options.output, [options.input] if options.input is not None else [], options.model)
        if options.input is not None and _is_file(options.output):
            check_partial(options.output, resume=options.resume)
    source = options.format or layout_of(options.input)
    target = options.output_format or (source if options.output is None else layout_of(options.output))
    return Layout(
        source=source,
        # The name of the output says nothing where it has no suffix of a layout.
        target=source if target == "text" and options.output_format is None else target,
        column=options.column,
        key=options.key,
        alternatives=options.scores or options.num_hypotheses > 1,
    )


def _is_file(path: Path | None) -> bool:
    """Whether a path is, or will be, a file, and no device or pipe."""
    return path is not None and (path.is_file() or not path.exists())


def _translated(
    translator: "Translator", lines: Iterable[str], layout: Layout, *, show_progress: bool = False
) -> Iterator[str]:
    """Lines of output for lines of input."""
    waiting: deque[str] = deque()

    def texts() -> Iterator[str]:
        for number, line in enumerate(lines, start=1):
            text = layout.text_of(line, f"Standard input, line {number:,}")
            waiting.append(line)
            yield text

    translations = translator.hypotheses(texts(), show_progress=show_progress, with_scores=layout.alternatives)
    for found in translations:
        yield layout.line_of(waiting.popleft(), found)


def _answers(translator: "Translator", lines: Iterable[str], layout: Layout) -> Iterator[str]:
    """Lines of output for lines that are typed; what is refused is told, and the next line follows."""
    for number, line in enumerate(lines):
        try:
            text = layout.text_of(line, f"Line {number + 1:,}")
            (found,) = translator.translate_window([text], start=number, with_scores=layout.alternatives)
        except UserError as error:
            print(error, file=sys.stderr)
        else:
            yield layout.line_of(line, found)


def _prompted(lines: Iterator[str]) -> Iterator[str]:
    print("One text a line; Ctrl-D ends.", file=sys.stderr)
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = next(lines, None)
        if line is None:
            # The shell's prompt follows on a line of its own.
            print(file=sys.stderr)
            return
        yield line


def _write(translations: Iterable[str], output: Path | None) -> None:
    if output is not None:
        write_lines(output, translations)
        return
    for line in translations:
        print(line, flush=True)
