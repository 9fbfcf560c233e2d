import pytest
import torch

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.errors import UserError
from vanilla_transformer.training.preparation import model_size
from vanilla_transformer.training.preparation.model_size import check_size, num_parameters


SMALL = {"vocab_size": 50, "d_model": 16, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 24}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"attention_bias": True, "d_k": 3, "d_v": 5},
        {"norm_position": "pre", "encoder_attention_heads": 2},
        {"position_embedding_type": "learned", "max_position_embeddings": 7},
        {"tie_word_embeddings": False},
        {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 30},
        {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 30, "tie_word_embeddings": False},
    ],
)
def test_parameters_are_counted_as_the_model_has_them(settings):
    config = VanillaTransformerConfig(**{**SMALL, "decoder_ffn_dim": 40, **settings})
    assert num_parameters(config) == VanillaTransformerForConditionalGeneration(config).num_parameters()


@pytest.mark.parametrize("name", ["d_model", "encoder_layers", "decoder_ffn_dim", "vocab_size"])
def test_a_model_beyond_the_memory_is_refused_without_making_it(name):
    with pytest.raises(UserError, match=r"The model would have [\d,]+ parameters, whose .* this machine has"):
        check_size(VanillaTransformerConfig(**{name: 1_000_000_000}))


def test_in_a_single_process_on_a_cpu_adams_moments_count(monkeypatch):
    config = VanillaTransformerConfig(**SMALL)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(model_size, "machine_memory", lambda: 15 * num_parameters(config))
    with pytest.raises(UserError, match="weights, gradients and Adam's two moments"):
        check_size(config)
    # Processes may share them.
    monkeypatch.setenv("WORLD_SIZE", "8")
    check_size(config)
