import errno
import math
import re
import resource
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from runs import D_MODEL, MAX_UPDATES, assert_same_run, make_run, train_anew
from transformers import AutoModelForSeq2SeqLM

from vanilla_transformer.errors import UserError
from vanilla_transformer.training import engine, result
from vanilla_transformer.training.engine import TrainingRun
from vanilla_transformer.training.preparation.vocabulary_and_ids import prepare
from vanilla_transformer.training.records.checkpoints import fault_of
from vanilla_transformer.training.step import divergence
from vanilla_transformer.training.step.divergence import LossWatch
from vanilla_transformer.training.step.loss import SmoothedTranslationLoss


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
        r"lower `tokens_per_batch` \(it is 160\)"
    )
    failing = mock.patch.object(SmoothedTranslationLoss, "forward", side_effect=error)
    with failing, pytest.raises(UserError, match=expected) as raised:
        train_anew(options)
    assert raised.value.__cause__ is error


def allocate_more_than_there_is(*_):
    torch.empty(1 << 50)


@pytest.mark.parametrize("place", ["backward", "optimiser", "validation"])
def test_memory_that_a_processor_refuses_is_named_wherever_it_is_asked_for(make_options, tmp_path, place):
    run = make_run(make_options(tmp_path))
    if place == "backward":
        run.model.model.shared.weight.register_hook(allocate_more_than_there_is)
    elif place == "optimiser":
        run.optimizer.optimizer.register_step_pre_hook(allocate_more_than_there_is)
    else:
        run.model.register_forward_pre_hook(allocate_more_than_there_is)
        run.model.model.register_forward_pre_hook(allocate_more_than_there_is)
    where = {"backward": "update 1", "optimiser": "the optimiser's part of update 1"}
    expected = rf"^Out of memory in {where.get(place, 'the validation of update 0')}, on a batch of \d+ pairs with .*"
    with pytest.raises(UserError, match=expected + "lower `tokens_per_batch`") as raised:
        run.validation(0) if place == "validation" else run.step(run.batches.updates(0)[0], 1)
    assert "DefaultCPUAllocator" in str(raised.value.__cause__)


def test_other_failures_pass_through(make_options, tmp_path):
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with mock.patch.object(SmoothedTranslationLoss, "forward", side_effect=error), pytest.raises(RuntimeError) as got:
        train_anew(make_options(tmp_path))
    assert got.value is error


@contextmanager
def poisoned(number: int, value: float, parameter: str = "model.encoder.layers.0.fc1.weight"):
    """Plant a value among the weights before a step; yields what the weights were after it."""
    original, after = TrainingRun.step, {}

    def step(self, update, this):
        if this == number:
            with torch.no_grad():
                dict(self.model.named_parameters())[parameter][0, 0] = value
            after.update((name, tensor.clone()) for name, tensor in self.model.state_dict().items())
        try:
            return original(self, update, this)
        finally:
            if this == number:
                same = all(torch.equal(after[n], t) for n, t in self.model.state_dict().items() if n != parameter)
                after["same"] = same

    with mock.patch.object(TrainingRun, "step", step):
        yield after


