"""Tests of training without padding: the same losses and gradients as with it."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from native_parts import require
from runs import make_run, records_of, train_anew

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.data.batching import RandomBatches
from vanilla_transformer.data.collation import collate, pack
from vanilla_transformer.native import training_kernels as kernels
from vanilla_transformer.training.cpu.fused_layers import fuse_operations
from vanilla_transformer.training.cpu.padding_free import can_pack
from vanilla_transformer.training.dry_run import dry_run
from vanilla_transformer.training.step.loss import SmoothedTranslationLoss


KINDS = {
    "post_norm": {},
    "pre_norm": {"norm_position": "pre"},
    "learned_positions": {"position_embedding_type": "learned", "max_position_embeddings": 50},
    "wide_values": {"d_k": 16, "d_v": 48, "attention_bias": True},
}
SOURCE_LENGTHS, TARGET_LENGTHS = (3, 17, 9, 40, 1), (5, 12, 20, 33, 1)
PACKABLE = {"mixed_precision": "bf16", "device": "cpu", "d_k": 16, "d_v": 16}


@pytest.fixture(autouse=True)
def available():
    require("kernels", kernels.why_no_kernels())


def make_model(**changes) -> VanillaTransformerForConditionalGeneration:
    config = VanillaTransformerConfig(
        vocab_size=60, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=96, decoder_ffn_dim=96, dropout=0.0, **changes,
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = VanillaTransformerForConditionalGeneration(config).train()
    fuse_operations(model)
    return model


def sentences() -> tuple[list[np.ndarray], list[np.ndarray]]:
    generator = np.random.default_rng(0)
    return tuple(
        [np.append(generator.integers(5, 60, length), 2) for length in lengths]
        for lengths in (SOURCE_LENGTHS, TARGET_LENGTHS)
    )


def results(model, *parts, autocast: bool = True) -> dict[str, torch.Tensor]:
    """Losses and gradients."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, nll = SmoothedTranslationLoss(model, 0.1)(*parts)
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    # A bias of the keys moves all scores of a query alike: its gradient is zero but for rounding.
    kept = {name: gradient for name, gradient in gradients.items() if not name.endswith("k_proj.bias")}
    return {"loss": loss.detach(), "nll": nll, **kept}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_the_padded_batch(kind):
    model = make_model(**KINDS[kind])
    sources, targets = sentences()
    start = model.config.decoder_start_token_id
    padded = collate(sources, targets, pad_token_id=model.config.pad_token_id, decoder_start_token_id=start)
    exact = results(model, padded, autocast=False)
    of_padded = results(model, padded)
    of_packed = results(model, pack(sources, targets, decoder_start_token_id=start))
    for name, expected in exact.items():
        distances = [(found[name] - expected).norm() / expected.norm() for found in (of_packed, of_padded)]
        assert distances[0] < 1.2 * distances[1] + 1e-3, name


def test_a_batch_in_parts_has_the_sum_of_their_losses():
    model = make_model()
    sources, targets = sentences()
    ids = {
        "pad_token_id": model.config.pad_token_id,
        "decoder_start_token_id": model.config.decoder_start_token_id,
    }
    whole = results(model, collate(sources, targets, **ids), autocast=False)
    parts = [collate(sources[part], targets[part], **ids) for part in (slice(0, 2), slice(2, None))]
    for name, found in results(model, *parts, autocast=False).items():
        torch.testing.assert_close(found, whole[name], rtol=1e-4, atol=1e-5)


def test_sentences_do_not_see_one_another():
    model = make_model()
    sources, targets = sentences()
    start = model.config.decoder_start_token_id
    packed = pack(sources, targets, decoder_start_token_id=start)
    alone = pack(sources[2:3], targets[2:3], decoder_start_token_id=start)
    loss = SmoothedTranslationLoss(model, 0.1)
    names = [name for name in packed if name != "labels"]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        among = loss._hidden_states(**{name: packed[name] for name in names})[0]
        single = loss._hidden_states(**{name: alone[name] for name in names})[0]
    first = sum(len(target) for target in targets[:2])
    torch.testing.assert_close(among[first : first + len(targets[2])], single, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("model_changes", "option_changes", "device"),
    [
        ({}, {"mixed_precision": "no"}, "cpu"),
        ({}, {"mixed_precision": "fp16"}, "cpu"),
        ({}, {}, "cuda"),
        ({}, {"max_length": kernels.LONGEST + 1}, "cpu"),
        ({"attention_dropout": 0.1}, {}, "cpu"),
        ({"d_k": 8}, {}, "cpu"),
    ],
)
def test_what_cannot_be_packed(model_changes, option_changes, device):
    options = {"mixed_precision": "bf16", "max_length": 100}
    assert can_pack(make_model(), SimpleNamespace(**options), torch.device("cpu"))
    options = SimpleNamespace(**options | option_changes)
    assert not can_pack(make_model(**model_changes), options, torch.device(device))


def test_another_attention_is_not_packed():
    model = make_model()
    model.set_attn_implementation("sdpa")
    assert not can_pack(model, SimpleNamespace(mixed_precision="bf16", max_length=100), torch.device("cpu"))


@pytest.mark.parametrize("batching", ["lengths", "random"])
def test_a_run_packs_where_it_can_and_pads_where_it_cannot(make_options, tmp_path, batching, monkeypatch):
    losses = []
    for packs in (True, False):
        folder = tmp_path / str(packs)
        options = make_options(folder, batching=batching, dropout=0.0, max_updates=6, log_every=1, **PACKABLE)
        with monkeypatch.context() as patch:
            if not packs:
                patch.setattr("vanilla_transformer.training.engine.can_pack", lambda *_: False)
            run = make_run(options)
            train_anew(options)
        records = [record for record in records_of(folder) if record["kind"] == "train"]
        fill_rates = {run.fill_rate, *(record["fill_rate"] for record in records)}
        assert run.packs == packs
        # These batches are so small that parts of random ones are single pairs.
        assert fill_rates == {1.0} if packs or batching == "random" else max(fill_rates) < 1.0
        losses.append([record["loss"] for record in records])
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


def test_padding_that_is_not_computed_is_not_counted(make_options, tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("Packed batches have no padding.")

    monkeypatch.setattr(RandomBatches, "parts", refuse)
    options = make_options(tmp_path, batching="random", max_updates=2, **PACKABLE)
    train_anew(options)
    assert {record["fill_rate"] for record in records_of(tmp_path, "train")} == {1.0}
    assert json.loads((tmp_path / "run.json").read_text())["fill_rate"] == 1.0
    assert dry_run(options)["share of tokens that are not padding"] == 1.0


def test_recomputed_layers_give_the_same_run(make_options, tmp_path):
    losses = []
    for recomputes in (False, True):
        folder = tmp_path / str(recomputes)
        values = {"gradient_checkpointing": recomputes, "dropout": 0.1, "max_updates": 4, "log_every": 1}
        train_anew(make_options(folder, **values, **PACKABLE))
        losses.append([record["loss"] for record in records_of(folder) if record["kind"] == "train"])
    assert losses[0] == losses[1]
