"""Positions follow from the attention mask, so that the side of the padding does not matter."""

import pytest
import torch
from tiny_models import ARCHITECTURES, BOS, PAD, SOURCES, TARGETS, batch_of, batch_with_labels, build, gradients
from torch import nn
from transformers import DynamicCache, StaticCache

import vanilla_transformer
from vanilla_transformer import VanillaTransformerForCausalLM


HEADS = [
    "VanillaTransformerEncoderModel",
    "VanillaTransformerForCausalLM",
    "VanillaTransformerForMaskedLM",
    "VanillaTransformerForQuestionAnswering",
    "VanillaTransformerForSequenceClassification",
    "VanillaTransformerForTokenClassification",
]
PROMPTS = [[BOS, 7, 12, 9, 25, 6], [BOS, 11, 5], [BOS, 29]]


def on_the_left(sequences: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids padded on the left, and their mask."""
    longest = max(map(len, sequences))
    ids = [[PAD] * (longest - len(row)) + row for row in sequences]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in sequences]
    return torch.tensor(ids), torch.tensor(mask)


def left_batch() -> dict[str, torch.Tensor]:
    """`batch_of(SOURCES, TARGETS)` with all padding on the left."""
    batch = {}
    batch["input_ids"], batch["attention_mask"] = on_the_left(SOURCES)
    batch["decoder_input_ids"], batch["decoder_attention_mask"] = on_the_left(
        [[BOS, *target[:-1]] for target in TARGETS]
    )
    return batch


def rows_of(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What belongs to tokens, sentence by sentence; all of it if there is one row a sentence."""
    return tensor[mask.bool()] if tensor.shape[:2] == mask.shape else tensor


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ["default", "learned_positions", "pre_norm", "tensor2tensor_positions"])
def test_a_translation_does_not_depend_on_the_side_of_the_padding(architecture, attention):
    model = build(**ARCHITECTURES[architecture])
    model.set_attn_implementation(attention)
    results = []
    for batch in (batch_of(SOURCES, TARGETS), left_batch()):
        model.zero_grad()
        logits = model(**batch).logits[batch["decoder_attention_mask"].bool()]
        logits.logsumexp(-1).sum().backward()
        results.append((logits.detach(), gradients(model)))
        assert all(gradient.isfinite().all() for gradient in results[-1][1].values())
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", HEADS)
def test_no_head_depends_on_the_side_of_the_padding(name, attention):
    model = getattr(vanilla_transformer, name)(build(num_labels=3).config).double().eval()
    model.set_attn_implementation(attention)
    batch = batch_of(SOURCES, TARGETS)
    right = batch["input_ids"], batch["attention_mask"]
    found = []
    with torch.no_grad():
        for ids, mask in (right, on_the_left(SOURCES)):
            outputs = model(ids, attention_mask=mask)
            names = [name for name in outputs if "logits" in name or name == "last_hidden_state"]
            assert all(outputs[name].isfinite().all() for name in names)
            found.append({name: rows_of(outputs[name], mask) for name in names})
    assert found[0]
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_generation_does_not_depend_on_the_side_of_the_padding(num_beams, cache):
    if cache == "static" and num_beams > 1:
        pytest.skip("one way of keeping the cache is enough for beams")
    model = build(seed=3)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "num_beams": num_beams}
    if cache == "static":
        options["cache_implementation"] = "static"
    options["use_cache"] = cache != "none"
    right = batch_of(SOURCES, TARGETS)
    ids, mask = on_the_left(SOURCES)
    expected = model.generate(right["input_ids"], attention_mask=right["attention_mask"], **options)
    assert torch.equal(model.generate(ids, attention_mask=mask, **options), expected)
    # Prompts of unequal length for the decoder, too.
    prompts, prompt_mask = on_the_left(PROMPTS)
    together = model.generate(
        ids, attention_mask=mask, decoder_input_ids=prompts, decoder_attention_mask=prompt_mask, **options
    )
    for row, (source, prompt) in enumerate(zip(SOURCES, PROMPTS, strict=True)):
        alone = model.generate(torch.tensor([source]), decoder_input_ids=torch.tensor([prompt]), **options)
        assert together[row, -6:].tolist() == alone[0, -6:].tolist()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_language_model_continues_padded_texts_step_by_step(cache):
    torch.manual_seed(4)
    model = VanillaTransformerForCausalLM(build().config).double().eval()
    ids, mask = on_the_left(PROMPTS)
    with torch.no_grad():
        whole = model(ids, attention_mask=mask).logits
        kept = DynamicCache() if cache == "dynamic" else StaticCache(config=model.config, max_cache_len=6)
        pieces, seen = [], 0
        for piece in ids.split([3, 1, 2], dim=1):
            seen += piece.shape[1]
            output = model(piece, attention_mask=mask[:, :seen], past_key_values=kept, use_cache=True)
            pieces.append(output.logits)
        torch.testing.assert_close(torch.cat(pieces, dim=1)[mask.bool()], whole[mask.bool()], rtol=0, atol=1e-10)
        for row, text in enumerate(PROMPTS):
            alone = model(torch.tensor([text])).logits[0]
            torch.testing.assert_close(whole[row, -len(text) :], alone, rtol=0, atol=1e-10)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_padding_on_the_right_gives_the_bits_of_positions_counted_from_the_left(attention):
    model = build(dropout=0.1).train()
    model.set_attn_implementation(attention)
    batch = batch_with_labels()
    results = []
    for positions in (None, torch.arange(batch["input_ids"].shape[1])[None]):
        model.zero_grad()
        torch.manual_seed(0)
        loss = model(**batch, position_ids=positions).loss
        loss.backward()
        results.append((loss.detach(), gradients(model)))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_position_ids_are_those_of_the_source():
    model = build(seed=3)
    batch = batch_of(SOURCES, TARGETS)
    positions = torch.arange(batch["input_ids"].shape[1])[None] + 2
    source = {name: batch[name] for name in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    with torch.no_grad():
        encoded = model.model.encoder(**source, position_ids=positions)
        target = {name: value for name, value in batch.items() if name != "input_ids"}
        expected = model(**target, encoder_outputs=encoded).logits
        assert torch.equal(model(**batch, position_ids=positions).logits, expected)
        assert torch.equal(model(**target, encoder_outputs=encoded, position_ids=positions).logits, expected)
        assert not torch.equal(model(**batch).logits, expected)
        moved = torch.arange(batch["decoder_input_ids"].shape[1])[None] + 2
        assert not torch.equal(model(**batch, position_ids=positions, decoder_position_ids=moved).logits, expected)
    for num_beams in (1, 2):
        repeated = positions.expand(len(SOURCES), -1)
        generated = model.generate(**source, position_ids=repeated, num_beams=num_beams, **options)
        attention_mask = source["attention_mask"]
        # `generate` writes into what it is given.
        again = type(encoded)(last_hidden_state=encoded.last_hidden_state)
        expected = model.generate(encoder_outputs=again, attention_mask=attention_mask, num_beams=num_beams, **options)
        assert torch.equal(generated, expected)


def test_a_mask_of_four_dimensions_tells_no_positions():
    model = build()
    ids, mask = on_the_left(SOURCES)
    barred = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask == 0, torch.finfo(torch.float64).min)
    whole = barred[:, None, None, :].expand(-1, 1, mask.shape[1], -1)
    with torch.no_grad():
        from_the_left = torch.arange(ids.shape[1])[None]
        expected = model.model.encoder(ids, attention_mask=mask, position_ids=from_the_left).last_hidden_state
        actual = model.model.encoder(ids, attention_mask=whole).last_hidden_state
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-10)


