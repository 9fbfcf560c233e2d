import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizer,
)
from vanilla_transformer.errors import UserError
from vanilla_transformer.training.records.averaging import average_checkpoints


def save_model(folder: Path, seed: int, **options) -> Path:
    torch.manual_seed(seed)
    config = VanillaTransformerConfig(
        **{
            "vocab_size": 261,
            "d_model": 8,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 12,
            "decoder_ffn_dim": 12,
        }
        | options
    )
    VanillaTransformerForConditionalGeneration(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved_models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    checkpoints = [save_model(folder / str(seed), seed) for seed in range(5)]
    for checkpoint in checkpoints:
        VanillaTransformerTokenizer().save_pretrained(checkpoint)
    return checkpoints


@pytest.fixture
def checkpoints(saved_models, tmp_path):
    return [Path(shutil.copytree(path, tmp_path / f"checkpoint-{path.name}")) for path in saved_models]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(bits(one[name]) == bits(other[name]) for name in one)


@pytest.mark.parametrize("number", [2, 3, 5])
def test_every_weight_is_the_mean_rounded_once(checkpoints, tmp_path, number):
    average_checkpoints(checkpoints[:number], tmp_path / "mean")
    mean, parts = weights(tmp_path / "mean"), [weights(path) for path in checkpoints[:number]]
    assert mean.keys() == parts[0].keys()
    for name, tensor in mean.items():
        expected = np.mean([part[name].numpy().astype(np.float64) for part in parts], axis=0).astype(np.float32)
        assert np.array_equal(tensor.numpy(), expected), name
    assert not same_bits(mean, parts[0])


def test_the_mean_loads_as_a_model_whose_ties_are_whole(checkpoints, tmp_path):
    average_checkpoints(checkpoints, tmp_path / "mean")
    assert "lm_head.weight" not in weights(tmp_path / "mean")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "mean")
    assert isinstance(model, VanillaTransformerForConditionalGeneration)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    for name, tensor in weights(tmp_path / "mean").items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "mean")) == 261


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_mean_of_one_checkpoint_is_that_checkpoint(checkpoints, tmp_path, dtype):
    tensors = {name: tensor.to(dtype) for name, tensor in weights(checkpoints[0]).items()}
    # Negative zeros and subnormal numbers are easily lost in sums.
    first = next(iter(tensors.values())).view(-1)
    first[0], first[1] = -0.0, torch.finfo(dtype).smallest_normal / 2
    save_file(tensors, checkpoints[0] / "model.safetensors", metadata={"format": "pt"})
    average_checkpoints(checkpoints[:1], tmp_path / "mean")
    assert same_bits(weights(tmp_path / "mean"), tensors)


def test_equal_checkpoints_are_their_own_mean(checkpoints, tmp_path):
    average_checkpoints([checkpoints[0]] * 4, tmp_path / "mean")
    assert same_bits(weights(tmp_path / "mean"), weights(checkpoints[0]))


def test_low_precision_is_kept_and_summed_in_high_precision(checkpoints, tmp_path):
    for checkpoint in checkpoints:
        tensors = {name: tensor.to(torch.bfloat16) for name, tensor in weights(checkpoint).items()}
        save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    average_checkpoints(checkpoints, tmp_path / "mean")
    parts = [weights(checkpoint) for checkpoint in checkpoints]
    for name, tensor in weights(tmp_path / "mean").items():
        assert tensor.dtype == torch.bfloat16
        expected = torch.stack([part[name].double() for part in parts]).mean(dim=0).to(torch.bfloat16)
        assert torch.equal(tensor, expected), name


def test_the_order_of_the_checkpoints_does_not_matter(checkpoints, tmp_path):
    average_checkpoints(checkpoints, tmp_path / "forwards")
    average_checkpoints(checkpoints[::-1], tmp_path / "backwards")
    assert same_bits(weights(tmp_path / "forwards"), weights(tmp_path / "backwards"))


