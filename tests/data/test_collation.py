import numpy as np
import pytest
import torch
from transformers import DataCollatorForSeq2Seq

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizer,
)
from vanilla_transformer.data.collation import collate, pack, pad


@pytest.fixture(scope="module")
def tokenizer():
    return VanillaTransformerTokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return VanillaTransformerForConditionalGeneration(
        VanillaTransformerConfig(
            vocab_size=len(tokenizer),
            d_model=8,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=8,
            decoder_ffn_dim=8,
        )
    )


def random_rows(generator: np.random.Generator, lengths: list[int]) -> list[np.ndarray]:
    return [np.append(generator.integers(5, 261, length - 1), 2).astype(np.int32) for length in lengths]


@pytest.mark.parametrize(
    ("source_lengths", "target_lengths"),
    [([1], [1]), ([7], [3]), ([3, 9, 1], [5, 2, 8]), ([4, 4], [6, 6]), ([1, 1, 40], [30, 1, 1])],
)
def test_tensors_equal_those_of_the_transformers_collator(tokenizer, model, source_lengths, target_lengths):
    generator = np.random.default_rng(len(source_lengths))
    sources, targets = random_rows(generator, source_lengths), random_rows(generator, target_lengths)
    expected = DataCollatorForSeq2Seq(tokenizer, model=model)(
        [
            {"input_ids": source.tolist(), "labels": target.tolist()}
            for source, target in zip(sources, targets, strict=True)
        ]
    )
    batch = collate(
        sources,
        targets,
        pad_token_id=model.config.pad_token_id,
        decoder_start_token_id=model.config.decoder_start_token_id,
    )
    assert batch.keys() == expected.keys()
    for name, tensor in batch.items():
        assert tensor.dtype == torch.int64
        assert torch.equal(tensor, expected[name]), name


def test_random_batches_hold_every_row_and_nothing_else():
    generator = np.random.default_rng(0)
    for _ in range(50):
        number = int(generator.integers(1, 12))
        sources, targets = (random_rows(generator, generator.integers(1, 30, number).tolist()) for _ in range(2))
        batch = collate(sources, targets, pad_token_id=0, decoder_start_token_id=1)
        for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
            real = batch["attention_mask"][row].bool()
            assert batch["input_ids"][row][real].tolist() == source.tolist()
            assert (batch["input_ids"][row][~real] == 0).all()
            real = batch["labels"][row] != -100
            assert batch["labels"][row][real].tolist() == target.tolist()
            inputs = batch["decoder_input_ids"][row].tolist()
            assert inputs == [1, *target, *[0] * len(inputs)][: len(inputs)]
        for name, rows in (("input_ids", sources), ("labels", targets)):
            assert batch[name].shape == (number, max(map(len, rows)))


def test_the_ids_of_padding_and_start_are_the_ones_given():
    sources, targets = [np.array([7, 2]), np.array([2])], [np.array([2]), np.array([9, 8, 2])]
    batch = collate(sources, targets, pad_token_id=99, decoder_start_token_id=98)
    assert batch["input_ids"].tolist() == [[7, 2], [2, 99]]
    assert batch["decoder_input_ids"].tolist() == [[98, 2, 99], [98, 9, 8]]
    assert batch["labels"].tolist() == [[2, -100, -100], [9, 8, 2]]


def test_padding_leaves_the_rows_that_it_was_given_alone():
    rows = [np.array([1, 2, 3]), np.array([4])]
    padded, mask = pad(rows, 7)
    padded.fill_(0)
    mask.fill_(0)
    assert [row.tolist() for row in rows] == [[1, 2, 3], [4]]


@pytest.mark.parametrize(
    ("source_lengths", "target_lengths"), [([1], [1]), ([7], [3]), ([3, 9, 1], [5, 2, 8]), ([1, 1, 40], [30, 1, 1])]
)
def test_packed_tensors_are_the_padded_ones_without_padding(source_lengths, target_lengths):
    generator = np.random.default_rng(len(source_lengths))
    sources, targets = random_rows(generator, source_lengths), random_rows(generator, target_lengths)
    packed = pack(sources, targets, decoder_start_token_id=3)
    padded = collate(sources, targets, pad_token_id=0, decoder_start_token_id=3)
    assert all(tensor.dtype == torch.int64 for tensor in packed.values())
    assert packed["source_starts"].diff().tolist() == source_lengths and packed["source_starts"][0] == 0
    assert packed["target_starts"].diff().tolist() == target_lengths and packed["target_starts"][0] == 0
    real = padded["labels"] != -100
    assert torch.equal(packed["input_ids"][0], padded["input_ids"][padded["attention_mask"] == 1])
    assert torch.equal(packed["labels"][0], padded["labels"][real])
    assert torch.equal(packed["decoder_input_ids"][0], padded["decoder_input_ids"][real])
