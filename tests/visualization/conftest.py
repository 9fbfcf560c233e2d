import pytest
import torch

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizer,
)


SOURCE = "A <b>ß</b> and $x_1$"
TARGET = "Ein </script><!-- ß"


@pytest.fixture(scope="session")
def tokenizer():
    return VanillaTransformerTokenizer()


@pytest.fixture(scope="session")
def make_model():
    """Make a small model with random weights, in evaluation mode."""

    def make_model(**settings) -> VanillaTransformerForConditionalGeneration:
        torch.manual_seed(3)
        sizes = {
            "vocab_size": 261, "d_model": 24, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 3, "dropout": 0.3,
            "attention_dropout": 0.3,
        }  # fmt: skip
        return VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**{**sizes, **settings})).eval()

    return make_model


@pytest.fixture
def model(make_model):
    return make_model().double()


@pytest.fixture(scope="session")
def ids(tokenizer):
    """Ids of a source and of a target."""
    batch = tokenizer([SOURCE], text_target=[TARGET])
    return batch["input_ids"][0], batch["labels"][0]
