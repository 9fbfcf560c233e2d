import json
import re
from dataclasses import fields

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError
from transformers import AutoConfig, EncoderDecoderCache, StaticCache

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration


def test_defaults_are_the_base_model_of_table_3():
    config = VanillaTransformerConfig()
    assert (config.encoder_layers, config.decoder_layers, config.d_model) == (6, 6, 512)
    assert (config.encoder_ffn_dim, config.decoder_ffn_dim) == (2048, 2048)
    assert (config.encoder_attention_heads, config.decoder_attention_heads) == (8, 8)
    assert (config.dropout, config.attention_dropout, config.activation_dropout) == (0.1, 0.0, 0.0)
    assert (config.norm_position, config.activation_function) == ("post", "relu")
    assert (config.position_embedding_type, config.sinusoidal_layout, config.sinusoidal_exponent) == (
        "sinusoidal",
        "interleaved",
        "paper",
    )
    assert config.tie_word_embeddings and config.share_encoder_decoder_embeddings and config.scale_embedding
    assert not config.attention_bias and not config.final_logits_bias


# Values, then what the message must hold: the field, the value it got, the remedy.
BROKEN_RULES = [
    *[
        ({name: value}, [f"`{name}` is {value}", "at least 1"])
        for name in (
            "vocab_size",
            "d_model",
            "encoder_attention_heads",
            "decoder_attention_heads",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
            "max_position_embeddings",
        )
        for value in (0, -3)
    ],
    (
        {"decoder_vocab_size": 0, "share_encoder_decoder_embeddings": False},
        ["`decoder_vocab_size` is 0", "at least 1"],
    ),
    ({"encoder_layers": -1}, ["`encoder_layers` is -1", "at least 0"]),
    ({"decoder_layers": -1}, ["`decoder_layers` is -1", "at least 0"]),
    ({"d_k": 0}, ["`d_k` is 0", "at least 1", "d_model / heads"]),
    ({"d_v": -2}, ["`d_v` is -2", "at least 1", "d_model / heads"]),
    (
        {"encoder_attention_heads": 7},
        ["`d_model` (512)", "divisible by `encoder_attention_heads` (7)", "511 or 518", "`d_k` and `d_v`"],
    ),
    (
        {"decoder_attention_heads": 6},
        ["`d_model` (512)", "divisible by `decoder_attention_heads` (6)", "510 or 516", "`d_k` and `d_v`"],
    ),
    # One free width is not enough: the other is still a quotient.
    ({"encoder_attention_heads": 7, "d_k": 64}, ["`encoder_attention_heads` (7)"]),
    ({"encoder_attention_heads": 7, "d_v": 64}, ["`encoder_attention_heads` (7)"]),
    ({"d_model": 4}, ["`d_model` (4)", "`encoder_attention_heads` (8)", "use a `d_model` of 8,"]),
    (
        {"d_model": 15, "encoder_attention_heads": 3, "decoder_attention_heads": 5},
        ["`d_model` (15)", "even", "use 16", 'position_embedding_type` "learned"'],
    ),
    (
        {
            "d_model": 2,
            "encoder_attention_heads": 1,
            "decoder_attention_heads": 1,
            "sinusoidal_exponent": "tensor2tensor",
        },
        ["`d_model` (2)", "at least 4", "tensor2tensor"],
    ),
    *[
        ({name: value}, [f"`{name}` is {value}", "at least 0 and below 1"])
        for name in ("dropout", "attention_dropout", "activation_dropout")
        for value in (-0.1, 1, 1.0, float("nan"))
    ],
    ({"layer_norm_eps": 0.0}, ["`layer_norm_eps` is 0.0", "above 0"]),
    ({"layer_norm_eps": float("nan")}, ["`layer_norm_eps` is nan", "above 0"]),
    ({"init_std": -0.5}, ["`init_std` is -0.5", "at least 0", "d_model ** -0.5"]),
    ({"init_std": float("nan")}, ["`init_std` is nan", "at least 0"]),
    ({"activation_function": "rleu"}, ["`activation_function` is 'rleu'", '"relu"']),
    *[
        ({"vocab_size": 100, name: value}, [f"`{name}` is {value}", "0 to 99"])
        for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
        for value in (100, -1)
    ],
    ({"vocab_size": 100, "eos_token_id": [2, 100]}, ["`eos_token_id` is [2, 100]", "0 to 99"]),
]


@pytest.mark.parametrize(("values", "parts"), BROKEN_RULES, ids=lambda part: str(part)[:60])
def test_values_that_do_not_fit_together_name_field_value_and_remedy(values, parts):
    with pytest.raises(StrictDataclassClassValidationError) as caught:
        VanillaTransformerConfig(**values)
    assert isinstance(caught.value.__cause__, ValueError)
    for part in parts:
        assert part in str(caught.value.__cause__)


