import json
import shutil
from dataclasses import replace

import pytest
import torch
from runs import D_MODEL, make_run, records_of, train_anew, weights_of
from safetensors.torch import load_file, save_file

from vanilla_transformer.errors import UserError
from vanilla_transformer.training.preparation.vocabulary_and_ids import prepare


ARCHITECTURE = (
    "tokenizer", "d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads",
    "encoder_ffn_dim", "decoder_ffn_dim", "dropout",
)  # fmt: skip


@pytest.fixture(scope="session")
def parent(make_options, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parent")
    train_anew(make_options(folder, max_updates=3, valid_files=()))
    return folder


@pytest.fixture
def child_options(make_options, parent):
    def make(output_dir, **values):
        plain = dict.fromkeys(ARCHITECTURE)
        return make_options(output_dir, **{**plain, "init_from": str(parent), **values})

    return make


def test_a_run_starts_from_the_weights_the_architecture_and_the_vocabulary_of_a_model(child_options, parent, tmp_path):
    run = make_run(child_options(tmp_path))
    expected = load_file(parent / "model.safetensors")
    assert all(torch.equal(run.model.state_dict()[name], tensor) for name, tensor in expected.items())
    assert (run.model.config.d_model, run.model.config.dropout) == (D_MODEL, 0.2)
    assert run.data.tokenizer.get_vocab() == make_run(child_options(tmp_path / "b")).data.tokenizer.get_vocab()
    assert len(run.data.tokenizer) == run.model.config.vocab_size
    assert not run.optimizer.state and run.update == 0
    # What is not architecture may be chosen anew.
    other = make_run(child_options(tmp_path / "c", dropout=0.4, d_model=D_MODEL))
    assert other.model.config.dropout == 0.4
    assert {module.p for module in other.model.modules() if isinstance(module, torch.nn.Dropout)} <= {0.4, 0.0}


def test_a_run_that_started_from_a_model_is_resumed_without_it(child_options, parent, tmp_path):
    options = child_options(tmp_path / "whole", max_updates=4, valid_files=())
    train_anew(options)
    moved = tmp_path / "moved"
    shutil.copytree(parent, moved)
    options = child_options(tmp_path / "cut", max_updates=2, valid_files=(), init_from=str(moved))
    train_anew(options)
    shutil.rmtree(moved)
    train_anew(replace(options, max_updates=4, resume=True))
    assert weights_of(tmp_path / "cut") != weights_of(parent)
    assert records_of(tmp_path / "cut")[-1] == records_of(tmp_path / "whole")[-1]
    newest = [tmp_path / name / "checkpoints" / "update-00000004" / "model.safetensors" for name in ("cut", "whole")]
    assert newest[0].read_bytes() == newest[1].read_bytes()


def test_contradictions_are_listed(child_options, parent, material, tmp_path):
    with pytest.raises(UserError, match=r"d_model \(16 there, 32 in .*\), norm_position \('post' there"):
        prepare(child_options(tmp_path, d_model=32, norm_position="pre"), tmp_path)
    with pytest.raises(UserError, match=r"differ in .*encoder_layers \(2 there, 4 in the options\)"):
        prepare(child_options(tmp_path, preset="tiny"), tmp_path)
    with pytest.raises(UserError, match=r"the vocabulary differ in vocab_size \(261 there, 300 in the vocabulary\)"):
        prepare(child_options(tmp_path, tokenizer=material / "merges"), tmp_path)
    with pytest.raises(UserError, match="neither a folder nor a model on the Hub"):
        prepare(child_options(tmp_path, init_from="no/such-model"), tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty, which holds no config\.json"):
        prepare(child_options(tmp_path, init_from=str(tmp_path / "empty")), tmp_path)


def test_models_that_cannot_be_used_are_refused(child_options, parent, tmp_path):
    damaged, partial, foreign = (tmp_path / name for name in ("damaged", "partial", "foreign"))
    for folder in (damaged, partial, foreign):
        folder.mkdir()
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(parent / name, folder)
    (damaged / "model.safetensors").write_bytes(b"\0" * 100)
    tensors = load_file(parent / "model.safetensors")
    left_out = {name: tensor for name, tensor in tensors.items() if "decoder.layers.1" not in name}
    save_file(left_out, partial / "model.safetensors", metadata={"format": "pt"})
    (foreign / "config.json").write_text(json.dumps({"model_type": "marian"}))
    with pytest.raises(UserError, match=r"The model in .*damaged cannot be loaded"):
        make_run(child_options(tmp_path / "a", init_from=str(damaged)))
    with pytest.raises(UserError, match=rf" and {len(tensors) - len(left_out) - 1} more are missing"):
        make_run(child_options(tmp_path / "b", init_from=str(partial)))
    with pytest.raises(UserError, match=r", a model of type marian; it must be a vanilla_transformer"):
        make_run(child_options(tmp_path / "c", init_from=str(foreign)))
