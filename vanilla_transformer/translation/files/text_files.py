"""Translates files of any length, and resumes interrupted translations.

While a file is translated, `OUTPUT.partial` holds the finished lines, and `OUTPUT.partial.json` records the input, the
model and the options. The output itself appears when it is complete.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tqdm import tqdm

from vanilla_transformer.data.utf8 import decode_lines
from vanilla_transformer.errors import UserError
from vanilla_transformer.files import describe, lock, replacing

from .layouts import Layout


if TYPE_CHECKING:
    from vanilla_transformer.translation.translator import Translator

# Files of a model's folder that its translations depend on, apart from those of its tokenizer's vocabulary. Outputs
# may lie in the same folder.
_MODEL_FILES = (
    "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "config.json", "generation_config.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file to translate, which has been read and checked to its end.

    Args:
        path: The file.
        num_lines: Number of its lines.
        digest: SHA-256 of its content.
    """

    path: Path
    num_lines: int
    digest: str

    @classmethod
    def check(cls, path: Path, layout: Layout) -> "InputFile":
        """Read and check a file before any work starts.

        Args:
            path: The file.
            layout: Layout of its lines.

        Returns:
            The file.

        Raises:
            UserError: It is missing, empty, not UTF-8 or a pipe, or a line does not have the layout.
        """
        digest, num_lines = hashlib.sha256(), 0
        try:
            mode = path.stat().st_mode
            # A pipe can be read only once.
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise UserError(
                    f"{path} is not a regular file; give one, or pipe it: ... | vanilla-transformer translate."
                )
            with path.open("rb") as file:
                for line in decode_lines(_digested(file, digest), path):
                    num_lines += 1
                    layout.text_of(line, f"{path}, line {num_lines:,}")
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}); check the path.") from error
        if num_lines == 0:
            raise UserError(f"{path} is empty; give at least one line.")
        return cls(path, num_lines, digest.hexdigest())

    def lines(self) -> Iterator[str]:
        """The lines without their ends.

        Raises:
            UserError: The file has changed since it was checked; raised after the last line.
        """
        digest = hashlib.sha256()
        with self.path.open("rb") as file:
            yield from decode_lines(_digested(file, digest), self.path)
        if digest.hexdigest() != self.digest:
            raise UserError(f"{self.path} has changed while it was translated; translate it again.")


def _digested(file: BinaryIO, digest: Any) -> Iterator[bytes]:
    """Yield the lines of a file, and update a digest with them."""
    for line in file:
        digest.update(line)
        yield line


def translate_file(
    translator: "Translator",
    source: InputFile,
    target: Path,
    layout: Layout,
    *,
    model: str | Path,
    resume: bool = False,
    show_progress: bool = False,
) -> None:
    """Translate a file into a file, in constant memory.

    Args:
        translator: Model, tokenizer and search.
        source: The file of texts.
        target: The file of translations, which appears, or is replaced, when they are complete.
        layout: Layout of the lines of input and output.
        model: Folder or name of the translator's model.
        resume: Whether to continue the unfinished output of an interrupted call with the same input, model and
            options, if there is one.
        show_progress: Whether to draw a progress bar.

    Raises:
        UserError: There is an unfinished output, and it is not to be continued, or was made with another input, model
            or other options; another process writes this output; or the input has changed since it was checked.
    """
    # A symbolic link stays, and its target is replaced.
    target = target.resolve()
    partial, record = partial_files(target)
    made_with = {
        "input": source.digest,
        "model": _identity_of_model(translator, model),
        "layout": asdict(layout),
        "search": asdict(translator.options),
        "long_texts": [translator.long_texts, translator.max_source_tokens],
        "target_language": getattr(translator.tokenizer, "tgt_lang", None),
        "dtype": str(translator.model.dtype),
        "quantization": translator.quantization,
    }
    made_with = json.loads(json.dumps(made_with))
    with partial.open("a+b") as output:
        # Before the lock is held, another process may be writing both files.
        _lock(output, partial)
        check_partial(target, resume=resume)
        if _holds_lines(partial):
            _compare(partial, record, made_with)
        else:
            with replacing(record, record.with_name(f"{record.name}.new")) as aside:
                aside.write_text(json.dumps(made_with, indent=2), encoding="utf-8")
        done = _complete_lines(output)
        if done > source.num_lines:
            raise UserError(
                f"{partial} cannot be continued, because it has {done:,} lines, and {source.path} "
                f"{source.num_lines:,}; delete it."
            )
        lines = islice(source.lines(), done, None)
        with tqdm(
            total=source.num_lines, initial=done, desc="Translating", unit="line", disable=not show_progress
        ) as progress:
            while block := list(islice(lines, translator.window)):
                texts = [layout.text_of(line, "") for line in block]
                found = translator.translate_window(
                    texts, start=done, with_scores=layout.alternatives, on_progress=progress.update
                )
                for line, translations in zip(block, found, strict=True):
                    output.write(f"{layout.line_of(line, translations)}\n".encode())
                done += len(block)
                output.flush()
                os.fsync(output.fileno())
        if os.name == "nt":
            # Windows renames no open file.
            output.close()
        partial.replace(target)
        record.unlink(missing_ok=True)


