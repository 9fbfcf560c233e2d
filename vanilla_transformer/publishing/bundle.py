"""The files of a published model: weights, tokenizer, configuration with code, card, facts, measurements."""

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoTokenizer

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.errors import UserError
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.tokenization_vanilla_transformer import VanillaTransformerTokenizer

from .card import CARD, FACTS, PICTURE, card_files
from .facts import Facts, merged, read_facts, read_json
from .remote_code import published_config, published_tokenizer_config, source_files
from .run_facts import find_facts, find_scores, records_until, result_updates


_TRANSLATION = VanillaTransformerForConditionalGeneration.__name__
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_INDEX = "model.safetensors.index.json"
# What tokenizers of transformers save; ours has the first two.
_TOKENIZER = re.compile(
    r"tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|"
    r"merges\.txt|chat_template\.jinja|.*\.(spm|model)"
)
# What belongs to one model, and would be taken for part of the next one that is published in its place.
_MODEL_FILES = (_INDEX, "generation_config.json", "metrics.jsonl", PICTURE)
_UPDATE = re.compile(r"update-(\d+)")


@dataclass(frozen=True, slots=True)
class Bundle:
    """What becomes a commit.

    Args:
        files: Contents, or the files that hold them, by their names in the repository.
        facts: What its card tells.
        folder: Folder of the model.
    """

    files: dict[str, bytes | Path]
    facts: Facts
    folder: Path

    @property
    def card(self) -> str:
        """The text of the model card."""
        return self.files[CARD].decode()

    def sizes(self) -> dict[str, int]:
        """Bytes of each file, by name."""
        return {
            name: content.stat().st_size if isinstance(content, Path) else len(content)
            for name, content in sorted(self.files.items())
        }

    def replaced(self, names: Iterable[str]) -> list[str]:
        """Files of an earlier model that this one lacks.

        Args:
            names: Files of the repository.

        Returns:
            Those of them that must go when this model comes: weights in other pieces, for example.
        """
        return [
            name
            for name in names
            if name not in self.files
            and (name in _MODEL_FILES or _WEIGHTS.fullmatch(name) or ("/" not in name and _TOKENIZER.fullmatch(name)))
        ]


def make_bundle(
    folder: Path,
    place: str,
    *,
    run: Path | None = None,
    revision: str | None = None,
    told: dict[str, Any] | None = None,
    evaluations: Sequence[Path] = (),
) -> Bundle:
    """Gather the files of a model.

    Args:
        folder: A run's folder, one of its checkpoints, or any folder with a model of this package.
        place: Name of the repository.
        run: Folder of the run; default: `folder`, or the run that the checkpoint `folder` lies in.
        revision: Branch that the card tells how to load; `None` for the main branch.
        told: Facts that no file of the run holds; they win over those that are found.
        evaluations: Files of scores, which win over those that are found or told.

    Returns:
        The files.

    Raises:
        UserError: The folder holds no whole model of this package, or facts are wrong.
    """
    weights = check_model_folder(folder)
    run = run or run_of(folder)
    match = _UPDATE.fullmatch(folder.resolve().name)
    updates = [int(match[1])] if match else [] if run is None else result_updates(run)
    found = find_facts(folder, run, weights, name=place, updates=updates)
    if not evaluations and (folder / "evaluation.json").exists():
        found["scores"] = find_scores(folder / "evaluation.json")
    given: dict[str, Any] = {"name": place}
    if evaluations:
        given["scores"] = [score for path in evaluations for score in find_scores(path)]
    facts = read_facts(merged(merged(found, told or {}), given), FACTS)
    files: dict[str, bytes | Path] = {path.name: path for path in weights}
    for path in sorted(folder.iterdir()):
        if path.name in ("generation_config.json", _INDEX) or _TOKENIZER.fullmatch(path.name):
            files[path.name] = path
    files["config.json"] = _json(published_config(read_json(folder / "config.json")))
    if "tokenizer_config.json" in files:
        files["tokenizer_config.json"] = _json(published_tokenizer_config(read_json(folder / "tokenizer_config.json")))
    files |= {path.name: path for path in source_files()}
    if run is not None and (records := records_until(run, max(updates, default=None))):
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        files["metrics.jsonl"] = lines.encode()
    files |= {name: text.encode() for name, text in card_files(facts, place, revision=revision).items()}
    return Bundle(files, facts, folder)