def test_the_suggested_widths_are_accepted():
    for heads in (3, 7, 12, 600):
        with pytest.raises(StrictDataclassClassValidationError) as caught:
            VanillaTransformerConfig(encoder_attention_heads=heads, position_embedding_type="learned")
        suggestion = re.search(r"use a `d_model` of ([\d or]+),", str(caught.value.__cause__)).group(1)
        for width in suggestion.split(" or "):
            VanillaTransformerConfig(
                d_model=int(width),
                encoder_attention_heads=heads,
                decoder_attention_heads=heads,
                position_embedding_type="learned",
            )


def test_smallest_and_unusual_values_are_accepted():
    VanillaTransformerConfig(encoder_layers=0, decoder_layers=0)
    VanillaTransformerConfig(dropout=0, attention_dropout=0.999, init_std=0)
    VanillaTransformerConfig(d_model=510, encoder_attention_heads=8, decoder_attention_heads=7, d_k=64, d_v=32)
    VanillaTransformerConfig(
        d_model=15, encoder_attention_heads=3, decoder_attention_heads=5, position_embedding_type="learned"
    )
    VanillaTransformerConfig(pad_token_id=None, bos_token_id=None, eos_token_id=[2, 3])
    VanillaTransformerConfig(eos_token_id=None, decoder_start_token_id=None)
    VanillaTransformerConfig(d_model=4, encoder_attention_heads=2, decoder_attention_heads=2, vocab_size=5)


def test_ids_lie_in_the_vocabularies_that_look_them_up():
    two = {"vocab_size": 50, "decoder_vocab_size": 80, "share_encoder_decoder_embeddings": False}
    VanillaTransformerConfig(**two, decoder_start_token_id=79, pad_token_id=49)
    with pytest.raises(StrictDataclassClassValidationError, match=r"`pad_token_id` is 50; .* 0 to 49"):
        VanillaTransformerConfig(**two, pad_token_id=50)
    two = {"vocab_size": 80, "decoder_vocab_size": 50, "share_encoder_decoder_embeddings": False}
    for name in ("decoder_start_token_id", "eos_token_id"):
        with pytest.raises(StrictDataclassClassValidationError, match=rf"`{name}` is 50; .* 0 to 49"):
            VanillaTransformerConfig(**two, **{name: 50})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size", "37000"),
        ("vocab_size", None),
        ("d_model", 512.0),
        ("d_k", "64"),
        ("encoder_layers", 6.5),
        ("dropout", "0.1"),
        ("layer_norm_eps", "1e-6"),
        ("norm_position", "middle"),
        ("norm_position", None),
        ("position_embedding_type", "rotary"),
        ("sinusoidal_layout", "shuffled"),
        ("sinusoidal_exponent", 2),
        ("tie_word_embeddings", "yes"),
        ("attention_bias", 1),
        ("activation_function", None),
        ("pad_token_id", "<pad>"),
    ],
)
def test_a_wrong_type_names_the_field(name, value):
    with pytest.raises(StrictDataclassFieldValidationError, match=f"'{name}'"):
        VanillaTransformerConfig(**{name: value})


ODD_VALUES = [
    None, True, -1, 2**31, 10**30, 0.5, 1e308, float("nan"), float("inf"), float("-inf"), "", "512", [], [None],
    [True], [2.0], ["a"], [[2]], {}, {"a": 1}, b"x", 1j, float,
]  # fmt: skip
# Names that are not fields, and what they may hold.
ALIASES = {"hidden_size": "d_model", "num_attention_heads": "encoder_attention_heads"}
ALIASES |= {"num_hidden_layers": "encoder_layers", "torch_dtype": "dtype"}
OWN = [field.name for field in fields(VanillaTransformerConfig) if field.name in vars(VanillaTransformerConfig)]


@pytest.mark.parametrize("name", [*OWN, "dtype", "id2label", "num_labels", *ALIASES])
def test_odd_values_are_accepted_and_saved_or_refused_with_their_name(name, tmp_path):
    for value in ODD_VALUES:
        try:
            config = VanillaTransformerConfig(**{name: value})
        except (ValueError, StrictDataclassFieldValidationError, StrictDataclassClassValidationError) as error:
            said = str(error if isinstance(error, ValueError) else error.__cause__ or error)
            assert name in str(error) or ALIASES.get(name, name) in said, (value, error)
        else:
            config.save_pretrained(tmp_path)
            again = VanillaTransformerConfig.from_pretrained(tmp_path)
            assert again.to_dict() == config.to_dict(), value


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"num_labels": 10**9},
            "`num_labels` is 1000000000; it must be a whole number, at least 1 and at most 1048576",
        ),
        ({"num_labels": True}, "`num_labels` is True"),
        ({"dtype": "float99"}, "`dtype` is 'float99'; it must be the name of a type of torch"),
    ],
)
def test_odd_values_of_every_configuration_are_refused_in_one_sentence(values, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        VanillaTransformerConfig(**values)


def test_a_configuration_of_an_older_version_loads(tmp_path):
    """One as this package wrote it, with the names that transformers has dropped since."""
    old = {
        "model_type": "vanilla_transformer", "architectures": ["VanillaTransformerForConditionalGeneration"],
        "vocab_size": 300, "decoder_vocab_size": 300, "d_model": 64, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_layers": 1, "decoder_layers": 1, "torch_dtype": "float32",
        "dropout": 0, "layer_norm_eps": 1e-6, "init_std": None, "d_k": None, "eos_token_id": 2,
        "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1},
        "transformers_version": "5.17.0",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(old), encoding="utf-8")
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.d_model, config.num_labels, config.dtype) == (64, 2, torch.float32)


