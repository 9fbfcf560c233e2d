import paper_equations
import pytest
import torch
from tiny_models import (
    ARCHITECTURES,
    BEAMS_OVER_TWO_VOCABULARIES,
    BOS,
    EOS,
    PAD,
    SOURCES,
    TARGETS,
    batch_of,
    build,
    largest_difference,
    oracle_of,
    padded,
    tiny_config,
)
from torch import nn
from transformers import MarianConfig, MarianMTModel

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_model_equals_the_papers_equations(architecture, attention):
    model = build(**ARCHITECTURES[architecture])
    model.set_attn_implementation(attention)
    oracle = oracle_of(model)
    batch = batch_of(SOURCES, TARGETS)
    with torch.no_grad():
        encoded = model.model.encoder(batch["input_ids"], batch["attention_mask"]).last_hidden_state
        decoded = model.model(**batch).last_hidden_state
        output = model(**batch, labels=padded(TARGETS, -100))
    total = 0.0
    smoothed_total = 0.0
    for row, (source, target) in enumerate(zip(SOURCES, TARGETS, strict=True)):
        memory = oracle.encode(source)
        assert largest_difference(encoded[row, : len(source)], memory) < 1e-10
        states = oracle.decode(memory, [BOS, *target[:-1]])
        assert largest_difference(decoded[row, : len(target)], states) < 1e-10
        logits = oracle.project(states)
        assert largest_difference(output.logits[row, : len(target)], logits) < 1e-10
        total += paper_equations.cross_entropy(logits, target)
        smoothed_total += paper_equations.cross_entropy(logits, target, smoothing=0.1)
    num_tokens = sum(map(len, TARGETS))
    assert abs(output.loss.item() - total / num_tokens) < 1e-10
    smoothed = nn.functional.cross_entropy(
        output.logits.flatten(0, 1), padded(TARGETS, -100).flatten(), ignore_index=-100, label_smoothing=0.1
    )
    assert abs(smoothed.item() - smoothed_total / num_tokens) < 1e-10
    assert abs(smoothed_total - total) > 1e-3


@pytest.mark.parametrize("layout", ["interleaved", "concatenated"])
@pytest.mark.parametrize("exponent", ["paper", "tensor2tensor"])
def test_positions_equal_the_printed_formula(layout, exponent):
    config = tiny_config(d_model=48, sinusoidal_layout=layout, sinusoidal_exponent=exponent)
    positions = VanillaTransformerModel(config).encoder.embed_positions
    table = paper_equations.sinusoidal_positions(300, 48, layout=layout, exponent=exponent)
    assert largest_difference(positions(torch.arange(300)[None], torch.float64)[0], table) < 1e-10
    some = torch.tensor([[5, 3, 250], [0, 299, 5]])
    assert largest_difference(positions(some, torch.float64), table[some.numpy()]) < 1e-10
    # Angles of up to 299 radians are exact to half a unit in the last place of float32, which is 1.5e-5 there.
    assert largest_difference(positions(torch.arange(300)[None], torch.float32)[0], table) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_positions_are_rounded_once(dtype):
    positions = VanillaTransformerModel(tiny_config(d_model=120)).encoder.embed_positions
    position_ids = torch.arange(8192)[None]
    narrow = positions(position_ids, dtype)
    assert narrow.dtype == dtype
    assert torch.equal(narrow, positions(position_ids, torch.float32).to(dtype))
    # Angles in bfloat16 would leave fewer than a thousand of these apart.
    assert len(torch.unique(narrow[0].float(), dim=0)) == 8192


