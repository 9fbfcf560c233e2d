import resource
import subprocess
import sys
import sysconfig
from contextlib import contextmanager
from pathlib import Path

import pytest

from vanilla_transformer.cli import main


SCRIPT = Path(sysconfig.get_path("scripts")) / "vanilla-transformer"
DATA = Path(__file__).parents[1] / "data"
# A model that trains in well under a second.
SMALL = """
    --d_model 16 --encoder_layers 1 --decoder_layers 1 --encoder_attention_heads 2 --decoder_attention_heads 2
    --encoder_ffn_dim 16 --decoder_ffn_dim 16 --vocab_size 300 --tokens_per_batch 256 --tokens_per_update 256
    --save_every 2 --validate_every 4 --valid_bleu_sentences 2 --keep_last 2 --average_last 2 --num_beams 2
    --device cpu
""".split()  # noqa: SIM905


@pytest.fixture(scope="session")
def corpus():
    """English and German file of a small corpus."""
    return DATA / "sentences.en", DATA / "sentences.de"


@pytest.fixture(scope="session")
def small():
    """Flags of a small model and a short run."""
    return list(SMALL)


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory, corpus):
    """A finished run; tests do not change it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    files = [str(path) for path in corpus]
    arguments = ["train", "--train_files", *files, "--valid_files", *files, "--output_dir", str(folder)]
    assert main([*arguments, *SMALL, "--max_updates", "4"]) == 0
    return folder


@pytest.fixture
def train(corpus, small, tmp_path):
    """Arguments of a short training in `tmp_path / "run"`; later flags win."""

    def train(*flags, files=corpus):
        folder = ["--output_dir", tmp_path / "run"]
        return ["train", "--train_files", *files, *folder, *small, "--max_updates", "2", *flags]

    return train


@pytest.fixture
def write():
    """Write a file of lines; returns its path."""

    def write(path: Path, *lines: str) -> Path:
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return path

    return write


@pytest.fixture
def start():
    """Start the console script as a process of its own."""

    def start(arguments, **options) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, SCRIPT, *map(str, arguments)], stderr=subprocess.PIPE, text=True, **options
        )

    return start


@pytest.fixture
def refused(call):
    """Call the command line with a mistake; returns the sentence about it."""

    def refused(*arguments, status=1):
        received, out, err = call(*arguments)
        assert received == status, err
        assert out == ""
        assert "Traceback" not in err
        # Progress bars aside, one line.
        assert err.endswith("\n")
        lines = [line for line in err.replace("\r", "\n").splitlines() if line.strip() and "%|" not in line]
        assert len(lines) == 1, err
        assert lines[0].startswith("vanilla-transformer")
        return lines[0]

    return refused


@pytest.fixture
def file_limit():
    """Within it, files cannot grow beyond a number of bytes, as on a full disk."""

    @contextmanager
    def file_limit(size: int):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    return file_limit


@pytest.fixture
def contents():
    """What a folder holds, file by file, to compare before and after."""

    def contents(folder: Path) -> dict[str, bytes | None]:
        return {
            path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
            for path in sorted(folder.rglob("*"))
        }

    return contents
