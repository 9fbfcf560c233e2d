import pytest
import torch

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.presets import PAPER, PROVENANCE, SIZES, SMALL, TRAINING_PAPER
from vanilla_transformer.training.options import TrainingOptions


def num_parameters(**settings) -> int:
    """Number of parameters and of elements of buffers, tied ones once."""
    with torch.device("meta"):
        model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**settings))
    return sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))


def millions(**settings) -> float:
    return num_parameters(**settings) / 1e6


@pytest.mark.parametrize("preset", SIZES)
def test_a_size_says_only_what_differs_from_the_base_model(preset):
    base = VanillaTransformerConfig()
    assert all(getattr(base, name) != value for name, value in SIZES[preset].items() if name not in ("d_k", "d_v"))


def test_the_tiny_model_has_the_dimensions_of_its_source():
    # Transformer-Tiny of Wu et al. (2021): 4 layers, 4 heads, d_model 128, d_ff 256, dropout 0.3.
    with torch.device("meta"):
        model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**SIZES["tiny"]))
    for stack in (model.model.encoder, model.model.decoder):
        assert len(stack.layers) == 4
        for layer in stack.layers:
            assert layer.fc1.weight.shape == (256, 128)
            assert (layer.self_attn.num_heads, layer.self_attn.d_k, layer.self_attn.d_v) == (4, 32, 32)
    assert 0.3 in {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}


@pytest.mark.parametrize("provenance", PROVENANCE)
@pytest.mark.parametrize("preset", ["base", "big", "e-learned-positions", "tiny"])
def test_every_provenance_adds_the_biases_that_its_system_has(provenance, preset):
    config = VanillaTransformerConfig(**SIZES[preset])
    # Four projections of each attention, of which a layer of the decoder has two; all are d_model wide here.
    biases = 4 * config.d_model * (config.encoder_layers + 2 * config.decoder_layers)
    if provenance == "marian":
        biases += config.vocab_size
    settings = SIZES[preset] | PROVENANCE[provenance]
    assert num_parameters(**settings) - num_parameters(**SIZES[preset]) == biases


# How far each row of Table 3 is from the base model, in millions of parameters, worked out by hand for projections
# without bias: a layer of both stacks is 12 d_model h d_k and twice 2 d_model d_ff, its normalisations and biases.
DISTANCES = {
    "c-4-layers": -14.7,
    "c-2-layers": -29.4,
    "c-8-layers": 14.7,
    "b-dk-16": -7.1,
    "b-dk-32": -4.7,
    "c-dff-4096": 25.2,
    "c-dff-1024": -12.6,
    "a-1-head": 0.0,
    "a-4-heads": 0.0,
    "a-16-heads": 0.0,
    "a-32-heads": 0.0,
    "d-dropout-0": 0.0,
    "d-dropout-0.2": 0.0,
    "d-label-smoothing-0": 0.0,
    "d-label-smoothing-0.2": 0.0,
}


@pytest.mark.parametrize("preset", DISTANCES)
def test_rows_are_as_far_from_the_base_model_as_table_3_says(preset):
    assert millions(**PAPER[preset]) - millions() == pytest.approx(DISTANCES[preset], abs=0.1)


# Table 3 prints millions of parameters of whole models, of a vocabulary that it does not state exactly.
PRINTED = {
    "base": 65,
    "big": 213,
    "b-dk-16": 58,
    "b-dk-32": 60,
    "c-2-layers": 36,
    "c-4-layers": 50,
    "c-8-layers": 80,
    "c-d-256": 28,
    "c-d-1024": 168,
    "c-dff-1024": 53,
    "c-dff-4096": 90,
}


@pytest.mark.parametrize("preset", PRINTED)
def test_sizes_are_those_of_table_3(preset):
    assert millions(**PAPER[preset]) == pytest.approx(PRINTED[preset], rel=0.08)


# Table 3's rows, blank where they have the base model's value: N, d_model, d_ff, h, d_k, d_v, P_drop, epsilon_ls.
TABLE_3 = {
    "base": (6, 512, 2048, 8, 64, 64, 0.1, 0.1),
    "a-1-head": (None, None, None, 1, 512, 512, None, None),
    "a-4-heads": (None, None, None, 4, 128, 128, None, None),
    "a-16-heads": (None, None, None, 16, 32, 32, None, None),
    "a-32-heads": (None, None, None, 32, 16, 16, None, None),
    "b-dk-16": (None, None, None, None, 16, None, None, None),
    "b-dk-32": (None, None, None, None, 32, None, None, None),
    "c-2-layers": (2, None, None, None, None, None, None, None),
    "c-4-layers": (4, None, None, None, None, None, None, None),
    "c-8-layers": (8, None, None, None, None, None, None, None),
    "c-d-256": (None, 256, None, None, 32, 32, None, None),
    "c-d-1024": (None, 1024, None, None, 128, 128, None, None),
    "c-dff-1024": (None, None, 1024, None, None, None, None, None),
    "c-dff-4096": (None, None, 4096, None, None, None, None, None),
    "d-dropout-0": (None, None, None, None, None, None, 0.0, None),
    "d-dropout-0.2": (None, None, None, None, None, None, 0.2, None),
    "d-label-smoothing-0": (None, None, None, None, None, None, None, 0.0),
    "d-label-smoothing-0.2": (None, None, None, None, None, None, None, 0.2),
    "e-learned-positions": (None, None, None, None, None, None, None, None),
    "big": (6, 1024, 4096, 16, None, None, 0.3, None),
}


@pytest.mark.parametrize("row", TABLE_3)
def test_every_row_of_table_3_is_a_preset(row):
    options = TrainingOptions(preset=row)
    config = VanillaTransformerConfig(**options.model_settings())
    for side in ("encoder", "decoder"):
        heads = getattr(config, f"{side}_attention_heads")
        widths = (config.d_model // heads if width is None else width for width in (config.d_k, config.d_v))
        layers, ffn_dim = getattr(config, f"{side}_layers"), getattr(config, f"{side}_ffn_dim")
        found = (layers, config.d_model, ffn_dim, heads, *widths, config.dropout, options.label_smoothing)
        printed = TABLE_3[row]
        assert found == tuple(x if y is None else y for x, y in zip(TABLE_3["base"], printed, strict=True))
    assert config.position_embedding_type == ("learned" if row == "e-learned-positions" else "sinusoidal")


def test_the_presets_of_the_paper_are_the_rows_of_table_3():
    assert PAPER.keys() == TABLE_3.keys()
    assert TRAINING_PAPER.keys() <= PAPER.keys()


def test_sizes_of_the_paper_and_small_ones_do_not_share_names():
    assert not PAPER.keys() & SMALL.keys()
    assert not SIZES.keys() & PROVENANCE.keys()
