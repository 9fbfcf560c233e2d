"""A run that was killed, whenever it was, goes on as if nothing had happened."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from runs import assert_same_run, stopped_after, train_anew

from vanilla_transformer.training.records.checkpoints import fault_of, list_checkpoints


STRESS = Path(__file__).parents[2] / "scripts" / "stress" / "kill_and_resume.py"
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


class Photographer:
    """Copies a run's folder before each change that Python makes to files there: what a SIGKILL would leave."""

    def __init__(self):
        self.run: Path | None = None
        sys.addaudithook(self.see)

    @contextmanager
    def photographing(self, run: Path, album: Path) -> Iterator[None]:
        self.album, self.seen = album, set()
        album.mkdir(exist_ok=True)
        self.run = run
        try:
            yield
        finally:
            self.run = None

    def see(self, event: str, arguments: tuple) -> None:
        if self.run is None or event not in CHANGES:
            return
        # What is deleted is named relative to its open folder.
        if event not in ("os.remove", "os.rmdir") and not str(arguments[0]).startswith(str(self.run)):
            return
        run, self.run = self.run, None
        try:
            files = sorted(path for path in run.rglob("*") if "cache" not in path.parts)
            state = hashlib.sha256()
            for path in files:
                state.update(f"{path}\0".encode() + (path.read_bytes() if path.is_file() else b"/"))
            if state.digest() not in self.seen:
                self.seen.add(state.digest())
                shutil.copytree(run, self.album / f"{len(self.seen):04d}-{len(list(self.album.iterdir())):04d}")
        finally:
            self.run = run


@pytest.fixture(scope="module")
def photographer():
    # An audit hook stays for as long as the process lives.
    return Photographer()


# The stop leaves a checkpoint that the next one takes the place of.
STOP, OPTIONS = 5, {"keep_last": 2, "validate_every": 4, "encoder_layers": 1, "decoder_layers": 1}


@pytest.fixture(scope="module")
def whole(make_options, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    train_anew(make_options(folder, **OPTIONS))
    return folder


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_any_state_of_the_files_is_one_to_go_on_from(photographer, whole, make_options, tmp_path, every):
    run, album = tmp_path / "run", tmp_path / "album"
    options = make_options(run, **OPTIONS)
    with photographer.photographing(run, album):
        with stopped_after(STOP, signal.SIGTERM):
            train_anew(options)
        train_anew(replace(options, resume=True))
    assert_same_run(run, whole)
    photographs = sorted(album.iterdir())
    assert len(photographs) > 60
    kept = {path: [each.name for each in list_checkpoints(path / "checkpoints")] for path in photographs}
    # Among them: none yet, the stopgap and what takes its place, and one too many.
    for names in ([], [4, 5, 8], [4, 8, 11]):
        assert [f"update-{update:08d}" for update in names] in kept.values()
    changes = [photographs[i] for i in range(1, len(photographs)) if kept[photographs[i]] != kept[photographs[i - 1]]]
    for photograph in sorted({*changes, *photographs[::every]}):
        for checkpoint in list_checkpoints(photograph / "checkpoints"):
            assert fault_of(checkpoint) is None
        train_anew(make_options(photograph, **OPTIONS, resume=bool(kept[photograph])))
        assert_same_run(photograph, whole)
        assert not [path for path in photograph.rglob("*") if "partial" in path.name or "replaced" in path.name]
        shutil.rmtree(photograph)


@pytest.mark.parametrize(
    ("kills", "processes"), [(3, 1), *(pytest.param(6, number, marks=pytest.mark.slow) for number in (1, 2, 4))]
)
def test_killed_runs_equal_unbroken_ones(tmp_path, kills, processes):
    command = [sys.executable, STRESS, "--kills", str(kills), "--processes", str(processes)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=550, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{kills} kills with {processes} process" in result.stdout
    assert list(tmp_path.iterdir()) == []
