import subprocess
import sys

import pytest
import torch
from initial_values import assert_freshly_initialised
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import PAD, SOURCES, TARGETS, assert_same_numbers, batch_of, build
from transformers import AutoModel, AutoModelForSeq2SeqLM

from vanilla_transformer import VanillaTransformerForConditionalGeneration, VanillaTransformerModel


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
        assert_same_numbers(logits, model.eval()(**batch).logits)


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
