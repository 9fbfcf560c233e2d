import json
import socket

import datasets
import pytest
import sacrebleu
import torch
from sacrebleu.metrics import BLEU, CHRF
from transformers import (
    DataCollatorForSeq2Seq,
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizer,
)
from vanilla_transformer.errors import UserError
from vanilla_transformer.evaluation import TranslationMetric, evaluate_model, score


HYPOTHESES = ["The house stands on the hill.", "I have lost my key", "Sie liest ein Buch, im Garten!"]
REFERENCES = ["The house is on the hill.", "I have lost my keys.", "sie liest ein Buch im Garten"]


class Repeater:
    """A translator that translates a text into itself, and counts how often it is asked."""

    def __init__(self):
        self.calls = 0

    def translate(self, texts, *, show_progress=False):
        self.calls += 1
        return list(texts)


# Scores


@pytest.mark.parametrize("tokenize", ["13a", "none", "intl", "char", "zh"])
@pytest.mark.parametrize("lowercase", [False, True])
def test_scores_are_sacrebleus_own(tokenize, lowercase):
    scores = score(HYPOTHESES, REFERENCES, tokenize=tokenize, lowercase=lowercase)
    bleu = sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES], tokenize=tokenize, lowercase=lowercase, force=True)
    assert scores.bleu == bleu.score
    assert 0.0 < scores.bleu < 100.0
    chrf = CHRF(lowercase=lowercase)
    assert scores.chrf == chrf.corpus_score(HYPOTHESES, [REFERENCES]).score
    assert scores.num_sentences == 3
    bleu = BLEU(tokenize=tokenize, lowercase=lowercase)
    bleu.corpus_score(HYPOTHESES, [REFERENCES])
    assert scores.bleu_signature == str(bleu.get_signature())
    assert scores.chrf_signature == str(chrf.get_signature())
    assert f"tok:{tokenize}|" in scores.bleu_signature
    assert f"version:{sacrebleu.__version__}" in scores.bleu_signature


def test_sacrebleus_functions_have_the_same_defaults():
    scores = score(HYPOTHESES, REFERENCES)
    assert scores.bleu == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score
    assert scores.chrf == sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score


def test_a_text_equals_itself_and_another_does_not():
    perfect = score(REFERENCES, REFERENCES)
    assert perfect.bleu == pytest.approx(100.0)
    assert perfect.chrf == pytest.approx(100.0)
    assert score(["Nothing of that kind"] * 3, REFERENCES).bleu < 10.0


def test_the_record_is_json():
    record = score(HYPOTHESES, REFERENCES).as_dict()
    assert json.loads(json.dumps(record)) == record
    assert list(record) == ["bleu", "chrf", "bleu_signature", "chrf_signature", "num_sentences"]


def test_a_model_is_scored_by_its_translations():
    scores, translations = evaluate_model(Repeater(), HYPOTHESES, REFERENCES, tokenize="intl", lowercase=True)
    assert translations == HYPOTHESES
    assert scores == score(HYPOTHESES, REFERENCES, tokenize="intl", lowercase=True)


# Mistakes


def test_unequal_numbers_are_refused():
    with pytest.raises(UserError, match="2 translations and 3 references"):
        score(HYPOTHESES[:2], REFERENCES)
    translator = Repeater()
    with pytest.raises(UserError, match="2 sources and 3 references"):
        evaluate_model(translator, HYPOTHESES[:2], REFERENCES)
    assert translator.calls == 0


def test_nothing_to_score_is_refused():
    for empty in (lambda: score([], []), lambda: evaluate_model(Repeater(), [], [])):
        with pytest.raises(UserError, match="nothing to score"):
            empty()


def test_an_unknown_tokenisation_is_refused_before_anything_is_translated():
    translator = Repeater()
    for attempt in (
        lambda: score(HYPOTHESES, REFERENCES, tokenize="14a"),
        lambda: evaluate_model(translator, HYPOTHESES, REFERENCES, tokenize="14a"),
    ):
        with pytest.raises(UserError, match=r"^`tokenize` is 14a; it must be one of 13a, none, "):
            attempt()
    assert translator.calls == 0


