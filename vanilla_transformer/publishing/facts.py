"""The facts about a model, measured by its run or given by the user; unknown facts are absent."""

import difflib
import json
import math
from dataclasses import MISSING, asdict, dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from vanilla_transformer.errors import UserError


Record = TypeVar("Record")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingText:
    """The text that a model was trained on.

    Args:
        name: What it is called.
        dataset: Its name on the Hub.
        url: Where it comes from.
        license: Its licence, in words.
        train_pairs: Number of pairs that were trained on.
        valid_pairs: Number of pairs that were validated on.
        dropped_pairs: Number of training pairs that were left out as empty, too long or unreadable.
    """

    name: str | None = None
    dataset: str | None = None
    url: str | None = None
    license: str | None = None
    train_pairs: int | None = None
    valid_pairs: int | None = None
    dropped_pairs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a model was trained.

    Args:
        updates: Number of optimiser steps.
        epochs: Passes over the text.
        averaged: Number of checkpoints whose mean the model is.
        seconds: Duration of the training alone, without validation and saving.
        device: Kind of device.
        processes: Number of processes.
        hardware: The machine, in words.
        options: Training options under their names on the command line.
        versions: Versions of the packages.
    """

    updates: int | None = None
    epochs: float | None = None
    averaged: int | None = None
    seconds: float | None = None
    device: str | None = None
    processes: int | None = None
    hardware: str | None = None
    options: dict[str, str | int | float | bool] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Negative log-likelihood per target token, in nats, over the updates.

    Args:
        train: Updates and values on training text, with dropout.
        valid: Updates and values on validation text.
    """

    train: tuple[tuple[int, float], ...] = ()
    valid: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TestScore:
    """Scores on a test set, and how they were computed.

    Args:
        test_set: Name of the test set.
        dataset: Its name on the Hub.
        split: Its split there.
        num_sentences: Number of its sentences.
        bleu: BLEU, 0 to 100.
        bleu_signature: The settings of sacreBLEU that reproduce it.
        chrf: chrF2, 0 to 100.
        chrf_signature: The same for chrF.
        num_beams: Beam size.
        length_penalty: Length penalty.
        rules: Rules of the beam search: `paper` or `transformers`.
        seconds: Duration of translating it.
        device: Device that translated it.
        threads: Number of CPU threads that translated it.
    """

    # Keeps pytest from collecting this class as a test.
    __test__ = False

    test_set: str
    dataset: str | None = None
    split: str | None = None
    num_sentences: int
    bleu: float
    bleu_signature: str
    chrf: float | None = None
    chrf_signature: str | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    rules: str | None = None
    seconds: float | None = None
    device: str | None = None
    threads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All facts on a model card.

    Args:
        name: Name of the model.
        summary: A sentence about it.
        source_language: Code of the source language.
        target_languages: Codes of the target languages.
        language_tags: Target languages from which a user must choose; empty without a choice.
        license: Licence of the model, as the Hub names it, such as `apache-2.0`.
        parameters: Number of parameters.
        architecture: The configuration's hyper-parameters.
        max_source_tokens: Length of the longest sentences that it was trained on.
        text: The training text.
        training: The training.
        curve: Learning curve.
        scores: Scores on test sets.
        limits: Sentences about what it cannot do.
    """

    name: str
    summary: str | None = None
    source_language: str | None = None
    target_languages: tuple[str, ...] = ()
    language_tags: tuple[str, ...] = ()
    license: str | None = None
    parameters: int | None = None
    architecture: dict[str, str | int | float | bool] = field(default_factory=dict)
    max_source_tokens: int | None = None
    text: TrainingText | None = None
    training: Training | None = None
    curve: Curve | None = None
    scores: tuple[TestScore, ...] = ()
    limits: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The record that is written as JSON, without what is unknown."""
        return _known(asdict(self))

    def as_json(self) -> str:
        """The text of `facts.json`."""
        return json.dumps(self.as_dict(), indent=2, ensure_ascii=False) + "\n"


def read_facts(values: Any, place: object) -> Facts:
    """Check a record of facts.

    Args:
        values: Content of a `facts.json`.
        place: Where it was read, for messages.

    Returns:
        The facts.

    Raises:
        UserError: A name is unknown, a required name is missing, or a value has the wrong type.
    """
    return _record(Facts, values, str(place))


def merged(found: dict[str, Any], told: dict[str, Any]) -> dict[str, Any]:
    """Merge facts from the user into facts from files; the user's win, item by item.

    Args:
        found: Facts from files.
        told: Facts from the user.

    Returns:
        A record with both.
    """
    both = dict(found)
    for name, value in told.items():
        nested = isinstance(value, dict) and isinstance(found.get(name), dict)
        both[name] = merged(found[name], value) if nested else value
    return both


def _record(kind: type[Record], values: Any, place: str) -> Record:
    if not isinstance(values, dict):
        raise UserError(f"{place} holds {values!r}; it must be an object with names and values.")
    hints = get_type_hints(kind)
    for name in values:
        if name not in hints:
            nearest = difflib.get_close_matches(name, hints, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"the names are {', '.join(hints)}."
            raise UserError(f"{place} names {name}, which is not known; {hint}")
    for item in fields(kind):
        if item.default is MISSING and item.default_factory is MISSING and item.name not in values:
            raise UserError(f"{place} lacks {item.name}; add it.")
    return kind(**{name: _value(hints[name], value, f"{place}: {name}") for name, value in values.items()})


def _value(hint: Any, value: Any, place: str) -> Any:
    if isinstance(hint, UnionType):
        choices = get_args(hint)
        if value is None and NoneType in choices:
            return None
        plain = [choice for choice in choices if choice is not NoneType]
        if len(plain) == 1:
            return _value(plain[0], value, place)
        if isinstance(value, tuple(plain)):
            return value
    elif get_origin(hint) is dict and isinstance(value, dict):
        return {name: _value(get_args(hint)[1], item, f"{place}, {name}") for name, item in value.items()}
    elif get_origin(hint) is tuple and isinstance(value, list | tuple):
        kinds = get_args(hint)
        kinds = [kinds[0]] * len(value) if kinds[-1] is Ellipsis else kinds
        if len(kinds) == len(value):
            return tuple(_value(kind, item, place) for kind, item in zip(kinds, value, strict=True))
    elif get_origin(hint) is not None:
        pass
    elif hasattr(hint, "__dataclass_fields__"):
        return _record(hint, value, place)
    # JSON has neither infinity nor NaN, though Python writes them.
    elif (
        isinstance(value, int | float if hint is float else hint)
        and isinstance(value, bool) == (hint is bool)
        and not (isinstance(value, float) and not math.isfinite(value))
    ):
        return value
    raise UserError(f"{place} is {value!r}, which has the wrong type; correct it.")


def _known(value: Any) -> Any:
    """A value without `None`, and without empty containers."""
    if isinstance(value, dict):
        known = {name: _known(item) for name, item in value.items()}
        return {name: item for name, item in known.items() if item is not None and item not in ({}, [])}
    if isinstance(value, list | tuple):
        return [_known(item) for item in value]
    return value
