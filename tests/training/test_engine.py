import json
import math
from dataclasses import replace
from itertools import chain
from unittest import mock

import numpy as np
import pytest
import sacrebleu
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from runs import (
    D_MODEL,
    MAX_UPDATES,
    UPDATES_PER_EPOCH,
    WARMUP_STEPS,
    make_run,
    observed_steps,
    records_of,
    train_anew,
    weights_of,
)
from safetensors.torch import load_file
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from vanilla_transformer import Translator, VanillaTransformerForConditionalGeneration, VanillaTransformerTokenizer
from vanilla_transformer.cli import train as verb
from vanilla_transformer.data.batching import RandomBatches, TokenBatches, Update
from vanilla_transformer.errors import UserError
from vanilla_transformer.training.engine import TrainingRun, train
from vanilla_transformer.training.preparation.vocabulary_and_ids import model_configuration, prepare
from vanilla_transformer.training.records.checkpoints import list_checkpoints, update_of
from vanilla_transformer.training.step.loss import SmoothedTranslationLoss


def gradients_of(run: TrainingRun, update: Update, number: int = 1) -> dict[str, torch.Tensor]:
    """The gradients that the optimiser receives in a step."""
    gradients = {}

    def read(*_):
        gradients.update((name, parameter.grad.clone()) for name, parameter in run.model.named_parameters())

    handle = run.optimizer.optimizer.register_step_pre_hook(read)
    run.step(update, number)
    handle.remove()
    assert len(gradients) == len(list(run.model.parameters()))
    return gradients


