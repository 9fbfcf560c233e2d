"""`quickstart`: train, evaluate and try a small English-German model on the shipped sample."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from vanilla_transformer.training.options import TrainingOptions, option
from vanilla_transformer.training.preparation.output_folder import check_output_dir

from .options import read_recipe


@dataclass(kw_only=True)
class QuickstartOptions:
    """Options of `quickstart`."""

    output_dir: Path = option(Path("vanilla-transformer-quickstart"), "Folder for the run and its model.")
    seed: int = option(1, "Seed for the initial weights, the order of batches and dropout.")
    resume: bool = option(False, "Continue an interrupted quickstart in OUTPUT_DIR.")


OPTIONS = QuickstartOptions


def run(options: QuickstartOptions) -> int:
    """Train and evaluate on the sample; print the scores and how to use the model."""
    training = TrainingOptions(**read_recipe("quickstart", TrainingOptions))
    training = replace(training, output_dir=options.output_dir, seed=options.seed, resume=options.resume)
    check_output_dir(training, ("evaluation.json", "translations.de"))
    print("Training a small English-German Transformer on the shipped sample.", flush=True)
    from .session import start

    start()
    from vanilla_transformer.quickstart.first_run import first_run

    result = first_run(training)
    folder = options.output_dir
    if result.interrupted_by is not None:
        print(
            f"Stopped and saved; continue with `vanilla-transformer quickstart --output_dir {folder} --resume`.",
            file=sys.stderr,
        )
        return 128 + result.interrupted_by
    print(f"\nTranslations of sentences that the model was not trained on ({folder}/translations.de has them all):\n")
    for source, reference, translation in result.examples:
        print(f"  English    {source}\n  reference  {reference}\n  model      {translation}\n")
    print(
        f"BLEU of the model on {result.scores.num_sentences} sentences: {result.scores.bleu:.1f} "
        f"(copying the source: {result.copy_scores.bleu:.1f}; {result.scores.bleu_signature})\n"
        f"Time: {result.seconds / 60:.1f} minutes\n\n"
        "Load the result in Python:\n\n"
        "  from vanilla_transformer import Translator\n"
        f'  translator = Translator.from_pretrained("{folder}")\n'
        '  print(translator.translate("The device is not supported."))\n\n'
        "or with transformers alone, after `import vanilla_transformer`:\n\n"
        "  from transformers import AutoModelForSeq2SeqLM, AutoTokenizer\n"
        f'  model = AutoModelForSeq2SeqLM.from_pretrained("{folder}")\n'
        f'  tokenizer = AutoTokenizer.from_pretrained("{folder}")'
    )
    return 0
