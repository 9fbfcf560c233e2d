"""`score`: score a file of translations with BLEU and chrF."""

import json
from dataclasses import dataclass
from pathlib import Path

from vanilla_transformer.training.options import option

from .files import read_lines


@dataclass(kw_only=True)
class ScoreOptions:
    """Options of `score`."""

    translations: Path = option(..., "File of translations, one per line.")
    references: Path = option(..., "File of references, one per line.")
    tokenize: str = option(
        "13a", "Tokenisation of sacreBLEU: 13a, none (for text that is tokenised already), intl, char, zh, ..."
    )
    lowercase: bool = option(False, "Ignore case.")


OPTIONS = ScoreOptions


def run(options: ScoreOptions) -> int:
    """Print the scores as JSON."""
    translations, references = read_lines(options.translations), read_lines(options.references)
    from vanilla_transformer.evaluation import score

    scores = score(translations, references, tokenize=options.tokenize, lowercase=options.lowercase)
    print(json.dumps(scores.as_dict(), indent=2))
    return 0
