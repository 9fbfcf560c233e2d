import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hub_server import Repository
from huggingface_hub import ModelCard
from publishing_material import SENTENCES, TINY, TOKEN
from safetensors.torch import load_file

from vanilla_transformer.cli import train as train_verb
from vanilla_transformer.errors import UserError
from vanilla_transformer.publishing import upload
from vanilla_transformer.publishing.background import BackgroundPush
from vanilla_transformer.publishing.upload import Destination, Hub, UploadError
from vanilla_transformer.training import engine
from vanilla_transformer.training.records.checkpoints import rotate


@pytest.fixture
def train(call, tmp_path):
    def train(*flags, folder=tmp_path / "run"):
        files = ["--train_files", *SENTENCES, "--valid_files", *SENTENCES, "--output_dir", folder]
        return call("train", *files, *TINY, "--max_updates", "8", "--save_every", "2", "--keep_last", "2", *flags)

    return train


class Gate:
    """Stands for the Hub: uploads wait until they are let through, and are noted."""

    def __init__(self):
        self.opened = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.uploads: list[tuple[str, bool]] = []
        self.failures = 0

    def prepare(self, destination, attempts=1):
        pass

    def upload(self, bundle, destination, message, attempts=1):
        self.begun.release()
        assert self.opened.acquire(timeout=60)
        # Whether the weights are still there when they are sent.
        self.uploads.append((message, bundle.files["model.safetensors"].is_file()))
        if self.failures:
            self.failures -= 1
            raise UploadError("The Hub is away.")
        return f"commit {len(self.uploads)}"


@pytest.fixture
def checkpoints(run_folder, tmp_path):
    """A run's folder whose checkpoints a test may delete."""
    import shutil

    return Path(shutil.copytree(run_folder, tmp_path / "copy")) / "checkpoints"


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def push(gate, checkpoints):
    return BackgroundPush(gate, Destination(repo="user/en-de"), checkpoints.parent)


def test_of_those_that_wait_only_the_newest_is_published_and_none_is_deleted_before(gate, push, checkpoints):
    first, second, third, fourth = (checkpoints / f"update-{update:08d}" for update in (2, 4, 6, 8))
    push.offer(first)
    assert gate.begun.acquire(timeout=60)
    push.offer(second)
    push.offer(third)
    # The first is being sent, the third waits; the second was passed over, and rotation may have it.
    rotate(checkpoints, keep=1)
    assert sorted(path.name for path in checkpoints.iterdir()) == [first.name, third.name, fourth.name]
    gate.opened.release(2)
    push.finish(None, 60)
    assert gate.uploads == [("Checkpoint update-00000002", True), ("Checkpoint update-00000006", True)]
    rotate(checkpoints, keep=1)
    assert [path.name for path in checkpoints.iterdir()] == [fourth.name]


def test_the_result_takes_the_place_of_what_waits(gate, push, checkpoints, capsys):
    push.offer(checkpoints / "update-00000002")
    assert gate.begun.acquire(timeout=60)
    push.offer(checkpoints / "update-00000004")
    gate.opened.release(2)
    push.finish(checkpoints.parent)
    assert [message for message, _ in gate.uploads] == ["Checkpoint update-00000002", "Result of the run"]
    assert "Published as commit 2" in capsys.readouterr().err


def test_a_failure_is_reported_and_the_next_checkpoint_tried(gate, push, checkpoints, capsys):
    gate.failures = 1
    gate.opened.release(2)
    push.offer(checkpoints / "update-00000002")
    with push._changed:
        push._changed.wait_for(lambda: len(gate.uploads) == 1 and not push._is_busy, 60)
    assert "update-00000002: The Hub is away. The run goes on." in capsys.readouterr().err
    push.offer(checkpoints / "update-00000004")
    push.finish(None, 60)
    assert len(gate.uploads) == 2 and push.failure is None


def test_what_was_not_published_in_time_is_said(gate, push, checkpoints):
    push.offer(checkpoints / "update-00000008")
    assert gate.begun.acquire(timeout=60)
    with pytest.raises(UserError, match="was not published in 0 seconds; user/en-de has an earlier one"):
        push.finish(None, 0.01)
    gate.opened.release()


