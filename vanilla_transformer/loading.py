"""Loads models and tokenizers: complete, matching each other, and without running code that they bring.

Plain `from_pretrained` initialises missing weights at random, ignores unknown ones, and asks on standard input whether
it may run Python code from the folder. A verb that reads text from standard input must not take it as the answer.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config, tokenizer_class_from_name

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .errors import UserError
from .modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration


WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
_MODEL_SETTINGS = ("config.json", "generation_config.json", WEIGHTS_INDEX)
_TOKENIZER_SETTINGS = ("config.json", "tokenizer_config.json", "tokenizer.json")


def load_config(source: str | Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Load the configuration of a model.

    Args:
        source: Folder of the model, or its name on the Hub.
        trust_remote_code: Whether code that comes with the model may run. Models of this package never need it.

    Returns:
        The configuration.

    Raises:
        UserError: It is missing, damaged, of an unknown type, or needs code that may not run.
    """
    _check_json(source, _MODEL_SETTINGS)
    with _sentences(source):
        return AutoConfig.from_pretrained(
            source, trust_remote_code=trust_remote_code, local_files_only=Path(source).is_dir()
        )


def load_model(
    source: str | Path,
    *,
    config: PreTrainedConfig | None = None,
    dtype: torch.dtype | str = "auto",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a translation model and check that no weight is missing or, for models of this package, unknown.

    Args:
        source: Folder of the model, or its name on the Hub; its weights are safetensors.
        config: Configuration to build it with; `None` for its own.
        dtype: Floating-point type of the weights; `auto` is the one that its configuration names.
        trust_remote_code: As for `load_config`.

    Returns:
        The model, in evaluation mode, on the CPU.

    Raises:
        UserError: As for `load_config`, or weights are damaged, missing, unknown or of other shapes, or the generation
            configuration cannot be used.
    """
    config = config or load_config(source, trust_remote_code=trust_remote_code)
    is_ours = isinstance(config, VanillaTransformerConfig)
    folder = Path(source)
    if folder.is_dir():
        with _sentences(source):
            stored = _stored_names(folder)
        if is_ours and config.encoder_layers + config.decoder_layers > len(stored):
            # Checked before that many layers are built.
            raise UserError(
                f"The weights in {source} do not fit its config.json ({len(stored):,} tensors for "
                f"{config.encoder_layers:,} and {config.decoder_layers:,} layers); save the model again, or give "
                "another."
            )
    with _sentences(source):
        kind = VanillaTransformerForConditionalGeneration if is_ours else AutoModelForSeq2SeqLM
        model, report = kind.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code and not is_ours,
            local_files_only=folder.is_dir(),
            use_safetensors=True,
            # Mismatched weights are reported by name below.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    # Files of other classes may hold more weights than the model; missing ones are initialised at random for all.
    found = {
        "missing": report["missing_keys"],
        "of another shape": [name for name, *_ in report["mismatched_keys"]],
        "unknown": report["unexpected_keys"] if is_ours else (),
    }
    wrong = [f"{sorted(names)[0]}{_others(len(names))} {what}" for what, names in found.items() if names]
    if wrong:
        raise UserError(
            f"The weights in {source} do not fit its config.json ({'; '.join(wrong)}); save the model again, or give "
            "another."
        )
    if not model.dtype.is_floating_point:
        raise UserError(f"The model in {source} is of type {model.dtype}; save it in a floating-point type.")
    if is_ours:
        _check_generation(model, source)
    return model


def load_tokenizer(source: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load a tokenizer.

    Args:
        source: Its folder, or the name of its model on the Hub.
        trust_remote_code: As for `load_config`.

    Returns:
        The tokenizer.

    Raises:
        UserError: It is missing, damaged, or needs code that may not run.
    """
    local = Path(source).is_dir()
    _check_json(source, _TOKENIZER_SETTINGS)
    with _sentences(source, "The tokenizer"):
        needs_code = _needs_code(get_tokenizer_config(source, local_files_only=local))
        if needs_code and not trust_remote_code:
            raise _not_trusted(source)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=needs_code, local_files_only=local)
        length = tokenizer.model_max_length
        if isinstance(length, bool) or not isinstance(length, int | float) or not length >= 1:
            raise UserError(f"The tokenizer in {source} has a model_max_length of {length!r}; it must be at least 1.")
        # A damaged vocabulary may fail only on its first text.
        tokenizer("a")
    return tokenizer


def check_whole(folder: Path) -> None:
    """Refuse a model with a PEFT adapter in its folder, or one that does not load with its tokenizer.

    `from_pretrained` also loads an adapter in the folder; a copy of the model's own files would lose it.

    Args:
        folder: Folder of a model.

    Raises:
        UserError: As said, and as for `load_model`, `load_tokenizer` and `check_tokenizer_fits`.
    """
    if (folder / "adapter_config.json").is_file():
        raise UserError(f"{folder} holds an adapter beside the model; merge it into the weights and save the model.")
    model = load_model(folder)
    if any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        check_tokenizer_fits(model, load_tokenizer(folder), folder)


