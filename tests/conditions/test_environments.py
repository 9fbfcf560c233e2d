"""Training and translating where something of the usual surroundings is missing, or somebody else is there."""

import os
import subprocess
import sys

import pytest
from users import ONE_PROCESS


@pytest.fixture
def unusable_home(tmp_path):
    """A folder that nobody may write, not even root."""
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        if sys.platform != "linux":
            pytest.skip("root may write everywhere")
        return "/proc"
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o500)
    return str(folder)


def test_no_home(user, trained):
    user.train(variables={"HOME": None})
    assert user.digest() == trained.digest()
    # The caches of libraries did not come to lie where the user works.
    assert sorted(path.name for path in user.work.iterdir() if path.suffix == "") == ["log", "runs", "scripts"]


def test_a_home_that_cannot_be_written(user, trained, unusable_home):
    user.train(variables={"HOME": unusable_home})
    assert user.digest() == trained.digest()


def test_the_c_locale(user, trained, translations):
    plain = {"LANG": None, "LC_ALL": "C"}
    assert user.translate_file(trained.file(""), variables=plain) == translations


def test_standard_input_is_closed(user, trained):
    user.train(stdin=None, preexec_fn=lambda: os.close(0))
    assert user.digest() == trained.digest()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity")
@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_one_core(user, trained, number):
    core = min(os.sched_getaffinity(0))
    command = [*ONE_PROCESS, "--num_processes", str(number)]
    user.train(*command, preexec_fn=lambda: os.sched_setaffinity(0, {core}))
    assert user.record()["processes"] == number
    # Sums in float32 may round by the number of threads.
    assert user.losses() == pytest.approx(trained.losses(), rel=1e-5)


def test_a_busy_neighbour(user, trained):
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        user.train()
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()
    assert user.digest() == trained.digest()
