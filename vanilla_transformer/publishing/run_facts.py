"""The facts that a model's folder and its run's records tell."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError, safe_open

from vanilla_transformer.errors import UserError
from vanilla_transformer.loading import read_json
from vanilla_transformer.training.records.journal import read_journal

from .facts import TestScore


# Points of a curve that a card keeps of each kind.
_POINTS = 100
_ARCHITECTURE = (
    "d_model",
    "encoder_layers",
    "decoder_layers",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "norm_position",
    "position_embedding_type",
    "activation_function",
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "tie_word_embeddings",
    "vocab_size",
)
# Options that say how weights were reached; none of them names a file.
_OPTIONS = (
    "batching",
    "tokens_per_update",
    "tokens_per_batch",
    "max_length",
    "warmup_steps",
    "learning_rate_scale",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "label_smoothing",
    "max_grad_norm",
    "bpe_dropout",
    "ema_decay",
    "mixed_precision",
    "seed",
)
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def find_facts(
    folder: Path, run: Path | None, weights: list[Path], *, name: str, updates: Sequence[int] = ()
) -> dict[str, Any]:
    """Gather what the files say.

    Args:
        folder: The model's folder.
        run: Folder of the run that made it, with `run.json`, `options.yaml` and `metrics.jsonl`; `None` if unknown.
        weights: Its weights, in safetensors.
        name: Name of the model.
        updates: Numbers of optimiser steps of the checkpoints that it is made of; empty if unknown.

    Returns:
        A record for `facts.read_facts`.
    """
    config = read_json(folder / "config.json")
    found: dict[str, Any] = {
        "name": name,
        "parameters": sum(_sizes(path) for path in weights),
        "architecture": {key: config[key] for key in _ARCHITECTURE if config.get(key) is not None},
    }
    path = folder / "tokenizer_config.json"
    tokenizer = read_json(path) if path.exists() else {}
    length = tokenizer.get("model_max_length")
    # Tokenizers without a length write a number beyond all others.
    if isinstance(length, int | float) and length < 1e9:
        found["max_source_tokens"] = int(length)
    # A tokenizer that was saved with a language needs no other.
    if tokenizer.get("tgt_lang") is None and (tags := _language_tags(folder / "tokenizer.json")):
        found["target_languages"] = found["language_tags"] = tags
    if run is not None:
        try:
            _add_run(found, run, updates)
        except (LookupError, TypeError, AttributeError) as error:
            raise UserError(
                f"The records in {run}, run.json, options.yaml and metrics.jsonl, are not as runs write them "
                f"({type(error).__name__}: {error}); restore them, or publish a copy of the model alone."
            ) from error
    return found


def find_scores(path: Path) -> list[dict[str, Any]]:
    """The scores of a file that `evaluate --output` or `quickstart` wrote.

    Args:
        path: The file.

    Returns:
        Records for `facts.read_facts`.

    Raises:
        UserError: The file holds no scores.
    """
    record = read_json(path)
    if isinstance(record.get("model"), dict):
        record = record["model"]
    if "bleu" not in record:
        raise UserError(f"{path} holds no scores; give a file that `evaluate --output` wrote.")
    names = TestScore.__dataclass_fields__
    # The name of the model may be a path.
    return [{"test_set": path.stem, **{key: value for key, value in record.items() if key in names}}]


def records_until(run: Path, update: int | None) -> list[dict[str, Any]]:
    """What a run measured, up to an update.

    Args:
        run: The run's folder.
        update: Number of optimiser steps; `None` for all.

    Returns:
        The records of `metrics.jsonl`.

    Raises:
        UserError: A line of it is JSON, and no record.
    """
    path = run / "metrics.jsonl"
    records = read_journal(path) if path.exists() else []
    return [record for record in records if update is None or record["update"] <= update]


def _language_tags(path: Path) -> list[str]:
    """Languages that the vocabulary of our tokenizer has tags for."""
    entries = read_json(path).get("added_tokens", []) if path.exists() else []
    return [entry["content"][2:-1] for entry in entries if re.fullmatch("<2.+>", entry["content"])]


def result_updates(run: Path) -> list[int]:
    """Numbers of optimiser steps of the checkpoints that a run's result was made of; empty if it is not recorded."""
    result = read_json(run / "run.json").get("result")
    updates = result.get("updates", []) if isinstance(result, dict) else []
    if not isinstance(updates, list) or not all(isinstance(update, int) for update in updates):
        raise UserError(f"{run / 'run.json'} has {updates!r} as the updates of its result; restore the file.")
    return updates


def _add_run(found: dict[str, Any], run: Path, updates: Sequence[int]) -> None:
    record = read_json(run / "run.json")
    for name in ("train", "valid", "device", "processes", "versions"):
        if name not in record or (name == "train" and not isinstance(record[name], dict)):
            raise UserError(
                f"{run / 'run.json'} lacks {name}, which runs write; restore it, or publish a copy of the model alone."
            )
    options = _read_options(run / "options.yaml")
    languages = (options.get("source_language"), options.get("target_language"))
    if languages[0]:
        found["source_language"] = languages[0]
    if languages[1]:
        found["target_languages"] = [languages[1]]
    train, valid = record["train"], record["valid"]
    found["text"] = {
        "dataset": None if record.get("dataset_is_folder") else _hub_name(options.get("dataset")),
        "train_pairs": train.get("pairs_kept"),
        "dropped_pairs": sum(train["dropped"].values()) if "dropped" in train else None,
        "valid_pairs": valid.get("pairs_kept") if valid else None,
    }
    # Of a result that nobody noted, how far the run has come tells nothing.
    update = max(updates, default=None)
    records = records_until(run, update)
    steps = [item for item in records if item["kind"] == "train"]
    seconds = [item.get("seconds") for item in steps]
    found["training"] = {
        "updates": update,
        "epochs": steps[-1].get("epoch") if steps and updates else None,
        "averaged": len(updates) or None,
        "seconds": round(sum(seconds), 1) if seconds and updates and None not in seconds else None,
        "device": str(record["device"]).split(":")[0],
        "processes": record["processes"],
        "options": {key: options[key] for key in _OPTIONS if options.get(key) is not None},
        "versions": record["versions"],
    }
    found["curve"] = {
        "train": _points((item["update"], item["nll"]) for item in steps),
        "valid": _points((item["update"], item["loss"]) for item in records if item["kind"] == "valid"),
    }


def _read_options(path: Path) -> dict[str, Any]:
    try:
        options = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} is not YAML ({' '.join(str(error).split())}); correct it.") from error
    if not isinstance(options, dict):
        raise UserError(f"{path} holds no named values; restore the options of the run.")
    return options


def _hub_name(dataset: str | None) -> str | None:
    """The name of a data set, unless it is a folder of this machine."""
    is_name = dataset is not None and _HUB_NAME.fullmatch(dataset) and not Path(dataset).exists()
    return dataset if is_name else None


def _points(values: Any) -> list[list[float]]:
    """So many points of a curve, evenly spaced, the last one among them."""
    points = [[update, round(value, 4)] for update, value in values]
    step = max(1, math.ceil(len(points) / _POINTS))
    return points[::-1][::step][::-1]


def _sizes(path: Path) -> int:
    """Number of values in a file of safetensors; tied weights are there once."""
    try:
        with safe_open(path, "np") as file:
            return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read as safetensors ({error}); use another copy.") from error