def check_tokenizer_fits(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str | Path) -> None:
    """Refuse a tokenizer with more entries than the model has embeddings, or with another end-of-sentence token.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        source: Folder or name of both, for the message.

    Raises:
        UserError: As said.
    """
    entries = max(tokenizer.get_vocab().values(), default=-1) + 1
    embeddings = model.get_input_embeddings().weight.shape[0]
    if entries > embeddings:
        raise UserError(
            f"The tokenizer in {source} has {entries:,} entries and the model {embeddings:,}; save the model's own "
            "tokenizer there."
        )
    if tokenizer.pad_token_id is None:
        raise UserError(f"The tokenizer in {source} has no pad_token; save one that defines it.")
    ends = model.config.eos_token_id
    if isinstance(model.config, VanillaTransformerConfig) and ends is not None:
        last = tokenizer("a")["input_ids"][-1]
        if last not in (ends if isinstance(ends, list) else [ends]):
            raise UserError(
                f"The tokenizer in {source} ends texts with token {last}, and the model's eos_token_id is {ends}; "
                "save the model's own tokenizer there."
            )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds named values.

    Args:
        path: The file, in UTF-8.

    Returns:
        Its content.

    Raises:
        UserError: It is missing, or holds something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check the path.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}); correct it.") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no named values; give a JSON object.")
    return values


def _check_json(source: str | Path, names: Sequence[str]) -> None:
    """Refuse existing files of a folder that hold no JSON object."""
    for path in (Path(source) / name for name in names if Path(source).is_dir()):
        if path.exists():
            read_json(path)


def _stored_names(folder: Path) -> list[str]:
    """Names of a model's tensors; only the headers of the files are read."""
    if (folder / WEIGHTS).is_file():
        with safe_open(folder / WEIGHTS, "pt") as file:
            return list(file.keys())
    if (folder / WEIGHTS_INDEX).is_file():
        return list(read_json(folder / WEIGHTS_INDEX)["weight_map"])
    raise _no_safetensors(folder)


@contextmanager
def _sentences(source: str | Path, what: str = "The model") -> Iterator[None]:
    """Turn any exception that transformers, tokenizers or safetensors raise for a damaged file into one sentence.

    Invalid values cause exceptions of any type; tokenizers raises plain `Exception`.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # The text of transformers for a model whose code may not run.
        if "trust_remote_code=True" in str(error):
            raise _not_trusted(source) from error
        if "use_safetensors=True" in str(error):
            raise _no_safetensors(source) from error
        raise UserError(
            f"{what} in {source} cannot be loaded ({_reason(error)}); save it again, or give another."
        ) from error


def _reason(error: Exception) -> str:
    if isinstance(error, StrictDataclassError) and error.__cause__ is not None:
        error = error.__cause__
    # Names in backticks are read as our caller's arguments; these are a file's.
    text = " ".join(str(error).split()).replace("`", "'")
    if not text or isinstance(error, LookupError | TypeError | AttributeError):
        text = f"{type(error).__name__} {text}".strip()
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]} ..."


# transformers lists all of its classes when it does not know one.
_LONGEST_REASON = 300


def _not_trusted(source: str | Path) -> UserError:
    return UserError(
        f"{source} needs Python code that comes with it, which only translation and evaluation run, and only with "
        "`trust_remote_code`; set it if you trust that code, or give another model."
    )


def _needs_code(config: dict[str, Any]) -> bool:
    """Whether a tokenizer's class comes as code with it, and is neither ours nor one of transformers."""
    codes = config.get("auto_map") or {}
    if isinstance(codes, dict):
        codes = codes.get("AutoTokenizer") or ()
    if not codes:
        return False
    codes = [codes] if isinstance(codes, str) else codes
    name = config.get("tokenizer_class") or str(next(filter(None, codes), "")).rsplit(".", 1)[-1]
    return tokenizer_class_from_name(name) is None


def _no_safetensors(source: str | Path) -> UserError:
    return UserError(
        f"{source} has no weights in safetensors, and pickles such as pytorch_model.bin are not read; save the model "
        "with `save_pretrained` of transformers 5."
    )


def _check_generation(model: PreTrainedModel, source: str | Path) -> None:
    """Refuse invalid values in a generation configuration."""
    config = model.generation_config
    entries = model.config.decoder_vocab_size

    def is_id(value: object) -> bool:
        return _is_whole(value) and 0 <= value < entries

    def are_ids(values: object) -> bool:
        return isinstance(values, list | tuple) and all(is_id(value) for value in values)

    def are_words(values: object) -> bool:
        return isinstance(values, list | tuple) and all(are_ids(word) for word in values)

    ids = f"an id below {entries:,}"
    rules = {
        "decoder_start_token_id": (is_id, ids),
        "eos_token_id": (lambda value: is_id(value) or (are_ids(value) and value), f"{ids}, or a list of such ids"),
        # The first token has no more candidates than the vocabulary has entries.
        "num_beams": (
            lambda value: value is None or (_is_whole(value) and 1 <= value <= entries),
            f"a whole number from 1 to {entries:,}",
        ),
        "length_penalty": (lambda value: value is None or _is_finite(value), "a finite number"),
        "suppress_tokens": (lambda value: value is None or are_ids(value), f"a list, each {ids}"),
        "bad_words_ids": (lambda value: value is None or are_words(value), f"a list of lists, each {ids}"),
    }
    for name, (is_valid, rule) in rules.items():
        if not is_valid(value := getattr(config, name, None)):
            raise UserError(
                f"The generation configuration in {source} has {value!r} as {name}; it must be {rule}: correct "
                "generation_config.json, or config.json where there is none."
            )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def _others(number: int) -> str:
    return " is" if number == 1 else f" and {number - 1:,} more are"


def architecture_of(config: PreTrainedConfig) -> dict[str, Any]:
    """A model's configuration without the entries about files and versions that transformers adds.

    Args:
        config: Configuration of a model.

    Returns:
        Values by name.
    """
    notes = ("transformers_version", "architectures", "dtype", "_name_or_path")
    return {name: value for name, value in config.to_dict().items() if name not in notes}
