import math
import subprocess
import sys

import numpy as np
import paper_equations
import pytest
import torch
from paper_equations import PaperTransformer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EncoderDecoderCache,
    MarianConfig,
    MarianMTModel,
    StaticCache,
)

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
)


PAD, BOS, EOS = 0, 1, 2
SOURCES = [[7, 12, 9, 25, 6, 2], [11, 5, 2], [29, 8, 14, 2]]
TARGETS = [[9, 7, 2], [22, 6, 13, 10, 2], [17, 2]]


def tiny_config(**changes) -> VanillaTransformerConfig:
    values = {
        "vocab_size": 30,
        "d_model": 24,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 3,
        "decoder_attention_heads": 3,
        "encoder_ffn_dim": 40,
        "decoder_ffn_dim": 40,
        "max_position_embeddings": 16,
        "dropout": 0.0,
    }
    return VanillaTransformerConfig(**{**values, **changes})


def build(*, seed: int = 0, **changes) -> VanillaTransformerForConditionalGeneration:
    """A float64 model in evaluation mode, without ones and zeros behind which a fault could hide."""
    torch.manual_seed(seed)
    model = VanillaTransformerForConditionalGeneration(tiny_config(**changes)).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm.weight" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(".bias"):
                parameter.normal_(std=0.3)
        # A pad row that is not zero, so that masks and not zeros keep padding out.
        model.get_input_embeddings().weight[PAD].normal_()
        model.model.decoder.embed_tokens.weight[PAD].normal_()
        if model.final_logits_bias is not None:
            model.final_logits_bias.normal_()
    return model


def padded(sequences: list[list[int]], value: int = PAD) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence([torch.tensor(s) for s in sequences], batch_first=True, padding_value=value)


def batch_of(sources: list[list[int]], targets: list[list[int]]) -> dict[str, torch.Tensor]:
    source = padded(sources)
    decoder_input = padded([[BOS, *target[:-1]] for target in targets])
    return {
        "input_ids": source,
        "attention_mask": padded([[1] * len(s) for s in sources], 0),
        "decoder_input_ids": decoder_input,
        "decoder_attention_mask": padded([[1] * len(t) for t in targets], 0),
    }


def batch_with_labels() -> dict[str, torch.Tensor]:
    batch = batch_of(SOURCES, TARGETS)
    return {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "labels": padded(TARGETS, -100),
    }


def oracle_of(model: VanillaTransformerForConditionalGeneration) -> PaperTransformer:
    config = model.config
    return PaperTransformer(
        {name: tensor.numpy() for name, tensor in model.state_dict().items()},
        d_model=config.d_model,
        encoder_layers=config.encoder_layers,
        decoder_layers=config.decoder_layers,
        encoder_heads=config.encoder_attention_heads,
        decoder_heads=config.decoder_attention_heads,
        eps=config.layer_norm_eps,
        pre_norm=config.norm_position == "pre",
        layout=config.sinusoidal_layout,
        exponent=config.sinusoidal_exponent,
        learned_positions=config.position_embedding_type == "learned",
        scaled_embeddings=config.scale_embedding,
    )


def largest_difference(actual: torch.Tensor, expected: np.ndarray) -> float:
    return float(np.abs(actual.detach().numpy() - expected).max())


ARCHITECTURES = {
    "default": {},
    "free_widths": {"d_k": 5, "d_v": 7},
    "one_head_of_narrow_values": {"encoder_attention_heads": 1, "decoder_attention_heads": 1, "d_v": 3},
    "pre_norm": {"norm_position": "pre"},
    "attention_bias": {"attention_bias": True},
    "final_logits_bias": {"final_logits_bias": True},
    "tensor2tensor_positions": {"sinusoidal_layout": "concatenated", "sinusoidal_exponent": "tensor2tensor"},
    "concatenated_layout": {"sinusoidal_layout": "concatenated"},
    "learned_positions": {"position_embedding_type": "learned"},
    "two_vocabularies": {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 33},
    "two_vocabularies_untied": {
        "share_encoder_decoder_embeddings": False,
        "decoder_vocab_size": 33,
        "tie_word_embeddings": False,
    },
    "untied": {"tie_word_embeddings": False},
    "unequal_stacks": {
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 6,
        "encoder_layers": 1,
        "decoder_layers": 3,
        "encoder_ffn_dim": 17,
    },
    "unscaled_embeddings_and_large_epsilon": {"scale_embedding": False, "layer_norm_eps": 0.1},
    "everything": {
        "d_k": 4,
        "d_v": 6,
        "norm_position": "pre",
        "attention_bias": True,
        "final_logits_bias": True,
        "share_encoder_decoder_embeddings": False,
        "decoder_vocab_size": 33,
        "tie_word_embeddings": False,
        "encoder_attention_heads": 2,
        "position_embedding_type": "learned",
    },
}


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


