import json
import re
import shutil
import tempfile
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, hf_hub_download, snapshot_download
from publishing_material import TOKEN

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.publishing import upload
from vanilla_transformer.publishing.upload import Hub
from vanilla_transformer.training.records.checkpoints import rotate


PATIENCE = upload.ATTEMPTS


def test_a_run_becomes_one_commit(online, server, call, run_folder):
    status, out, err = call("publish", run_folder, "--repo", "user/en-de", "--license", "apache-2.0")
    assert status == 0, err
    repository = server.repositories["user/en-de"]
    assert not repository.private
    assert repository.messages == ["initial commit", "Publish the model"]
    assert out.strip() == f"{server.url}/user/en-de/commit/{repository.branches['main']}"
    files = server.files("user/en-de")
    assert files.keys() == {
        ".gitattributes", "README.md", "config.json", "configuration_vanilla_transformer.py", "facts.json",
        "generation_config.json", "learning_curve.svg", "metrics.jsonl", "model.safetensors",
        "modeling_vanilla_transformer.py", "pipeline_vanilla_transformer.py", "tokenization_vanilla_transformer.py",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    for name in ("model.safetensors", "tokenizer.json", "metrics.jsonl", "generation_config.json"):
        assert files[name] == (run_folder / name).read_bytes(), name
    # The large file went where large files go, and nobody there saw the token.
    assert server.count("PUT", "^/storage/") == 1
    assert all(request.token is None for request in server.requests if request.path.startswith("/storage/"))
    assert json.loads(files["facts.json"])["license"] == "apache-2.0"
    assert ModelCard(files["README.md"].decode()).data.license == "apache-2.0"


def test_nothing_published_or_printed_holds_the_token_or_a_path(online, server, call, run_folder, tmp_path):
    status, out, err = call("publish", run_folder, "--repo", "user/en-de")
    assert status == 0
    for name, content in {**server.files("user/en-de"), "out": out.encode(), "err": err.encode()}.items():
        assert TOKEN.encode() not in content, name
        for place in (run_folder, run_folder.parent.parent, tmp_path.parent):
            assert str(place).encode() not in content, (name, place)


@pytest.mark.parametrize("what", ["token", "path"])
def test_facts_with_the_token_or_a_path_are_refused(online, server, refused, model, monkeypatch, what):
    monkeypatch.chdir(model.parent)
    words = {"token": f"made with {TOKEN}", "path": f"made in {model}"}
    (model / "facts.json").write_text(json.dumps({"summary": words[what]}))
    line = refused("publish", model, "--repo", "user/en-de")
    assert {"token": "the token of the Hub", "path": "a path of this machine"}[what] in line
    assert TOKEN not in line
    assert [*server.repositories.get("user/en-de").messages] == ["initial commit"]
    if what == "path":
        assert "a path of this machine" in refused("publish", model, "--repo", "user/en-de", "--dry_run")


@pytest.mark.parametrize("place", ["model", "temporary"])
def test_paths_outside_of_home_are_refused_too(online, refused, model, monkeypatch, tmp_path, place):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    # The model's folder lies in neither of these.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    text = {"model": f"from {model}/raw", "temporary": f"from {tmp_path}/temporary/x"}[place]
    (model / "facts.json").write_text(json.dumps({"summary": text}))
    assert "a path of this machine" in refused("publish", model, "--repo", "user/en-de")


def test_publishing_again_sends_only_what_changed(online, server, call, model):
    assert call("publish", model, "--repo", "team/en-de")[0] == 0
    first = server.repositories["team/en-de"].branches["main"]
    status, out, _ = call("publish", model, "--repo", "team/en-de")
    assert status == 0
    # Nothing changed: the address is that of the commit which is there.
    assert server.repositories["team/en-de"].branches["main"] == first
    assert out.strip().endswith(first)
    assert call("publish", model, "--repo", "team/en-de", "--license", "mit")[0] == 0
    assert server.count("PUT", "^/storage/") == 1
    assert len(server.repositories["team/en-de"].commits) == 3


def test_of_an_earlier_model_nothing_stays(online, server, call, model, run_folder, tmp_path):
    assert call("publish", run_folder, "--repo", "user/en-de")[0] == 0
    server.repositories["user/en-de"].commit("main", {"spm.model": b"old", "notes.txt": b"mine"}, "More")
    sharded = VanillaTransformerForConditionalGeneration.from_pretrained(model)
    for path in (model / "model.safetensors", model / "generation_config.json"):
        path.unlink()
    sharded.save_pretrained(model, max_shard_size="8KB")
    (model / "generation_config.json").unlink()
    assert call("publish", model, "--repo", "user/en-de")[0] == 0
    repository = server.repositories["user/en-de"]
    assert repository.messages[-2:] == ["More", "Publish the model"]
    files = server.files("user/en-de")
    gone = {"model.safetensors", "generation_config.json", "metrics.jsonl", "learning_curve.svg", "spm.model"}
    assert not gone & files.keys()
    assert {"model.safetensors.index.json", "notes.txt", ".gitattributes"} <= files.keys()
    folder = snapshot_download("user/en-de", cache_dir=tmp_path / "cache", endpoint=server.url)
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(folder)
    assert loaded.state_dict().keys() == sharded.state_dict().keys()
    assert all(value.equal(sharded.state_dict()[name]) for name, value in loaded.state_dict().items())
    # And back: one file instead of many.
    assert call("publish", run_folder, "--repo", "user/en-de")[0] == 0
    names = server.files("user/en-de").keys()
    assert [name for name in names if name.startswith(("model.", "model-"))] == ["model.safetensors"]


def test_private_repositories(online, server, call, refused, model):
    assert call("publish", model, "--repo", "user/secret", "--private")[0] == 0
    assert server.repositories["user/secret"].private
    assert (
        call("publish", model, "--repo", "user/secret", "--private", "--message", "Again", "--license", "mit")[0] == 0
    )
    assert server.repositories["user/secret"].messages[-1] == "Again"
    assert call("publish", model, "--repo", "user/open")[0] == 0
    before = len(server.requests)
    assert "exists and is public" in refused("publish", model, "--repo", "user/open", "--private", "--license", "mit")
    assert not any("commit" in request.path for request in server.requests[before:])


def test_branches_and_tags(online, server, call, refused, model, tmp_path):
    arguments = ["publish", model, "--repo", "user/en-de", "--revision", "trial", "--tag", "v1"]
    assert call(*arguments)[0] == 0
    repository = server.repositories["user/en-de"]
    assert repository.tags["v1"] == repository.branches["trial"] != repository.branches["main"]
    assert server.files("user/en-de").keys() == {".gitattributes"}
    card = server.files("user/en-de", "v1")["README.md"].decode()
    assert 'from_pretrained("user/en-de", revision="v1", trust_remote_code=True)' in card
    assert "has a tag v1 already" in refused(*arguments, "--license", "mit")
    # What is downloaded by tag is what was uploaded.
    folder = snapshot_download("user/en-de", revision="v1", cache_dir=tmp_path / "cache", endpoint=server.url)
    path = hf_hub_download("user/en-de", "model.safetensors", revision="v1", cache_dir=tmp_path, endpoint=server.url)
    with open(path, "rb") as file, open(f"{folder}/model.safetensors", "rb") as other:
        assert file.read() == other.read() == (model / "model.safetensors").read_bytes()


@pytest.mark.parametrize("status", [403, 503])
def test_a_tag_that_fails_is_not_taken_for_the_commit(online, server, call, refused, model, status):
    server.fail("POST", "/tag/", status, times=PATIENCE)
    line = refused("publish", model, "--repo", "user/en-de", "--tag", "v1")
    repository = server.repositories["user/en-de"]
    head = repository.branches["main"]
    assert f"published as {server.url}/user/en-de/commit/{head}, but without the tag v1" in line
    server.accidents.clear()
    assert call("publish", model, "--repo", "user/en-de", "--tag", "v1")[0] == 0
    assert repository.tags == {"v1": head} and repository.branches["main"] == head


def test_a_dry_run_prints_files_and_card_and_asks_nobody(online, server, call, run_folder, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    status, out, _ = call("publish", run_folder, "--repo", "user/en-de", "--dry_run")
    assert status == 0
    assert server.requests == []
    listed = dict(reversed(line.split()) for line in out[: out.index("\n\n")].splitlines())
    assert int(listed["model.safetensors"].replace(",", "")) == (run_folder / "model.safetensors").stat().st_size
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert call("publish", run_folder, "--repo", "user/en-de")[0] == 0
    files = server.files("user/en-de")
    assert {name: int(size.replace(",", "")) for name, size in listed.items()} == {
        name: len(content) for name, content in files.items() if name != ".gitattributes"
    }
    assert out.endswith("\n\n" + files["README.md"].decode())


def test_a_checkpoint_is_published_without_its_optimiser(online, server, call, run_folder):
    folder = run_folder / "checkpoints" / "update-00000004"
    assert call("publish", folder, "--repo", "user/en-de")[0] == 0
    files = server.files("user/en-de")
    assert not {"optimizer.safetensors", "training_state.json", "manifest.json"} & files.keys()
    records = [json.loads(line) for line in files["metrics.jsonl"].splitlines()]
    assert records and max(record["update"] for record in records) == 4
    training = json.loads(files["facts.json"])["training"]
    assert (training["updates"], training["averaged"]) == (4, 1)


def test_rotation_leaves_a_checkpoint_that_is_being_published(online, server, call, run_folder, tmp_path, monkeypatch):
    checkpoints = Path(shutil.copytree(run_folder, tmp_path / "copy")) / "checkpoints"
    original = Hub.prepare

    def prepare(*arguments):
        rotate(checkpoints, keep=1)
        original(*arguments)

    monkeypatch.setattr(Hub, "prepare", prepare)
    assert call("publish", checkpoints / "update-00000002", "--repo", "user/en-de")[0] == 0
    assert sorted(path.name for path in checkpoints.iterdir()) == ["update-00000002", "update-00000008"]


# What goes wrong


def test_a_checkpoint_that_vanishes_is_said(online, refused, run_folder, tmp_path, monkeypatch):
    folder = Path(shutil.copytree(run_folder / "checkpoints" / "update-00000008", tmp_path / "copy"))
    monkeypatch.setattr(Hub, "prepare", lambda *_: shutil.rmtree(folder))
    assert re.search(f"was deleted while {folder} was being", refused("publish", folder, "--repo", "user/en-de"))


ACCIDENTS = [
    ("POST", "/preupload/", 500),
    ("POST", "/preupload/", "cut before"),
    ("POST", "/lfs/objects/batch", 429),
    ("PUT", "^/storage/", 500),
    ("PUT", "^/storage/", "cut before"),
    ("PUT", "^/storage/", "cut after"),
    ("POST", "/commit/", 500),
    ("POST", "/commit/", 503),
    ("POST", "/commit/", 409),
    ("POST", "/commit/", 429),
    ("POST", "/commit/", "cut before"),
    ("POST", "/commit/", "cut after"),
    ("POST", "/api/repos/create", 500),
    ("POST", "/api/repos/create", "cut before"),
    ("POST", "/api/repos/create", "cut after"),
    ("POST", "/api/validate-yaml", 502),
]


@pytest.mark.parametrize(("method", "path", "kind"), ACCIDENTS)
def test_trouble_that_passes_is_outlived(online, server, call, model, method, path, kind):
    server.fail(method, path, kind, times=2)
    status, _, err = call("publish", model, "--repo", "user/en-de")
    assert status == 0, err
    # One commit, even where the answer to the first was lost: then nothing is left to send again.
    assert server.accidents[0].times == (1 if (path, kind) == ("/commit/", "cut after") else 0)
    assert online
    assert server.repositories["user/en-de"].messages == ["initial commit", "Publish the model"]
    assert server.files("user/en-de")["model.safetensors"] == (model / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("method", "path", "kind"),
    [
        ("PUT", "^/storage/.*/1$", 503),
        ("PUT", "^/storage/.*/11$", "cut before"),
        ("PUT", "^/storage/.*/2$", "cut after"),
        ("POST", "/api/complete_multipart", 500),
        ("POST", "/api/complete_multipart", "cut before"),
        ("POST", "/api/complete_multipart", "cut after"),
        ("POST", "/api/verify", 502),
    ],
)
def test_trouble_with_parts_of_a_large_file_is_outlived(online, server, call, model, method, path, kind):
    server.part_size = 3072
    server.fail(method, path, kind, times=2)
    status, _, err = call("publish", model, "--repo", "user/en-de")
    assert status == 0, err
    assert server.accidents[0].times == 0
    assert server.count("PUT", "^/storage/[0-9a-f]+/11$") >= 1
    assert server.files("user/en-de")["model.safetensors"] == (model / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("method", "path"), [("POST", "/repos/create"), ("POST", "/commit/"), ("PUT", "^/storage/")])
def test_a_hub_that_falls_silent_is_given_up(online, server, refused, model, monkeypatch, method, path):
    monkeypatch.setattr(upload, "_SILENCE", 0.2)
    server.fail(method, path, "silence", times=1000)
    assert f"not reached in {PATIENCE} attempts" in refused("publish", model, "--repo", "user/en-de")


def test_the_wait_that_the_hub_asks_for_is_kept(online, server, call, model):
    server.fail("POST", "/commit/", 429, Retry_After="37")
    assert call("publish", model, "--repo", "user/en-de")[0] == 0
    assert max(online) >= 37


def test_no_hub_makes_us_wait_for_days(online, server, call, model):
    server.fail("POST", "/repos/create", 429, Retry_After="900000")
    assert call("publish", model, "--repo", "user/en-de")[0] == 0
    assert online == [600]


@pytest.mark.parametrize(
    ("method", "path", "kind"),
    [("PUT", "^/storage/", 500), ("POST", "/commit/", 503), ("PUT", "^/storage/", "cut before")],
)
def test_trouble_that_stays_leaves_the_repository_as_it_was(online, server, call, refused, model, method, path, kind):
    assert call("publish", model, "--repo", "user/en-de", "--license", "mit")[0] == 0
    before = server.files("user/en-de")
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-2] ^= 1
    weights.write_bytes(content)
    server.fail(method, path, kind, times=1000)
    line = refused("publish", model, "--repo", "user/en-de", "--license", "apache-2.0")
    assert f"not reached in {PATIENCE} attempts" in line
    assert "signed" not in line and "127.0.0.1" not in line
    assert server.files("user/en-de") == before


@pytest.mark.parametrize(
    ("token", "repo", "words"),
    [
        ("hf_unknown", "user/en-de", "does not know the token"),
        ("hf_tokenofanother", "user/en-de", "may not write to user/en-de"),
        (TOKEN, "strangers/en-de", "may not write to strangers/en-de"),
    ],
)
def test_what_a_token_may_not_do_is_refused_at_once(online, server, refused, model, monkeypatch, token, repo, words):
    monkeypatch.setenv("HF_TOKEN", token)
    line = refused("publish", model, "--repo", repo)
    assert words in line and token not in line
    assert online == []
    assert server.repositories == {}


@pytest.mark.parametrize("status", [401, 403, 400])
def test_a_commit_that_is_refused_is_not_repeated(online, server, refused, model, status):
    server.fail("POST", "/commit/", status, times=1000)
    refused("publish", model, "--repo", "user/en-de")
    assert server.count("POST", "/commit/") == 1
    assert server.files("user/en-de").keys() == {".gitattributes"}


def test_without_a_token(online, server, refused, model, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    assert "no token" in refused("publish", model, "--repo", "user/en-de")
    assert server.requests == []


@pytest.mark.parametrize("repo", ["en-de", "user/en/de", "user/en de", "user/-de", "../de", "user/"])
def test_names_that_the_hub_does_not_take(online, server, refused, model, repo):
    assert "not the name of a repository" in refused("publish", model, "--repo", repo)
    assert server.requests == []


@pytest.mark.parametrize("tag", ["a b", "v1.", "a..b", "/v1", "v~1"])
def test_tags_that_git_does_not_take(online, server, refused, model, tag):
    assert "--tag" in refused("publish", model, "--repo", "user/en-de", "--tag", tag)
    assert server.requests == []


RECORD = '{"train": {}, "valid": null, "device": "cpu", "processes": 1, "versions": {}}'


def write_records(folder, record, options):
    (folder / "run.json").write_text(record)
    (folder / "options.yaml").write_text(options)


def write_metrics(folder, line):
    write_records(folder, RECORD, "seed: 1")
    (folder / "metrics.jsonl").write_text(f"{line}\n")


def change_record(**values):
    return json.dumps({**json.loads(RECORD), **values})


def change(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "lacks model.safetensors"),
        (lambda folder: (folder / "config.json").unlink(), "lacks config.json"),
        (lambda folder: (folder / "tokenizer_config.json").unlink(), "lacks tokenizer_config.json"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "lacks tokenizer.json"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"12345678{"), "cannot be loaded"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"\2" + bytes(7) + b"[]"),
            "cannot be loaded",
        ),
        (lambda folder: change(folder / "config.json", norm_position="middle"), "cannot be loaded"),
        (lambda folder: change(folder / "config.json", d_model="x"), "cannot be loaded"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
        (lambda folder: write_records(folder, "{}", "seed: 1"), "lacks train"),
        (lambda folder: write_records(folder, change_record(train=3), "seed: 1"), "lacks train"),
        (lambda folder: write_records(folder, change_record(train={"dropped": 3}), "seed: 1"), "not as runs write"),
        (lambda folder: write_records(folder, change_record(valid=[3]), "seed: 1"), "not as runs write"),
        (lambda folder: write_records(folder, change_record(result={"updates": "x"}), "seed: 1"), "has 'x' as the"),
        (lambda folder: write_metrics(folder, "[1]"), "holds [1], which is no record"),
        (lambda folder: write_metrics(folder, '{"kind": "train"}'), "which is no record"),
        (lambda folder: write_metrics(folder, '{"kind": "train", "update": 1}'), "not as runs write"),
        (lambda folder: write_records(folder, RECORD, "a: [b"), "is not YAML"),
        (lambda folder: write_records(folder, RECORD, "- a"), "holds no named values"),
        (lambda folder: change(folder / "config.json", model_type="marian"), "of type marian"),
        (
            lambda folder: change(folder / "tokenizer_config.json", model_max_length="512"),
            "a model_max_length of '512'",
        ),
        (
            lambda folder: change(folder / "config.json", architectures=["VanillaTransformerForMaskedLM"]),
            "holds a VanillaTransformerForMaskedLM, but",
        ),
        (lambda folder: change(folder / "config.json", encoder_layers=2), "do not fit its config.json"),
        (lambda folder: change(folder / "config.json", encoder_ffn_dim=8), "do not fit its config.json"),
        (lambda folder: (folder / "facts.json").write_text('{"licence": "mit"}'), "did you mean license"),
        (lambda folder: (folder / "facts.json").write_text('{"parameters": "many"}'), "which has the wrong type"),
        (lambda folder: (folder / "facts.json").write_text('{"scores": [{"bleu": 1.0}]}'), "lacks test_set"),
        (lambda folder: (folder / "facts.json").write_text("[]"), "holds no named values"),
        (lambda folder: (folder / "evaluation.json").write_text("{}"), "holds no scores"),
    ],
)
def test_a_folder_that_is_no_whole_model_is_refused(online, server, refused, model, damage, words):
    damage(model)
    assert words in refused("publish", model, "--repo", "user/en-de")
    assert server.requests == []


def test_a_model_of_two_minds_about_its_weights_is_refused(online, server, refused, model):
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    shutil.copy(model / "model.safetensors", model / "model-00001-of-00001.safetensors")
    assert "holds model.safetensors and model.safetensors.index.json" in refused("publish", model, "--repo", "user/a")
    assert server.requests == []


def test_offline_is_said(online, server, refused, model, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refused("publish", model, "--repo", "user/en-de")


def test_the_sentence_about_a_missing_folder(refused, tmp_path):
    assert re.search("is not a folder", refused("publish", tmp_path / "none", "--repo", "user/en-de"))