def test_the_newest_checkpoints_files_accompany_the_mean(checkpoints, tmp_path):
    for number, checkpoint in enumerate(checkpoints):
        content = json.loads((checkpoint / "generation_config.json").read_text())
        (checkpoint / "generation_config.json").write_text(json.dumps(content | {"max_length": 100 + number}))
        (checkpoint / "optimizer.safetensors").write_bytes(b"large")
    average_checkpoints(checkpoints[:3], tmp_path / "mean")
    names = {path.name for path in (tmp_path / "mean").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert json.loads((tmp_path / "mean" / "generation_config.json").read_text())["max_length"] == 102


def test_an_older_mean_is_replaced(checkpoints, tmp_path):
    average_checkpoints(checkpoints[:2], tmp_path / "mean")
    average_checkpoints(checkpoints[2:4], tmp_path / "mean")
    average_checkpoints(checkpoints[2:4], tmp_path / "fresh")
    assert same_bits(weights(tmp_path / "mean"), weights(tmp_path / "fresh"))


# What cannot be averaged


def test_no_checkpoint_has_no_mean(tmp_path):
    with pytest.raises(UserError, match="No checkpoint was given to average; name at least one model folder"):
        average_checkpoints([], tmp_path / "mean")


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"encoder_ffn_dim": 16}, r"model.encoder.layers.0.fc1.bias is \(16,\) and \(12,\)"),
        ({"decoder_layers": 2}, r"model.decoder.layers.1.* is \(.*\) and absent"),
        ({"tie_word_embeddings": False}, r"lm_head.weight is \(261, 8\) and absent"),
        ({"encoder_layers": 0}, r"is absent and \("),
    ],
)
def test_another_architecture_is_refused_by_its_first_difference(checkpoints, tmp_path, options, difference):
    other = save_model(tmp_path / "other", 9, **options)
    with pytest.raises(UserError, match=rf"other and .*checkpoint-0 are of different architectures \(.*{difference}"):
        average_checkpoints([*checkpoints, other], tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def test_models_of_like_shapes_and_other_meanings_are_refused(checkpoints, tmp_path):
    other = save_model(tmp_path / "other", 9, encoder_attention_heads=4)
    assert weights(other).keys() == weights(checkpoints[0]).keys()
    with pytest.raises(UserError, match=r"different architectures \(encoder_attention_heads is 4 and 2\)"):
        average_checkpoints([*checkpoints, other], tmp_path / "mean")


def test_a_moving_average_beside_weights_alone_is_refused(checkpoints, tmp_path):
    shutil.copy(checkpoints[1] / "model.safetensors", checkpoints[1] / "ema.safetensors")
    with pytest.raises(UserError, match=r"checkpoint-1 holds a moving average of its weights .*checkpoint-0 none"):
        average_checkpoints(checkpoints, tmp_path / "mean")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_folder_without_a_model_is_refused(checkpoints, tmp_path, name):
    (checkpoints[1] / name).unlink()
    with pytest.raises(
        UserError, match=r"checkpoint-1 is not a checkpoint: it lacks model.safetensors or config.json"
    ):
        average_checkpoints(checkpoints, tmp_path / "mean")
    with pytest.raises(UserError, match="absent is not a checkpoint"):
        average_checkpoints([tmp_path / "absent"], tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


@pytest.mark.parametrize("damage", [lambda c: c[: len(c) // 2], lambda c: b"", lambda c: b"{" * 100, lambda c: c[8:]])
def test_damaged_weights_are_refused_by_name(checkpoints, tmp_path, damage):
    path = checkpoints[2] / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=r"checkpoint-2/model.safetensors is damaged .*use another checkpoint"):
        average_checkpoints(checkpoints, tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def test_a_checkpoint_is_not_overwritten_by_the_mean(checkpoints, tmp_path):
    before = {path.name: path.read_bytes() for path in checkpoints[1].iterdir()}
    alias = tmp_path / "nowhere" / ".." / checkpoints[1].name
    (tmp_path / "nowhere").mkdir()
    for output_dir in (checkpoints[1], alias):
        with pytest.raises(UserError, match="is one of the checkpoints to average; give another folder"):
            average_checkpoints(checkpoints, output_dir)
    assert {path.name: path.read_bytes() for path in checkpoints[1].iterdir()} == before