def test_a_loss_that_is_not_a_number_stops_before_the_weights_move(make_options, tmp_path):
    options = make_options(tmp_path)
    planned = make_run(make_options(tmp_path / "plan")).batches.updates(1)[1].batches[0]
    named = ", ".join(str(pair) for pair in planned)
    lines = ", ".join(str(pair + 1) for pair in planned)
    checkpoint = tmp_path / "checkpoints" / "update-00000004"
    expected = (
        rf"^In update 6 the loss is infinite or not a number, on pairs {named} \(lines {lines} of .*train\.en and "
        rf".*train\.de\); the last sound checkpoint is {checkpoint}, from which a new run may start with `init_from`"
    )
    with poisoned(6, math.nan) as after, pytest.raises(UserError, match=expected):
        train_anew(options)
    assert after["same"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["update-00000004"]
    assert fault_of(checkpoint) is None
    assert not (tmp_path / "model.safetensors").exists()
    # The fault was planted; without it, the run goes on from there.
    train_anew(replace(options, resume=True))
    train_anew(make_options(tmp_path / "whole"))
    assert_same_run(tmp_path, tmp_path / "whole")


def test_a_gradient_that_is_not_finite_stops_although_the_loss_is(make_options, tmp_path):
    run = make_run(make_options(tmp_path))
    update = run.batches.updates(0)[0]
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.model.model.shared.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(UserError, match=r"In update 1 the gradient is infinite .* nothing was saved before"):
        run.step(update, 1)
    assert all(torch.equal(before[name], tensor) for name, tensor in run.model.state_dict().items())
    assert not run.optimizer.state


def test_pairs_have_no_lines_where_some_were_dropped(make_options, material, tmp_path):
    texts = []
    for language in ("en", "de"):
        texts.append(tmp_path / f"gap.{language}")
        texts[-1].write_text("\n" + (material / f"train.{language}").read_text(encoding="utf-8"), encoding="utf-8")
    with poisoned(1, math.inf), pytest.raises(UserError, match=r"not a number, on pairs [0-9, ]*; nothing was saved"):
        train_anew(make_options(tmp_path / "run", train_files=tuple(texts)))


def test_a_loss_that_stays_far_above_its_mean_stops_the_run(make_options, tmp_path):
    original = TrainingRun.step

    def step(self, update, number):
        sums = original(self, update, number)
        return sums * 8.0 if number > 10 else sums

    options = make_options(tmp_path, max_updates=60, valid_files=(), keep_last=20, save_every=10)
    last = rf"the last sound checkpoint is {tmp_path}/checkpoints/update-00000010, "
    with mock.patch.object(TrainingRun, "step", step), pytest.raises(UserError, match=last) as raised:
        train_anew(options)
    assert f"in update {10 + divergence.PATIENCE} it is" in str(raised.value)
    # A resumed run remembers how long it has been going on.
    with mock.patch.object(TrainingRun, "step", step), pytest.raises(UserError) as again:
        train_anew(replace(options, resume=True))
    assert str(again.value) == str(raised.value)


def test_the_watch_wants_both_many_updates_and_losses_worse_than_a_guess():
    def alarms(losses, guess=9.0):
        watch = LossWatch()
        return [number for number, loss in enumerate(losses, start=1) if watch.see(loss, guess)]

    calm = [10.0, 8.0, 6.0] + [4.0] * 300
    limit = divergence.PATIENCE
    assert alarms(calm) == []
    assert alarms(calm + [100.0] * (limit - 1) + [4.0] + [100.0] * (limit - 1)) == []
    assert alarms(calm + [100.0] * limit) == [len(calm) + limit]
    # Not three times the mean; not worse than a guess.
    assert alarms(calm + [11.9] * 100) == []
    assert alarms([0.5] * 300 + [8.9] * 100) == []
    assert alarms([*calm, math.nan]) == [len(calm) + 1]


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
    assert re.search(reason, str(raised.value.__cause__))
    # There is no run yet, so that it may be started.
    with fail_in(8), pytest.raises(UserError, match=rf"of update 8 cannot be .*{reason}.* use `resume`\."):
        train_anew(options)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["update-00000004"]
    assert train_anew(replace(options, resume=True)).updates == MAX_UPDATES
    train_anew(make_options(tmp_path / "whole"))
    assert_same_run(tmp_path, tmp_path / "whole")


def test_a_result_that_cannot_be_written_can_be_made_later(make_options, tmp_path):
    options = make_options(tmp_path, max_updates=4)
    original = result.average_checkpoints

    def average(*arguments, **options):
        with small_files(8192):
            original(*arguments, **options)

    message = r"The model cannot be written to .*File too large.* use `resume`\."
    with mock.patch.object(result, "average_checkpoints", average), pytest.raises(UserError, match=message):
        train_anew(options)
    assert not (tmp_path / "model.safetensors").exists()
    train_anew(replace(options, resume=True))
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path).config.d_model == D_MODEL


def test_other_failures_while_saving_pass_through(make_options, tmp_path):
    error = ValueError("a defect")
    with mock.patch.object(engine, "save_file", side_effect=error), pytest.raises(ValueError) as got:
        train_anew(make_options(tmp_path))
    assert got.value is error