@pytest.mark.parametrize("shared", [True, pytest.param(False, marks=BEAMS_OVER_TWO_VOCABULARIES)])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_model_equals_marian_under_the_same_weights(shared, attention):
    sizes = {
        "vocab_size": 30,
        "decoder_vocab_size": 30 if shared else 37,
        "share_encoder_decoder_embeddings": shared,
        "d_model": 24,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 3,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 40,
        "decoder_ffn_dim": 32,
        "max_position_embeddings": 16,
        "dropout": 0.0,
        "scale_embedding": True,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "decoder_start_token_id": BOS,
    }
    torch.manual_seed(1)
    marian = MarianMTModel(MarianConfig(**sizes, activation_function="relu", forced_eos_token_id=None)).double().eval()
    model = VanillaTransformerForConditionalGeneration(
        VanillaTransformerConfig(
            **sizes,
            attention_bias=True,
            final_logits_bias=True,
            layer_norm_eps=1e-5,
            sinusoidal_layout="concatenated",
            sinusoidal_exponent="paper",
        )
    )
    model = model.double().eval()
    marian.set_attn_implementation(attention)
    model.set_attn_implementation(attention)
    with torch.no_grad():
        for name, parameter in marian.named_parameters():
            if "embed_positions" not in name:
                parameter.normal_(mean=1.0 if "norm.weight" in name else 0.0, std=0.3)
        marian.final_logits_bias.normal_()
    tables = {f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")}
    weights = {name: tensor for name, tensor in marian.state_dict().items() if name not in tables}
    assert tables <= marian.state_dict().keys()
    assert weights.keys() == model.state_dict().keys()
    model.load_state_dict(weights)

    batch = batch_of(SOURCES, TARGETS)
    with torch.no_grad():
        logits = model(**batch).logits
        real = batch["decoder_attention_mask"].bool()
        # Marian rounds its table of positions to float32: 6e-8 at the input, and a hundredfold by the logits.
        assert (logits - marian(**batch).logits)[real].abs().max() < 1e-5
        table = torch.from_numpy(paper_equations.sinusoidal_positions(16, 24, layout="concatenated"))
        marian.model.encoder.embed_positions.weight.copy_(table)
        marian.model.decoder.embed_positions.weight.copy_(table)
        assert (logits - marian(**batch).logits)[real].abs().max() < 1e-10
        options = {"num_beams": 3, "max_new_tokens": 7, "do_sample": False}
        source = {name: batch[name] for name in ("input_ids", "attention_mask")}
        assert torch.equal(model.generate(**source, **options), marian.generate(**source, **options))


def number_of_parameters(**changes) -> int:
    with torch.device("meta"):
        model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**changes))
    return sum(parameter.numel() for parameter in model.parameters())


def test_parameter_counts_of_table_3():
    vocabulary, width, inner, layers, heads, d_k, d_v = 37000, 512, 2048, 6, 8, 64, 64
    attention = width * heads * d_k * 2 + width * heads * d_v + heads * d_v * width
    feed_forward = width * inner + inner + inner * width + width
    norm = 2 * width
    encoder = layers * (attention + feed_forward + 2 * norm)
    decoder = layers * (2 * attention + feed_forward + 3 * norm)
    base = number_of_parameters()
    assert base == vocabulary * width + encoder + decoder

    def in_millions(difference: int) -> float:
        return round(difference / 1e6, 1)

    # The differences between rows of Table 3; no vocabulary size reproduces the printed sums.
    assert in_millions(base - number_of_parameters(encoder_layers=4, decoder_layers=4)) == 14.7
    assert in_millions(base - number_of_parameters(d_k=16)) == 7.1
    assert in_millions(number_of_parameters(encoder_ffn_dim=4096, decoder_ffn_dim=4096) - base) == 25.2
    for row_a in (1, 4, 16, 32):
        assert number_of_parameters(encoder_attention_heads=row_a, decoder_attention_heads=row_a) == base


def test_sinusoidal_positions_have_no_length_limit():
    model = build(max_position_embeddings=4)
    source = torch.arange(5, 30).repeat(2)[None]
    oracle = oracle_of(model)
    with torch.no_grad():
        logits = model(source, decoder_input_ids=source).logits[0]
    ids = source[0].tolist()
    assert largest_difference(logits, oracle.project(oracle.decode(oracle.encode(ids), ids))) < 1e-10


def test_learned_positions_end_at_their_number():
    model = build(position_embedding_type="learned", max_position_embeddings=6)
    fits = torch.tensor([[7, 8, 9, 10, 11, 2]])
    too_long = torch.tensor([[7, 8, 9, 10, 11, 12, 2]])
    model(fits, decoder_input_ids=fits)
    with pytest.raises(ValueError, match="Encoder got 7 positions, but `max_position_embeddings` is 6; shorten"):
        model(too_long, decoder_input_ids=fits)
    with pytest.raises(ValueError, match="Decoder got 7 positions, but `max_position_embeddings` is 6; shorten"):
        model(fits, decoder_input_ids=too_long)
    with pytest.raises(ValueError, match="Decoder got 7 positions"):
        model.generate(fits, max_new_tokens=9, min_new_tokens=9, do_sample=False)
    assert model.generate(fits, max_new_tokens=6, min_new_tokens=6, do_sample=False).shape == (1, 7)