def relative_distance(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest distance of two tensors of one name, relative to the norm of all expected ones together."""
    total = math.sqrt(sum(float(tensor.square().sum()) for tensor in expected.values()))
    assert actual.keys() == expected.keys() and total > 0.0
    return max(float((actual[name] - expected[name]).norm()) for name in expected) / total


def pair_of(corpus, index: int) -> dict[str, torch.Tensor]:
    """A pair as a batch of one, without the collation that training uses."""
    source, target = (torch.from_numpy(rows[0].copy()).long()[None] for rows in corpus.rows(np.array([index])))
    start = torch.full((1, 1), VanillaTransformerTokenizer().bos_token_id)
    return {"input_ids": source, "labels": target, "decoder_input_ids": torch.cat([start, target[:, :-1]], dim=1)}


def logits_of(model, pair: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(input_ids=pair["input_ids"], decoder_input_ids=pair["decoder_input_ids"]).logits


# The step


@pytest.mark.parametrize("entries", ["vocabulary", "others"])
def test_labels_are_smoothed_over_the_chosen_entries(entries, make_options, tmp_path):
    run = make_run(make_options(tmp_path, label_smoothing=0.1, label_smoothing_over=entries))
    size = run.model.config.decoder_vocab_size
    # Spread over all entries, the same mass leaves the label with a part of it.
    taken = run.loss.label_smoothing * (1.0 - (1.0 / size if entries == "others" else 0.0))
    assert taken == pytest.approx(0.1, rel=1e-12)


def test_the_gradient_is_that_of_the_whole_update_however_it_is_cut(make_options, tmp_path, float64):
    options = make_options(tmp_path, dropout=0.0, label_smoothing=0.1)
    run = make_run(options)
    corpus = run.data.train
    pairs = np.array([3, 17, 4, 25, 0, 11, 29, 8])
    tokens = int(corpus.target_lengths[pairs].sum())

    expected_loss = expected_nll = 0.0
    for index in pairs:
        pair = pair_of(corpus, index)
        logits, labels = logits_of(run.model, pair)[0], pair["labels"][0]
        loss = F.cross_entropy(logits, labels, label_smoothing=0.1, reduction="sum")
        (loss / tokens).backward()
        expected_loss += loss.item()
        expected_nll += F.cross_entropy(logits, labels, reduction="sum").item()
    expected = {name: parameter.grad.clone() for name, parameter in run.model.named_parameters()}
    start = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}

    for batches in ([pairs], [pairs[:1], pairs[1:]], [pairs[:3], pairs[3:5], pairs[5:]], np.split(pairs, 8)):
        run.model.load_state_dict(start)
        run.optimizer.zero_grad()
        update = Update(tuple(batches), tokens)
        assert relative_distance(gradients_of(run, update), expected) < 1e-12
        run.model.load_state_dict(start)
        loss, nll = run.step(update, 1).tolist()
        assert (loss, nll) == pytest.approx((expected_loss, expected_nll), rel=1e-12)
    assert relative_distance(gradients_of(run, Update((pairs[1:],), tokens)), expected) > 1e-3


def test_gradient_checkpointing_recomputes_the_same_gradients_and_masks(make_options, tmp_path, float64):
    gradients, passes = {}, {}
    for checkpointing in (False, True):
        run = make_run(make_options(tmp_path, dropout=0.3, gradient_checkpointing=checkpointing))
        counts = []
        for layer in (*run.model.model.encoder.layers, *run.model.model.decoder.layers):
            layer.fc1.register_forward_hook(lambda *_, counts=counts: counts.append(1))
        update = run.batches.updates(0)[0]
        gradients[checkpointing] = gradients_of(run, update)
        passes[checkpointing] = len(counts)
    assert passes[True] == 2 * passes[False]
    assert relative_distance(gradients[True], gradients[False]) < 1e-12
    # Dropout was on.
    without = gradients_of(make_run(make_options(tmp_path, dropout=0.0)), update)
    assert relative_distance(without, gradients[False]) > 1e-2


def test_masks_depend_on_the_update_and_the_batch(make_options, tmp_path):
    run = make_run(make_options(tmp_path))
    first, second = run.batches.updates(0)[0].batches[:2]
    start = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}

    def losses(update: Update, number: int) -> list[float]:
        run.model.load_state_dict(start)
        return run.step(update, number).tolist()

    one = Update((first,), 100)
    assert losses(one, 1) == losses(one, 1)
    assert losses(one, 1) != losses(one, 2)
    same_twice = losses(Update((first, first), 100), 1)
    assert same_twice[0] != pytest.approx(2 * losses(one, 1)[0], rel=1e-9)
    assert losses(Update((first, second), 100), 1) != losses(Update((second, first), 100), 1)


def test_clipping_bounds_the_norm_of_the_gradient(make_options, tmp_path):
    norms = {}
    for limit in (0.0, 0.01):
        run = make_run(make_options(tmp_path, max_grad_norm=limit))
        gradients = gradients_of(run, run.batches.updates(0)[0])
        norms[limit] = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
    assert norms[0.0] > 0.05
    assert norms[0.01] == pytest.approx(0.01, rel=1e-3) and norms[0.01] <= 0.01 * (1 + 1e-6)


# The journal


def test_the_journal_begins_with_the_initial_weights_and_follows_the_papers_schedule(make_options, tmp_path, float64):
    options = make_options(tmp_path, dropout=0.0, log_every=1, max_updates=12, learning_rate_scale=1.5)
    rates = []

    def read_rate(optimizer, *_):
        rates.append(optimizer.param_groups[0]["lr"])

    hook = register_optimizer_step_pre_hook(read_rate)
    try:
        train_anew(options)
    finally:
        hook.remove()
    records = records_of(tmp_path, "train")
    assert [record["update"] for record in records] == list(range(1, 13))
    expected = [
        1.5 * D_MODEL**-0.5 * min(step**-0.5, step * WARMUP_STEPS**-1.5) for step in range(1, len(records) + 1)
    ]
    assert [record["learning_rate"] for record in records] == pytest.approx(expected, rel=1e-12)
    assert rates == pytest.approx(expected, rel=1e-12)

    data = prepare(options, options.cache_dir)
    torch.manual_seed(options.seed)
    model = VanillaTransformerForConditionalGeneration(model_configuration(options, data.tokenizer)).eval()
    updates = make_run(replace(options, output_dir=tmp_path / "plan")).batches.updates(0)
    nll = smoothed = tokens = 0.0
    with torch.no_grad():
        for index in np.concatenate(updates[0].batches):
            pair = pair_of(data.train, index)
            logits, labels = logits_of(model, pair)[0], pair["labels"][0]
            nll += F.cross_entropy(logits, labels, reduction="sum").item()
            smoothed += F.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.1).item()
            tokens += len(labels)
    assert records[0]["nll"] == pytest.approx(nll / tokens, rel=1e-12)
    assert records[0]["loss"] == pytest.approx(smoothed / tokens, rel=1e-12)

    for record, update in zip(records, updates, strict=False):
        real = padded = 0
        for batch in update.batches:
            for lengths in (data.train.source_lengths[batch], data.train.target_lengths[batch]):
                real, padded = real + sum(lengths.tolist()), padded + max(lengths.tolist()) * len(batch)
        assert record["fill_rate"] == pytest.approx(real / padded) and 0.5 < record["fill_rate"] <= 1.0
        assert record["epoch"] == record["update"] / UPDATES_PER_EPOCH


def test_random_batches_are_cut_into_parts_once(make_options, tmp_path, monkeypatch):
    cut = []

    def parts(self, batch, parts=RandomBatches.parts):
        cut.append(tuple(batch))
        return parts(self, batch)

    monkeypatch.setattr(RandomBatches, "parts", parts)
    run = make_run(make_options(tmp_path / "plan", batching="random"))
    assert not cut
    updates = run.batches.updates(0)
    train_anew(make_options(tmp_path / "run", batching="random", max_updates=2, valid_files=()))
    # Of the whole epoch for the run's record, and when each is computed.
    batches = [tuple(batch) for update in [*updates, *updates[:2]] for batch in update.batches]
    assert sorted(cut) == sorted(batches)


def test_a_record_is_the_mean_over_the_tokens_since_the_last_one(make_options, tmp_path):
    train_anew(make_options(tmp_path / "each", log_every=1, valid_files=()))
    train_anew(make_options(tmp_path / "four", log_every=4, valid_files=()))
    each, four = records_of(tmp_path / "each"), records_of(tmp_path / "four")
    assert [record["update"] for record in four] == [4, 8, 11]
    updates = make_run(make_options(tmp_path / "plan")).batches.updates
    tokens = [update.num_target_tokens for epoch in range(3) for update in updates(epoch)]
    for record, span in zip(four, (slice(0, 4), slice(4, 8), slice(8, 11)), strict=True):
        for name in ("loss", "nll"):
            mean = np.average([entry[name] for entry in each[span]], weights=tokens[:MAX_UPDATES][span])
            assert record[name] == pytest.approx(mean, rel=1e-12)


def test_epochs_end_the_run_after_every_pair_was_used_as_often(make_options, tmp_path):
    seen = []
    original = TrainingRun.step

    def step(self, update, number):
        seen.append(np.concatenate(update.batches).tolist())
        return original(self, update, number)

    with mock.patch.object(TrainingRun, "step", step):
        result = train_anew(make_options(tmp_path, max_epochs=2, max_updates=1000))
    assert result.updates == len(seen) == 2 * UPDATES_PER_EPOCH
    for epoch in (seen[:UPDATES_PER_EPOCH], seen[UPDATES_PER_EPOCH:]):
        assert sorted(chain.from_iterable(epoch)) == list(range(30))
    assert seen[:UPDATES_PER_EPOCH] != seen[UPDATES_PER_EPOCH:]
    assert json.loads((tmp_path / "run.json").read_text())["updates"] == 2 * UPDATES_PER_EPOCH


def test_an_epoch_is_planned_once(make_options, tmp_path):
    planned = []
    original = TokenBatches.batches

    def batches(self, epoch):
        planned.append((self.shuffle, epoch))
        return original(self, epoch)

    with mock.patch.object(TokenBatches, "batches", batches):
        train_anew(make_options(tmp_path, valid_files=()))
    assert planned == [(True, 0), (True, 1), (True, 2)]


def test_a_process_trains_again_with_another_precision(make_options, tmp_path):
    train_anew(make_options(tmp_path / "float32", max_updates=1))
    train(make_options(tmp_path / "bfloat16", max_updates=1, mixed_precision="bf16"))
    Accelerator(cpu=True, mixed_precision="bf16")
    with pytest.raises(UserError, match=r"`mixed_precision` is no, but this process has an Accelerator with bf16"):
        train(make_options(tmp_path / "again", max_updates=1))
    # What was there before stays.
    train(make_options(tmp_path / "lent", max_updates=1, mixed_precision="bf16"))
    assert AcceleratorState().mixed_precision == "bf16"


# Validation


def test_validation_scores_an_evaluation_mode_model_and_leaves_training_as_it_was(make_options, tmp_path):
    evaluated, modes = [], []

    def evaluation(model, tokenizer):
        assert not any(module.training for module in model.modules())
        assert tokenizer.eos_token_id == model.config.eos_token_id
        # Whatever it draws, the training does not notice.
        torch.manual_seed(0)
        evaluated.append(len(steps))
        return {"score": float(len(steps))}

    original = SmoothedTranslationLoss.forward

    def forward(self, *arguments, **inputs):
        if torch.is_grad_enabled():
            modes.append(all(module.training for module in self.modules()))
        return original(self, *arguments, **inputs)

    with mock.patch.object(SmoothedTranslationLoss, "forward", forward), observed_steps() as steps:
        train_anew(make_options(tmp_path / "with"), evaluation)
    assert evaluated == [3, 6, 9, 11]
    records = records_of(tmp_path / "with", "valid")
    assert [(record["update"], record["score"]) for record in records] == [(3, 3.0), (6, 6.0), (9, 9.0), (11, 11.0)]
    assert all(record["perplexity"] == pytest.approx(math.exp(record["loss"])) for record in records)
    assert len(modes) > MAX_UPDATES and all(modes)

    train_anew(make_options(tmp_path / "without", valid_files=()))
    assert records_of(tmp_path / "without") == records_of(tmp_path / "with", "train")
    assert weights_of(tmp_path / "without") == weights_of(tmp_path / "with")


def test_the_validation_loss_is_the_plain_one_of_each_pair(make_options, tmp_path, float64):
    options = make_options(tmp_path, average_last=1)
    train_anew(options)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert not model.training
    corpus = prepare(options, options.cache_dir).valid
    nll = tokens = 0.0
    with torch.no_grad():
        for index in range(len(corpus)):
            pair = pair_of(corpus, index)
            nll += model(input_ids=pair["input_ids"], labels=pair["labels"]).loss.item() * pair["labels"].numel()
            tokens += pair["labels"].numel()
    record = records_of(tmp_path, "valid")[-1]
    assert record["update"] == MAX_UPDATES
    assert record["loss"] == pytest.approx(nll / tokens, rel=1e-12)


def test_the_verb_scores_validation_sentences_unless_there_are_none(make_options, material, tmp_path, monkeypatch):
    # Of 10 pairs the first and the sixth.
    sources, references = (
        (material / f"valid.{language}").read_text(encoding="utf-8").splitlines()[::5] for language in ("en", "de")
    )
    translations = dict(zip(sources, (f"{reference} und" for reference in references), strict=True))
    # After one update the model's own translations would have no word of the references.
    monkeypatch.setattr(Translator, "translate", lambda _, texts, **options: [translations[text] for text in texts])
    options = make_options(tmp_path, max_updates=1, valid_bleu_sentences=2)
    train_anew(options, verb._sample_bleu(options))
    expected = sacrebleu.corpus_bleu([*translations.values()], [references])
    assert records_of(tmp_path, "valid")[-1]["bleu"] == expected.score
    assert verb._sample_bleu(replace(options, valid_bleu_sentences=0)) is None
    for name in ("blank.en", "blank.de"):
        (tmp_path / name).write_text("\n\n")
    unusable = replace(options, valid_files=(tmp_path / "blank.en", tmp_path / "blank.de"), output_dir=tmp_path / "b")
    with pytest.raises(UserError, match=r"None of the 2 lines of .*blank\.en"):
        train_anew(unusable, verb._sample_bleu(unusable))


# The result


def test_the_result_is_the_mean_of_the_last_checkpoints(make_options, tmp_path):
    train_anew(make_options(tmp_path, average_last=3, keep_last=4, save_every=2))
    checkpoints = list_checkpoints(tmp_path / "checkpoints")
    assert [update_of(checkpoint) for checkpoint in checkpoints] == [6, 8, 10, 11]
    last = [load_file(checkpoint / "model.safetensors") for checkpoint in checkpoints[-3:]]
    result = load_file(tmp_path / "model.safetensors")
    assert result.keys() == last[0].keys()
    for name, tensor in result.items():
        mean = torch.stack([weights[name].double() for weights in last]).mean(dim=0)
        torch.testing.assert_close(tensor.double(), mean, rtol=1e-6, atol=1e-9)
        assert not torch.equal(last[0][name], last[2][name])


def test_the_result_loads_and_generates_whole_sentences(make_options, tmp_path):
    train_anew(make_options(tmp_path, max_updates=2, num_beams=3, length_penalty=0.7))
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(model, VanillaTransformerForConditionalGeneration)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert (saved["max_length"], saved["num_beams"], saved["length_penalty"]) == (150, 3, 0.7)

    text = "A sentence of sixty characters, each of which is one token .."
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    assert ids.shape == (1, 62)

    def copy(_, inputs, logits):
        # One call for each new token, beyond the end for beams that left the sentence.
        steps.append(min(len(steps), ids.shape[1] - 1))
        forced = torch.full_like(logits, -1e4)
        forced[..., ids[0, steps[-1]]] = 0.0
        return forced

    steps = []
    model.lm_head.register_forward_hook(copy)
    output = model.generate(ids)
    assert tokenizer.decode(output[0], skip_special_tokens=True) == text
    assert output[0, 1:63].tolist() == ids[0].tolist()
