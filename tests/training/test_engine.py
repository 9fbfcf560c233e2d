import errno
import json
import math
import resource
import signal
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from vanilla_transformer import VanillaTransformerForConditionalGeneration, VanillaTransformerTokenizer
from vanilla_transformer.cli import train as verb
from vanilla_transformer.data.batching import Update
from vanilla_transformer.data.corpora import ParallelText
from vanilla_transformer.data.encoding import iterate_texts
from vanilla_transformer.errors import UserError
from vanilla_transformer.training import engine
from vanilla_transformer.training.checkpoints import list_checkpoints, update_of
from vanilla_transformer.training.configuration import TrainingOptions
from vanilla_transformer.training.engine import TrainingRun, train
from vanilla_transformer.training.estimation import dry_run
from vanilla_transformer.training.journal import read_journal
from vanilla_transformer.training.loss import SmoothedTranslationLoss
from vanilla_transformer.training.preparation import model_configuration, prepare


SENTENCES = tuple(Path(__file__).parents[1] / "data" / f"sentences.{language}" for language in ("en", "de"))
D_MODEL, WARMUP_STEPS = 16, 5
# 30 training pairs make 10 batches of 160 tokens: 4 updates an epoch, the last of a single batch.
UPDATES_PER_EPOCH, MAX_UPDATES = 4, 11


@pytest.fixture(autouse=True)
def forget_mixed_precision():
    """Accelerate remembers its settings for the whole process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def float64():
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(previous)


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A folder with training and validation text, two vocabularies, and room for the encoded text."""
    folder = tmp_path_factory.mktemp("material")
    for path in SENTENCES:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / f"train{path.suffix}").write_text("".join(lines[:30]), encoding="utf-8")
        (folder / f"valid{path.suffix}").write_text("".join(lines[30:]), encoding="utf-8")
        (folder / f"changed{path.suffix}").write_text("".join(lines[1:31]), encoding="utf-8")
    VanillaTransformerTokenizer().save_pretrained(folder / "bytes")
    texts = iterate_texts(ParallelText(SENTENCES))
    VanillaTransformerTokenizer.train_from_iterator(texts, 300).save_pretrained(folder / "merges")
    return folder


@pytest.fixture(scope="module")
def make_options(material):
    def make(output_dir: Path, **values) -> TrainingOptions:
        defaults = {
            "output_dir": output_dir,
            "train_files": (material / "train.en", material / "train.de"),
            "valid_files": (material / "valid.en", material / "valid.de"),
            "cache_dir": material / "cache",
            "tokenizer": material / "bytes",
            "max_length": 100,
            "d_model": D_MODEL,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "dropout": 0.2,
            "max_updates": MAX_UPDATES,
            "tokens_per_batch": 160,
            "tokens_per_update": 480,
            "warmup_steps": WARMUP_STEPS,
            "device": "cpu",
            "log_every": 2,
            "validate_every": 3,
            "save_every": 4,
            "keep_last": 3,
            "average_last": 2,
        }
        return TrainingOptions(**{**defaults, **values})

    return make


def train_anew(options: TrainingOptions, evaluation=None):
    AcceleratorState._reset_state(reset_partial_state=True)
    return train(options, evaluation)


def make_run(options: TrainingOptions) -> TrainingRun:
    AcceleratorState._reset_state(reset_partial_state=True)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    accelerator = Accelerator(cpu=True, mixed_precision=options.mixed_precision)
    return TrainingRun(options, accelerator, prepare(options, options.cache_dir), None)


@contextmanager
def observed_steps(after=None):
    """Collect the numbers of the optimiser steps; `after` is called with each when it is done."""
    original, numbers = TrainingRun.step, []

    def step(self, update, number):
        sums = original(self, update, number)
        numbers.append(number)
        if after is not None:
            after(number)
        return sums

    with mock.patch.object(TrainingRun, "step", step):
        yield numbers


@contextmanager
def stopped_after(update: int, number: int = signal.SIGINT, times: int = 1):
    def raise_signal(done):
        if done == update:
            for _ in range(times):
                signal.raise_signal(number)

    with observed_steps(raise_signal) as numbers:
        yield numbers


def records_of(folder: Path, kind: str | None = None) -> list[dict]:
    """The journal without the one measurement that no two runs share."""
    records = read_journal(folder / "metrics.jsonl")
    return [
        {name: value for name, value in record.items() if name != "tokens_per_second"}
        for record in records
        if kind in (None, record["kind"])
    ]