@pytest.mark.parametrize("shared", [True, False])
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


def caches(kind: str, config: VanillaTransformerConfig, target_length: int, source_length: int) -> EncoderDecoderCache:
    if kind == "dynamic":
        return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    return EncoderDecoderCache(
        StaticCache(config=config, max_cache_len=target_length),
        StaticCache(config=config, max_cache_len=source_length),
    )


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ["default", "free_widths", "learned_positions", "unequal_stacks", "pre_norm"])
def test_cached_decoding_equals_uncached(architecture, attention, kind):
    model = build(**ARCHITECTURES[architecture])
    model.set_attn_implementation(attention)
    batch = batch_of(SOURCES, [TARGETS[1]] * 3)
    targets = batch["decoder_input_ids"]
    source = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        whole = model(**source, decoder_input_ids=targets, use_cache=False).logits
        encoder_outputs = model.model.encoder(**source)
        # One position at a time, and a first piece of two, as when decoding goes on from a prompt.
        for pieces in ([1, 1, 1, 1, 1], [2, 1, 2]):
            cache = caches(kind, model.config, targets.shape[1], source["input_ids"].shape[1])
            logits = []
            for piece in targets.split(pieces, dim=1):
                output = model(
                    encoder_outputs=encoder_outputs,
                    attention_mask=source["attention_mask"],
                    decoder_input_ids=piece,
                    past_key_values=cache,
                    use_cache=True,
                )
                assert output.past_key_values is cache
                logits.append(output.logits)
            torch.testing.assert_close(torch.cat(logits, dim=1), whole, rtol=0, atol=1e-10)
            assert int(cache.get_seq_length()) == targets.shape[1]