def partial_files(target: Path) -> tuple[Path, Path]:
    """Paths of an unfinished output and of its record."""
    target = target.resolve()
    return target.with_name(f"{target.name}.partial"), target.with_name(f"{target.name}.partial.json")


def check_partial(target: Path, *, resume: bool) -> None:
    """Refuse to overwrite an unfinished output, or other files of the same names.

    Args:
        target: The file of translations.
        resume: Whether to continue an unfinished output.

    Raises:
        UserError: There is an unfinished output, and it is not to be continued or cannot be; or other files have its
            names.
    """
    partial, record = partial_files(target)
    for path in (partial, record):
        if os.path.lexists(path) and not path.is_file():
            raise UserError(f"{path} is in the way: it must be a file, or not be there; move it away.")
    if _holds_lines(partial):
        if not resume:
            raise UserError(
                f"{partial} holds what an interrupted translation left; continue it with `resume`, or delete it."
            )
        if _read_record(record) is None:
            raise UserError(f"{partial} cannot be continued, because {record} is missing or damaged; delete both.")
    elif record.exists() and _read_record(record) is None:
        raise UserError(f"{record} is not what a translation left, and would be overwritten; move it away.")


def _holds_lines(partial: Path) -> bool:
    return partial.exists() and partial.stat().st_size > 0


def _read_record(record: Path) -> dict[str, Any] | None:
    """The record of an unfinished output; `None` if it cannot be read."""
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.keys() >= {"input", "model", "search"} else None


def _compare(partial: Path, record: Path, made_with: dict) -> None:
    before = _read_record(record) or {}
    different = [name for name, value in made_with.items() if before.get(name) != value]
    if different:
        raise UserError(
            f"{partial} cannot be continued, because these have changed: {', '.join(different)}; set them back, or "
            "delete it."
        )


def _complete_lines(output: BinaryIO) -> int:
    """The number of complete lines of a file; what follows them is cut off."""
    output.seek(0)
    number = end = 0
    for line in output:
        if line.endswith(b"\n"):
            number += 1
            end += len(line)
    output.truncate(end)
    output.seek(end)
    return number


def _lock(output: BinaryIO, path: Path) -> None:
    """Lock an open file against other processes until it is closed, if the file system has locks."""
    try:
        is_ours = lock(output.fileno(), path)
    except OSError:
        # Some network file systems have no locks.
        return
    if not is_ours:
        raise UserError(f"{path} is being written by another process; wait for it, or choose another file.")


def is_model_file(path: Path, model: str | Path) -> bool:
    """Whether a path is one of a model's own files.

    Args:
        path: The path.
        model: Folder of the model, or its name on the Hub.
    """
    real = path.resolve()
    in_folder = Path(model).is_dir() and real.parent == Path(model).resolve()
    return in_folder and any(fnmatch(real.name, pattern) for pattern in _MODEL_FILES)


def _identity_of_model(translator: "Translator", model: str | Path) -> str:
    folder = Path(model)
    if not folder.is_dir():
        return f"{model}@{getattr(translator.model.config, '_commit_hash', None)}"
    digest = hashlib.sha256()
    patterns = {*_MODEL_FILES, *translator.tokenizer.vocab_files_names.values()}
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        found = describe(path, "sha256")
        digest.update(f"{path.name} {found['size']} ".encode() + bytes.fromhex(found["sha256"]))
    return digest.hexdigest()
