"""The hook that receives finished checkpoints while the run goes on."""

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from accelerate.state import AcceleratorState
from transformers import AutoModelForSeq2SeqLM

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.training.engine import TrainingRun, train
from vanilla_transformer.training.options import TrainingOptions
from vanilla_transformer.training.records.checkpoints import fault_of, list_checkpoints, update_of
from vanilla_transformer.training.records.leases import reading


DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(autouse=True)
def forget_accelerate():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def options(tmp_path):
    VanillaTransformerTokenizer().save_pretrained(tmp_path / "tokenizer")
    return TrainingOptions(
        train_files=(DATA / "sentences.en", DATA / "sentences.de"), output_dir=tmp_path / "run",
        cache_dir=tmp_path / "cache", tokenizer=tmp_path / "tokenizer", device="cpu", max_length=100, d_model=16,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24,
        decoder_ffn_dim=24, tokens_per_batch=160, tokens_per_update=160, max_updates=8, log_every=1, save_every=2,
        keep_last=1, average_last=1, trackers=("none",),
    )  # fmt: skip


def updates_of(options: TrainingOptions) -> list[int]:
    return [update_of(checkpoint) for checkpoint in list_checkpoints(options.output_dir / "checkpoints")]


def test_the_hook_receives_every_checkpoint_whole(options):
    received = []

    def publish(checkpoint):
        assert fault_of(checkpoint) is None
        assert AutoModelForSeq2SeqLM.from_pretrained(checkpoint).config.d_model == 16
        received.append(update_of(checkpoint))

    train(options, on_checkpoint=publish)
    assert received == [2, 4, 6, 8]
    assert updates_of(options) == [8]


@pytest.mark.parametrize("kind", ["metrics", "samples"])
def test_what_was_measured_is_on_the_disk_when_a_checkpoint_stands(options, kind):
    synced, received = {}, []
    original = os.fsync

    def fsync(descriptor):
        status = os.fstat(descriptor)
        synced[status.st_ino] = status.st_size
        original(descriptor)

    def publish(checkpoint):
        status = (options.output_dir / f"{kind}.jsonl").stat()
        assert synced[status.st_ino] == status.st_size
        received.append(status.st_size)

    options = replace(options, valid_files=options.train_files, validate_every=1)
    with mock.patch.object(os, "fsync", fsync):
        train(options, lambda *_: {"samples": [{"hypothesis": "x"}]}, publish)
        assert received == sorted({*received}) and len(received) == 8
        train(replace(options, resume=True, max_updates=10), lambda *_: {"samples": [{"hypothesis": "x"}]}, publish)
    assert received[-1] > received[7]


def test_a_failing_hook_is_reported_and_the_run_goes_on(options, capsys):
    def publish(checkpoint):
        raise ConnectionError("no route to host")

    assert train(options, on_checkpoint=publish).updates == 8
    reports = [line for line in capsys.readouterr().err.splitlines() if "on_checkpoint failed" in line]
    assert len(reports) == 4
    assert reports[0].endswith("update-00000002 (ConnectionError: no route to host); the run goes on.")
    assert updates_of(options) == [8]


def test_a_slow_reader_in_the_background_keeps_its_checkpoint(options):
    started, finish, faults = threading.Event(), threading.Event(), []

    def upload(checkpoint):
        with reading(checkpoint):
            started.set()
            finish.wait(60)
            faults.append(fault_of(checkpoint))

    threads = []

    def publish(checkpoint):
        if not threads:
            threads.append(threading.Thread(target=upload, args=(checkpoint,)))
            threads[0].start()
            # Else the run may have gone on and deleted the checkpoint before.
            assert started.wait(60)

    train(options, on_checkpoint=publish)
    # Rotation deleted 4 and 6 meanwhile.
    assert updates_of(options) == [2, 8]
    finish.set()
    threads[0].join()
    assert faults == [None]


def test_a_stopgap_that_is_being_read_is_not_averaged(options, tmp_path):
    options.keep_last = options.average_last = 2
    options.max_updates = 6
    train(options)
    assert updates_of(options) == [4, 6]
    expected = (options.output_dir / "model.safetensors").read_bytes()

    options.output_dir = tmp_path / "stopped"
    step = TrainingRun.step

    def stop_after_5(self, update, number):
        sums = step(self, update, number)
        if number == 5:
            signal.raise_signal(signal.SIGINT)
        return sums

    AcceleratorState._reset_state(reset_partial_state=True)
    with mock.patch.object(TrainingRun, "step", stop_after_5):
        assert train(options).updates == 5
    options.resume = True
    AcceleratorState._reset_state(reset_partial_state=True)
    with reading(list_checkpoints(options.output_dir / "checkpoints")[-1]):
        train(options)
        assert updates_of(options) == [4, 5, 6]
    assert (options.output_dir / "model.safetensors").read_bytes() == expected