@pytest.mark.parametrize("error", [ImportError, RuntimeError])
def test_a_tokenisation_whose_package_is_not_installed_is_one_sentence(monkeypatch, error):
    def missing(**_):
        raise error("\n\nPlease install this:\n\n  pip install that")

    monkeypatch.setattr("vanilla_transformer.evaluation.BLEU", missing)
    with pytest.raises(UserError) as caught:
        score(HYPOTHESES, REFERENCES, tokenize="ja-mecab")
    assert "`tokenize` ja-mecab" in str(caught.value)
    assert "pip install that" in str(caught.value)
    assert "\n" not in str(caught.value)


# The metric


@pytest.fixture
def metric(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the metric opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    return TranslationMetric(cache_dir=str(tmp_path))


def test_the_metric_equals_the_score(metric):
    for references in (REFERENCES, [[reference] for reference in REFERENCES]):
        for options in ({}, {"tokenize": "char", "lowercase": True}):
            result = metric.compute(predictions=HYPOTHESES, references=references, **options)
            assert result == score(HYPOTHESES, REFERENCES, **options).as_dict()


def test_the_metric_takes_batches(metric):
    for hypothesis, reference in zip(HYPOTHESES, REFERENCES, strict=True):
        metric.add(prediction=hypothesis, reference=reference)
    assert metric.compute() == score(HYPOTHESES, REFERENCES).as_dict()


def test_the_metric_refuses_several_references_and_unknown_tokenisations(metric):
    with pytest.raises(UserError, match="2 references"):
        metric.compute(predictions=["a", "b"], references=[["a"], ["b", "c"]])
    with pytest.raises(UserError, match="14a"):
        metric.compute(predictions=["a"], references=["a"], tokenize="14a")


def test_the_metric_serves_a_seq2seq_trainer_that_learns_to_copy(tmp_path, metric):
    tokenizer = VanillaTransformerTokenizer()
    torch.manual_seed(0)
    config = VanillaTransformerConfig(
        vocab_size=len(tokenizer), d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32,
        decoder_ffn_dim=32, encoder_attention_heads=2, decoder_attention_heads=2, dropout=0.0,
    )  # fmt: skip
    model = VanillaTransformerForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        max_length=8, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1
    )
    texts = [a + b + c for a in "abc" for b in "abc" for c in "abc"]
    rows = datasets.Dataset.from_list([dict(tokenizer(text, text_target=text)) for text in texts])
    seen = []

    def compute_metrics(prediction):
        ids = prediction.predictions
        hypotheses = tokenizer.batch_decode(ids.clip(min=0), skip_special_tokens=True)
        labels = prediction.label_ids.copy()
        labels[labels == -100] = tokenizer.pad_token_id
        references = tokenizer.batch_decode(labels, skip_special_tokens=True)
        assert references == texts
        seen.append((hypotheses, references))
        return {
            name: value
            for name, value in metric.compute(predictions=hypotheses, references=references, tokenize="char").items()
            if isinstance(value, float)
        }

    arguments = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path / "trainer"), max_steps=60, per_device_train_batch_size=27,
        per_device_eval_batch_size=9, learning_rate=1e-2, predict_with_generate=True, generation_max_length=8,
        generation_num_beams=1, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no", seed=1,
        dataloader_pin_memory=False, logging_strategy="no",
    )  # fmt: skip
    trainer = Seq2SeqTrainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < before["eval_loss"] / 2
    assert after["eval_chrf"] > before["eval_chrf"]
    hypotheses, references = seen[-1]
    assert after["eval_bleu"] == sacrebleu.corpus_bleu(hypotheses, [references], tokenize="char").score
    assert after["eval_chrf"] == sacrebleu.corpus_chrf(hypotheses, [references]).score
    assert len(seen) == 2