def weights_of(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


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


def test_the_verb_scores_validation_sentences_unless_there_are_none(make_options, material, tmp_path):
    options = make_options(tmp_path, max_updates=1, valid_bleu_sentences=2)
    train_anew(options, verb._sample_bleu(options))
    assert 0.0 <= records_of(tmp_path, "valid")[-1]["bleu"] <= 100.0
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


# Stopping and resuming


@pytest.fixture(scope="module")
def uninterrupted(make_options, tmp_path_factory):
    """Folders of runs that nothing stopped, by precision."""

    @cache
    def run(mixed_precision: str) -> Path:
        folder = tmp_path_factory.mktemp(f"uninterrupted_{mixed_precision}")
        assert train_anew(make_options(folder, mixed_precision=mixed_precision)).interrupted_by is None
        return folder

    return run


def assert_same_run(actual: Path, expected: Path) -> None:
    assert records_of(actual) == records_of(expected)
    assert weights_of(actual) == weights_of(expected)
    names = [path.name for path in list_checkpoints(expected / "checkpoints")]
    assert [path.name for path in list_checkpoints(actual / "checkpoints")] == names
    for name in names:
        for file in ("model.safetensors", "optimizer.safetensors"):
            paths = (folder / "checkpoints" / name / file for folder in (actual, expected))
            assert len({path.read_bytes() for path in paths}) == 1


def test_precision_makes_a_difference(uninterrupted):
    assert weights_of(uninterrupted("no")) != weights_of(uninterrupted("bf16"))


# 1: within the first epoch, between two records; 3, 9: a validation is due; 4: an epoch ends and a checkpoint is due;
# 5, 7: beside a checkpoint, within the second epoch; 10: within the third; 11: the end.
@pytest.mark.parametrize(
    ("mixed_precision", "update"), [*(("no", update) for update in (1, 3, 4, 5, 7, 10, 11)), ("bf16", 6), ("bf16", 9)]
)
def test_stopping_and_resuming_changes_nothing(uninterrupted, make_options, tmp_path, mixed_precision, update):
    options = make_options(tmp_path, mixed_precision=mixed_precision)
    with stopped_after(update) as before:
        result = train_anew(options)
    assert (result.interrupted_by, result.updates) == (signal.SIGINT, update)
    assert not (tmp_path / "model.safetensors").exists()
    assert update_of(list_checkpoints(tmp_path / "checkpoints")[-1]) == update
    with observed_steps() as after:
        result = train_anew(replace(options, resume=True))
    assert (result.interrupted_by, result.updates) == (None, MAX_UPDATES)
    assert before + after == list(range(1, MAX_UPDATES + 1))
    assert_same_run(tmp_path, uninterrupted(mixed_precision))


def test_a_run_may_be_stopped_again_and_again(uninterrupted, make_options, tmp_path):
    options = make_options(tmp_path)
    numbers = []
    for update in (2, 3, 5, 10):
        with stopped_after(update, signal.SIGTERM, times=2) as steps:
            assert train_anew(options).interrupted_by == signal.SIGTERM
        numbers += steps
        options = replace(options, resume=True)
    with observed_steps() as steps:
        train_anew(options)
    assert numbers + steps == list(range(1, MAX_UPDATES + 1))
    assert_same_run(tmp_path, uninterrupted("no"))
    # Once more: there is nothing left to do.
    with observed_steps() as steps:
        assert train_anew(options).updates == MAX_UPDATES
    assert steps == []
    assert_same_run(tmp_path, uninterrupted("no"))


def test_a_crash_loses_only_what_came_after_the_last_checkpoint(uninterrupted, make_options, tmp_path):
    options = make_options(tmp_path)

    def crash(done):
        if done == 7:
            raise RuntimeError("crash")

    with observed_steps(crash), pytest.raises(RuntimeError, match=r"^crash$"):
        train_anew(options)
    assert records_of(tmp_path)[-1]["update"] == 6
    with observed_steps() as steps:
        train_anew(replace(options, resume=True))
    assert steps == list(range(5, MAX_UPDATES + 1))
    assert_same_run(tmp_path, uninterrupted("no"))


def test_a_second_ctrl_c_stops_at_once(make_options, tmp_path):
    with stopped_after(2, times=2), pytest.raises(KeyboardInterrupt):
        train_anew(make_options(tmp_path))
    assert list_checkpoints(tmp_path / "checkpoints") == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_damaged_checkpoint_is_passed_over_with_a_message(uninterrupted, make_options, tmp_path, capsys):
    options = make_options(tmp_path)
    with stopped_after(9):
        train_anew(options)
    damaged = tmp_path / "checkpoints" / "update-00000009" / "optimizer.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    capsys.readouterr()
    with observed_steps() as steps:
        train_anew(replace(options, resume=True))
    message = capsys.readouterr().err
    assert "update-00000009 is damaged (optimizer.safetensors has" in message
    assert "Resuming from" in message and "update-00000008." in message
    assert steps == [9, 10, 11]
    assert_same_run(tmp_path, uninterrupted("no"))


def test_damaged_checkpoints_do_not_outlive_sound_ones(make_options, tmp_path):
    train_anew(make_options(tmp_path, max_updates=8))
    (tmp_path / "checkpoints" / "update-00000008" / "model.safetensors").write_bytes(b"")
    options = make_options(tmp_path, max_updates=6, resume=True, keep_last=1, average_last=1)
    train_anew(options)
    assert [update_of(path) for path in list_checkpoints(tmp_path / "checkpoints")] == [6]
    assert weights_of(tmp_path) == weights_of(tmp_path / "checkpoints" / "update-00000006")


def test_nothing_is_resumed_if_every_checkpoint_is_damaged(make_options, tmp_path):
    train_anew(make_options(tmp_path, max_updates=1))
    (tmp_path / "checkpoints" / "update-00000001" / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"Every checkpoint in .* is damaged"):
        train_anew(make_options(tmp_path, resume=True))


def test_a_finished_run_can_be_continued_as_if_it_had_been_longer(uninterrupted, make_options, tmp_path):
    options = make_options(tmp_path, log_every=1, save_every=2, max_updates=5)
    train_anew(options)
    changes = {"max_updates": MAX_UPDATES, "log_every": 2, "save_every": 4, "resume": True}
    train_anew(replace(options, **changes))
    assert weights_of(tmp_path) == weights_of(uninterrupted("no"))
    assert records_of(tmp_path)[-2:] == records_of(uninterrupted("no"))[-2:]


@pytest.fixture(scope="module")
def short_run(make_options, tmp_path_factory):
    folder = tmp_path_factory.mktemp("short_run")
    train_anew(make_options(folder, max_updates=1))
    return folder


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 2}, r"seed \(1 then, 2 now\)"),
        ({"dropout": 0.3}, r"dropout \(0\.2 then, 0\.3 now\)"),
        ({"tokens_per_batch": 120}, r"tokens_per_batch \(160 then, 120 now\)"),
        ({"mixed_precision": "bf16"}, r"mixed_precision \('no' then, 'bf16' now\)"),
        ({"seed": 2, "d_model": 32}, r"d_model \(16 then, 32 now\); seed \(1 then, 2 now\)"),
        ({"tokenizer": "merges"}, r"vocabulary \("),
        ({"train_files": ("changed.en", "changed.de")}, r"because these differ: training text \([^;]*; set them back"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_what_a_run_was_computed_with_cannot_change(short_run, make_options, material, changes, named):
    if "tokenizer" in changes:
        changes = {"tokenizer": material / changes["tokenizer"]}
    if "train_files" in changes:
        changes = {"train_files": tuple(material / name for name in changes["train_files"])}
    before = {path: path.read_bytes() for path in short_run.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=named):
        train_anew(make_options(short_run, max_updates=1, resume=True, **changes))
    assert {path: path.read_bytes() for path in short_run.rglob("*") if path.is_file()} == before


def test_a_run_is_neither_overwritten_nor_resumed_by_mistake(short_run, make_options, tmp_path):
    with pytest.raises(UserError, match="already holds a run; continue it with --resume"):
        train_anew(make_options(short_run))
    with pytest.raises(UserError, match="holds no checkpoints; leave --resume out"):
        train_anew(make_options(tmp_path, resume=True))


# Estimates


def test_a_dry_run_reports_and_leaves_nothing_behind(make_options, tmp_path, monkeypatch):
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    options = make_options(tmp_path / "run", cache_dir=None, tokenizer=None, vocab_size=300, max_epochs=3)
    options.dry_run = True
    options.max_updates = 7
    AcceleratorState._reset_state(reset_partial_state=True)
    figures = dry_run(options)
    assert [path.name for path in tmp_path.rglob("*")] == ["scratch"]
    assert list(figures) == [
        "parameters",
        "vocabulary entries",
        "training pairs",
        "dropped",
        "batches per epoch",
        "updates per epoch",
        "updates",
        "epochs",
        "share of tokens that are not padding",
        "tokens per second (source and target)",
        "expected time",
        "expected memory of a process",
    ]
    model_figures = replace(options, dry_run=False, cache_dir=tmp_path / "cache", output_dir=tmp_path / "real")
    run = make_run(model_figures)
    assert figures["parameters"] == sum(parameter.numel() for parameter in run.model.parameters())
    assert figures["vocabulary entries"] == run.model.config.vocab_size == 300
    assert (figures["training pairs"], figures["dropped"], figures["updates"]) == (30, "none", 7)
    batches = run.batches.batches(0)
    assert figures["batches per epoch"] == len(batches)
    assert figures["updates per epoch"] == math.ceil(len(batches) / 3)
    assert figures["epochs"] == pytest.approx(7 / math.ceil(len(batches) / 3), abs=0.005)
    assert 0.5 < figures["share of tokens that are not padding"] <= 1.0
    assert figures["tokens per second (source and target)"] > 0
    assert figures["expected time"].endswith("minutes")
    assert float(figures["expected memory of a process"].removesuffix(" GiB")) > 0.05
    with pytest.raises(ValueError, match="call `dry_run`"):
        train(options)


# Failures


CPU_ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "107374182400 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError(CPU_ALLOCATOR)])
def test_running_out_of_memory_names_the_batch_and_the_option(make_options, tmp_path, error):
    options = make_options(tmp_path)
    first = make_run(options).batches.updates(0)[0].batches[0]
    corpus = prepare(options, options.cache_dir).train
    expected = (
        rf"Out of memory in update 1, on a batch of {len(first)} pairs with up to "
        rf"{max(corpus.source_lengths[first])} source and {max(corpus.target_lengths[first])} target tokens; "
        r"lower --tokens_per_batch \(it is 160\)"
    )
    failing = mock.patch.object(SmoothedTranslationLoss, "forward", side_effect=error)
    with failing, pytest.raises(UserError, match=expected) as raised:
        train_anew(options)
    assert raised.value.__cause__ is error


def test_other_failures_pass_through(make_options, tmp_path):
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with mock.patch.object(SmoothedTranslationLoss, "forward", side_effect=error), pytest.raises(RuntimeError) as got:
        train_anew(make_options(tmp_path))
    assert got.value is error


@contextmanager
def small_files(limit: int):
    """Have the operating system refuse to let files grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def refuse_to_write(write, *arguments):
    raise OSError(errno.ENOSPC, "No space left on device")


def write_into_small_files(write, *arguments):
    # Room for the configuration, but not for the weights.
    with small_files(8192):
        write(*arguments)


def write_tokenizer_into_small_files(write, run, *arguments):
    save = run.data.tokenizer.save_pretrained

    def save_into_small_files(*names):
        with small_files(1024):
            save(*names)

    with mock.patch.object(run.data.tokenizer, "save_pretrained", save_into_small_files):
        write(run, *arguments)


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        (refuse_to_write, "No space left on device"),
        (write_into_small_files, "File too large"),
        (write_tokenizer_into_small_files, "File too large"),
    ],
)
def test_a_full_disk_is_named_and_spares_what_was_saved(make_options, tmp_path, way, reason):
    original = TrainingRun._write_checkpoint_files
    options = make_options(tmp_path)

    def fail_in(update):
        def write(self, *arguments):
            if self.update != update:
                return original(self, *arguments)
            return way(original, self, *arguments)

        return mock.patch.object(TrainingRun, "_write_checkpoint_files", write)

    with fail_in(4), pytest.raises(UserError, match=rf"of update 4 cannot be .*{reason}.* start again\.") as raised:
        train_anew(options)
    assert raised.value.__cause__ is not None
    # There is no run yet, so that it may be started.
    with fail_in(8), pytest.raises(UserError, match=rf"of update 8 cannot be .*{reason}.* use --resume\."):
        train_anew(options)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["update-00000004"]
    assert train_anew(replace(options, resume=True)).updates == MAX_UPDATES
    train_anew(make_options(tmp_path / "whole"))
    assert_same_run(tmp_path, tmp_path / "whole")


def test_a_result_that_cannot_be_written_can_be_made_later(make_options, tmp_path):
    options = make_options(tmp_path, max_updates=4)
    original = engine.average_checkpoints

    def average(*arguments):
        with small_files(8192):
            original(*arguments)

    message = r"The model cannot be written to .*File too large.* use --resume\."
    with mock.patch.object(engine, "average_checkpoints", average), pytest.raises(UserError, match=message):
        train_anew(options)
    assert not (tmp_path / "model.safetensors").exists()
    train_anew(replace(options, resume=True))
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path).config.d_model == D_MODEL


def test_other_failures_while_saving_pass_through(make_options, tmp_path):
    error = ValueError("a defect")
    with mock.patch.object(engine, "save_optimizer", side_effect=error), pytest.raises(ValueError) as got:
        train_anew(make_options(tmp_path))
    assert got.value is error
