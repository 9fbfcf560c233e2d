import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from fine_tune_by_tokens import TOKENS_PER_BATCH, trainer_for
from packaging.version import Version
from safetensors.torch import load_file
from torch.utils.data import IterableDataset

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizer,
)
from vanilla_transformer.data.batching import TokenBatches
from vanilla_transformer.errors import UserError
from vanilla_transformer.training.seq2seq_trainer import TokenBatchSampler


SCRIPT = Path(__file__).with_name("fine_tune_by_tokens.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = VanillaTransformerConfig(
        vocab_size=261, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16,
        encoder_attention_heads=2, decoder_attention_heads=2, dropout=0.0,
    )  # fmt: skip
    VanillaTransformerForConditionalGeneration(config).save_pretrained(folder)
    VanillaTransformerTokenizer().save_pretrained(folder)
    return folder


def batches_of(trainer) -> list[dict[str, torch.Tensor]]:
    """Have a trainer collect the batches that it collates."""
    seen, collate = [], trainer.data_collator
    trainer.data_collator = lambda rows: seen.append(collate(rows)) or seen[-1]
    return seen


def sources_of(batches) -> list[bytes]:
    return [row[row != 0].numpy().tobytes() for batch in batches for row in batch["input_ids"]]


def test_an_epoch_is_all_pairs_once_in_batches_within_the_budget(folder, tmp_path):
    trainer = trainer_for(folder, tmp_path, save_strategy="no")
    seen = batches_of(trainer)
    trainer.train()
    assert trainer.state.global_step == len(seen) and len(seen) % 2 == 0
    assert all(max(batch["input_ids"].numel(), batch["labels"].numel()) <= TOKENS_PER_BATCH for batch in seen)
    assert len({len(batch["input_ids"]) for batch in seen}) > 1
    first, second = (sources_of(part) for part in (seen[: len(seen) // 2], seen[len(seen) // 2 :]))
    everything = sorted(np.array(row).tobytes() for row in trainer.train_dataset["input_ids"])
    assert sorted(first) == sorted(second) == everything
    assert first != second

    # Evaluation keeps its own batches and order.
    seen.clear()
    trainer.evaluate()
    assert [len(batch["input_ids"]) for batch in seen][:-1] == [4] * (len(seen) - 1)
    assert sources_of(seen) == [np.array(row).tobytes() for row in trainer.eval_dataset["input_ids"]]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_resumed_run_reads_the_same_batches(folder, tmp_path, accumulation):
    trainer = trainer_for(folder, tmp_path / "whole", gradient_accumulation_steps=accumulation)
    trainer.train()
    updates = trainer.state.global_step
    for update in (updates // 4, updates // 2, updates - 2):
        resumed = trainer_for(folder, tmp_path / f"{update}", gradient_accumulation_steps=accumulation)
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{update}"))
        for name, tensor in trainer.model.state_dict().items():
            assert torch.equal(resumed.model.state_dict()[name], tensor), (update, name)


# It loads the optimiser to the device `cpu:0`, which torch does not know as one to load to.
@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"), reason="transformers 5.17 resumes on CPUs in one process only"
)
def test_two_processes_train_as_one_does_that_accumulates(folder, tmp_path):
    trainer = trainer_for(folder, tmp_path / "one", gradient_accumulation_steps=2)
    # Else the last update of an epoch would repeat a batch with two processes.
    assert len(trainer.get_train_dataloader()) % 2 == 0
    trainer.train()
    updates = trainer.state.global_step
    expected = trainer.model.state_dict()
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", SCRIPT, folder]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    subprocess.run([*launch, tmp_path / "two", str(updates - 2)], check=True, env=environment)
    for output in (tmp_path / "two", tmp_path / "two" / "resumed"):
        actual = load_file(output / "model.safetensors")
        for key, tensor in actual.items():
            torch.testing.assert_close(tensor, expected[key], rtol=0, atol=1e-9)


@pytest.mark.parametrize(("num_pairs", "num_processes"), [(20, 3), (21, 4), (3, 8)])
def test_processes_share_every_epoch_in_equal_numbers_of_batches(num_pairs, num_processes):
    lengths = np.random.default_rng(0).integers(1, 9, (2, num_pairs))
    plan = TokenBatches(*lengths, tokens_per_batch=16)
    shares = [TokenBatchSampler(plan, process=p, num_processes=num_processes) for p in range(num_processes)]
    for epoch in (0, 1):
        for share in shares:
            share.set_epoch(epoch)
        rounds = list(zip(*shares, strict=True))
        assert len(rounds) == len(shares[0])
        read = [batch for batches in rounds for batch in batches]
        every = [batch.tolist() for batch in plan.batches(epoch)]
        assert read == (every * num_processes)[: len(read)]
        assert len(every) <= len(read) < len(every) + num_processes


def test_data_without_a_length_is_refused(folder, tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(())

    trainer = trainer_for(folder, tmp_path, Stream(), max_steps=1)
    with pytest.raises(UserError, match="Stream without a length"):
        trainer.train()


def test_a_pair_longer_than_a_batch_is_refused_before_training(folder, tmp_path):
    trainer = trainer_for(folder, tmp_path, tokens_per_batch=20)
    with pytest.raises(UserError, match="is 20, but a pair has"):
        trainer.train()