def test_json_round_trip(tmp_path):
    config = VanillaTransformerConfig(
        vocab_size=300,
        decoder_vocab_size=400,
        share_encoder_decoder_embeddings=False,
        tie_word_embeddings=False,
        d_model=48,
        encoder_layers=1,
        decoder_layers=4,
        encoder_attention_heads=3,
        decoder_attention_heads=4,
        d_k=5,
        d_v=6,
        encoder_ffn_dim=10,
        decoder_ffn_dim=20,
        activation_function="gelu",
        dropout=0.3,
        attention_dropout=0.2,
        activation_dropout=0.05,
        sinusoidal_layout="concatenated",
        sinusoidal_exponent="tensor2tensor",
        max_position_embeddings=77,
        norm_position="pre",
        layer_norm_eps=1e-5,
        attention_bias=True,
        final_logits_bias=True,
        scale_embedding=False,
        init_std=0.25,
        eos_token_id=[2, 4],
    )
    config.save_pretrained(tmp_path / "once")
    loaded = AutoConfig.from_pretrained(tmp_path / "once")
    assert type(loaded) is VanillaTransformerConfig
    loaded.save_pretrained(tmp_path / "twice")
    assert (tmp_path / "twice/config.json").read_bytes() == (tmp_path / "once/config.json").read_bytes()
    for name in {field.name for field in fields(config)} - {"transformers_version"}:
        assert getattr(loaded, name) == getattr(config, name), name


def test_one_shared_vocabulary_has_one_size():
    assert VanillaTransformerConfig(vocab_size=321).decoder_vocab_size == 321
    assert VanillaTransformerConfig(vocab_size=321, decoder_vocab_size=99).decoder_vocab_size == 321
    two = VanillaTransformerConfig(vocab_size=321, decoder_vocab_size=99, share_encoder_decoder_embeddings=False)
    assert two.decoder_vocab_size == 99


def test_common_names_are_aliases():
    config = VanillaTransformerConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=3)
    assert (config.d_model, config.encoder_attention_heads, config.encoder_layers) == (64, 4, 3)
    config.num_hidden_layers = 5
    assert config.encoder_layers == 5 and config.decoder_layers == 6


def unequal_stacks(**changes) -> VanillaTransformerConfig:
    values = {
        "vocab_size": 40,
        "decoder_vocab_size": 30,
        "share_encoder_decoder_embeddings": False,
        "d_model": 24,
        "encoder_layers": 1,
        "decoder_layers": 3,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 20,
    }
    return VanillaTransformerConfig(**{**values, **changes})


def test_the_decoders_view_has_the_decoders_depth_heads_and_vocabulary():
    view = unequal_stacks().get_text_config(decoder=True)
    assert (view.num_hidden_layers, view.num_attention_heads, view.vocab_size) == (3, 4, 30)
    view = unequal_stacks().get_text_config(encoder=True)
    assert (view.num_hidden_layers, view.num_attention_heads, view.vocab_size) == (1, 2, 40)
    assert unequal_stacks().get_text_config(decoder=True).d_model == 24


@pytest.mark.parametrize(("encoder_layers", "decoder_layers"), [(1, 3), (3, 1)])
def test_generation_with_unequal_depths(encoder_layers, decoder_layers):
    torch.manual_seed(0)
    config = unequal_stacks(encoder_layers=encoder_layers, decoder_layers=decoder_layers)
    model = VanillaTransformerForConditionalGeneration(config).double().eval()
    source = torch.randint(5, 40, (3, 6))
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    without_cache = model.generate(source, use_cache=False, **options)
    assert torch.equal(model.generate(source, **options), without_cache)
    assert torch.equal(model.generate(source, cache_implementation="static", **options), without_cache)
    cache = EncoderDecoderCache(
        StaticCache(config=config, max_cache_len=9), StaticCache(config=config, max_cache_len=6)
    )
    assert torch.equal(model.generate(source, past_key_values=cache, **options), without_cache)
    assert len(cache.self_attention_cache.layers) == decoder_layers
