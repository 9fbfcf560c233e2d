"""The measurements of a run as JSON Lines; each record occurs exactly once, even if the run is resumed."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vanilla_transformer.data.batching import Update
from vanilla_transformer.errors import UserError
from vanilla_transformer.files import replacing, sync


class Journal:
    """Append-only record of a run.

    Args:
        path: File of JSON lines, each with the number of its optimiser step under `update`.
        last_update: Records after this step are dropped, because the run stopped before it saved that state.
        last_validation: The same limit for validations; the saved state may not include the last step's validation.
        on_record: Receives every record, including the existing ones that are kept.
    """

    def __init__(
        self,
        path: Path,
        last_update: int = 0,
        last_validation: int | None = None,
        on_record: Callable[[dict[str, Any]], None] | None = None,
    ):
        self.path = path
        self._on_record = on_record
        last = {"valid": last_update if last_validation is None else last_validation}
        records = read_journal(path) if path.exists() else []
        kept = [record for record in records if record["update"] <= last.get(record["kind"], last_update)]
        content = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept)
        with replacing(path) as aside:
            aside.write_text(content, encoding="utf-8")
        if on_record is not None:
            for record in kept:
                on_record(record)

    def write(self, kind: str, update: int, values: dict[str, Any]) -> None:
        """Append a record.

        Args:
            kind: `train`, `valid` or `sample`.
            update: Number of optimiser steps done.
            values: Measurements, or a sample's texts.
        """
        record = {"kind": kind, "update": update, **values}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
        if self._on_record is not None:
            self._on_record(record)

    def sync(self) -> None:
        """Flush all records to the disk, before a checkpoint is written that counts on them."""
        sync(self.path)


def read_journal(path: Path) -> list[dict[str, Any]]:
    """All complete records of a journal; truncated lines, which are not JSON, are left out.

    Args:
        path: The journal.

    Returns:
        The records, each with its `kind`, a text, and `update`, a whole number.

    Raises:
        UserError: The file cannot be read, or a line is JSON but no record.
    """
    records = []
    try:
        # Bytes, of which only "\n" ends a line; a text's lines would also end at a carriage return.
        with path.open("rb") as file:
            lines = [line.decode("utf-8", errors="replace") for line in file]
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); correct it, or move it away.") from error
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not _is_record(record):
            raise UserError(f"{path} holds {line.rstrip()[:80]}, which is no record of an update; take the line out.")
        records.append(record)
    return records


def _is_record(record: object) -> bool:
    return (
        isinstance(record, dict)
        and isinstance(record.get("kind"), str)
        and isinstance(record.get("update"), int)
        and not isinstance(record["update"], bool)
    )


def validation_line(update: int, record: dict[str, float]) -> str:
    """The scores of a validation as one line of text."""
    scores = ", ".join(f"{name} {value:.2f}" for name, value in record.items() if name != "loss")
    return f"Update {update:,}: validation loss {record['loss']:.4f}, {scores}"


class Window:
    """Sums over the updates since the last record."""

    def __init__(self):
        self.sums = torch.zeros(2, dtype=torch.float64)
        self.target_tokens = 0
        self.tokens = 0
        self.padded_tokens = 0
        self.flops = 0.0
        self.updates = 0
        self.seconds = 0.0
        self._started = time.perf_counter()

    def add(self, update: Update, sums: torch.Tensor, tokens: tuple[int, int], flops: float) -> None:
        """Count an update: losses summed over all processes, tokens without and with padding, and operations."""
        self.sums += sums
        self.flops += flops
        self.target_tokens += update.num_target_tokens
        self.tokens += tokens[0]
        self.padded_tokens += tokens[1]
        self.updates += 1
        now = time.perf_counter()
        self.seconds += now - self._started
        self._started = now

    def state(self) -> dict[str, Any]:
        """The sums, in JSON values."""
        return {
            "updates": self.updates,
            "sums": self.sums.tolist(),
            "target_tokens": self.target_tokens,
            "tokens": self.tokens,
            "padded_tokens": self.padded_tokens,
            "flops": self.flops,
            "seconds": self.seconds,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the sums from `state`, as if the run had not been interrupted."""
        vars(self).update(state, sums=torch.tensor(state["sums"], dtype=torch.float64))

    def restart_clock(self) -> None:
        """Do not count the time since the last update, which validation and saving took."""
        self._started = time.perf_counter()
