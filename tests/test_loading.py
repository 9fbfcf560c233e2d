import ast
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, MarianConfig, MarianMTModel

import vanilla_transformer
from vanilla_transformer import (
    Translator,
    VanillaTransformerConfig,
    VanillaTransformerEncoderModel,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizer,
)
from vanilla_transformer.errors import UserError
from vanilla_transformer.loading import check_tokenizer_fits, check_whole, load_config, load_model, load_tokenizer


SIZES = {
    "vocab_size": 261, "d_model": 16, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
}  # fmt: skip
PACKAGE = Path(vanilla_transformer.__file__).parent


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**SIZES)).save_pretrained(folder)
    VanillaTransformerTokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "model"))


def change(path: Path, **values) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def configured(**values):
    return lambda folder: change(folder / "config.json", **values)


def stored(alter):
    def misfit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        alter(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return misfit


def test_what_fits_is_loaded_as_transformers_loads_it(saved):
    expected = AutoModelForSeq2SeqLM.from_pretrained(saved).state_dict()
    loaded = load_model(saved)
    assert not loaded.training
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())


@pytest.mark.parametrize(
    ("misfit", "words"),
    [
        (configured(encoder_layers=5), r"model\.encoder\.layers\.3\..* and 23 more are missing"),
        (configured(encoder_layers=2), r"model\.encoder\.layers\.2\..* and 11 more are unknown"),
        (configured(encoder_ffn_dim=24), r"model\.encoder\.layers\.0\.fc1\.bias and 8 more are"),
        (configured(encoder_layers=10**9), "tensors for 1,000,000,000 and 2 layers"),
        (configured(tie_word_embeddings=False), r"lm_head\.weight is missing"),
        (stored(lambda tensors: tensors.pop("model.shared.weight")), r"weight and 3 more are missing"),
        (stored(lambda tensors: tensors.update(extra=torch.zeros(1))), "extra is unknown"),
        (
            stored(lambda tensors: tensors.update({"model.shared.weight": torch.zeros(300, 16)})),
            r"model\.shared\.weight is of another shape",
        ),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_named(folder, misfit, words):
    misfit(folder)
    with pytest.raises(UserError, match=f"The weights in {folder} do not fit its config.json .*{words}"):
        load_model(folder)
    with pytest.raises(UserError, match=words):
        Translator.from_pretrained(folder, device="cpu")


def test_an_encoder_is_no_model_for_translation(folder):
    VanillaTransformerEncoderModel(VanillaTransformerConfig(**SIZES)).save_pretrained(folder)
    with pytest.raises(UserError, match=r"model\.decoder.* more are missing"):
        load_model(folder)


def test_models_of_other_classes_may_leave_out_what_they_compute(tmp_path):
    config = MarianConfig(
        **SIZES, pad_token_id=0, eos_token_id=2, decoder_start_token_id=1, forced_eos_token_id=None
    )  # fmt: skip
    MarianMTModel(config).save_pretrained(tmp_path)
    assert isinstance(load_model(tmp_path), MarianMTModel)
    stored(lambda tensors: tensors.update(extra=torch.zeros(1)))(tmp_path)
    assert isinstance(load_model(tmp_path), MarianMTModel)
    change(tmp_path / "config.json", encoder_layers=5)
    with pytest.raises(UserError, match=r"layers\.3\..* are missing"):
        load_model(tmp_path)


def test_a_vocabulary_that_does_not_fit(folder):
    model = load_model(folder)
    larger = VanillaTransformerTokenizer()
    larger.add_tokens(["one more"])
    with pytest.raises(UserError, match="has 262 entries and the model 261"):
        check_tokenizer_fits(model, larger, folder)
    without_end = VanillaTransformerTokenizer(eos_token="a")
    with pytest.raises(UserError, match=r"ends texts with token .*, and the model's eos_token_id is 2"):
        check_tokenizer_fits(model, without_end, folder)
    check_tokenizer_fits(model, load_tokenizer(folder), folder)


def test_an_adapter_is_not_lost_without_a_word(folder):
    check_whole(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="holds an adapter beside the model; merge it"):
        check_whole(folder)


def test_pickles_are_not_read(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"has no weights in safetensors, and pickles .* are not read"):
        load_model(folder)


def test_our_classes_load_a_folder_that_names_code(folder):
    # As `publish` writes it; the files themselves are not there.
    change(
        folder / "config.json",
        auto_map={"AutoConfig": "evil.Config", "AutoModelForSeq2SeqLM": "evil.Model"},
    )
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.VanillaTransformerTokenizer", None]})
    for trust in (False, True):
        assert type(load_config(folder, trust_remote_code=trust)) is VanillaTransformerConfig
        assert type(load_model(folder, trust_remote_code=trust)) is VanillaTransformerForConditionalGeneration
        assert type(load_tokenizer(folder, trust_remote_code=trust)) is VanillaTransformerTokenizer


def test_every_auto_class_is_told_whether_to_run_code():
    calls = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "from_pretrained"
                # Concrete classes, what they inherit, and our translator run no code unless they are told to.
                and path.name != "modeling_vanilla_transformer.py"
                and not ast.unparse(node.func.value).startswith(("VanillaTransformer", "Translator"))
            ):
                calls.append((path.name, {keyword.arg for keyword in node.keywords}))
    assert len(calls) >= 3
    assert not [name for name, keywords in calls if name != "first_run.py" and "trust_remote_code" not in keywords]