def test_texts_without_tokens_harm_no_others():
    model = build()
    batch = left_batch()
    batch["attention_mask"][1] = 0
    batch["decoder_attention_mask"][1] = 0
    output = model(**batch)
    assert output.logits.isfinite().all()
    output.logits[[0, 2]].sum().backward()
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


def test_compiled_and_exported_models_take_padding_on_either_side():
    torch.compiler.reset()
    model = build()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    exported = torch.export.export(model, (), kwargs={**left_batch(), "use_cache": False}).module()
    with torch.no_grad():
        for batch in (left_batch(), batch_of(SOURCES, TARGETS)):
            expected = model(**batch, use_cache=False).logits
            torch.testing.assert_close(compiled(**batch, use_cache=False).logits, expected, rtol=0, atol=1e-12)
            torch.testing.assert_close(exported(**batch, use_cache=False).logits, expected, rtol=0, atol=1e-12)
    torch.compiler.reset()


def test_learned_positions_end_where_they_did():
    encoder = build(position_embedding_type="learned", max_position_embeddings=4).model.encoder
    with pytest.raises(ValueError, match=r"got 5 positions, but `max_position_embeddings` is 4"):
        encoder(torch.tensor([[PAD, 5, 6, 7, 8]]), attention_mask=torch.tensor([[0, 1, 1, 1, 1]]))
    assert isinstance(encoder.embed_positions, nn.Embedding)
