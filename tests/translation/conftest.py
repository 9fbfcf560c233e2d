from copy import deepcopy
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizer,
)


@pytest.fixture(scope="session")
def sentences() -> list[str]:
    return (Path(__file__).parents[1] / "data" / "sentences.en").read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="session")
def make_model():
    """Make a small model with random weights."""

    def make_model(**settings) -> VanillaTransformerForConditionalGeneration:
        torch.manual_seed(3)
        sizes = {
            "vocab_size": 261, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "dropout": 0.0,
        }  # fmt: skip
        model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**{**sizes, **settings})).eval()
        model.generation_config = GenerationConfig(
            max_length=64, num_beams=2, length_penalty=0.6, early_stopping=True,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        )  # fmt: skip
        return model

    return make_model


@pytest.fixture(scope="session")
def tokenizer():
    return VanillaTransformerTokenizer()


@pytest.fixture(scope="session")
def learned(make_model, tokenizer, sentences):
    """A model in float32 that has begun to learn the first letters of sentences: its outputs differ, and end."""
    model = make_model()
    rows = tokenizer(
        sentences, text_target=[sentence[:8] for sentence in sentences], padding=True, return_tensors="pt"
    )
    rows["labels"][rows["labels"] == tokenizer.pad_token_id] = -100
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(150):
        model(**rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.fixture(scope="module")
def model(learned):
    """The learned model in float64."""
    return deepcopy(learned).double()