def check_model_folder(folder: Path) -> list[Path]:
    """Refuse what is not a whole model of this package.

    Args:
        folder: Folder of a model.

    Returns:
        The files of its weights.

    Raises:
        UserError: As said.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the folder of a run, a checkpoint or another model.")
    if not (folder / "config.json").is_file():
        hint = "let the run end, or give one of its checkpoints." if (folder / "checkpoints").is_dir() else "give one."
        raise UserError(f"{folder} is not a model's folder: it lacks config.json; {hint}")
    config = read_json(folder / "config.json")
    kind = config.get("model_type")
    if kind != VanillaTransformerConfig.model_type:
        raise UserError(
            f"{folder} holds a model of type {kind}; publish those of {VanillaTransformerConfig.model_type}."
        )
    architectures = config.get("architectures") or [_TRANSLATION]
    if architectures != [_TRANSLATION]:
        raise UserError(
            f"{folder} holds a {', '.join(map(str, architectures))}, but the card is that of a translation model; "
            "publish a head with its own `push_to_hub`."
        )
    weights = [path for path in sorted(folder.iterdir()) if _WEIGHTS.fullmatch(path.name)]
    if (folder / _INDEX).is_file():
        places = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise UserError(f"{folder / _INDEX} has no weight_map with the names of files; save the model again.")
        needed = sorted({*places.values()})
    else:
        needed = ["model.safetensors"]
    present = {path.name for path in weights}
    names = [*needed, "tokenizer_config.json"]
    path = folder / "tokenizer_config.json"
    # Without it, ours would load as one of bytes alone.
    if path.is_file() and read_json(path).get("tokenizer_class") == VanillaTransformerTokenizer.__name__:
        names.append("tokenizer.json")
    for name in names:
        if name not in present and not (folder / name).is_file():
            raise UserError(f"{folder} lacks {name}, which a published model needs; save model and tokenizer there.")
    return [folder / name for name in needed]


def check_loads(folder: Path) -> None:
    """Refuse a model that would not load as it was saved, or whose tokenizer does not fit.

    Args:
        folder: Folder of a model.

    Raises:
        UserError: Weights are damaged, missing or of other shapes, or the tokenizer has entries that they lack.
    """
    try:
        config = VanillaTransformerConfig.from_pretrained(folder)
        _, report = VanillaTransformerForConditionalGeneration.from_pretrained(
            folder, output_loading_info=True, ignore_mismatched_sizes=True
        )
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (SafetensorError, StrictDataclassError, OSError, ValueError) as error:
        raise UserError(f"{folder} does not load ({' '.join(str(error).split())}); save it again.") from error
    wrong = [*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"]), *report["unexpected_keys"]]
    if wrong:
        raise UserError(f"The weights in {folder} do not fit its config.json ({sorted(wrong)[0]}); save it again.")
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"The tokenizer in {folder} has {len(tokenizer):,} entries and the model {config.vocab_size:,}; save the "
            "model's own tokenizer there."
        )


def told_facts(folder: Path) -> dict[str, Any]:
    """What `facts.json` in a folder tells of its model; nothing if it is not there."""
    path = folder / FACTS
    return read_json(path) if path.exists() else {}


def run_of(folder: Path) -> Path | None:
    """The run that a model comes from: its folder, or that of its checkpoints; `None` if there are no records."""
    folder = folder.resolve()
    candidates = [folder, folder.parent.parent] if folder.parent.name == "checkpoints" else [folder]
    needed = ("run.json", "options.yaml")
    return next((path for path in candidates if all((path / name).is_file() for name in needed)), None)


def check_private(bundle: Bundle, secrets: dict[str, str]) -> None:
    """Refuse to publish a text that holds what belongs to this machine alone.

    Args:
        bundle: The files.
        secrets: Words that no text may hold, with what they are.

    Raises:
        UserError: A text holds one of them.
    """
    for name, content in bundle.files.items():
        if name.endswith(".safetensors") or content in source_files():
            continue
        text = (content.read_bytes() if isinstance(content, Path) else content).decode(errors="replace")
        for word, what in secrets.items():
            # Any folder's name may be an entry of a vocabulary.
            is_word = os.sep in word and name != "tokenizer_config.json" and _TOKENIZER.fullmatch(name)
            if word in text and not is_word:
                raise UserError(f"{name} would publish {what}; take it out of the file or facts that it comes from.")


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