@pytest.mark.parametrize("architecture", ["default", "free_widths", "learned_positions", "two_vocabularies"])
def test_beam_search_with_a_reordered_cache_equals_beam_search_without(architecture):
    model = build(**ARCHITECTURES[architecture], seed=3)
    batch = batch_of(SOURCES, TARGETS)
    reorderings = []

    def remember(cache, beam_indices):
        reorderings.append(beam_indices.tolist())
        return reorder(cache, beam_indices)

    reorder = EncoderDecoderCache.reorder_cache
    options = {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "num_beams": 4,
        "num_return_sequences": 4,
        "max_new_tokens": 10,
        "return_dict_in_generate": True,
        "output_scores": True,
        "do_sample": False,
    }
    uncached = model.generate(**options, use_cache=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EncoderDecoderCache, "reorder_cache", remember)
        cached = model.generate(**options, use_cache=True)
    assert torch.equal(cached.sequences, uncached.sequences)
    torch.testing.assert_close(cached.sequences_scores, uncached.sequences_scores, rtol=0, atol=1e-10)
    assert any(order != list(range(12)) for order in reorderings)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_cross_attention_projects_a_source_once(num_beams):
    model = build()
    calls = []
    for layer in model.model.decoder.layers:
        layer.encoder_attn.k_proj.register_forward_hook(lambda *_: calls.append("key"))
        layer.encoder_attn.v_proj.register_forward_hook(lambda *_: calls.append("value"))
        layer.self_attn.k_proj.register_forward_hook(lambda *_: calls.append("own key"))
    model.generate(padded(SOURCES[:1]), num_beams=num_beams, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert calls.count("key") == calls.count("value") == len(model.model.decoder.layers)
    assert calls.count("own key") == 6 * len(model.model.decoder.layers)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("architecture", ["default", "free_widths", "pre_norm", "unequal_stacks"])
def test_sdpa_equals_eager(architecture):
    results = {}
    for attention in ("eager", "sdpa"):
        model = build(**ARCHITECTURES[architecture])
        model.set_attn_implementation(attention)
        assert model.config._attn_implementation == attention
        batch = batch_of(SOURCES, TARGETS)
        output = model(**batch, labels=padded(TARGETS, -100))
        output.loss.backward()
        real = batch["decoder_attention_mask"].bool()
        results[attention] = (output.logits[real].detach(), gradients(model))
    torch.testing.assert_close(results["sdpa"], results["eager"], rtol=0, atol=1e-10)


def test_set_attn_implementation_reaches_every_attention():
    model = build()
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        for module in (model, model.model, model.model.encoder, model.model.decoder):
            assert module.config._attn_implementation == attention
    called = []
    interface = "vanilla_transformer.modeling_vanilla_transformer.eager_attention_forward"
    with pytest.MonkeyPatch.context() as patch:
        original = sys.modules[interface.rpartition(".")[0]].eager_attention_forward
        patch.setattr(interface, lambda *args, **kwargs: called.append(1) or original(*args, **kwargs))
        model(**batch_of(SOURCES, TARGETS))
        assert not called
        model.set_attn_implementation("eager")
        model(**batch_of(SOURCES, TARGETS))
        assert len(called) == 2 + 2 * 2
    with pytest.raises(ValueError, match="attn_implementation"):
        model.set_attn_implementation("no_such_attention")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ["default", "free_widths", "learned_positions"])
def test_outputs_do_not_depend_on_padding_or_neighbours(architecture, attention):
    model = build(**ARCHITECTURES[architecture])
    model.set_attn_implementation(attention)
    together = batch_of(SOURCES, TARGETS)
    with torch.no_grad():
        logits = model(**together).logits
        for row, (source, target) in enumerate(zip(SOURCES, TARGETS, strict=True)):
            # One sentence alone and without any mask; the batch; the same row behind other neighbours.
            alone = model(
                input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([[BOS, *target[:-1]]])
            ).logits[0]
            torch.testing.assert_close(logits[row, : len(target)], alone, rtol=0, atol=1e-10)
            long = [5, 6] * 5
            among_others = model(**batch_of([long, source, [9]], [long, target, [8]])).logits[1, : len(target)]
            torch.testing.assert_close(among_others, alone, rtol=0, atol=1e-10)
        # What stands in the padding must not matter, on either side.
        filled = dict(together)
        for ids, mask in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
            filled[ids] = torch.where(together[mask].bool(), together[ids], 17)
        real = together["decoder_attention_mask"].bool()
        torch.testing.assert_close(model(**filled).logits[real], logits[real], rtol=0, atol=1e-10)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_decoder_is_causal_and_the_encoder_is_not(attention):
    model = build()
    model.set_attn_implementation(attention)
    source = torch.tensor([SOURCES[0]])
    target = torch.tensor([[BOS, 9, 8, 7, 6, 5]])
    with torch.no_grad():
        logits = model(source, decoder_input_ids=target).logits
        for position in range(1, target.shape[1]):
            changed = target.clone()
            changed[0, position:] = 20
            others = model(source, decoder_input_ids=changed).logits
            torch.testing.assert_close(others[:, :position], logits[:, :position], rtol=0, atol=1e-12)
            assert (others[:, position:] - logits[:, position:]).abs().amin(dim=1).max() > 1e-3
        encoded = model.model.encoder(source).last_hidden_state
        changed = source.clone()
        changed[0, -1] = 20
        assert ((model.model.encoder(changed).last_hidden_state - encoded).abs().amax(dim=-1) > 1e-4).all()


