"""The identity of a run: what a resumed run must have in common with the run that it continues."""

from typing import Any

from vanilla_transformer.data.encoding import fingerprint_of_tokenizer
from vanilla_transformer.training.preparation.vocabulary_and_ids import PreparedData

from .options import FREE_ON_RESUME, TrainingOptions


def identity_of(options: TrainingOptions, data: PreparedData) -> dict[str, dict[str, Any]]:
    """Everything that weights, losses and the order of batches depend on.

    Args:
        options: Training options.
        data: Vocabulary and encoded text.

    Returns:
        The groups `options` and `data`, each with values by name.
    """
    return {
        "options": {name: value for name, value in options.as_dict().items() if name not in FREE_ON_RESUME},
        "data": {
            "training text": data.train.fingerprint,
            "vocabulary": fingerprint_of_tokenizer(data.tokenizer),
        },
    }


def differences(then: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]]) -> list[str]:
    """Name everything in which two identities differ, with both values.

    Args:
        then: Identity of the run that is to be continued; groups that `now` lacks are ignored.
        now: Identity of the run that continues it.

    Returns:
        One phrase for each difference.
    """
    # A checkpoint from before an option existed has the option's default.
    defaults = TrainingOptions().as_dict()
    then = {**then, "options": {**{name: defaults.get(name) for name in now["options"]}, **then["options"]}}
    # By name, because options of the model are part of its architecture, too.
    phrases = {
        name: f"{name} ({then[group].get(name)!r} then, {values.get(name)!r} now)"
        for group, values in now.items()
        for name in sorted(values.keys() | then[group])
        if values.get(name) != then[group].get(name)
    }
    return list(phrases.values())
