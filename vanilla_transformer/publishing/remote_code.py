"""Lets a repository run without this package: its source files, and the configuration entries that name them.

`register_for_auto_class` would do the same, but it changes the classes for the whole process and copies the sources at
every later save.
"""

from pathlib import Path
from typing import Any

from transformers.models.auto import auto_factory, modeling_auto

import vanilla_transformer
from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.pipeline_vanilla_transformer import CUSTOM_PIPELINES
from vanilla_transformer.tokenization_vanilla_transformer import VanillaTransformerTokenizer


_PACKAGE = Path(vanilla_transformer.__file__).parent
# Where transformers records from which place a tokenizer was loaded.
_LOCAL = ("is_local", "local_files_only", "name_or_path", "_name_or_path")


def source_files() -> list[Path]:
    """The source files that a repository needs: configuration, model, tokenizer and pipeline."""
    return sorted(_PACKAGE.glob("*_vanilla_transformer.py"))


def published_config(config: dict[str, Any]) -> dict[str, Any]:
    """Add the names of the classes of configuration, models and pipelines.

    Args:
        config: Content of the model's `config.json`.

    Returns:
        Content of the published file.
    """
    classes = {"AutoConfig": _name_of(VanillaTransformerConfig), **_model_classes()}
    config = _without_places(config)
    config["auto_map"] = classes
    config.pop("custom_pipelines", None)
    if classes.get("AutoModelForSeq2SeqLM", "").split(".")[-1] in config.get("architectures", ()):
        config["custom_pipelines"] = CUSTOM_PIPELINES
    return config


def published_tokenizer_config(config: dict[str, Any]) -> dict[str, Any]:
    """Add the name of the tokenizer's class if it is ours, and remove the place it was loaded from.

    Args:
        config: Content of `tokenizer_config.json`.

    Returns:
        Content of the published file.
    """
    config = _without_places(config)
    if config.get("tokenizer_class") == VanillaTransformerTokenizer.__name__:
        # The second entry is for a fast tokenizer; transformers expects both.
        config["auto_map"] = {"AutoTokenizer": [_name_of(VanillaTransformerTokenizer), None]}
    return config


def _without_places(config: dict[str, Any]) -> dict[str, Any]:
    # A special token may be a slash and a word; private paths have more parts.
    return {
        name: value
        for name, value in config.items()
        if name not in _LOCAL
        and not (isinstance(value, str) and Path(value).is_absolute() and len(Path(value).parts) > 2)
    }


def _model_classes() -> dict[str, str]:
    """The models of the family, by the Auto class that each is registered with."""
    vanilla_transformer.register()
    found = {}
    for name, auto_class in sorted(vars(modeling_auto).items()):
        if not isinstance(auto_class, type) or not issubclass(auto_class, auto_factory._BaseAutoModelClass):
            continue
        mapping = auto_class._model_mapping
        if mapping is not None and VanillaTransformerConfig in mapping:
            found[name.removeprefix("_")] = _name_of(mapping[VanillaTransformerConfig])
    return found


def _name_of(kind: type) -> str:
    return f"{kind.__module__.split('.')[-1]}.{kind.__name__}"