@pytest.mark.parametrize("architecture", ["default", "two_vocabularies", "unscaled_embeddings_and_large_epsilon"])
def test_embeddings_as_inputs_equal_ids_as_inputs(architecture):
    model = build(**ARCHITECTURES[architecture])
    batch = batch_of(SOURCES, TARGETS)
    with torch.no_grad():
        expected = model(**batch).logits
        source_embeddings = model.get_input_embeddings()(batch.pop("input_ids"))
        target_embeddings = model.get_decoder().get_input_embeddings()(batch.pop("decoder_input_ids"))
        actual = model(**batch, inputs_embeds=source_embeddings, decoder_inputs_embeds=target_embeddings).logits
    assert torch.equal(actual, expected)


def test_ids_and_embeddings_exclude_each_other():
    encoder = build().model.encoder
    ids = torch.tensor([SOURCES[0]])
    with pytest.raises(ValueError, match="got both of token ids and embeddings; pass exactly one"):
        encoder(input_ids=ids, inputs_embeds=encoder.embed_tokens(ids))
    with pytest.raises(ValueError, match="got neither of token ids and embeddings; pass exactly one"):
        encoder()


def test_attention_weights_and_hidden_states():
    model = build(**ARCHITECTURES["unequal_stacks"])
    model.set_attn_implementation("eager")
    batch = batch_of(SOURCES, TARGETS)
    with torch.no_grad():
        output = model(**batch, output_attentions=True, output_hidden_states=True)
    rows, source_length = batch["input_ids"].shape
    target_length = batch["decoder_input_ids"].shape[1]
    assert [tuple(w.shape) for w in output.encoder_attentions] == [(rows, 2, source_length, source_length)]
    assert [tuple(w.shape) for w in output.decoder_attentions] == [(rows, 6, target_length, target_length)] * 3
    assert [tuple(w.shape) for w in output.cross_attentions] == [(rows, 6, target_length, source_length)] * 3
    assert [tuple(h.shape) for h in output.encoder_hidden_states] == [(rows, source_length, 24)] * 2
    assert [tuple(h.shape) for h in output.decoder_hidden_states] == [(rows, target_length, 24)] * 4
    assert torch.equal(output.encoder_hidden_states[-1], output.encoder_last_hidden_state)
    assert torch.equal(model.lm_head(output.decoder_hidden_states[-1]), output.logits)

    source_padding = batch["attention_mask"] == 0
    target_padding = batch["decoder_attention_mask"] == 0
    future = torch.ones(target_length, target_length, dtype=torch.bool).triu(1)
    for attentions, queries, barred in (
        (output.encoder_attentions, ~source_padding, source_padding[:, None, :]),
        (output.decoder_attentions, ~target_padding, target_padding[:, None, :] | future),
        (output.cross_attentions, ~target_padding, source_padding[:, None, :]),
    ):
        for weights in attentions:
            by_query = weights.transpose(1, 2)[queries]
            torch.testing.assert_close(by_query.sum(-1), torch.ones(by_query.shape[:-1], dtype=torch.float64))
            barred_here = barred.expand(rows, weights.shape[2], -1)[queries]
            assert (by_query.transpose(0, 1)[:, barred_here] == 0).all()
            assert (by_query.transpose(0, 1)[:, ~barred_here] > 0).all()


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("architecture", ["default", "pre_norm"])
def test_gradient_checkpointing_gives_equal_gradients(architecture, use_reentrant):
    model = build(**ARCHITECTURES[architecture], dropout=0.2).train()
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": use_reentrant})
            assert model.is_activation_checkpointing
        calls = []
        hook = model.model.decoder.layers[0].fc1.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        model.zero_grad()
        torch.manual_seed(5)
        output = model(**batch_with_labels())
        output.loss.backward()
        hook.remove()
        assert len(calls) == (2 if checkpointing else 1)
        results.append((output.loss.detach(), gradients(model)))
    assert all(gradient.abs().sum() > 0 for name, gradient in results[0][1].items() if "k_proj" in name)
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-12)


