import pytest
import torch
from tiny_models import ARCHITECTURES, BEAMS_OVER_TWO_VOCABULARIES, SOURCES, TARGETS, batch_of, build, padded
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from vanilla_transformer import VanillaTransformerConfig


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


@pytest.mark.parametrize(
    "architecture",
    [
        "default",
        "free_widths",
        "learned_positions",
        pytest.param("two_vocabularies", marks=BEAMS_OVER_TWO_VOCABULARIES),
    ],
)
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


# What transformers passes on to its own inner call.
@pytest.mark.filterwarnings("ignore:Passing `generation_config` together")
@pytest.mark.parametrize("assistant_seed", [0, 1])
def test_assisted_decoding_gives_what_the_model_alone_gives(assistant_seed):
    model, assistant = build(seed=0), build(seed=assistant_seed)
    steps = []
    model.get_decoder().register_forward_hook(lambda *_: steps.append(1))
    options = {"max_new_tokens": 12, "do_sample": False, "num_beams": 1}
    for source in SOURCES:
        ids = torch.tensor([source])
        steps.clear()
        expected = model.generate(ids, **options)
        alone = len(steps)
        steps.clear()
        assert torch.equal(model.generate(ids, assistant_model=assistant, **options), expected)
        # One that knows what the model will say spares it most steps; one that does not costs it none.
        assert len(steps) <= (alone // 2 + 1 if assistant_seed == 0 else alone)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"cache_implementation": "static"}], ids=str)
def test_a_decoder_without_layers_counts_its_positions(positions, options):
    model = build(decoder_layers=0, position_embedding_type=positions, seed=3)
    batch = batch_of(SOURCES, TARGETS)
    source = {name: batch[name] for name in ("input_ids", "attention_mask")}
    both = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "num_beams": options.get("num_beams", 1)}
    both |= {"return_dict_in_generate": True, "output_logits": True}
    uncached = model.generate(**source, use_cache=False, **both)
    cached = model.generate(**source, **{**both, **options})
    assert torch.equal(cached.sequences, uncached.sequences)
    # A token may be the likeliest at every position.
    torch.testing.assert_close(torch.stack(cached.logits), torch.stack(uncached.logits), rtol=0, atol=1e-10)
