"""Tests of compiling, keeping and loading C++, on libraries of a few lines."""

import ctypes
import hashlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from vanilla_transformer.native import library


pytestmark = pytest.mark.skipif(
    os.name != "posix" or not (shutil.which("g++") or shutil.which("clang++")), reason="compiles"
)

SOURCE = """
extern "C" int answer() { return 42; }
extern "C" int works_here() { return 1; }
extern "C" int works_nowhere() { return 0; }
extern "C" const long long* shared_constants() {
    static const long long table[] = {2, 16, 7};
    return table;
}
"""
FUNCTIONS = {"answer": (ctypes.c_int, [])}
CONSTANTS = {"width": 16, "failed": 7}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of libraries, of a cache of its own; and a folder of its own for temporary files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    yield tmp_path / "cache" / "vanilla_transformer" / "libraries"
    assert not list((tmp_path / "temporary").iterdir())
    library._hanging.clear()


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Let a shell script be the compiler."""

    def compiler(script: str) -> Path:
        path = tmp_path / "compiler"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return path

    return compiler


def load(source: Path, **settings) -> ctypes.CDLL:
    return library.load_library(
        **{"name": "answer", "sources": [source], "functions": FUNCTIONS, "constants": CONSTANTS, **settings}
    )


def assert_whole(cache: Path) -> Path:
    (compiled,) = cache.iterdir()
    assert compiled.name.endswith(f"-{hashlib.sha256(compiled.read_bytes()).hexdigest()}.so")
    assert compiled.stat().st_mode & 0o777 == 0o600 and cache.stat().st_mode & 0o777 == 0o700
    return compiled


def test_a_library_is_compiled_once(cache, source, monkeypatch):
    assert load(source).answer() == 42
    compiled = assert_whole(cache)
    monkeypatch.setattr(library, "_compile", lambda *_: pytest.fail("compiled again"))
    assert load(source).answer() == 42
    assert assert_whole(cache) == compiled


def replace(path: Path, content: bytes) -> None:
    # A new file: the process has the old one in its memory.
    path.unlink()
    path.write_bytes(content)
    path.chmod(0o600)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:5000],
        lambda content: content[:-1],
        lambda content: b"",
        lambda content: b"\0" * len(content),
        lambda content: content[:7000] + bytes([content[7000] ^ 1]) + content[7001:],
        lambda content: b"int main() {}",
    ],
    ids=["half", "almost whole", "empty", "zeros", "a bit", "text"],
)
def test_a_damaged_library_is_compiled_again(cache, source, damage):
    load(source)
    compiled = assert_whole(cache)
    replace(compiled, damage(compiled.read_bytes()))
    assert load(source).answer() == 42
    assert assert_whole(cache) == compiled


def test_what_is_sound_and_yet_cannot_be_loaded_is_compiled_again(cache, source):
    load(source)
    compiled = assert_whole(cache)
    stem = compiled.stem.rpartition("-")[0]
    other = b"not a library"
    compiled.unlink()
    (cache / f"{stem}-{hashlib.sha256(other).hexdigest()}.so").write_bytes(other)
    assert load(source).answer() == 42
    assert assert_whole(cache) == compiled


@pytest.mark.parametrize("foreign", ["writable", "link", "owner"])
def test_a_library_that_others_may_have_written_is_not_loaded(cache, source, foreign, tmp_path):
    load(source)
    compiled = assert_whole(cache)
    if foreign == "writable":
        compiled.chmod(0o620)
    elif foreign == "link":
        compiled.rename(tmp_path / "elsewhere.so")
        compiled.symlink_to(tmp_path / "elsewhere.so")
    elif os.geteuid() == 0:
        os.chown(compiled, 12345, 12345)
    else:
        pytest.skip("only root can give files away")
    # A file system may give the inode number of a deleted file to the next one.
    before = compiled.lstat().st_ino, compiled.lstat().st_ctime_ns
    assert load(source).answer() == 42
    after = assert_whole(cache).lstat()
    assert (after.st_ino, after.st_ctime_ns) != before


@pytest.mark.parametrize("foreign", ["group", "others", "owner"])
def test_a_folder_that_others_may_write_is_refused(cache, source, foreign):
    load(source)
    if foreign != "owner":
        cache.chmod(0o770 if foreign == "group" else 0o707)
    elif os.geteuid() == 0:
        os.chown(cache, 12345, 12345)
    else:
        pytest.skip("only root can give folders away")
    with pytest.raises(
        OSError, match=f"^{cache} for compiled code belongs to another user or may be written by others"
    ):
        load(source)


def test_without_a_home_folder_the_database_of_users_has_it(cache, source, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    # Relative paths would depend on the working directory.
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    home = SimpleNamespace(pw_dir=str(tmp_path / "home"))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: home)
    for value in (None, "", "relative"):
        monkeypatch.delenv("HOME", raising=False) if value is None else monkeypatch.setenv("HOME", value)
        before = {*tmp_path.iterdir()} - {tmp_path / "home"}
        assert load(source).answer() == 42
        assert_whole(tmp_path / "home" / ".cache" / "vanilla_transformer" / "libraries")
        assert {*tmp_path.iterdir()} - before == {tmp_path / "home"}

    def unknown(_):
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(OSError, match=r"^there is no home folder for compiled code; set XDG_CACHE_HOME"):
        load(source)


def test_a_home_folder_that_cannot_be_written_is_named(cache, source, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"for compiled code cannot be made \(Not a directory\); set XDG_CACHE_HOME"):
        load(source)


def test_a_full_disk_is_named_and_leaves_nothing(cache, source, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"^the answer cannot be compiled and kept: No space left on device$"):
        load(source)
    assert not list(cache.iterdir())


@pytest.mark.parametrize(
    ("script", "clause"),
    [
        ("echo 'no such flag' >&2; exit 1", "no such flag"),
        ("exit 3", "exit status 3"),
        ("kill -SEGV $$", "ended by signal 11|Segmentation fault"),
        ("exit 0", "it writes no library"),
    ],
    ids=["fails", "fails silently", "is killed", "writes nothing"],
)
def test_a_compiler_that_does_not_work_is_named(cache, source, compiler, script, clause):
    path = compiler(script)
    with pytest.raises(OSError, match=rf"^{path} does not compile the answer \((?:{clause})"):
        load(source)
    assert not list(cache.iterdir())


@pytest.mark.parametrize(
    ("cxx", "clause"),
    [
        ("/absent/c++ -m64", r"/absent/c\+\+ -m64 does not compile the answer \(there is no program /absent/c\+\+\)"),
        ("g++ '", r"CXX=g\+\+ ' is no command \(No closing quotation\)"),
    ],
)
def test_a_command_that_is_none_is_named(cache, source, monkeypatch, cxx, clause):
    monkeypatch.setenv("CXX", cxx)
    with pytest.raises(OSError, match=f"^{clause}"):
        load(source)


def test_a_compiler_may_have_arguments_and_other_versions(cache, source, compiler, monkeypatch):
    real = shutil.which("g++") or shutil.which("clang++")
    path = compiler(f'case "$*" in *--version*) echo 1;; *) exec {real} "$@";; esac')
    assert load(source).answer() == 42
    # Other arguments and another version make other libraries.
    monkeypatch.setenv("CXX", f"{path} -DUNUSED='a b'")
    assert load(source).answer() == 42
    assert len(list(cache.iterdir())) == 2
    path.write_text(path.read_text().replace("echo 1", "echo 2"))
    assert load(source).answer() == 42
    assert len(list(cache.iterdir())) == 3


def test_what_is_compiled_must_fit_the_side_of_python(cache, source):
    load(source)
    for settings, clause in (
        ({"constants": {"width": 16, "failed": 8}}, "C.. and Python disagree on the answer's constants"),
        ({"constants": {"width": 16}}, "C.. and Python disagree on the answer's constants"),
        ({"functions": {"question": (None, [])}}, "the compiled answer lacks a function .*question"),
    ):
        with pytest.raises(OSError, match=f"^{clause}"):
            load(source, **settings)
        # What does not fit is not kept.
        assert not list(cache.iterdir())


def test_a_library_tells_whether_it_works_here(cache, source):
    assert load(source, supported_by=("works_here", "this is not it")).answer() == 42
    with pytest.raises(OSError, match=r"^it works nowhere$"):
        load(source, supported_by=("works_nowhere", "it works nowhere"), functions={"absent": (None, [])})
    assert_whole(cache)


def test_other_systems_are_left_to_torch(cache, source, monkeypatch):
    monkeypatch.setattr(os, "name", "nt")
    with pytest.raises(OSError, match=r"^the answer is not compiled on "):
        load(source)


def test_a_compiler_that_hangs_is_ended_and_not_waited_for_again(
    cache, source, compiler, monkeypatch, tmp_path, caplog
):
    pids = tmp_path / "pids"
    path = compiler(f"echo $$ >> {pids}; sleep 100 & echo $! >> {pids}; wait")
    monkeypatch.setattr(library, "_QUIET_SECONDS", 0.1)
    monkeypatch.setenv("VANILLA_TRANSFORMER_COMPILE_SECONDS", "0.5")
    for _ in range(2):
        with pytest.raises(
            OSError, match=rf"^{path} does not compile the answer \(it takes longer than 0.5 seconds\)"
        ):
            load(source)
    assert caplog.messages == [f"Compiling the answer in C++ ({path}), which is done once; at most 0.5 seconds."]
    assert_gone(pids, 2)


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_a_bound_that_is_none_is_named(cache, source, monkeypatch, seconds):
    monkeypatch.setenv("VANILLA_TRANSFORMER_COMPILE_SECONDS", seconds)
    with pytest.raises(OSError, match=f"^VANILLA_TRANSFORMER_COMPILE_SECONDS is {seconds}, and must be a number"):
        load(source)


def assert_gone(pids: Path, count: int) -> None:
    """Those processes end within moments."""
    numbers = [int(line) for line in pids.read_text().split()]
    assert len(numbers) == count
    deadline = time.monotonic() + 10
    while any(is_running(number) for number in numbers):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    # What nobody has waited for yet is gone all the same.
    status = Path(f"/proc/{number}/stat")
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")


# Without the package, whose imports take seconds.
ALONE = """
import importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("native_code", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.load_library("answer", [Path(sys.argv[2])], {}, {})
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_compiler_ends_with_the_process_that_waits_for_it(cache, source, compiler, tmp_path, number):
    pids = tmp_path / "pids"
    compiler(f"echo $$ >> {pids}; sleep 100 & echo $! >> {pids}; wait")
    temporary = tmp_path / "temporary"
    process = subprocess.Popen(
        [sys.executable, "-c", ALONE, library.__file__, source],
        env={**os.environ, "TMPDIR": str(temporary)},
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 30
        while not (pids.exists() and pids.read_text().count("\n") == 2):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        process.wait(timeout=10)
    finally:
        process.kill()
        process.wait()
    assert_gone(pids, 2)
    while list(temporary.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_several_may_compile_at_once(cache, source):
    with ThreadPoolExecutor(4) as pool:
        assert [library.answer() for library in pool.map(load, [source] * 4)] == [42] * 4
    assert_whole(cache)
