"""The files of a published model: weights, tokenizer, configuration with code, card, facts, measurements."""

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.errors import UserError
from vanilla_transformer.loading import WEIGHTS, WEIGHTS_INDEX, read_json
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.tokenization_vanilla_transformer import VanillaTransformerTokenizer

from .card import CARD, FACTS, PICTURE, card_files
from .facts import Facts, merged, read_facts
from .remote_code import published_config, published_tokenizer_config, source_files
from .run_facts import find_facts, find_scores, records_until, result_updates


_TRANSLATION = VanillaTransformerForConditionalGeneration.__name__
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
# Files that tokenizers of transformers save; ours saves the first two.
_TOKENIZER = re.compile(
    r"tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|"
    r"merges\.txt|chat_template\.jinja|.*\.(spm|model)"
)
# Files of one model that would be mistaken for part of the next model published in the same repository.
_MODEL_FILES = (WEIGHTS_INDEX, "generation_config.json", "metrics.jsonl", PICTURE)
_SCORES = "evaluation.json"
# Other files that are read from the folder of a model or a run.
_READ = (
    "config.json",
    "generation_config.json",
    WEIGHTS_INDEX,
    FACTS,
    _SCORES,
    "run.json",
    "options.yaml",
    "metrics.jsonl",
)
_UPDATE = re.compile(r"update-(\d+)")


@dataclass(frozen=True, slots=True)
class Bundle:
    """The content of a commit.

    Args:
        files: Contents, or paths of local files, by name in the repository.
        facts: The facts on the card.
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
            Those that must be deleted with this commit, for example weights in other shards.
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
        revision: Branch or tag that the card's examples load; `None` for the main branch.
        told: Facts from the user; they win over facts from files.
        evaluations: Files of scores; they win over scores from other files and from the user.

    Returns:
        The files.

    Raises:
        UserError: The folder holds no complete model of this package, or facts are invalid.
    """
    weights = check_model_folder(folder)
    run = run or run_of(folder)
    if run is not None:
        check_links(run)
    match = _UPDATE.fullmatch(folder.resolve().name)
    updates = [int(match[1])] if match else [] if run is None else result_updates(run)
    found = find_facts(folder, run, weights, name=place, updates=updates)
    if not evaluations and (folder / _SCORES).exists():
        found["scores"] = find_scores(folder / _SCORES)
    given: dict[str, Any] = {"name": place}
    if evaluations:
        given["scores"] = [score for path in evaluations for score in find_scores(path)]
    facts = read_facts(merged(merged(found, told or {}), given), FACTS)
    files: dict[str, bytes | Path] = {path.name: path for path in weights}
    for path in sorted(folder.iterdir()):
        is_wanted = path.name in ("generation_config.json", WEIGHTS_INDEX) or _TOKENIZER.fullmatch(path.name)
        if is_wanted and path.is_file():
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
    """Refuse a folder without a complete model of this package.

    Args:
        folder: Folder of a model.

    Returns:
        The files of its weights.

    Raises:
        UserError: As said.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the folder of a run, a checkpoint or another model.")
    check_links(folder)
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
            "publish a head with `model.push_to_hub(...)`."
        )
    weights = [path for path in sorted(folder.iterdir()) if _WEIGHTS.fullmatch(path.name)]
    if (folder / WEIGHTS_INDEX).is_file():
        places = read_json(folder / WEIGHTS_INDEX).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise UserError(
                f"{folder / WEIGHTS_INDEX} has no weight_map with the names of files; save the model again."
            )
        needed = sorted({*places.values()})
        if strangers := [name for name in needed if not _WEIGHTS.fullmatch(name)]:
            raise UserError(
                f"{folder / WEIGHTS_INDEX} names {strangers[0]}, which is no file of weights in the folder; save the "
                "model again."
            )
        if (folder / WEIGHTS).is_file():
            raise UserError(f"{folder} holds {WEIGHTS} and {WEIGHTS_INDEX}; remove the older of the two.")
    else:
        needed = [WEIGHTS]
    present = {path.name for path in weights}
    names = [*needed, "tokenizer_config.json"]
    path = folder / "tokenizer_config.json"
    # Without this file, our tokenizer would load with bytes as its only entries.
    if path.is_file() and read_json(path).get("tokenizer_class") == VanillaTransformerTokenizer.__name__:
        names.append("tokenizer.json")
    for name in names:
        if name not in present and not (folder / name).is_file():
            raise UserError(f"{folder} lacks {name}, which a published model needs; save model and tokenizer there.")
    return [folder / name for name in needed]


def check_links(folder: Path) -> None:
    """Refuse links to files outside a folder, which would publish files that the user may not know of.

    Links inside the folder are followed; so are links from a checkpoint into its run, and links of a huggingface_hub
    download into its `blobs`.

    Args:
        folder: Folder of a model or a run.

    Raises:
        UserError: A file is a link that leads out of the folder.
    """
    home = folder.resolve()
    run = run_of(home)
    places = [home] if run is None else [home, run]
    repository = home.parent.parent
    if home.parent.name == "snapshots" and repository.name.startswith("models--"):
        places.append(repository / "blobs")
    for path in sorted(folder.iterdir() if folder.is_dir() else []):
        is_read = path.name in _READ or _WEIGHTS.fullmatch(path.name) or _TOKENIZER.fullmatch(path.name)
        target = Path(os.path.realpath(path))
        if is_read and not any(target.is_relative_to(place) for place in places):
            raise UserError(
                f"{path} is a link to a file outside of the folder ({target}), which is not published; put a "
                "copy in its place, or leave it out."
            )


def told_facts(folder: Path) -> dict[str, Any]:
    """The facts in the `facts.json` of a folder; empty without that file.

    Args:
        folder: Folder of a model or a run.

    Returns:
        The facts.

    Raises:
        UserError: The file holds no JSON object, or is a link to a file outside the folder.
    """
    check_links(folder)
    path = folder / FACTS
    return read_json(path) if path.exists() else {}


def run_of(folder: Path) -> Path | None:
    """The run of a model: its own folder, or the folder above `checkpoints`; `None` without records of a run."""
    folder = folder.resolve()
    candidates = [folder, folder.parent.parent] if folder.parent.name == "checkpoints" else [folder]
    needed = ("run.json", "options.yaml")
    return next((path for path in candidates if all((path / name).is_file() for name in needed)), None)


def check_private(bundle: Bundle, secrets: dict[str, str]) -> None:
    """Refuse to publish a text that contains a secret or a path of this machine.

    Args:
        bundle: The files.
        secrets: Strings that no text may contain, each with a description.

    Raises:
        UserError: A text contains one of them.
    """
    for name, content in bundle.files.items():
        if name.endswith(".safetensors") or content in source_files():
            continue
        text = (content.read_bytes() if isinstance(content, Path) else content).decode(errors="replace")
        for word, what in secrets.items():
            # A vocabulary may contain the name of any folder.
            is_word = os.sep in word and name != "tokenizer_config.json" and _TOKENIZER.fullmatch(name)
            if word in text and not is_word:
                raise UserError(f"{name} would publish {what}; take it out of the file or facts that it comes from.")


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