def test_dropout_acts_in_training_only():
    model = build(dropout=0.3)
    batch = batch_of(SOURCES, TARGETS)
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, model(**batch).logits)
        model.train()
        assert not torch.equal(model(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize("architecture", ["default", "pre_norm"])
def test_under_autocast_layers_pass_on_half_precision_and_the_gradient_stays(architecture):
    model = build(**ARCHITECTURES[architecture]).float()
    dtypes = []
    for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
        layer.register_forward_pre_hook(lambda _, inputs: dtypes.append(inputs[0].dtype))
    wide = model(**batch_with_labels())
    wide.loss.backward()
    expected = gradients(model)
    dtypes.clear()
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        narrow = model(**batch_with_labels())
    narrow.loss.backward()
    assert set(dtypes) == {torch.bfloat16}
    # Eight bits of mantissa, over four layers.
    torch.testing.assert_close(narrow.loss, wide.loss, rtol=2e-2, atol=0.0)
    for name, gradient in gradients(model).items():
        assert gradient.dtype == torch.float32
        alike = nn.functional.cosine_similarity(gradient.flatten(), expected[name].flatten(), dim=0)
        assert alike > 0.99 or expected[name].norm() < 1e-6, name


def test_logits_to_keep_equals_slicing():
    model = build()
    batch = batch_of(SOURCES, TARGETS)
    with torch.no_grad():
        whole = model(**batch).logits
        torch.testing.assert_close(model(**batch, logits_to_keep=2).logits, whole[:, -2:], rtol=0, atol=1e-12)
        chosen = torch.tensor([0, 3])
        torch.testing.assert_close(model(**batch, logits_to_keep=chosen).logits, whole[:, chosen], rtol=0, atol=1e-12)
        assert torch.equal(model(**batch, logits_to_keep=0).logits, whole)


def test_labels_are_shifted_into_decoder_inputs():
    model = build(decoder_start_token_id=4)
    labels = padded(TARGETS, -100)
    shifted = model.prepare_decoder_input_ids_from_labels(labels)
    assert shifted.tolist() == [[4, 9, 7, 2, 0], [4, 22, 6, 13, 10], [4, 17, 2, 0, 0]]
    batch = batch_with_labels()
    with torch.no_grad():
        from_labels = model(**batch)
        explicit = model(**batch, decoder_input_ids=shifted)
    assert torch.equal(from_labels.logits, explicit.logits)
    assert torch.equal(from_labels.loss, explicit.loss)
    assert from_labels.past_key_values is None


def test_losses_of_micro_batches_sum_to_the_loss_of_the_batch():
    model = build()
    batch = batch_with_labels()
    num_tokens = int((batch["labels"] != -100).sum())
    whole = model(**batch)
    whole.loss.backward()
    expected = gradients(model)
    model.zero_grad()
    total = 0.0
    for count in (num_tokens, torch.tensor(num_tokens)):
        parts = []
        for row in range(3):
            loss = model(
                **{name: value[row : row + 1] for name, value in batch.items()}, num_items_in_batch=count
            ).loss
            parts.append(loss)
        total = torch.stack(parts).sum()
        torch.testing.assert_close(total, whole.loss, rtol=0, atol=1e-12)
    total.backward()
    torch.testing.assert_close(gradients(model), expected, rtol=0, atol=1e-12)


def test_half_precision_logits_are_scored_in_float32():
    model = build().bfloat16()
    output = model(**batch_with_labels())
    assert output.logits.dtype == torch.bfloat16 and output.loss.dtype == torch.float32
    labels = padded(TARGETS, -100)
    expected = nn.functional.cross_entropy(output.logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100)
    torch.testing.assert_close(output.loss, expected)


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


VOCABULARIES = [
    pytest.param(tied, shared, id=f"{'tied' if tied else 'untied'}-{'one' if shared else 'two'}_vocabularies")
    for tied in (True, False)
    for shared in (True, False)
]


def assert_ties(model: VanillaTransformerForConditionalGeneration, *, tied: bool, shared: bool) -> None:
    encoder, decoder = model.model.encoder.embed_tokens.weight, model.model.decoder.embed_tokens.weight
    assert (encoder.data_ptr() == decoder.data_ptr()) == shared
    assert (model.lm_head.weight.data_ptr() == decoder.data_ptr()) == tied
    assert model.lm_head.weight.shape == decoder.shape
    if shared:
        assert model.model.shared.weight is encoder is decoder
    assert model.get_input_embeddings().weight is encoder
    assert model.get_output_embeddings().weight is model.lm_head.weight


@pytest.mark.parametrize(("tied", "shared"), VOCABULARIES)
def test_saved_models_load_bitwise(tied, shared, tmp_path):
    model = build(
        tie_word_embeddings=tied,
        share_encoder_decoder_embeddings=shared,
        decoder_vocab_size=33,
        final_logits_bias=True,
    ).float()
    assert_ties(model, tied=tied, shared=shared)
    decoder_vocabulary = 30 if shared else 33
    embeddings = 24 * (30 + (0 if shared else 33) + (0 if tied else decoder_vocabulary))
    others = sum(p.numel() for name, p in model.named_parameters() if "layers." in name)
    assert sum(p.numel() for p in model.parameters()) == embeddings + others

    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as saved:
        matrices = [name for name in saved.keys() if "embed" in name or "shared" in name or "lm_head" in name]  # noqa: SIM118
        assert len(matrices) == 1 + (not shared) + (not tied)
        assert "final_logits_bias" in saved.keys()  # noqa: SIM118

    loaded, report = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is VanillaTransformerForConditionalGeneration
    assert not any(report.values()), report
    assert_ties(loaded, tied=tied, shared=shared)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert sum(p.numel() for p in loaded.parameters()) == embeddings + others

    base, report = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert type(base) is VanillaTransformerModel
    assert not report["missing_keys"]
    assert (base.encoder.embed_tokens.weight.data_ptr() == base.decoder.embed_tokens.weight.data_ptr()) == shared
    for name, tensor in model.model.state_dict().items():
        assert torch.equal(base.state_dict()[name], tensor), name

    # The base model's own folder fills the translation model, whose projection is new where it is not tied.
    base.save_pretrained(tmp_path / "base")
    head, report = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert_ties(head, tied=tied, shared=shared)
    assert set(report["missing_keys"]) == {"final_logits_bias", *([] if tied else ["lm_head.weight"])}
    assert not head.final_logits_bias.any()
    for name, tensor in model.model.state_dict().items():
        assert torch.equal(head.model.state_dict()[name], tensor), name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [37, 21])
def test_resized_models_keep_their_rows_and_ties(tied, size, tmp_path):
    model = build(tie_word_embeddings=tied, final_logits_bias=True).float()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.resize_token_embeddings(size)
    assert (model.config.vocab_size, model.config.decoder_vocab_size) == (size, size)
    assert_ties(model, tied=tied, shared=True)
    kept = min(size, 30)
    assert torch.equal(model.model.shared.weight[:kept], before["model.shared.weight"][:kept])
    assert torch.equal(model.lm_head.weight[:kept], before["lm_head.weight"][:kept])
    assert torch.equal(model.final_logits_bias[:, :kept], before["final_logits_bias"][:, :kept])
    assert not model.final_logits_bias[:, kept:].any()
    assert model.final_logits_bias.shape == (1, size)

    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert_ties(loaded, tied=tied, shared=True)
    batch = batch_of([[7, 8, size - 1, 2]], [[size - 1, 6, 2]])
    with torch.no_grad():
        logits = loaded(**batch).logits
        assert logits.shape[-1] == size
        assert torch.equal(logits, model.eval()(**batch).logits)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [37, 21])
