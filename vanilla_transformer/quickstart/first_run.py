"""The guided first run: from the shipped English-German sample to a model that translates, in minutes on a CPU."""

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path

from vanilla_transformer.data.utf8 import decode_lines
from vanilla_transformer.evaluation import Scores, evaluate_model, score
from vanilla_transformer.training.engine import train
from vanilla_transformer.training.options import TrainingOptions
from vanilla_transformer.translation.translator import Translator


SAMPLE = Path(__file__).parent / "sample"


@dataclass(frozen=True, slots=True)
class FirstRun:
    """What the first run found out.

    Args:
        scores: Scores of the model's translations of the test sentences.
        copy_scores: Scores of the source sentences themselves, taken as translations.
        examples: Source, reference and translation of ten test sentences.
        seconds: Duration of the whole run.
        interrupted_by: Number of the signal that stopped the training, or `None`; then there are no scores.
    """

    scores: Scores | None
    copy_scores: Scores | None
    examples: tuple[tuple[str, str, str], ...]
    seconds: float
    interrupted_by: int | None = None


def sample_files(split: str) -> tuple[Path, Path]:
    """The sample's English and German file of a split: `train`, `valid` or `test`."""
    return SAMPLE / f"{split}.en", SAMPLE / f"{split}.de"


def first_run(options: TrainingOptions) -> FirstRun:
    """Train on the sample, translate its test sentences and score them.

    Args:
        options: Training options; the text files are set here.

    Returns:
        Scores and examples; `evaluation.json` and `translations.de` in the output folder hold them too.

    Raises:
        UserError: As for `train`.
    """
    started = time.perf_counter()
    options = replace(options, train_files=sample_files("train"), valid_files=sample_files("valid"))
    result = train(options)
    if result.interrupted_by is not None:
        return FirstRun(None, None, (), time.perf_counter() - started, result.interrupted_by)
    sources, references = (_lines_of(path) for path in sample_files("test"))
    translator = Translator.from_pretrained(result.output_dir, device="cpu" if options.device == "cpu" else None)
    scores, translations = evaluate_model(translator, sources, references, show_progress=True)
    copy_scores = score(sources, references)
    step = len(sources) // 10
    examples = tuple(zip(sources, references, translations, strict=True))[::step][:10]
    search = {"num_beams": translator.options.num_beams, "length_penalty": translator.options.length_penalty}
    about = {"test_set": "quickstart sample", **search, "rules": translator.options.rules}
    record = {"model": {**scores.as_dict(), **about}, "copy_of_the_source": copy_scores.as_dict()}
    (result.output_dir / "evaluation.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (result.output_dir / "translations.de").write_text("".join(f"{line}\n" for line in translations), encoding="utf-8")
    return FirstRun(scores, copy_scores, examples, time.perf_counter() - started)


def _lines_of(path: Path) -> list[str]:
    with path.open("rb") as file:
        return list(decode_lines(file, path))
