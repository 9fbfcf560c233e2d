import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, MarianConfig, MarianMTModel, pipeline

import vanilla_transformer
from vanilla_transformer import (
    TranslationPipeline,
    Translator,
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizer,
    paper_beam_search,
)
from vanilla_transformer.pipeline_vanilla_transformer import CUSTOM_PIPELINES


TEXTS = ["The house.", "I have lost my key and cannot open the door.", "Yes.", "We are going home."]
SIZES = {
    "vocab_size": 261, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(5)
    model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**SIZES)).eval().double()
    # Weights without training repeat one token; larger ones let sources matter.
    with torch.no_grad():
        for values in model.model.encoder.parameters():
            values.mul_(2.0)
    model.generation_config = GenerationConfig(
        max_length=30, num_beams=2, length_penalty=0.6, early_stopping=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return model


@pytest.fixture(scope="module")
def tokenizer():
    return VanillaTransformerTokenizer()


@pytest.fixture(scope="module")
def translate(model, tokenizer):
    return TranslationPipeline(model=model, tokenizer=tokenizer, device="cpu")


def generated(model, tokenizer, text, **options):
    batch = tokenizer([text], return_tensors="pt")
    length = batch["input_ids"].shape[1] + 50
    ids = model.generate(**batch, **{"max_new_tokens": length, "max_length": None, **options})
    return [{"translation_text": found} for found in tokenizer.batch_decode(ids, skip_special_tokens=True)]


def test_translations_are_those_of_generate(model, tokenizer, translate):
    expected = [generated(model, tokenizer, text) for text in TEXTS]
    assert [translate(text) for text in TEXTS] == expected
    flat = [found[0] for found in expected]
    assert translate(TEXTS) == flat
    assert translate(tuple(TEXTS)) == flat
    assert list(translate(text for text in TEXTS)) == expected
    assert translate([]) == []
    assert len({found["translation_text"] for found in flat}) > 1


def test_batches_do_not_change_translations(translate):
    # The cap is that of the longest source of a batch.
    assert translate(TEXTS, batch_size=3, max_new_tokens=15) == translate(TEXTS, max_new_tokens=15)


def test_the_options_of_generate_reach_it(model, tokenizer, translate):
    several = translate(TEXTS[:2], num_beams=3, num_return_sequences=3, batch_size=2, max_new_tokens=9)
    options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 9}
    assert several == [generated(model, tokenizer, text, **options) for text in TEXTS[:2]]
    greedy = {"length_penalty": None, "early_stopping": None}
    assert translate(TEXTS[0], num_beams=1) == generated(model, tokenizer, TEXTS[0], num_beams=1, **greedy)
    config = GenerationConfig(**{**model.generation_config.to_dict(), "max_length": 7})
    (found,) = translate(TEXTS[0], generation_config=config)
    assert [found] == generated(model, tokenizer, TEXTS[0], max_new_tokens=6)
    always = TranslationPipeline(model=model, tokenizer=tokenizer, device="cpu", max_new_tokens=3)
    assert always(TEXTS[0]) == translate(TEXTS[0], max_new_tokens=3)


def test_the_papers_search_in_the_pipeline(model, tokenizer, translate):
    found = translate(TEXTS, num_beams=3, custom_generate=paper_beam_search, batch_size=4)
    expected = Translator(model, tokenizer, num_beams=3).translate(TEXTS)
    # Where the translator writes one line.
    assert [" ".join(entry["translation_text"].split()) for entry in found] == [" ".join(x.split()) for x in expected]


def test_the_language_of_the_target(model):
    languages = ["de", "fr"]
    tokenizer = VanillaTransformerTokenizer.train_from_iterator(["a"], 263, min_frequency=1, languages=languages)
    translate = TranslationPipeline(model=model, tokenizer=tokenizer, device="cpu")
    for language in ("fr", "de"):
        ids = translate.preprocess("a", **translate._sanitize_parameters(tgt_lang=language)[0])["input_ids"]
        assert ids[0, 0] == tokenizer.language_tags[language]
        assert tokenizer.tgt_lang is None
    tokenizer.tgt_lang = "de"
    assert translate.preprocess("a", tgt_lang="fr")["input_ids"][0, 0] == tokenizer.language_tags["fr"]
    assert translate.preprocess("a")["input_ids"][0, 0] == tokenizer.language_tags["de"]


def test_learned_positions_bound_the_translation(tokenizer):
    config = VanillaTransformerConfig(**SIZES, position_embedding_type="learned", max_position_embeddings=20)
    model = VanillaTransformerForConditionalGeneration(config).eval()
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=2, decoder_start_token_id=1)
    translate = TranslationPipeline(model=model, tokenizer=tokenizer, device="cpu")
    assert len(translate("a" * 19, suppress_tokens=[2])) == 1


def test_other_models_translate_too(tokenizer):
    config = MarianConfig(**SIZES, pad_token_id=0, eos_token_id=2, decoder_start_token_id=1)
    model = MarianMTModel(config).eval()
    translate = TranslationPipeline(model=model, tokenizer=tokenizer, device="cpu")
    assert translate(TEXTS[0]) == generated(model, tokenizer, TEXTS[0])


# A folder with its code, where the package is not installed


SAVE = """
import sys
from vanilla_transformer import (
    VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, VanillaTransformerTokenizer,
)
source, target = sys.argv[1:]
VanillaTransformerConfig.register_for_auto_class()
VanillaTransformerForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")
VanillaTransformerTokenizer.register_for_auto_class("AutoTokenizer")
VanillaTransformerForConditionalGeneration.from_pretrained(source).save_pretrained(target)
VanillaTransformerTokenizer.from_pretrained(source).save_pretrained(target)
"""
TRANSLATE = """
import json, sys
# As if it were not installed.
sys.modules["vanilla_transformer"] = None
from transformers import pipeline
folder, *texts = sys.argv[1:]
translate = pipeline("translation", model=folder, trust_remote_code=True, device="cpu")
found = translate(texts)
modules = {type(part).__module__ for part in (translate, translate.model, translate.tokenizer)}
print(json.dumps([found, sorted(modules)]))
"""


def run(code, *arguments, cwd, **environment):
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def published(tmp_path, model, tokenizer):
    plain, folder = tmp_path / "plain", tmp_path / "published"
    model.save_pretrained(plain)
    tokenizer.save_pretrained(plain)
    run(SAVE, plain, folder, cwd=tmp_path)
    package = Path(vanilla_transformer.__file__).parent
    shutil.copy(package / "pipeline_vanilla_transformer.py", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "custom_pipelines": CUSTOM_PIPELINES}))
    return folder


def test_a_published_folder_translates_where_the_package_is_not_installed(published, tmp_path, translate):
    out = run(TRANSLATE, published, *TEXTS, cwd=tmp_path, HF_MODULES_CACHE=str(tmp_path / "modules"))
    found, modules = json.loads(out.splitlines()[-1])
    assert found == translate(TEXTS)
    assert len(modules) == 3
    assert all(name.startswith("transformers_modules.") for name in modules)


def test_the_configuration_keeps_its_pipelines(published):
    config = VanillaTransformerConfig.from_pretrained(published)
    assert config.custom_pipelines == CUSTOM_PIPELINES
    assert json.loads(json.dumps(config.to_dict()))["custom_pipelines"] == CUSTOM_PIPELINES


def test_the_code_of_a_folder_runs_only_where_it_is_trusted(published):
    with pytest.raises(ValueError, match="trust_remote_code"):
        pipeline("translation", model=str(published), device="cpu")
