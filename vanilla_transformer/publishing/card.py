"""Renders facts as a model card: Markdown with the metadata that the Hub reads."""

import re
from functools import cache
from importlib import resources

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from jinja2 import Environment, StrictUndefined, Template

from vanilla_transformer.errors import UserError

from .curve import draw
from .facts import Facts


CARD = "README.md"
FACTS = "facts.json"
PICTURE = "learning_curve.svg"
# The Hub knows languages by two or three letters; a suffix as in pt_BR is left out.
_LANGUAGE = re.compile(r"([a-z]{2,3})(?:[-_].+)?")


def card_files(facts: Facts, place: str, *, revision: str | None = None) -> dict[str, str]:
    """The facts, the card made from them, and its picture.

    Args:
        facts: The facts.
        place: As for `render`.
        revision: As for `render`.

    Returns:
        Texts by the names of their files.

    Raises:
        UserError: As for `render`.
    """
    files = {FACTS: facts.as_json(), CARD: render(facts, place, revision=revision)}
    if has_picture(facts):
        files[PICTURE] = draw(facts.curve, f"Learning curve of {facts.name}")
    return files


def render(facts: Facts, place: str, *, revision: str | None = None) -> str:
    """Write the card.

    Args:
        facts: The facts.
        place: Name of the repository, or folder, of the card.
        revision: Branch or tag to load from; `None` for the main branch.

    Returns:
        The text of `README.md`.

    Raises:
        UserError: huggingface_hub refuses the metadata.
    """
    text = _template().render(
        facts=facts,
        metadata=metadata_of(facts).to_yaml(),
        place=place,
        revision="" if revision is None else f', revision="{revision}"',
        languages=_languages(facts),
        tag=facts.language_tags[0] if facts.language_tags else None,
        speeds=[score for score in facts.scores if score.seconds],
        picture=PICTURE if has_picture(facts) else None,
    )
    text = re.sub(r"\n{3,}", "\n\n", text)
    try:
        # The Hub reads cards in the same way.
        ModelCard(text)
    except ValueError as error:
        raise UserError(f"The facts make a card that is not valid ({error}); correct facts.json.") from error
    return text


def metadata_of(facts: Facts) -> ModelCardData:
    """The metadata: languages, licence, task, data and evaluation results.

    Args:
        facts: The facts.

    Returns:
        The metadata, without unknown entries.
    """
    codes = [facts.source_language, *facts.target_languages]
    matches = [_LANGUAGE.fullmatch(code.lower()) for code in codes if code is not None]
    languages = list(dict.fromkeys(match[1] for match in matches if match))
    dataset = facts.text.dataset if facts.text is not None else None
    return ModelCardData(
        language=languages or None,
        license=facts.license,
        library_name="transformers",
        pipeline_tag="translation",
        tags=["translation", "vanilla_transformer", "custom_code"],
        datasets=[dataset] if dataset else None,
        metrics=["bleu", "chrf"] if facts.scores else None,
        model_name=facts.name.split("/")[-1] if facts.scores else None,
        eval_results=_results(facts) or None,
    )


def has_picture(facts: Facts) -> bool:
    """Whether there is a curve to draw."""
    curve = facts.curve
    return curve is not None and max(len(curve.train), len(curve.valid)) > 1


@cache
def _template() -> Template:
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"cell": _cell, "decimal": _decimal, "duration": _duration}
    text = (resources.files(__package__) / "card_template.md").read_text(encoding="utf-8")
    return environment.from_string(text)


def _results(facts: Facts) -> list[EvalResult]:
    found = []
    for score in facts.scores:
        measured = (
            ("bleu", "BLEU", score.bleu, score.bleu_signature),
            ("chrf", "chrF", score.chrf, score.chrf_signature),
        )
        found += [
            EvalResult(
                task_type="translation",
                task_name="Translation",
                # The Hub requires a type for every data set, even for those that it does not host.
                dataset_type=score.dataset or re.sub(r"[\W_]+", "-", score.test_set.lower()).strip("-") or "test",
                dataset_name=score.test_set,
                dataset_split=score.split,
                metric_type=metric,
                metric_name=name,
                metric_value=round(value, 2),
                metric_args=None if signature is None else {"signature": signature},
            )
            for metric, name, value, signature in measured
            if value is not None
        ]
    return found


def _languages(facts: Facts) -> str:
    source = f"from {facts.source_language}" if facts.source_language else ""
    target = f"to {', '.join(facts.target_languages)}" if facts.target_languages else ""
    return " ".join(part for part in (source, target) if part)


def _cell(value: object) -> str:
    return "" if value is None else " ".join(str(value).split()).replace("|", "\\|")


def _decimal(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
