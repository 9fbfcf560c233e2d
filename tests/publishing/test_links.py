"""What is published lies in the model's folder, whatever links and indices say."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download
from safetensors.torch import load_file

from vanilla_transformer.publishing.background import BackgroundPush
from vanilla_transformer.publishing.bundle import told_facts
from vanilla_transformer.publishing.upload import Destination, Hub


KEY = "-----BEGIN OPENSSH PRIVATE KEY-----"
# With what it would be published as.
READ = (
    "generation_config.json", "vocab.json", "merges.txt", "notes.model", "chat_template.jinja", "tokenizer.json",
    "tokenizer_config.json", "config.json", "model.safetensors", "facts.json", "evaluation.json", "run.json",
    "options.yaml", "metrics.jsonl",
)  # fmt: skip


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "home" / "id_rsa"
    path.parent.mkdir()
    path.write_text(json.dumps({"summary": KEY}))
    return path


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("how", ["absolute", "relative", "chain"])
def test_a_link_out_of_the_folder_is_refused_by_name(online, server, refused, model, key, name, how):
    (model / name).unlink(missing_ok=True)
    target = {"absolute": key, "relative": Path("..") / "home" / "id_rsa", "chain": Path("inside")}[how]
    (model / "inside").symlink_to(key)
    (model / name).symlink_to(target)
    line = refused("publish", model, "--repo", "user/en-de")
    assert f"{model / name} is a link to a file outside of the folder ({key})" in line
    assert "put a copy in its place" in line
    assert server.requests == []
    assert name in refused("publish", model, "--repo", "user/en-de", "--dry_run")


def test_a_link_to_a_device_and_one_to_nothing(online, server, refused, model):
    (model / "vocab.json").symlink_to("/dev/zero")
    assert "vocab.json is a link" in refused("publish", model, "--repo", "user/en-de")
    (model / "vocab.json").unlink()
    (model / "merges.txt").symlink_to("/nowhere/at/all")
    assert "merges.txt is a link" in refused("publish", model, "--repo", "user/en-de")
    assert server.requests == []


def test_links_within_the_folder_are_followed(online, server, call, model):
    (model / "files").mkdir()
    (model / "tokenizer.json").rename(model / "files" / "tokens")
    (model / "tokenizer.json").symlink_to(Path("files") / "tokens")
    latest = model.parent / "latest"
    latest.symlink_to(model)
    # What nobody reads may lie anywhere.
    (model / "optimizer.safetensors").symlink_to("/etc/passwd")
    (model / "cache").symlink_to(model.parent)
    assert call("publish", latest, "--repo", "user/en-de")[0] == 0
    files = server.files("user/en-de")
    assert files["tokenizer.json"] == (model / "files" / "tokens").read_bytes()
    assert "optimizer.safetensors" not in files


def test_a_checkpoint_may_link_into_its_run(online, server, call, refused, run_folder, tmp_path, key):
    run = Path(shutil.copytree(run_folder, tmp_path / "run"))
    checkpoint = sorted((run / "checkpoints").iterdir())[-1]
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "tokenizer.json").symlink_to(run / "tokenizer.json")
    assert call("publish", checkpoint, "--repo", "user/en-de")[0] == 0
    assert server.files("user/en-de")["tokenizer.json"] == (run / "tokenizer.json").read_bytes()
    # Of the run's own files, too, none is read elsewhere.
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to(key)
    assert "metrics.jsonl is a link" in refused("publish", checkpoint, "--repo", "user/en-de", "--message", "Again")


def test_a_download_of_the_hub_is_published_again(online, server, call, model, tmp_path):
    assert call("publish", model, "--repo", "user/en-de")[0] == 0
    folder = Path(snapshot_download("user/en-de", cache_dir=tmp_path / "cache", endpoint=server.url))
    assert (folder / "config.json").is_symlink()
    assert call("publish", folder, "--repo", "team/copy")[0] == 0
    assert server.files("team/copy")["model.safetensors"] == (model / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "place", ["../home/secret.safetensors", "/etc/passwd", "files/model-00001-of-00001.safetensors", "id_rsa"]
)
def test_an_index_names_files_of_weights_in_the_folder(online, server, refused, model, tmp_path, place):
    (tmp_path / "home").mkdir()
    (model / "files").mkdir()
    for target in (tmp_path / "home" / "secret.safetensors", model / "files" / "model-00001-of-00001.safetensors"):
        shutil.copy(model / "model.safetensors", target)
    names = load_file(model / "model.safetensors")
    (model / "model.safetensors").rename(model / "id_rsa")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, place)}))
    line = refused("publish", model, "--repo", "user/en-de")
    assert f"names {place}, which is no file of weights in the folder" in line
    assert server.requests == []


def test_pushes_of_a_run_follow_no_links(online, server, run_folder, tmp_path, key):
    run = Path(shutil.copytree(run_folder, tmp_path / "run"))
    push = BackgroundPush(Hub(), Destination(repo="user/en-de"), run)
    push.prepare()
    checkpoint = sorted((run / "checkpoints").iterdir())[-1]
    (checkpoint / "vocab.json").symlink_to(key)
    push.offer(checkpoint)
    with push._changed:
        assert push._changed.wait_for(lambda: push._waiting is None and not push._is_busy, 60)
    assert "vocab.json is a link" in push.failure
    assert server.files("user/en-de").keys() == {".gitattributes"}
    (checkpoint / "vocab.json").unlink()
    (run / "facts.json").symlink_to(key)
    with pytest.raises(ValueError, match=r"facts\.json is a link"):
        told_facts(run)
