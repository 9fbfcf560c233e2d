"""Tests of dropout for CPUs."""

import pytest
import torch
from torch import nn

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.native.dropout import SixteenBitDropout, use_sixteen_bit_dropout


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_element_is_dropped_with_the_given_probability_or_scaled_by_the_inverse_of_the_other(p, dtype):
    torch.manual_seed(0)
    dropped = SixteenBitDropout(p)(torch.ones(400, 1000, dtype=dtype))
    kept = dropped != 0
    # Six standard deviations of the mean of 400,000 Bernoulli numbers.
    assert abs((~kept).double().mean().item() - p) < 6 * (p * (1 - p) / 400_000) ** 0.5
    expected = nn.functional.dropout(torch.ones(100, dtype=dtype), p)
    torch.testing.assert_close(dropped[kept], expected.max().expand(int(kept.sum())), rtol=1e-4, atol=0.0)


def test_masks_of_neighbours_rows_and_calls_are_independent():
    torch.manual_seed(0)
    dropout = SixteenBitDropout(0.5)
    first, second = (dropout(torch.ones(1000, 1000)) - 1.0 for _ in range(2))
    for other in (second, first.roll(1, 0), first.roll(1, 1), first.roll(4, 1), first.roll(500, 0)):
        # Products of independent signs have a standard deviation of 10^-3 in the mean.
        assert abs((first * other).mean().item()) < 6e-3


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 0, 4), (7, 1, 3)])
def test_any_shape_and_layout_is_kept(shape):
    hidden_states = torch.randn(shape)
    assert SixteenBitDropout(0.5)(hidden_states).shape == shape
    assert (
        SixteenBitDropout(0.5)(hidden_states.T if len(shape) == 2 else hidden_states).numel() == hidden_states.numel()
    )


def test_the_gradient_has_the_mask_of_the_forward_pass():
    hidden_states = torch.randn(50, 40, requires_grad=True)
    dropped = SixteenBitDropout(0.4)(hidden_states)
    dropped.sum().backward()
    torch.testing.assert_close(hidden_states.grad * hidden_states.detach(), dropped.detach())
    assert (hidden_states.grad == 0).any()


def test_the_generator_of_torch_decides_the_mask():
    dropout = SixteenBitDropout(0.5)
    hidden_states = torch.ones(1000)
    masks = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        masks.append(dropout(hidden_states))
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


@pytest.mark.parametrize("p", [0.0, 1e-6])
def test_nothing_is_dropped_at_probability_zero(p):
    hidden_states = torch.randn(100)
    assert SixteenBitDropout(p)(hidden_states) is hidden_states


def test_a_model_has_no_other_dropout_afterwards_and_the_same_parameters():
    config = VanillaTransformerConfig(
        vocab_size=50, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, dropout=0.2, activation_dropout=0.3,
    )  # fmt: skip
    model = VanillaTransformerForConditionalGeneration(config)
    before = {module: child.p for module, child in model.named_modules() if isinstance(child, nn.Dropout)}
    state = model.state_dict()
    use_sixteen_bit_dropout(model)
    after = {name: child for name, child in model.named_modules() if isinstance(child, SixteenBitDropout)}
    assert {name: round(child.num_dropped / 2**16, 4) for name, child in after.items()} == before
    assert not any(isinstance(child, nn.Dropout) for child in model.modules())
    assert model.state_dict().keys() == state.keys()
    ids = torch.randint(5, 50, (2, 6))
    model.eval()
    evaluated = model(input_ids=ids, labels=ids).logits
    model.train()
    assert not torch.equal(model(input_ids=ids, labels=ids).logits, evaluated)
