"""BLEU and chrF by sacreBLEU, with signatures: for texts, for a model, and as a metric for `Seq2SeqTrainer`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, get_args

import datasets
import evaluate
from sacrebleu.metrics import BLEU, CHRF

from vanilla_transformer.translation.translator import Translator

from .errors import UserError


# Tokenisations of sacreBLEU. `none` is for text that is tokenised already.
BleuTokenization = Literal["13a", "none", "intl", "char", "zh", "ja-mecab", "ko-mecab", "flores200"]


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of a translated text.

    Args:
        bleu: BLEU, 0 to 100.
        chrf: chrF2, 0 to 100.
        bleu_signature: The settings of sacreBLEU that reproduce this BLEU.
        chrf_signature: The same for chrF.
        num_sentences: Number of sentences.
    """

    bleu: float
    chrf: float
    bleu_signature: str
    chrf_signature: str
    num_sentences: int

    def as_dict(self) -> dict[str, float | int | str]:
        """The record that is written as JSON."""
        return asdict(self)


def score(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    tokenize: BleuTokenization = "13a",
    lowercase: bool = False,
) -> Scores:
    """Score translations against one reference each.

    Args:
        hypotheses: Translations, not tokenised unless `tokenize` is `none`.
        references: References, one for each.
        tokenize: Tokenisation inside sacreBLEU.
        lowercase: Whether case is ignored.

    Returns:
        BLEU and chrF with their signatures.

    Raises:
        UserError: There are no sentences, the numbers differ, or the tokenisation is unknown.
    """
    if len(hypotheses) != len(references):
        raise UserError(
            f"There are {len(hypotheses):,} translations and {len(references):,} references; each translation "
            "needs one reference."
        )
    if not references:
        raise UserError("There is nothing to score: the references are empty.")
    bleu, chrf = _bleu(tokenize, lowercase), CHRF(lowercase=lowercase)
    bleu_score = bleu.corpus_score(list(hypotheses), [list(references)])
    chrf_score = chrf.corpus_score(list(hypotheses), [list(references)])
    return Scores(
        bleu=bleu_score.score,
        chrf=chrf_score.score,
        bleu_signature=str(bleu.get_signature()),
        chrf_signature=str(chrf.get_signature()),
        num_sentences=len(references),
    )


def evaluate_model(
    translator: Translator,
    sources: Sequence[str],
    references: Sequence[str],
    *,
    tokenize: BleuTokenization = "13a",
    lowercase: bool = False,
    show_progress: bool = False,
) -> tuple[Scores, list[str]]:
    """Translate and score.

    Args:
        translator: Model, tokenizer and search options.
        sources: Source sentences.
        references: One reference for each.
        tokenize: As for `score`.
        lowercase: As for `score`.
        show_progress: Whether to draw a progress bar.

    Returns:
        The scores and the translations.

    Raises:
        UserError: As for `score`.
    """
    if len(sources) != len(references):
        raise UserError(
            f"There are {len(sources):,} sources and {len(references):,} references; each source needs one reference."
        )
    # Refuse a wrong tokenisation before translating, which takes long.
    _bleu(tokenize, lowercase)
    hypotheses = translator.translate(list(sources), show_progress=show_progress)
    return score(hypotheses, references, tokenize=tokenize, lowercase=lowercase), hypotheses


def _bleu(tokenize: str, lowercase: bool) -> BLEU:
    if tokenize not in get_args(BleuTokenization):
        raise UserError(f"`tokenize` is {tokenize}; it must be one of {', '.join(get_args(BleuTokenization))}.")
    try:
        # `force` only silences the warning about text that looks tokenised; the score is the same.
        return BLEU(tokenize=tokenize, lowercase=lowercase, force=True)
    except (ImportError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"`tokenize` {tokenize} needs a package that is not installed ({reason}); install it."
        ) from error


class TranslationMetric(evaluate.Metric):
    """BLEU and chrF as an `evaluate.Metric` that needs no network.

    Example:
        >>> from vanilla_transformer.evaluation import TranslationMetric
        >>> metric = TranslationMetric()
        >>> result = metric.compute(predictions=["Guten Tag ."], references=["Guten Tag ."])
        >>> round(result["chrf"])
        100
    """

    def _info(self) -> evaluate.MetricInfo:
        value = datasets.Value("string")
        return evaluate.MetricInfo(
            description="BLEU and chrF by sacreBLEU, with signatures.",
            citation="Post (2018), A Call for Clarity in Reporting BLEU Scores.",
            inputs_description="predictions: translations; references: one reference, or a list of one, for each.",
            features=[
                datasets.Features({"predictions": value, "references": value}),
                datasets.Features({"predictions": value, "references": datasets.Sequence(value)}),
            ],
        )

    def _compute(
        self,
        predictions: Sequence[str],
        references: Sequence[str] | Sequence[Sequence[str]],
        tokenize: BleuTokenization = "13a",
        lowercase: bool = False,
    ) -> dict[str, float | int | str]:
        for reference in references:
            if not isinstance(reference, str) and len(reference) != 1:
                raise UserError(f"A translation has {len(reference)} references; give each translation one reference.")
        singles = [reference if isinstance(reference, str) else reference[0] for reference in references]
        return score(predictions, singles, tokenize=tokenize, lowercase=lowercase).as_dict()