def test_a_resized_base_model_keeps_its_rows_and_ties(tied, size, tmp_path):
    build(tie_word_embeddings=tied).float().save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path)
    before = base.shared.weight.clone()
    base.resize_token_embeddings(size)
    base.save_pretrained(tmp_path / "resized")
    loaded = AutoModel.from_pretrained(tmp_path / "resized")
    kept = min(size, 30)
    for model in (base, loaded):
        assert (model.config.vocab_size, model.config.decoder_vocab_size) == (size, size)
        assert model.shared.weight is model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight
        assert model.shared.weight.shape == (size, 24)
        assert torch.equal(model.shared.weight[:kept], before[:kept])
    # The projection that the base model lacks has the new size, too.
    head = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "resized")
    assert_ties(head, tied=tied, shared=True)
    assert torch.equal(head.model.shared.weight, base.shared.weight)


@pytest.mark.parametrize("tied", [True, False])
def test_two_vocabularies_cannot_be_resized_as_one(tied):
    model = build(share_encoder_decoder_embeddings=False, decoder_vocab_size=33, tie_word_embeddings=tied)
    for part in (model, model.model):
        with pytest.raises(ValueError, match=r"one vocabulary that both sides share.*build a model of the new sizes"):
            part.resize_token_embeddings(40)
        assert (part.config.vocab_size, part.config.decoder_vocab_size) == (30, 33)
        assert [len(stack.embed_tokens.weight) for stack in (model.model.encoder, model.model.decoder)] == [30, 33]


