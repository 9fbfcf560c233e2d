"""`evaluate`: translate a test set and score it with BLEU and chrF."""

import json
from dataclasses import dataclass
from pathlib import Path

from vanilla_transformer.training.configuration import option

from .files import check_output_file, read_lines, write_lines
from .translator import TranslatorOptions, load_translator


@dataclass(kw_only=True)
class EvaluateOptions(TranslatorOptions):
    """Options of `evaluate`."""

    source: Path = option(..., "File of source sentences, one a line.")
    references: Path = option(..., "File of references, one a line.")
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
    translator = load_translator(options)
    from vanilla_transformer.evaluation import evaluate_model

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
        write_lines(options.translations, translations)
    if options.output is not None:
        write_lines(options.output, [record])
    print(record)
    return 0
