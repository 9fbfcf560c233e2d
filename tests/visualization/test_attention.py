import numpy as np
import paper_equations
import pytest
import torch
from paper_equations import PaperTransformer

from vanilla_transformer.errors import UserError
from vanilla_transformer.visualization import attention as module
from vanilla_transformer.visualization.attention import alignment, attention_of, eager_attention, merge


def test_weights_are_those_of_the_model(model, tokenizer, ids):
    source, target = ids
    found = attention_of(model, tokenizer, source, target)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        outputs = model(
            input_ids=torch.tensor([source]),
            decoder_input_ids=torch.tensor([[1, *target[:-1]]]),
            output_attentions=True,
        )
    for name, layers in (
        ("encoder", outputs.encoder_attentions),
        ("decoder", outputs.decoder_attentions),
        ("cross", outputs.cross_attentions),
    ):
        weights = found.parts[name][0]
        assert weights.dtype == np.float32
        np.testing.assert_allclose(weights, torch.cat(layers).numpy(), atol=1e-7)
    expected = outputs.logits[0].softmax(dim=-1)[range(len(target)), target]
    np.testing.assert_allclose(found.probabilities, expected.numpy(), rtol=1e-6)


def test_weights_are_those_of_the_equations(model, tokenizer, ids, monkeypatch):
    source, target = ids
    found = attention_of(model, tokenizer, source, target)
    config, softmax, recorded = model.config, paper_equations.softmax, []
    monkeypatch.setattr(paper_equations, "softmax", lambda scores: recorded.append(softmax(scores)) or recorded[-1])
    oracle = PaperTransformer(
        {name: tensor.numpy() for name, tensor in model.state_dict().items()},
        d_model=config.d_model,
        encoder_layers=config.encoder_layers,
        decoder_layers=config.decoder_layers,
        encoder_heads=config.encoder_attention_heads,
        decoder_heads=config.decoder_attention_heads,
        eps=config.layer_norm_eps,
    )
    oracle.decode(oracle.encode(source), [1, *target[:-1]])
    encoder, decoder = recorded[: 2 * 2], recorded[2 * 2 :]
    np.testing.assert_allclose(found.encoder.reshape(-1, *encoder[0].shape), encoder, atol=1e-6)
    for layer in range(3):
        own = decoder[6 * layer : 6 * layer + 6]
        np.testing.assert_allclose(found.decoder[layer], own[:3], atol=1e-6)
        np.testing.assert_allclose(found.cross[layer], own[3:], atol=1e-6)


def test_rows_are_named_after_what_is_written_and_columns_after_what_is_read(model, tokenizer, ids):
    found = attention_of(model, tokenizer, *ids)
    assert found.read.ids == (1, *found.target.ids[:-1])
    for weights, rows, columns in found.parts.values():
        assert weights.shape[2:] == (len(rows), len(columns))
        np.testing.assert_allclose(weights.sum(axis=-1), 1.0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_models_in_other_dtypes_have_probabilities_too(make_model, tokenizer, ids, dtype):
    model = make_model().to(dtype)
    exact = attention_of(make_model().to(dtype).double(), tokenizer, *ids)
    found = attention_of(model, tokenizer, *ids)
    np.testing.assert_allclose(found.cross, exact.cross, atol=0.05)


def test_the_model_is_left_as_it_was(model, tokenizer, ids):
    model.train()
    model.model.encoder.eval()
    modes = [module.training for module in model.modules()]
    before = model.config._attn_implementation
    assert before == "sdpa"
    attention_of(model, tokenizer, *ids)
    assert model.config._attn_implementation == before
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(ZeroDivisionError), eager_attention(model):
        assert model.config._attn_implementation == "eager" and not model.training
        raise ZeroDivisionError
    assert model.config._attn_implementation == before
    assert [module.training for module in model.modules()] == modes


def test_a_damaged_model_is_refused(model, tokenizer, ids):
    model.model.encoder.layers[1].self_attn.q_proj.weight.data.fill_(float("nan"))
    with pytest.raises(UserError, match=r"encoder attention weights .* no probabilities"):
        attention_of(model, tokenizer, *ids)


def test_texts_without_a_token_and_texts_beyond_all_bounds_are_refused(model, make_model, tokenizer, ids, monkeypatch):
    with pytest.raises(UserError, match="A text is empty"):
        attention_of(model, tokenizer, ids[0], [])
    learned = make_model(position_embedding_type="learned", max_position_embeddings=8)
    with pytest.raises(UserError, match="has learned 8 positions"):
        attention_of(learned, tokenizer, *ids)
    monkeypatch.setattr(module, "MOST_WEIGHTS", 100)
    with pytest.raises(UserError, match="shows at most 100"):
        attention_of(model, tokenizer, *ids)


def test_a_model_without_layers_has_no_weights(make_model, tokenizer, ids):
    found = attention_of(make_model(encoder_layers=0, decoder_layers=0), tokenizer, *ids)
    assert all(not len(weights) for weights, _, _ in found.parts.values())
    assert alignment(found).size == 0


def test_merged_words_are_the_sum_of_what_is_looked_at_and_the_mean_of_who_looks():
    weights = np.random.default_rng(0).dirichlet(np.ones(5), size=(2, 4)).astype(np.float32)
    merged = merge(weights, (0, 0, 1, 2), (0, 1, 1, 1, 2))
    assert merged.shape == (2, 3, 3)
    np.testing.assert_allclose(merged[:, 0, 1], weights[:, :2, 1:4].sum(axis=-1).mean(axis=-1), rtol=1e-6)
    np.testing.assert_allclose(merged[:, 2, 2], weights[:, 3, 4], rtol=1e-6)
    np.testing.assert_allclose(merged.sum(axis=-1), 1.0, rtol=1e-6)


def test_alignment_is_that_of_the_last_layer_but_one(model, tokenizer, ids):
    found = attention_of(model, tokenizer, *ids)
    expected = merge(found.cross[1].mean(axis=0), found.target.words, found.source.words)
    np.testing.assert_array_equal(alignment(found), expected)
    assert alignment(found, layer=0).shape == (len(found.target.word_labels), len(found.source.word_labels))


def test_arrays_hold_everything(model, tokenizer, ids, tmp_path):
    found = attention_of(model, tokenizer, *ids)
    np.savez(tmp_path / "arrays.npz", **found.arrays())
    with np.load(tmp_path / "arrays.npz", allow_pickle=False) as arrays:
        np.testing.assert_array_equal(arrays["cross"], found.cross)
        assert tuple(arrays["target_tokens"]) == found.target.labels
        assert tuple(arrays["source_ids"]) == found.source.ids