def test_a_checkpoint_that_is_deleted_meanwhile_is_no_surprise(push, checkpoints):
    with pytest.raises(FileNotFoundError):
        push.offer(checkpoints / "update-00000099")
    push.finish(None, 60)


# The whole way


def test_a_run_publishes_its_checkpoints_and_its_result(online, server, train, tmp_path, run_folder):
    status, out, err = train("--push_to_hub", "team/en-de", "--hub_private")
    assert status == 0, err
    repository = server.repositories["team/en-de"]
    assert repository.private
    first, *checkpoints, last = repository.messages
    assert (first, last) == ("initial commit", "Result of the run")
    assert checkpoints and all(message.startswith("Checkpoint update-") for message in checkpoints)
    assert checkpoints == sorted(set(checkpoints))
    # Every commit is a whole model, of one update.
    for name, entries in [*repository.commits.items()][1:]:
        files = server.files("team/en-de", name)
        assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= entries.keys()
        facts = json.loads(files["facts.json"])
        records = [json.loads(line) for line in files["metrics.jsonl"].splitlines()]
        assert facts["training"]["updates"] == max(record["update"] for record in records)
        assert TOKEN.encode() not in b"".join(files.values())
        assert str(tmp_path).encode() not in b"".join(files.values())
    assert server.files("team/en-de")["model.safetensors"] == (tmp_path / "run" / "model.safetensors").read_bytes()
    # The run is the same as one that publishes nothing.
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "run", run_folder))
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert TOKEN not in out + err + (tmp_path / "run" / "options.yaml").read_text()


def test_what_facts_json_tells_is_published_with_every_checkpoint(online, server, train, tmp_path):
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "facts.json"
    path.write_text('{"licence": "mit"}')
    status, _, err = train("--push_to_hub", "user/en-de")
    assert status == 1 and "did you mean license" in err
    assert server.requests == [] and [*path.parent.iterdir()] == [path]
    path.write_text('{"license": "mit"}')
    assert train("--push_to_hub", "user/en-de")[0] == 0
    for name in [*server.repositories["user/en-de"].commits][1:]:
        files = server.files("user/en-de", name)
        assert json.loads(files["facts.json"])["license"] == "mit"
        assert ModelCard(files["README.md"].decode()).data.license == "mit"


def test_a_slow_hub_does_not_hold_the_run_up(online, server, train, tmp_path, monkeypatch):
    server.open.clear()
    ended = []
    original = BackgroundPush.finish

    def finish(self, result, timeout=None):
        # All is trained and written, while the first checkpoint is still on its way.
        ended.append((server.count("POST", "/commit/"), (tmp_path / "run" / "model.safetensors").is_file()))
        server.open.set()
        original(self, result, timeout)

    monkeypatch.setattr(BackgroundPush, "finish", finish)
    status, _, err = train("--push_to_hub", "user/en-de")
    assert status == 0, err
    assert ended == [(0, True)]
    assert server.repositories["user/en-de"].messages[-1] == "Result of the run"
    # What waited has let go of its checkpoints: the next rotation has them.
    rotate(tmp_path / "run" / "checkpoints", keep=2)
    assert len([*(tmp_path / "run" / "checkpoints").iterdir()]) == 2


def test_a_hub_that_comes_and_goes(online, server, train, tmp_path):
    server.fail("POST", "/api/repos/create", "cut before", times=1)
    server.fail("PUT", "^/storage/", "cut before", times=2)
    server.fail("POST", "/commit/", 500, times=1)
    status, _, err = train("--push_to_hub", "user/en-de")
    assert status == 0, err
    assert "its checkpoints will try again" in err
    assert server.repositories["user/en-de"].messages[-1] == "Result of the run"


