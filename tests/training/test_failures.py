import errno
import resource
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from runs import D_MODEL, MAX_UPDATES, assert_same_run, make_run, train_anew
from transformers import AutoModelForSeq2SeqLM

from vanilla_transformer.errors import UserError
from vanilla_transformer.training import engine
from vanilla_transformer.training.engine import TrainingRun
from vanilla_transformer.training.loss import SmoothedTranslationLoss
from vanilla_transformer.training.preparation import prepare


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
