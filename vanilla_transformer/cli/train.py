"""`train`: train a translation model on parallel text."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vanilla_transformer.errors import UserError
from vanilla_transformer.training.options import TrainingOptions
from vanilla_transformer.training.preparation.texts import check_texts, open_texts

from .launcher import is_launched, is_worker, launch


if TYPE_CHECKING:
    from vanilla_transformer.publishing.background import BackgroundPush


OPTIONS = TrainingOptions
# Translations that samples.jsonl keeps of each validation.
NUM_SAMPLES = 5
# How long a run that was stopped waits for its last checkpoint to be published.
STOP_SECONDS = 60.0


def run(options: TrainingOptions) -> int:
    """Train, or with `--dry_run` estimate."""
    options.check()
    check_texts(options)
    if options.num_processes > 1 and not options.dry_run:
        return _launch(options)
    from .session import start

    start()
    if options.dry_run:
        from vanilla_transformer.training.dry_run import dry_run

        found = dry_run(options)
        # One of several processes speaks for all.
        for name, value in found.items() if os.environ.get("RANK", "0") == "0" else ():
            print(f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}")
        return 0
    from vanilla_transformer.training.engine import train
    from vanilla_transformer.training.step.process import check_devices

    if is_worker():
        check_devices(options, int(os.environ["WORLD_SIZE"]))
    push = _push(options)
    try:
        result = train(options, _sample_bleu(options), None if push is None else push.offer)
    except Exception:
        if push is not None:
            _send_last(push)
        raise
    # One of several processes speaks for all.
    if not result.is_complete and os.environ.get("RANK", "0") == "0":
        print(
            f"Stopped after {result.updates:,} updates and saved; continue with --resume.", file=sys.stderr, flush=True
        )
    _show_summary(result.output_dir)
    if push is not None and result.is_complete:
        push.finish(result.output_dir)
    elif push is not None:
        _send_last(push)
    return 0 if result.interrupted_by is None else 128 + result.interrupted_by


def _show_summary(folder: Path) -> None:
    """Draw the run's curve in the terminal that watches it."""
    if not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
        return
    from vanilla_transformer.visualization.summary import run_summary

    # Standard error is UTF-8 in any case; what the terminal shows, the locale says.
    print(run_summary(folder, unicode=sys.getfilesystemencoding() == "utf-8"), file=sys.stderr, flush=True)


def _send_last(push: "BackgroundPush") -> None:
    """Have the last checkpoint of a run that is over without a result published, if that does not take long."""
    try:
        push.finish(None, STOP_SECONDS)
    except UserError as error:
        print(error, file=sys.stderr)


def _push(options: TrainingOptions) -> "BackgroundPush | None":
    """What publishes the run, on its main process."""
    if options.push_to_hub is None:
        return None
    from vanilla_transformer.publishing.background import BackgroundPush
    from vanilla_transformer.publishing.upload import Destination, Hub

    destination = Destination(repo=options.push_to_hub, private=options.hub_private, revision=options.hub_revision)
    if os.environ.get("RANK", "0") != "0":
        return None
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    push = BackgroundPush(Hub(), destination, options.output_dir)
    push.prepare()
    return push


def _launch(options: TrainingOptions) -> int:
    """Train in several processes that have the same options."""
    import tempfile
    from dataclasses import replace

    import yaml

    if is_launched():
        raise UserError(
            f"--num_processes is {options.num_processes}, but another launcher has started this process; leave it to "
            "one of the two."
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "options.yaml"
        path.write_text(yaml.safe_dump(replace(options, num_processes=1).as_dict()), encoding="utf-8")
        return launch(["train", "--config", str(path)], options.num_processes)


def _sample_bleu(options: TrainingOptions):
    """BLEU on evenly spaced validation sentences, and some of them, for the engine to call at each validation."""
    _, text = open_texts(options)
    # Sentences in several target languages have no one tag to be translated with.
    if text is None or options.language_column is not None or options.valid_bleu_sentences == 0:
        return None
    from vanilla_transformer.data.corpora import Rejections
    from vanilla_transformer.evaluation import evaluate_model
    from vanilla_transformer.translation.translator import Translator

    pairs = [(source, target) for _, source, target in text.pairs(Rejections("drop"))]
    if not pairs:
        # The engine names what is wrong with the text.
        return None
    step = max(1, len(pairs) // options.valid_bleu_sentences)
    sources, references = zip(*pairs[::step][: options.valid_bleu_sentences], strict=True)

    def evaluation(model, tokenizer):
        # Greedy: the curve is to be looked at often, and costs a tenth of a beam search.
        translator = Translator(model, tokenizer, num_beams=1, tokens_per_batch=options.tokens_per_batch)
        scores, translations = evaluate_model(translator, sources, references)
        texts = [
            {"source": source, "reference": reference, "hypothesis": hypothesis}
            for source, reference, hypothesis in zip(sources, references, translations, strict=True)
        ]
        return {"bleu": scores.bleu, "samples": texts[:: max(1, len(texts) // NUM_SAMPLES)][:NUM_SAMPLES]}

    return evaluation
