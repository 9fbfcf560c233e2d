import pytest
import torch
from tiny_models import (
    ARCHITECTURES,
    SOURCES,
    TARGETS,
    batch_of,
    batch_with_labels,
    build,
    gradients,
    padded,
    tiny_config,
)
from torch import nn

from vanilla_transformer import VanillaTransformerForCausalLM, VanillaTransformerForMaskedLM


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


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("architecture", ["default", "pre_norm"])
def test_gradient_checkpointing_gives_equal_gradients(architecture, use_reentrant):
    model = build(**ARCHITECTURES[architecture], dropout=0.2).train()
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            # transformers 5.23 renamed it, and its old name warns there.
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": use_reentrant})
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


@pytest.mark.parametrize("kind", [VanillaTransformerForMaskedLM, VanillaTransformerForCausalLM])
def test_gradient_checkpointing_of_a_head_gives_equal_gradients(kind):
    torch.manual_seed(1)
    model = kind(tiny_config(dropout=0.2)).double().train()
    (layers,) = {stack.layers for name, stack in model.named_modules() if name in ("model.encoder", "model.decoder")}
    batch = batch_with_labels()
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        calls = []
        hook = layers[0].fc1.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        model.zero_grad()
        torch.manual_seed(5)
        output = model(**batch)
        output.loss.backward()
        hook.remove()
        assert len(calls) == (2 if checkpointing else 1)
        results.append((output.loss.detach(), gradients(model)))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-12)


def test_an_exported_model_takes_other_sizes():
    model = build()
    batch = batch_of(SOURCES, TARGETS)
    sizes = {name: {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO} for name in batch}
    exported = torch.export.export(
        model, (), {**batch, "use_cache": False}, dynamic_shapes={**sizes, "use_cache": None}
    ).module()
    other = batch_of([[5, 6, 2], [9, 4, 11, 28, 2]], [[12, 2], [7, 8, 14, 21, 6, 2]])
    with torch.no_grad():
        for inputs in (batch, other):
            actual = exported(**inputs, use_cache=False).logits
            torch.testing.assert_close(actual, model(**inputs, use_cache=False).logits, rtol=0, atol=1e-12)


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
