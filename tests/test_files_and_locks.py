import errno
import hashlib
import os
import subprocess
import sys

import pytest

from vanilla_transformer.files import describe, lock, replacing, write_manifest


@pytest.mark.parametrize("aside", [None, "mine"])
def test_a_file_is_replaced_whole(tmp_path, aside):
    path = tmp_path / "file"
    path.write_text("old")
    with replacing(path, aside and tmp_path / aside) as new:
        assert new == tmp_path / (aside or "partial-file")
        new.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(errno.ENOSPC, "No space left on device")])
def test_a_failure_leaves_the_old_file_alone(tmp_path, error):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(type(error) if isinstance(error, OSError) else error), replacing(path) as new:
        new.write_text("half")
        raise error
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_content_is_on_the_disk_before_its_name_and_the_name_before_the_end(tmp_path, monkeypatch):
    events = []
    sync, replace = os.fsync, type(tmp_path).replace

    def noting_sync(descriptor):
        events.append("folder" if os.path.samestat(os.fstat(descriptor), tmp_path.stat()) else "content")
        sync(descriptor)

    def noting_replace(path, target):
        events.append("replace")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", noting_sync)
    monkeypatch.setattr(type(tmp_path), "replace", noting_replace)
    with replacing(tmp_path / "file") as new:
        new.write_text("new")
    assert events == ["content", "replace", *([] if os.name == "nt" else ["folder"])]


def test_content_that_does_not_reach_the_disk_gets_no_name(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("old")

    def fail(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"), replacing(path) as new:
        new.write_text("new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_manifests_state_sizes_and_digests(tmp_path):
    content = b"some bytes" * 1000
    (tmp_path / "file").write_bytes(content)
    expected = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert describe(tmp_path / "file", "sha256") == expected
    expected = {"size": len(content), "blake2b": hashlib.blake2b(content, digest_size=32).hexdigest()}
    assert describe(tmp_path / "file", "blake2b") == expected
    write_manifest(tmp_path, "sha256")
    assert sorted(os.listdir(tmp_path)) == ["file", "manifest.json"]


HOLDER = """
import sys
from pathlib import Path
from vanilla_transformer.files import lock

path = Path(sys.argv[1])
with path.open("ab") as file:
    print(lock(file.fileno(), path), flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("end", ["closes", "dies"])
def test_a_lock_ends_with_its_holder_and_leaves_no_file(tmp_path, end):
    path = tmp_path / "file"
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "True\n"
        with path.open("ab") as file:
            assert not lock(file.fileno(), path)
        if end == "dies":
            holder.kill()
        else:
            holder.stdin.write("\n")
            holder.stdin.flush()
        holder.wait()
    with path.open("ab") as file:
        assert lock(file.fileno(), path)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(os.name == "nt", reason="no open file is renamed there")
@pytest.mark.parametrize("meanwhile", ["renamed", "replaced"])
def test_the_lock_of_a_file_that_has_lost_its_name_is_none(tmp_path, meanwhile):
    path = tmp_path / "file"
    with path.open("ab") as file:
        path.rename(tmp_path / "other")
        if meanwhile == "replaced":
            path.touch()
        assert not lock(file.fileno(), path)
