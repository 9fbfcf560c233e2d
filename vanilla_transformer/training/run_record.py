"""What a run's folder tells about the run: its options, and the record of versions, sizes and text."""

import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from vanilla_transformer.files import replacing
from vanilla_transformer.training.preparation.output_folder import read_run_record
from vanilla_transformer.training.preparation.vocabulary_and_ids import PreparedData
from vanilla_transformer.training.step.distribution import Division

from .options import TrainingOptions
from .run_identity import identity_of


_PACKAGES = ("vanilla-transformer", "torch", "transformers", "tokenizers", "accelerate", "datasets", "safetensors")


def note_result(folder: Path, updates: list[int] | None) -> None:
    """Note in `run.json` what the run's model was made of.

    Args:
        folder: Folder of the run.
        updates: Numbers of optimiser steps of the checkpoints; `None` while the model is being written.
    """
    _write(folder, {**read_run_record(folder), "result": None if updates is None else {"updates": updates}})


def write_run_record(folder: Path, options: TrainingOptions, data: PreparedData, facts: dict[str, Any]) -> None:
    """Write `options.yaml` and `run.json`, and say on standard error what is going to be trained.

    Args:
        folder: Folder of the run.
        options: Options of the run.
        data: Vocabulary and encoded text.
        facts: What the engine knows of the run: `parameters`, `updates`, `updates_per_epoch`, `fill_rate`,
            `processes`, `division`, `wrapper`, `device`, `attention`, `padding` and `operations`.
    """
    fingerprints = identity_of(options, data)["data"]
    if data.valid is not None:
        fingerprints["validation text"] = data.valid.fingerprint
    earlier = read_run_record(folder) if options.resume else {}
    record = {
        **facts,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in _PACKAGES},
        "trackers": list(options.chosen_trackers),
        "fingerprints": fingerprints,
        "dataset_is_folder": options.dataset is not None and Path(options.dataset).is_dir(),
        "train": data.train.report,
        "valid": None if data.valid is None else data.valid.report,
        # The model that lies there stays that of the earlier run until this one has a result.
        "result": earlier.get("result"),
    }
    # First, for it tells that the files beside it are a run's.
    _write(folder, record)
    values = options.as_dict() | {"resume": False}
    (folder / "options.yaml").write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    for name, corpus in (("training", data.train), ("validation", data.valid)):
        if corpus is not None and corpus.report["summary"]:
            print(f"Of the {name} text, {corpus.report['summary']}.", file=sys.stderr)
    per_epoch = record["updates_per_epoch"]
    extent = " in the window of a stream" if per_epoch is None else f"; {per_epoch:,} updates an epoch"
    print(
        f"{record['parameters']:,} parameters; {len(data.train):,} pairs{extent}; {record['fill_rate']:.1%} of the "
        f"tokens are not padding; {record['attention']} attention and {record['operations']} on "
        f"{record['processes']} x {record['device']}.\n"
        f"{Division(**record['division'])}.",
        file=sys.stderr,
    )


def _write(folder: Path, record: dict[str, Any]) -> None:
    content = json.dumps(record, indent=2, ensure_ascii=False)
    with replacing(folder / "run.json") as aside:
        # Bytes of a file's name that are not UTF-8 stay escaped.
        aside.write_text(content, encoding="utf-8", errors="backslashreplace")
