import pytest
import torch
from initial_values import assert_freshly_initialised
from tiny_models import tiny_config

from vanilla_transformer import VanillaTransformerForConditionalGeneration


@pytest.mark.parametrize("changes", [{}, {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}])
def test_initial_values(changes):
    config = tiny_config(
        vocab_size=500, decoder_vocab_size=400, attention_bias=True, position_embedding_type="learned", **changes
    )
    torch.manual_seed(7)
    model = VanillaTransformerForConditionalGeneration(config)
    if "tie_word_embeddings" not in changes:
        assert model.lm_head.weight is model.model.shared.weight
    tied_to_embedding = {"lm_head.weight"} if config.tie_word_embeddings else set()
    assert_freshly_initialised(model, model.state_dict().keys() - tied_to_embedding)

    torch.manual_seed(7)
    again = VanillaTransformerForConditionalGeneration(config).state_dict()
    torch.manual_seed(8)
    other = VanillaTransformerForConditionalGeneration(config).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(again[name], tensor), name
        assert tensor.unique().numel() == 1 or not torch.equal(other[name], tensor), name


def test_initial_standard_deviation_is_an_option():
    torch.manual_seed(0)
    model = VanillaTransformerForConditionalGeneration(tiny_config(vocab_size=2000, init_std=0.01))
    assert abs(model.model.shared.weight[1:].std().item() / 0.01 - 1) < 0.05
