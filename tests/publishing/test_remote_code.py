import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from publishing_material import TOKEN
from transformers import AutoModelForSeq2SeqLM

import vanilla_transformer
from vanilla_transformer import (
    TranslationPipeline,
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizer,
)
from vanilla_transformer.publishing.remote_code import published_config, published_tokenizer_config, source_files


SCRIPT = Path(sysconfig.get_path("scripts")) / "vanilla-transformer"
TEXTS = ["The house.", "We are going home."]
LOAD = """
import importlib.util, json, sys
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline
assert importlib.util.find_spec("vanilla_transformer") is None
name, *texts = sys.argv[1:]
model, report = AutoModelForSeq2SeqLM.from_pretrained(name, trust_remote_code=True, output_loading_info=True)
assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
batch = tokenizer(texts, return_tensors="pt", padding=True)
ids = model.generate(**batch, max_new_tokens=12)
translate = pipeline("translation", model=name, trust_remote_code=True, device="cpu")
kinds = [type(part).__module__ for part in (model, tokenizer, translate, translate.model)]
found = translate(texts, max_new_tokens=12)
print(json.dumps({"ids": ids.tolist(), "source": batch["input_ids"].tolist(), "found": found, "kinds": kinds}))
"""


SAVE_AND_PUSH = """
import importlib.util, json, sys
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline
assert importlib.util.find_spec("vanilla_transformer") is None
name, folder, repository, *texts = sys.argv[1:]
model = AutoModelForSeq2SeqLM.from_pretrained(name, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
for part in (model, tokenizer):
    part.save_pretrained(folder)
    part.push_to_hub(repository)
found = []
for place in (folder, repository):
    translate = pipeline("translation", model=place, trust_remote_code=True, device="cpu")
    assert all(type(part).__module__.startswith("transformers_modules.") for part in (translate, translate.model))
    found.append(translate(texts, max_new_tokens=12))
print(json.dumps(found))
"""


def run(command, **environment):
    environment = {name: value for name, value in {**os.environ, **environment}.items() if value is not None}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout, result.stderr


def isolated(tmp_path) -> str:
    """A folder with all that is installed but this package: an editable installation puts it on the path."""
    packages = tmp_path / "packages"
    packages.mkdir()
    ours = ("vanilla_transformer", "vanilla-transformer", "_vanilla_transformer", "__editable__")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(ours) and path.suffix != ".pth":
            (packages / path.name).symlink_to(path)
    return str(packages)


def test_a_published_model_runs_where_the_package_is_not_installed(server, model, tmp_path):
    hub = {
        "HF_ENDPOINT": server.url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "hf"),
    }
    # In parts, as the Hub takes files of gigabytes.
    server.part_size = 3072
    out, err = run(
        [sys.executable, SCRIPT, "publish", model, "--repo", "team/en-de", "--private"], **hub, HF_TOKEN=TOKEN
    )
    assert out.startswith(f"{server.url}/team/en-de/commit/")
    assert TOKEN not in out + err
    size = (model / "model.safetensors").stat().st_size
    assert server.count("PUT", "^/storage/[0-9a-f]+/[0-9]+$") == -(-size // 3072) > 10
    assert server.count("PUT", "^/storage/[0-9a-f]+$") == 0
    # -I leaves out the working directory and PYTHONPATH, -S what is installed.
    code = f"import sys; sys.path.insert(0, {isolated(tmp_path)!r})\n{LOAD}"
    out, _ = run([sys.executable, "-I", "-S", "-c", code, "team/en-de", *TEXTS], **hub, HF_TOKEN=TOKEN)
    result = json.loads(out.splitlines()[-1])
    assert len(result["kinds"]) == 4
    assert all(kind.startswith("transformers_modules.") for kind in result["kinds"])
    ours = VanillaTransformerForConditionalGeneration.from_pretrained(model)
    tokenizer = VanillaTransformerTokenizer.from_pretrained(model)
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    assert result["source"] == batch["input_ids"].tolist()
    assert result["ids"] == ours.generate(**batch, max_new_tokens=12).tolist()
    translate = TranslationPipeline(model=ours, tokenizer=tokenizer, device="cpu")
    assert result["found"] == translate(TEXTS, max_new_tokens=12)


def test_a_published_model_can_be_saved_and_pushed_again_without_the_package(server, model, tmp_path):
    hub = {
        "HF_ENDPOINT": server.url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "hf"),
        "HF_TOKEN": TOKEN,
    }
    run([sys.executable, SCRIPT, "publish", model, "--repo", "team/en-de"], **hub)
    code = f"import sys; sys.path.insert(0, {isolated(tmp_path)!r})\n{SAVE_AND_PUSH}"
    again = tmp_path / "again"
    out, _ = run([sys.executable, "-I", "-S", "-c", code, "team/en-de", again, "user/again", *TEXTS], **hub)
    assert {path.name for path in again.glob("*.py")} == {path.name for path in source_files()}
    assert "team/en-de" not in (again / "config.json").read_text()
    ours = VanillaTransformerForConditionalGeneration.from_pretrained(model)
    tokenizer = VanillaTransformerTokenizer.from_pretrained(model)
    translate = TranslationPipeline(model=ours, tokenizer=tokenizer, device="cpu")
    assert json.loads(out.splitlines()[-1]) == [translate(TEXTS, max_new_tokens=12)] * 2


