import errno
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from vanilla_transformer.errors import UserError
from vanilla_transformer.training.records import leases
from vanilla_transformer.training.records.checkpoints import (
    discard,
    fault_of,
    list_checkpoints,
    rotate,
    update_of,
    write_checkpoint,
)
from vanilla_transformer.training.records.leases import reading, training_in


def write_files(folder: Path) -> None:
    for name in ("config.json", "model.safetensors", "optimizer.safetensors", "training_state.json"):
        (folder / name).write_bytes(b"{}" * 1000)


def write_checkpoints(folder: Path, *updates: int) -> list[Path]:
    return [write_checkpoint(folder, update, write_files) for update in updates]


def test_rotation_leaves_a_checkpoint_that_is_being_read_for_later(tmp_path):
    first, second, third = write_checkpoints(tmp_path, 1, 2, 3)
    with reading(first), reading(first):
        rotate(tmp_path, 1)
        assert list_checkpoints(tmp_path) == [first, third]
        assert fault_of(first) is None
        discard([first])
        assert list_checkpoints(tmp_path) == [first, third]
    assert not second.exists()
    rotate(tmp_path, 1)
    assert list_checkpoints(tmp_path) == [third]


def test_a_lease_ends_with_an_error_of_its_reader(tmp_path):
    first, second = write_checkpoints(tmp_path, 1, 2)
    with pytest.raises(ConnectionError), reading(first):
        raise ConnectionError
    rotate(tmp_path, 1)
    assert list_checkpoints(tmp_path) == [second]


def test_what_is_gone_cannot_be_read(tmp_path):
    first, _ = write_checkpoints(tmp_path, 1, 2)
    rotate(tmp_path, 1)
    with pytest.raises(FileNotFoundError), reading(first):
        pytest.fail("read")


def test_a_reader_that_comes_during_the_deletion_is_told(tmp_path, monkeypatch):
    (checkpoint,) = write_checkpoints(tmp_path, 1)
    outcomes, rename = [], Path.rename

    def read() -> None:
        try:
            with reading(checkpoint):
                outcomes.append("read")
        except FileNotFoundError:
            outcomes.append("gone")

    def rename_with_a_reader_waiting(path, target):
        # The reader has the manifest open, and waits for its lock, when the folder goes.
        thread.start()
        thread.join(timeout=0.5)
        assert outcomes == []
        return rename(path, target)

    thread = threading.Thread(target=read)
    monkeypatch.setattr(Path, "rename", rename_with_a_reader_waiting)
    discard([checkpoint])
    assert not checkpoint.exists()
    thread.join()
    assert outcomes == ["gone"]


def test_many_readers_in_threads_never_see_a_checkpoint_go(tmp_path):
    stop, faults, reads = threading.Event(), [], []

    def read() -> None:
        while not stop.is_set():
            for checkpoint in list_checkpoints(tmp_path):
                try:
                    with reading(checkpoint):
                        faults.append(fault_of(checkpoint))
                        reads.append(checkpoint)
                except FileNotFoundError:
                    continue

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for update in range(1, 60):
        write_checkpoint(tmp_path, update, write_files)
        rotate(tmp_path, 1)
    stop.set()
    for thread in threads:
        thread.join()
    assert len(set(reads)) > 1
    assert set(faults) == {None}
    rotate(tmp_path, 1)
    assert [update_of(checkpoint) for checkpoint in list_checkpoints(tmp_path)] == [59]


def test_another_process_reads_undisturbed_and_a_dead_one_holds_nothing(tmp_path):
    first, second = write_checkpoints(tmp_path, 1, 2)
    program = (
        "import sys, time; from pathlib import Path; from vanilla_transformer.training.records.leases import reading\n"
        "with reading(Path(sys.argv[1])):\n    print('reading', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(first)], stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout.readline() == "reading\n"
        rotate(tmp_path, 1)
        assert list_checkpoints(tmp_path) == [first, second]
        reader.kill()
    rotate(tmp_path, 1)
    assert list_checkpoints(tmp_path) == [second]


def test_a_damaged_checkpoint_without_manifest_can_be_deleted(tmp_path):
    first, second = write_checkpoints(tmp_path, 1, 2)
    (first / "manifest.json").unlink()
    rotate(tmp_path, 1)
    assert list_checkpoints(tmp_path) == [second]


def test_one_run_at_a_time_writes_into_a_folder(tmp_path):
    with training_in(tmp_path):
        with pytest.raises(UserError, match=f"^Another process trains in {tmp_path} already"), training_in(tmp_path):
            pytest.fail("trained")
        with training_in(tmp_path.parent):
            pass
    # A run that was killed holds nothing, and one that failed neither.
    with pytest.raises(ConnectionError), training_in(tmp_path):
        raise ConnectionError
    with training_in(tmp_path):
        pass


def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(leases.fcntl, "flock", refuse)
    with training_in(tmp_path):
        pass
