import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vanilla_transformer.data import cached_folders
from vanilla_transformer.data.cached_folders import write_whole


ONE, OTHER, VOCABULARY = "1" * 32, "2" * 32, f"vocabulary-{'3' * 32}"

# Writes a folder in two halves; in between it waits for a line on standard input.
WRITER = """
import sys
from pathlib import Path
from vanilla_transformer.data.cached_folders import write_whole

def write(partial):
    (partial / "first").write_text("half")
    print(partial, flush=True)
    sys.stdin.readline()
    (partial / "second").write_text("half")

write_whole(Path(sys.argv[1]), write)
"""

needs_locks = pytest.mark.skipif(os.name == "nt", reason="leftovers are cleared away where locks are")


def start_writing(folder: Path) -> tuple[subprocess.Popen, Path]:
    command = [sys.executable, "-c", WRITER, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, Path(process.stdout.readline().rstrip("\n"))


def write_one_file(folder: Path) -> None:
    write_whole(folder, lambda partial: (partial / "file").write_text("whole"))


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@needs_locks
@pytest.mark.parametrize("name", [ONE, VOCABULARY, "0"])
def test_only_what_a_dead_process_left_is_cleared_away(tmp_path, name):
    process, partial = start_writing(tmp_path / name)
    with process:
        write_one_file(tmp_path / OTHER)
        assert names_in(partial) == ["first"]
        process.communicate("\n")
    assert process.returncode == 0 and names_in(tmp_path / name) == ["first", "manifest.json", "second"]
    assert names_in(tmp_path) == sorted([name, OTHER])

    process, partial = start_writing(tmp_path / f"{name[:-1]}4")
    with process:
        process.kill()
    assert names_in(partial) == ["first"]
    # A folder that is there already needs no writing.
    write_one_file(tmp_path / OTHER)
    assert partial.exists()
    write_one_file(tmp_path / ("5" * 32))
    assert names_in(tmp_path) == sorted([name, OTHER, "5" * 32])


def test_folders_of_others_stay(tmp_path):
    suffix = f"partial-{'0' * 32}"
    others = [f"my.{suffix}", f"{ONE}.partial-1234", f"vocabulary.{suffix}", f"{ONE}.{suffix}.old"]
    for name in others:
        (tmp_path / name).mkdir()
    write_one_file(tmp_path / ONE)
    assert names_in(tmp_path) == sorted([*others, ONE])


@needs_locks
def test_a_file_system_without_locks_is_written_and_keeps_leftovers(tmp_path, monkeypatch):
    import fcntl

    leftover = tmp_path / f"{OTHER}.partial-{'0' * 32}"
    leftover.mkdir()

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    write_one_file(tmp_path / ONE)
    assert names_in(tmp_path) == sorted([ONE, leftover.name])
    monkeypatch.undo()
    write_one_file(tmp_path / "0")
    assert names_in(tmp_path) == sorted(["0", ONE])


@needs_locks
def test_a_folder_that_is_cleared_away_before_it_was_locked_is_made_again(tmp_path, monkeypatch):
    import fcntl

    flock = fcntl.flock
    taken = []

    def overtaken(descriptor, operation):
        if not taken:
            taken.extend(tmp_path.iterdir())
            taken[0].rmdir()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", overtaken)
    write_one_file(tmp_path / ONE)
    assert len(taken) == 1 and names_in(tmp_path) == [ONE] and names_in(tmp_path / ONE) == ["file", "manifest.json"]


def test_a_failed_write_leaves_nothing(tmp_path):
    def fail(partial: Path) -> None:
        (partial / "file").write_text("half")
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        write_whole(tmp_path / ONE, fail)
    assert names_in(tmp_path) == []


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("damage", ["bit", "truncated", "deleted", "manifest", "odd manifest", "no manifest"])
def test_a_damaged_folder_is_told_and_made_again(tmp_path, damage, capsys):
    folder = tmp_path / ONE
    write_one_file(folder)
    sound = (folder / "file").stat().st_ino
    write_one_file(folder)
    assert capsys.readouterr().err == "" and (folder / "file").stat().st_ino == sound
    {
        "bit": lambda: flip_a_bit(folder / "file"),
        "truncated": lambda: (folder / "file").write_text("who"),
        "deleted": (folder / "file").unlink,
        "manifest": lambda: flip_a_bit(folder / "manifest.json"),
        "odd manifest": lambda: (folder / "manifest.json").write_text("[1, 2]"),
        "no manifest": (folder / "manifest.json").unlink,
    }[damage]()
    write_one_file(folder)
    assert (folder / "file").read_text() == "whole"
    error = capsys.readouterr().err
    assert error.startswith(f"{folder} cannot be used (") and error.endswith("); it is made again.\n")
    assert names_in(tmp_path) == [ONE]
    write_one_file(folder)
    assert capsys.readouterr().err == ""


def test_what_another_process_has_made_again_meanwhile_stays(tmp_path, monkeypatch):
    folder = tmp_path / ONE
    write_one_file(folder)
    flip_a_bit(folder / "file")
    find = cached_folders._fault_of

    def overtaken(path: Path) -> str | None:
        fault = find(path)
        monkeypatch.undo()
        write_one_file(folder)
        (folder / "mine").touch()
        return fault

    monkeypatch.setattr(cached_folders, "_fault_of", overtaken)
    write_one_file(folder)
    assert names_in(folder) == ["file", "manifest.json", "mine"] and names_in(tmp_path) == [ONE]