def test_a_silent_hub_does_not_hold_the_run_up(online, server, train, tmp_path, monkeypatch):
    monkeypatch.setattr(upload, "_SILENCE", 0.2)
    server.fail("POST", "", "silence", times=10_000)
    status, _, err = train("--push_to_hub", "user/en-de")
    assert status == 1
    assert "its checkpoints will try again" in err and "was not published" in err.splitlines()[-1]
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_a_hub_that_stays_away_costs_the_run_nothing(online, server, train, tmp_path, monkeypatch):
    server.fail("POST", "/commit/", 503, times=10_000)
    status, _, err = train("--push_to_hub", "user/en-de")
    assert status == 1
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert "The run goes on." in err
    last = err.splitlines()[-1]
    assert "was not published" in last and f"publish {tmp_path / 'run'} --repo user/en-de" in last
    assert server.files("user/en-de").keys() == {".gitattributes"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--push_to_hub", "strangers/en-de"], "may not write to strangers/en-de"),
        (["--push_to_hub", "another/en-de"], "may not write to another/en-de"),
        (["--push_to_hub", "no name"], "not the name of a repository"),
        (["--hub_private"], "--hub_private was given without --push_to_hub"),
        (["--hub_revision", "x"], "--hub_revision was given without --push_to_hub"),
    ],
)
def test_what_cannot_be_published_is_refused_before_the_run(online, server, train, tmp_path, flags, words):
    server.repositories["another/en-de"] = Repository(private=False)
    server.repositories["another/en-de"].commit("main", {}, "initial commit")
    status, _, err = train(*flags)
    assert status == 1 and words in err
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_only_the_main_process_publishes(online, monkeypatch, tmp_path):
    from vanilla_transformer.training.options import TrainingOptions

    options = TrainingOptions(push_to_hub="user/en-de", output_dir=tmp_path)
    monkeypatch.setenv("RANK", "1")
    assert train_verb._push(options) is None
    assert train_verb._push(replace(options, push_to_hub=None)) is None


def test_of_two_processes_one_publishes(server, tmp_path):
    environment = {
        **os.environ,
        "HF_ENDPOINT": server.url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "hf"),
        "HF_TOKEN": TOKEN,
    }
    arguments = ["--train_files", *SENTENCES, "--valid_files", *SENTENCES, "--output_dir", tmp_path / "run", *TINY]
    arguments += ["--max_updates", "8", "--save_every", "2", "--num_processes", "2", "--push_to_hub", "user/en-de"]
    command = [sys.executable, "-m", "vanilla_transformer", "train", *map(str, arguments)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["processes"] == 2
    repository = server.repositories["user/en-de"]
    assert repository.messages[-1] == "Result of the run"
    assert len({*repository.messages}) == len(repository.messages)
    assert server.count("POST", "/api/repos/create") == 1
    assert server.count("POST", "/commit/") == len(repository.messages) - 1
    assert process.stderr.count("Published as ") == 1
    weights = (tmp_path / "run" / "model.safetensors").read_bytes()
    assert server.files("user/en-de")["model.safetensors"] == weights


def test_a_stopped_run_publishes_its_last_checkpoint_and_keeps_its_status(online, server, train):
    status, _, err = train("--push_to_hub", "user/en-de", "--max_time", "1", "--max_updates", "100000")
    assert status == 0 and "continue with --resume" in err
    repository = server.repositories["user/en-de"]
    assert repository.messages[-1].startswith("Checkpoint update-")


def test_a_run_that_fails_publishes_its_last_checkpoint(online, server, train, monkeypatch):
    original = engine.train

    def fail(options, evaluation, on_checkpoint):
        original(options, evaluation)
        on_checkpoint(options.output_dir / "checkpoints" / "update-00000008")
        raise UserError("The disk is full.")

    monkeypatch.setattr(engine, "train", fail)
    status, _, err = train("--push_to_hub", "user/en-de")
    assert status == 1 and err.splitlines()[-1].endswith("The disk is full.")
    assert server.repositories["user/en-de"].messages[-1] == "Checkpoint update-00000008"


def test_hub_refuses_zero_attempts(online):
    with pytest.raises(ValueError, match="at least 1"):
        Hub().prepare(Destination(repo="user/en-de"), attempts=0)
