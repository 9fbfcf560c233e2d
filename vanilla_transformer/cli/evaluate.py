"""`evaluate`: translate a test set and score it with BLEU and chrF."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vanilla_transformer.training.options import option

from .files import check_output_file, read_lines, write_lines
from .translator import TranslatorOptions, load_translator


if TYPE_CHECKING:
    from vanilla_transformer.translation.translator import Translator


@dataclass(kw_only=True)
class EvaluateOptions(TranslatorOptions):
    """Options of `evaluate`."""

    source: Path = option(..., "File of source sentences, one per line.")
    references: Path = option(..., "File of references, one per line.")
    tokenize: str = option(
        "13a", "Tokenisation of sacreBLEU: 13a, none (for text that is tokenised already), intl, char, zh, ..."
    )
    lowercase: bool = option(False, "Ignore case.")
    test_set: str | None = option(
        None, "Name of the test set, written with the scores. Default: the file name of `source`."
    )
    translations: Path | None = option(None, "File for the translations.")
    output: Path | None = option(None, "File for the scores, as JSON; they are printed as well.")


OPTIONS = EvaluateOptions


def run(options: EvaluateOptions) -> int:
    """Print the scores as JSON."""
    sources, references = read_lines(options.source), read_lines(options.references)
    taken = [options.source, options.references]
    for path in (options.translations, options.output):
        if path is not None:
            check_output_file(path, taken, options.model)
            taken.append(path)
    translator = load_translator(options)
    from vanilla_transformer.evaluation import evaluate_model

    started = time.perf_counter()
    scores, translations = evaluate_model(
        translator,
        sources,
        references,
        tokenize=options.tokenize,
        lowercase=options.lowercase,
        show_progress=True,
    )
    seconds = time.perf_counter() - started
    about = {"test_set": options.test_set or options.source.stem, **_circumstances(translator), "seconds": seconds}
    record = json.dumps(scores.as_dict() | about | {"model": options.model}, indent=2)
    if options.translations is not None:
        write_lines(options.translations, translations)
    if options.output is not None:
        write_lines(options.output, [record])
    print(record)
    return 0


def _circumstances(translator: "Translator") -> dict[str, Any]:
    """Search, precision and hardware of a translator."""
    import torch

    from vanilla_transformer import VanillaTransformerForConditionalGeneration

    search, model, device = translator.options, translator.model, translator.model.device
    on_gpu = device.type == "cuda"
    return {
        "num_beams": search.num_beams,
        "length_penalty": search.length_penalty,
        # Models of other classes translate with `generate`.
        "rules": search.rules if isinstance(model, VanillaTransformerForConditionalGeneration) else "transformers",
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": translator.quantization,
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "threads": None if on_gpu else torch.get_num_threads(),
        "workers": translator.workers,
    }