def rows_of_one_matrix(name):
    """Names of all weights that are rows of the matrix that `name` belongs to.

    The authors' code projects to queries, keys and values with one matrix, and from the encoder to keys and values.
    """
    for block, parts in (("self_attn.", "qkv"), ("encoder_attn.", "kv")):
        for part in parts:
            if f"{block}{part}_proj." in name:
                return [name.replace(f"{part}_proj.", f"{other}_proj.") for other in parts]
    return [name]


def assert_freshly_initialised(model: VanillaTransformerForConditionalGeneration, names) -> None:
    d_model = model.config.d_model
    state = model.state_dict()
    for name in names:
        tensor = state[name]
        if "norm.weight" in name:
            assert (tensor == 1).all(), name
        elif name.endswith("bias"):
            assert (tensor == 0).all(), name
        elif "shared" in name or "embed" in name or "lm_head" in name:
            rows = tensor
            if "lm_head" not in name and "positions" not in name:
                assert (tensor[PAD] == 0).all(), name
                rows = tensor[PAD + 1 :]
            # Ten standard errors are beyond any seed's luck.
            assert abs(rows.std().item() / d_model**-0.5 - 1) < 10 / math.sqrt(2 * rows.numel()), name
            assert abs(rows.mean().item()) < 10 * d_model**-0.5 / math.sqrt(rows.numel()), name
        else:
            fan_out = sum(state[part].shape[0] for part in rows_of_one_matrix(name))
            bound = math.sqrt(6 / (tensor.shape[1] + fan_out))
            assert tensor.abs().max() <= bound, name
            assert tensor.abs().max() > 0.9 * bound, name
            assert abs(tensor.std().item() / (bound / math.sqrt(3)) - 1) < 0.15, name


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


def test_missing_weights_are_initialised_and_present_ones_are_kept(tmp_path):
    model = build(tie_word_embeddings=False, share_encoder_decoder_embeddings=False, decoder_vocab_size=330).float()
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    absent = {
        "model.decoder.embed_tokens.weight",
        "model.encoder.layers.1.fc1.weight",
        "model.encoder.layers.0.fc2.bias",
        "model.decoder.layers.0.encoder_attn.k_proj.weight",
        "model.decoder.layers.1.encoder_attn_layer_norm.weight",
        "lm_head.weight",
    }
    assert absent < weights.keys()
    kept = {name: tensor for name, tensor in weights.items() if name not in absent}
    # A pad row that an earlier training left different from zero is a loaded value like any other.
    assert kept["model.encoder.embed_tokens.weight"][PAD].any()
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})

    torch.manual_seed(11)
    loaded, report = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(report["missing_keys"]) == absent
    for name, tensor in kept.items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert_freshly_initialised(loaded, absent)


def test_compiled_forward_equals_eager():
    torch.compiler.reset()
    model = build(**ARCHITECTURES["free_widths"])
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for sources, targets in ((SOURCES, TARGETS), (SOURCES[:2], TARGETS[:2])):
        batch = batch_of(sources, targets)
        with torch.no_grad():
            torch.testing.assert_close(compiled(**batch).logits, model(**batch).logits, rtol=0, atol=1e-12)
    torch.compiler.reset()


