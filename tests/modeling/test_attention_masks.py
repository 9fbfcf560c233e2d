import sys

import pytest
import torch
from tiny_models import ARCHITECTURES, BOS, SOURCES, TARGETS, batch_of, build, gradients, padded


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
