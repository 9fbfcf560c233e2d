"""A user's surroundings, and README's commands."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import torch

from vanilla_transformer.training.records.journal import read_journal


ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
# Programs of the environment that the tests run in: ours, and the launchers.
PROGRAMS = Path(sysconfig.get_path("scripts"))
# What makes README's runs short; flags that come later win.
SHORT = """
    --output_dir runs/en-de --d_model 16 --encoder_layers 1 --decoder_layers 1 --encoder_attention_heads 2
    --decoder_attention_heads 2 --encoder_ffn_dim 16 --decoder_ffn_dim 16 --vocab_size 300 --tokens_per_batch 256
    --tokens_per_update 512 --warmup_steps 10 --max_updates 6 --log_every 1 --keep_last 1 --average_last 1
    --valid_files valid.en valid.de --validate_every 3 --valid_bleu_sentences 0
""".split()  # noqa: SIM905


class User:
    """Somebody who works in a folder with text, and whose environment nothing was added to.

    Args:
        folder: Receives the home folder and the working directory.
    """

    def __init__(self, folder: Path):
        self.work, self.home = folder / "work", folder / "home"
        self.home.mkdir(parents=True)
        self.work.mkdir()
        for language in ("en", "de"):
            lines = (DATA / f"sentences.{language}").read_text(encoding="utf-8").splitlines(keepends=True)
            for name, part in (("train", lines[:30]), ("valid", lines[30:]), ("test", lines[30:34])):
                (self.work / f"{name}.{language}").write_text("".join(part), encoding="utf-8")
        # README's commands are given in a clone of the repository.
        (self.work / "scripts").symlink_to(ROOT / "scripts")
        self.environment = {
            "PATH": os.pathsep.join([str(PROGRAMS), *os.defpath.split(os.pathsep)]),
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
        }
        if torch.accelerator.is_available():
            # The machine has no GPU.
            self.environment["CUDA_VISIBLE_DEVICES"] = ""

    @contextmanager
    def start(self, command: list[str], *, log: Path | None = None, **options):
        """Start a command, and end it with what it started; its standard error is collected in a file."""
        environment = {**self.environment, **options.pop("variables", {})}
        environment = {name: value for name, value in environment.items() if value is not None}
        log = log or self.work / "log"
        with log.open("wb") as output:
            options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": output, **options}
            process = subprocess.Popen(
                [shutil.which(command[0], path=self.environment["PATH"]), *command[1:]],
                cwd=self.work, env=environment, start_new_session=True, **options,
            )  # fmt: skip
        try:
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=60)

    def run(self, command: list[str], **options) -> tuple[int, str, str]:
        """Run a command; returns its exit status, standard output and standard error."""
        with self.start(command, **options) as process:
            out, _ = process.communicate(timeout=200)
        return process.returncode, out.decode(), (self.work / "log").read_text(encoding="utf-8")

    def train(self, *command: str, more: Sequence[str] = (), **options) -> str:
        """Run a training of README's, shortened; returns what it says."""
        status, out, err = self.run([*(command or ONE_PROCESS), *SHORT, *more], **options)
        assert (status, out) == (0, ""), err
        assert "Traceback" not in err
        return err

    def digest(self) -> str:
        """Of the weights of the run."""
        return sha256((self.work / "runs" / "en-de" / "model.safetensors").read_bytes()).hexdigest()

    def losses(self) -> list[float]:
        """Of the run, in its journal."""
        return [record["loss"] for record in read_journal(self.file("metrics.jsonl"))]

    def record(self) -> dict:
        """What the run tells of itself."""
        return json.loads(self.file("run.json").read_text(encoding="utf-8"))

    def file(self, name: str) -> Path:
        """A file of the run."""
        return self.work / "runs" / "en-de" / name

    def translate_file(self, model: Path, **options) -> str:
        """Translate README's test set; returns the translations' digest."""
        command = readme("vanilla-transformer translate --model runs/en-de --input test.en")
        command[command.index("--model") + 1] = str(model)
        status, out, err = self.run(command, **options)
        assert (status, out) == (0, ""), err
        assert "Traceback" not in err
        return sha256((self.work / command[-1]).read_bytes()).hexdigest()


def readme(beginning: str, page: str = "README.md") -> list[str]:
    """A page's first command that begins so, without the continuation of lines."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    line = re.search(rf"^{re.escape(beginning)}.*$", text, flags=re.MULTILINE)
    assert line is not None, beginning
    return shlex.split(line[0])


# The run that several processes share, and the same with one process or other launchers.
ACCELERATE = readme(
    "accelerate launch --config_file scripts/launch/many_gpus.yaml --num_processes 2", "scripts/launch/README.md"
)
ARGUMENTS = ACCELERATE[ACCELERATE.index("scripts/train.py") + 1 :]
ONE_PROCESS = ["vanilla-transformer", "train", *ARGUMENTS]