def test_what_is_named_is_what_the_library_would_name(model, tmp_path, monkeypatch):
    folder = tmp_path / "registered"
    # As `register_for_auto_class` does for the rest of a process.
    monkeypatch.setattr(VanillaTransformerConfig, "_auto_class", "AutoConfig")
    monkeypatch.setattr(VanillaTransformerForConditionalGeneration, "_auto_class", "AutoModelForSeq2SeqLM")
    monkeypatch.setattr(VanillaTransformerTokenizer, "_auto_class", "AutoTokenizer")
    VanillaTransformerForConditionalGeneration.from_pretrained(model).save_pretrained(folder)
    VanillaTransformerTokenizer.from_pretrained(model).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    ours = published_config(json.loads((model / "config.json").read_text()))
    assert config["auto_map"].items() <= ours["auto_map"].items()
    theirs = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer = published_tokenizer_config(json.loads((model / "tokenizer_config.json").read_text()))
    assert tokenizer["auto_map"] == theirs["auto_map"]
    copied = {path.name for path in folder.glob("*.py")}
    assert copied == {path.name for path in source_files()}


def test_every_class_that_is_named_exists(model):
    config = published_config(json.loads((model / "config.json").read_text()))
    folder = Path(vanilla_transformer.__file__).parent
    for name in config["auto_map"].values():
        module, kind = name.split(".")
        assert f"\nclass {kind}(" in (folder / f"{module}.py").read_text(), name
    assert not VanillaTransformerForConditionalGeneration.is_remote_code()


def test_only_models_for_translation_name_the_pipeline():
    assert "custom_pipelines" in published_config({"architectures": ["VanillaTransformerForConditionalGeneration"]})
    stale = {"architectures": ["VanillaTransformerModel"], "custom_pipelines": {}, "_name_or_path": "/home/me/run"}
    assert published_config(stale).keys() == {"architectures", "auto_map"}


def test_configurations_tell_no_place_of_this_machine():
    place = {"source_vocabulary": "/data/corpora/en.txt", "d_model": 16}
    assert published_config(place).keys() == {"d_model", "auto_map"}
    config = {"tokenizer_class": "MarianTokenizer", "vocab_file": "/data/vocab.json", "unk_token": "/unk", "x": "/"}
    assert published_tokenizer_config(config).keys() == {"tokenizer_class", "unk_token", "x"}


def test_another_tokenizer_keeps_its_class():
    config = {"tokenizer_class": "MarianTokenizer", "name_or_path": "/home/me/marian", "is_local": True}
    assert published_tokenizer_config(config) == {"tokenizer_class": "MarianTokenizer"}


def test_publishing_changes_nothing_for_this_process(online, call, model):
    assert call("publish", model, "--repo", "user/en-de")[0] == 0
    again = VanillaTransformerForConditionalGeneration.from_pretrained(model)
    again.save_pretrained(model.parent / "again")
    assert "auto_map" not in json.loads((model.parent / "again" / "config.json").read_text())
    assert not list((model.parent / "again").glob("*.py"))
    assert AutoModelForSeq2SeqLM.from_pretrained(model).__class__ is VanillaTransformerForConditionalGeneration