def test_compiled_learned_positions_keep_their_limit():
    torch.compiler.reset()
    encoder = build(position_embedding_type="learned", max_position_embeddings=6).model.encoder
    compiled = torch.compile(encoder, fullgraph=True, backend="eager")
    with torch.no_grad():
        for length in (3, 5, 6):
            ids = torch.arange(5, 5 + length)[None]
            expected = encoder(ids).last_hidden_state
            torch.testing.assert_close(compiled(ids).last_hidden_state, expected, rtol=0, atol=1e-12)
    torch.compiler.reset()


def test_a_fresh_process_loads_what_was_saved(tmp_path):
    model = build(share_encoder_decoder_embeddings=False, decoder_vocab_size=33)
    model.save_pretrained(tmp_path)
    batch = batch_of(SOURCES, TARGETS)
    with torch.no_grad():
        torch.save((batch, model(**batch).logits), tmp_path / "expected.pt")
    program = """
import sys, torch, vanilla_transformer
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM
folder = sys.argv[1]
batch, expected = torch.load(folder + "/expected.pt")
model = AutoModelForSeq2SeqLM.from_pretrained(folder)
with torch.no_grad():
    logits = model(**batch).logits
assert model.dtype == torch.float64, model.dtype
torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
print(type(AutoConfig.from_pretrained(folder)).__name__)
print(type(AutoModel.from_pretrained(folder)).__name__)
print(type(model).__name__)
"""
    finished = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == [
        "VanillaTransformerConfig",
        "VanillaTransformerModel",
        "VanillaTransformerForConditionalGeneration",
    ]


FIRST_DIGIT = 5
LONGEST = 7


def digit_strings(number: int, *, held_out: bool, generator: torch.Generator) -> list[list[int]]:
    """Strings of four to seven digits; those whose sum is divisible by five are never trained on."""
    strings = []
    while len(strings) < number:
        lengths = torch.randint(4, LONGEST + 1, (number,), generator=generator).tolist()
        digits = torch.randint(0, 10, (number, LONGEST), generator=generator).tolist()
        drawn = (row[:length] for row, length in zip(digits, lengths, strict=True))
        strings += [string for string in drawn if (sum(string) % 5 == 0) == held_out]
    return strings[:number]


def as_ids(string: list[int]) -> list[int]:
    return [FIRST_DIGIT + digit for digit in string] + [EOS]


def share_learnt(transform, seed: int) -> float:
    """Train on `transform` and return the share of held-out strings that greedy search gets exactly right."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    config = tiny_config(
        vocab_size=FIRST_DIGIT + 10,
        d_model=64,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
    )
    model = VanillaTransformerForConditionalGeneration(config).train()
    steps, warmup = 600, 150
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.98), eps=1e-9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / warmup, 1 - step / steps))
    for _ in range(steps):
        strings = digit_strings(96, held_out=False, generator=generator)
        sources = [as_ids(string) for string in strings]
        output = model(
            input_ids=padded(sources),
            attention_mask=padded([[1] * len(source) for source in sources], 0),
            labels=padded([as_ids(transform(string)) for string in strings], -100),
        )
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        schedule.step()

    strings = digit_strings(500, held_out=True, generator=generator)
    sources = [as_ids(string) for string in strings]
    generated = model.eval().generate(
        padded(sources),
        attention_mask=padded([[1] * len(source) for source in sources], 0),
        max_new_tokens=LONGEST + 2,
        do_sample=False,
    )
    right = 0
    for string, ids in zip(strings, generated.tolist(), strict=True):
        wanted = [BOS, *as_ids(transform(string))]
        right += ids[: len(wanted)] == wanted and not any(ids[len(wanted) :])
    return right / len(strings)


@pytest.mark.parametrize("transform", [list, lambda string: string[::-1]], ids=["copy", "reverse"])
def test_a_model_learns(transform):
    # A seed from the operating system: learning must not hang on luck.
    seed = torch.seed() % 2**32
    assert share_learnt(transform, seed) >= 0.99, f"seed {seed}"
