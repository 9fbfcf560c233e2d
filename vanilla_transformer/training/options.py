"""The training options, one dataclass. Nothing heavy is imported here, so the command line can check them at once."""

import math
import re
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from vanilla_transformer.cores import check_side_by_side
from vanilla_transformer.errors import UserError
from vanilla_transformer.presets import PROVENANCE, SIZES, TRAINING_PAPER, TRAINING_PROVENANCE


# Pairs and tokens are counted in signed 32-bit integers.
LARGEST_NUMBER = (1 << 31) - 1
# The tokenizer's own limit, repeated because its module is slow to import.
LARGEST_VOCABULARY = 1 << 20


def option(default: Any, text: str, **metadata: Any) -> Any:
    """A dataclass field with the help text that the command line shows; `...` as default makes it required."""
    metadata["help"] = text
    return field(metadata=metadata) if default is ... else field(default=default, metadata=metadata)


def check_range(name: str, value: int | None, smallest: int, largest: int = LARGEST_NUMBER) -> None:
    """Refuse a whole number that lies out of its range.

    Args:
        name: Name of the option.
        value: Its value; `None` passes.
        smallest: Smallest value.
        largest: Largest value.

    Raises:
        UserError: The value is smaller or larger.
    """
    if value is not None and value < smallest:
        raise UserError(f"`{name}` is {value}; it must be at least {smallest}.")
    if value is not None and value > largest:
        raise UserError(f"`{name}` is {value}; it must be at most {largest}.")


@dataclass(kw_only=True)
class TrainingOptions:
    """All options of a training run; the defaults are the paper's base model and training (§5).

    The paper saves a checkpoint every 10 minutes; the recipes `base` and `big` set this as a number of updates.

    Raises:
        UserError: From `check`, when a value is out of range or contradicts another.
    """

    # The command line adds --config, which reads these options from a YAML file.
    TAKES_RECIPE: ClassVar[bool] = True

    output_dir: Path = option(Path("run"), "Folder of the run, for the model, checkpoints, metrics and options.")
    train_files: tuple[Path, ...] = option(
        (),
        "Training text: a source file and a target file with one sentence per line, or one tab-separated, JSON Lines "
        "(.jsonl) or TMX (.tmx) file. Files may be compressed (.gz).",
    )
    valid_files: tuple[Path, ...] = option((), "Validation text, in the same form.")
    dataset: str | None = option(
        None, "Data set to train on instead of files: its name on the Hub, or a folder that `datasets` can load."
    )
    dataset_config: str | None = option(None, "Configuration of the data set.")
    dataset_revision: str | None = option(None, "Commit, tag or branch of the data set on the Hub.")
    streaming: bool = option(
        False, "Stream the data set instead of encoding it first, and batch it in windows of `stream_window` pairs."
    )
    stream_window: int = option(
        100_000,
        "Number of pairs in the window of a stream that is sorted into batches; every checkpoint stores the window.",
    )
    train_split: str = option("train", "Split of the data set to train on.")
    valid_split: str | None = option(None, "Split of the data set to validate on.")
    pair_keys: tuple[str, str] | None = option(
        None,
        "Fields of source and target in JSON Lines and data sets. Default: 'translation' with a text per language, "
        "fields named after the two languages, or 'source' and 'target'.",
    )
    tsv_columns: tuple[int, int] | None = option(
        None,
        "Columns of source and target in tab-separated files, counted from 1. Default: 1 2, if there are two columns.",
    )
    source_language: str | None = option(None, "Code of the source language, such as en; saved with the model.")
    target_language: str | None = option(None, "Code of the target language, such as de; saved with the model.")
    language_tags: bool = option(
        False, "Put a tag for the target language, such as <2de>, before each source (Johnson et al., 2017)."
    )
    language_column: str | None = option(
        None,
        "Field, or number of the tab-separated column, that holds the target language of each pair.",
    )
    invalid_pairs: Literal["drop", "refuse"] = option(
        "drop", "Whether pairs that are empty, too long, not UTF-8 or lack a column are dropped, or stop the run."
    )
    bpe_dropout: float = option(
        0.0, "BPE-dropout: probability of skipping a merge, drawn again in each epoch (Provilkov et al., 2020)."
    )
    max_length: int = option(256, "Largest number of tokens of a sentence, </s> included.")
    cache_dir: Path | None = option(None, "Folder for the vocabulary and the encoded text. Default: OUTPUT_DIR/cache.")

    tokenizer: Path | None = option(
        None, "Folder of a tokenizer to use. Default: train a vocabulary on the training text."
    )
    vocab_size: int = option(37000, "Size of the vocabulary to train, which both languages share.")
    min_frequency: int = option(2, "Merge two tokens only if they are neighbours at least this often.")
    vocabulary_pairs: int = option(
        1_000_000,
        "Train the vocabulary on at most this many pairs, evenly spaced in the text, to bound its memory.",
    )

    init_from: str | None = option(
        None,
        "Start from the weights of this model, a folder or a name on the Hub. Its architecture is used, and its "
        "vocabulary unless `tokenizer` is given.",
    )
    preset: str = option(
        "base",
        "Dimensions, dropout, positions and label smoothing: a row of the paper's Table 3, or tiny. One of "
        + ", ".join(SIZES)
        + ".",
    )
    provenance: str = option(
        "paper",
        "Which system's details to follow where they differ from the paper: paper, " + ", ".join(PROVENANCE) + ".",
    )
    d_model: int | None = option(
        None, "Width of the model. Default for this option and the next ones: the preset's value."
    )
    encoder_layers: int | None = option(None, "Number of encoder layers.")
    decoder_layers: int | None = option(None, "Number of decoder layers.")
    encoder_attention_heads: int | None = option(None, "Number of attention heads in the encoder.")
    decoder_attention_heads: int | None = option(None, "Number of attention heads in the decoder.")
    d_k: int | None = option(None, "Width of the queries and keys of a head.")
    d_v: int | None = option(None, "Width of the values of a head.")
    encoder_ffn_dim: int | None = option(None, "Inner width of the encoder's feed-forward networks.")
    decoder_ffn_dim: int | None = option(None, "Inner width of the decoder's feed-forward networks.")
    activation_function: str | None = option(None, "Activation function of the feed-forward networks.")
    dropout: float | None = option(
        None, "Dropout on the outputs of sub-layers and on the sum of embeddings and positions."
    )
    attention_dropout: float | None = option(None, "Dropout on attention weights.")
    activation_dropout: float | None = option(None, "Dropout inside feed-forward networks.")
    position_embedding_type: Literal["sinusoidal", "learned"] | None = option(None, "Kind of position embedding.")
    max_position_embeddings: int | None = option(None, "Number of learned positions.")
    norm_position: Literal["post", "pre"] | None = option(
        None, "Layer normalisation after (post) or before (pre) each sub-layer."
    )
    attention_bias: bool | None = option(None, "Whether the attention projections have biases.")
    share_encoder_decoder_embeddings: bool | None = option(
        None, "Whether encoder and decoder share one embedding matrix."
    )
    tie_word_embeddings: bool | None = option(None, "Whether the output projection is the decoder's embedding matrix.")

    max_updates: int = option(100_000, "Number of optimiser steps.")
    max_epochs: int | None = option(
        None, "Stop after this number of passes over the text, if `max_updates` has not been reached."
    )
    max_time: str | None = option(
        None, "Save and stop after this time, such as 90m, 2h30m or a number of seconds; the run can be resumed."
    )
    early_stopping_patience: int = option(
        0, "Stop after this number of validations in a row without improvement; 0 never stops early."
    )
    early_stopping_threshold: float = option(0.0, "Smallest change of `best_metric` that counts as an improvement.")
    best_metric: Literal["loss", "bleu"] = option("loss", "Validation score by which checkpoints are compared.")
    batching: Literal["lengths", "random"] = option(
        "lengths",
        "Sentences of a batch: of similar lengths, or random ones, with which updates of few batches learn more. "
        "Random batches are padded in parts of similar lengths; on CPUs with AVX-512, bf16 runs them padding-free.",
    )
    tokens_per_batch: int = option(
        4096,
        "Largest number of source tokens, and of target tokens, in a batch. Padding counts in batches of similar "
        "lengths, but not in random ones.",
    )
    tokens_per_update: int = option(
        24_576, "The same limit for one optimiser step, over all processes; a multiple of `tokens_per_batch`."
    )
    warmup_steps: int = option(4000, "Number of optimiser steps in which the learning rate rises.")
    learning_rate_scale: float = option(1.0, "Factor by which the paper's learning rate is multiplied.")
    adam_beta1: float = option(0.9, "Adam's decay rate for the mean of the gradient.")
    adam_beta2: float = option(0.98, "Adam's decay rate for the mean of the squared gradient.")
    adam_epsilon: float = option(1e-9, "Adam's epsilon.")
    label_smoothing: float | None = option(
        None,
        "Label smoothing: probability mass spread over the vocabulary. Default: 0.1, or what the preset's name says.",
    )
    label_smoothing_over: Literal["vocabulary", "others"] | None = option(
        None,
        "Spread that mass over the whole vocabulary, or over all entries but the label. Default: by `provenance`.",
    )
    max_grad_norm: float = option(
        0.0, "Clip the norm of the gradient to this value; 0 does not clip, as in the paper."
    )
    ema_decay: float = option(
        0.0,
        "Largest decay of an exponential moving average of the weights, such as 0.999. Validation and the result use "
        "the average. 0 keeps none.",
    )
    seed: int = option(1, "Seed for the initial weights, the order of batches and dropout.")

    num_processes: int = option(
        1, "Number of processes on this machine; for several machines, use `accelerate launch` or torchrun."
    )
    device: Literal["auto", "cpu"] = option(
        "auto", "Device to train on: auto is an accelerator if there is one, else the CPU."
    )
    mixed_precision: Literal["no", "bf16", "fp16"] = option(
        "no", "bf16 computes matrix products in bfloat16; fp16 in float16, with dynamic loss scaling."
    )
    attention: Literal["auto", "eager", "sdpa"] = option(
        "auto",
        "Attention implementation; auto is eager on CPUs, where SDPA's backward pass is slower, and sdpa elsewhere.",
    )
    gradient_checkpointing: bool = option(False, "Recompute activations in the backward pass to save memory.")

    log_every: int = option(50, "Optimiser steps between records of the training loss.")
    validate_every: int = option(1000, "Optimiser steps between validations.")
    valid_bleu_sentences: int = option(
        200, "Number of sentences translated at each validation to compute BLEU; 0 computes none."
    )
    save_every: int = option(1000, "Optimiser steps between checkpoints.")
    keep_last: int = option(5, "Number of last checkpoints to keep.")
    keep_best: int = option(1, "Number of best checkpoints by `best_metric` to keep besides.")
    result: Literal["last", "best"] = option(
        "last", "Whether the result is made from the last checkpoints or from the best one."
    )
    average_last: int | None = option(
        None,
        "Number of last checkpoints whose mean is the result. Default: 5, but at most `keep_last`, and 1 with "
        "`ema_decay` or if the best checkpoint is the result.",
    )
    num_beams: int = option(4, "Beam size to save in the generation configuration of the result.")
    length_penalty: float = option(
        0.6,
        "Length penalty to save there: the power of (5 + length) / 6 in translation, of length in plain `generate`.",
    )
    trackers: tuple[str, ...] | None = option(
        None,
        "Trackers that also get the records of metrics.jsonl: tensorboard, trackio, wandb, or none. "
        "Default: tensorboard if it is installed.",
    )
    push_to_hub: str | None = option(
        None,
        "Repository on the Hub, such as user/name, where checkpoints and the result are published.",
    )
    hub_private: bool = option(
        False, "Make that repository private. A repository that exists must be private already."
    )
    hub_revision: str | None = option(None, "Branch to publish on, made if it does not exist. Default: main.")
    resume: bool = option(False, "Continue the run in OUTPUT_DIR from its newest checkpoint.")
    dry_run: bool = option(False, "Print model size, batches, memory and time of the run without training.")

    def __post_init__(self):
        if self.label_smoothing is None:
            self.label_smoothing = TRAINING_PAPER.get(self.preset, {}).get("label_smoothing", 0.1)

    def check(self) -> None:
        """Check every value that can be checked without reading text or building a model.

        Raises:
            UserError: Names the option, its value, the rule and the remedy.
        """
        self._check_sources()
        for name, hint in get_type_hints(type(self)).items():
            choices = [kind for kind in (hint, *get_args(hint)) if get_origin(kind) is Literal]
            if choices and getattr(self, name) is not None:
                allowed = get_args(choices[0])
                self._require(name, getattr(self, name) in allowed, "one of " + ", ".join(allowed))
        for name in _WHOLE_NUMBERS:
            check_range(name, getattr(self, name), *_RANGES.get(name, (1,)))
        check_side_by_side("num_processes", self.num_processes)
        if self.max_time is not None:
            rule = "a time such as 90m, 2h30m, 1d or a number of seconds, and above 0"
            self._require("max_time", bool(_seconds(self.max_time)), rule)
        self._require("ema_decay", 0.0 <= self.ema_decay < 1.0, "at least 0 and below 1")
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            value = getattr(self, name)
            self._require(name, value is None or 0.0 <= value < 1.0, "at least 0 and below 1")
        self._require("bpe_dropout", 0.0 <= self.bpe_dropout < 1.0, "at least 0 and below 1")
        self._require("label_smoothing", 0.0 <= self.label_smoothing < 1.0, "at least 0 and below 1")
        for name in ("adam_beta1", "adam_beta2"):
            self._require(name, 0.0 <= getattr(self, name) < 1.0, "at least 0 and below 1")
        for name in ("adam_epsilon", "learning_rate_scale"):
            self._require(name, 0.0 < getattr(self, name) < math.inf, "above 0 and finite")
        # With larger powers, lengths overflow float32.
        self._require("length_penalty", abs(self.length_penalty) <= 10.0, "a number from -10 to 10")
        for name in ("max_grad_norm", "early_stopping_threshold"):
            self._require(name, 0.0 <= getattr(self, name) < math.inf, "at least 0 and finite")
        self._require("preset", self.preset in SIZES, "one of " + ", ".join(SIZES))
        self._require(
            "provenance",
            self.provenance == "paper" or self.provenance in PROVENANCE,
            "paper, " + " or ".join(PROVENANCE),
        )
        self._check_trackers()
        for name in ("hub_private", "hub_revision"):
            if getattr(self, name) and self.push_to_hub is None:
                raise UserError(f"`{name}` was given without `push_to_hub`; name the repository, or leave it out.")
        if self.max_length > self.tokens_per_batch:
            raise UserError(
                f"`max_length` is {self.max_length} and `tokens_per_batch` {self.tokens_per_batch}; a batch must hold "
                f"the longest sentence, so raise `tokens_per_batch` to {self.max_length} or more."
            )
        if self.tokens_per_update % self.tokens_per_batch != 0:
            count = max(1, round(self.tokens_per_update / self.tokens_per_batch))
            raise UserError(
                f"`tokens_per_update` is {self.tokens_per_update} and must be a multiple of `tokens_per_batch`, "
                f"{self.tokens_per_batch}; use {count * self.tokens_per_batch}."
            )
        self._check_result()
        if self.num_averaged > self.keep_last:
            raise UserError(
                f"`average_last` is {self.average_last}, but only {self.keep_last} checkpoints are kept; raise "
                "`keep_last`."
            )

    def _check_sources(self) -> None:
        if not self.train_files and self.dataset is None:
            raise UserError("No training text was given; give its files as `train_files`, or a `dataset`.")
        if self.train_files and self.dataset is not None:
            raise UserError("Both `train_files` and `dataset` were given; training text is one or the other.")
        if self.dataset is None:
            for name in ("dataset_config", "dataset_revision", "valid_split", "streaming"):
                if getattr(self, name):
                    raise UserError(f"`{name}` was given without `dataset`; name the data set, or leave it out.")
        if self.valid_files and self.valid_split is not None:
            raise UserError("Both `valid_files` and `valid_split` were given; validation text is one or the other.")
        if self.valid_files and self.train_files and len(self.valid_files) != len(self.train_files):
            raise UserError(
                f"Training text is {len(self.train_files)} and validation text {len(self.valid_files)} files; give "
                "both in the same form."
            )
        if self.streaming:
            for name in ("dry_run", "bpe_dropout", "max_epochs"):
                if getattr(self, name):
                    raise UserError(f"`{name}` was given with `streaming`; it needs text that is read as a whole.")
        if self.language_column is not None and not self.language_tags:
            raise UserError("`language_column` was given without `language_tags`, which it belongs to.")
        if self.language_tags and self.language_column is None and self.target_language is None:
            raise UserError(
                "`language_tags` was given without a language; name it with `target_language`, or each pair's with "
                "`language_column`."
            )

    def _check_result(self) -> None:
        """Check what depends on validation, and what becomes the result."""
        needs_validation = {
            '`result` "best"': self.result == "best",
            "`early_stopping_patience`": self.early_stopping_patience > 0,
        }
        for name, is_used in needs_validation.items():
            if is_used and not self.valid_files and self.valid_split is None:
                raise UserError(f"{name} goes by validation; give `valid_files` as well.")
            if is_used and self.best_metric == "bleu" and self.valid_bleu_sentences == 0:
                raise UserError(
                    f"{name} goes by BLEU, but `valid_bleu_sentences` is 0; raise it, to 200 for instance."
                )
        if self.result == "best" and self.keep_best == 0:
            raise UserError("`result` is best, but `keep_best` is 0; keep at least 1.")
        for name, is_used in (('`result` "best"', self.result == "best"), ("`ema_decay`", self.ema_decay > 0.0)):
            if is_used and self.average_last not in (None, 1):
                raise UserError(
                    f"`average_last` is {self.average_last}, but {name} makes the result of one checkpoint; leave one "
                    "of the two out, or set `average_last` to 1."
                )

    def _require(self, name: str, condition: bool, rule: str) -> None:
        if not condition:
            raise UserError(f"`{name}` is {getattr(self, name)}; it must be {rule}.")

    def _check_trackers(self) -> None:
        names = self.trackers or ()
        if names == ("none",):
            return
        for name in names:
            if name not in TRACKERS:
                raise UserError(f"`trackers` names {name}; it must be none, or of {', '.join(TRACKERS)}.")
            if find_spec(name) is None:
                raise UserError(
                    f"`trackers` names {name}, which is not installed; run `pip install {name}`, or leave it out."
                )

    @property
    def chosen_trackers(self) -> tuple[str, ...]:
        """The trackers to log to."""
        if self.trackers is None:
            return ("tensorboard",) if find_spec("tensorboard") is not None else ()
        return () if self.trackers == ("none",) else self.trackers

    @property
    def batches_per_update(self) -> int:
        """Number of batches in one optimiser step."""
        return self.tokens_per_update // self.tokens_per_batch

    @property
    def num_averaged(self) -> int:
        """Number of checkpoints whose mean is the result."""
        if self.average_last is not None:
            return self.average_last
        return 1 if self.ema_decay > 0.0 or self.result == "best" else min(5, self.keep_last)

    @property
    def max_seconds(self) -> float:
        """`max_time` in seconds; infinite without it."""
        return math.inf if self.max_time is None else _seconds(self.max_time)

    def model_settings(self) -> dict[str, Any]:
        """The model's hyper-parameters that differ from the paper's base model, vocabulary size aside."""
        chosen = {name: getattr(self, name) for name in MODEL_OPTIONS if getattr(self, name) is not None}
        return {**SIZES[self.preset], **PROVENANCE.get(self.provenance, {}), **chosen}

    @property
    def smoothed_entries(self) -> Literal["vocabulary", "others"]:
        """Where label smoothing spreads its mass; the whole vocabulary by default, since the paper does not say."""
        return self.label_smoothing_over or TRAINING_PROVENANCE.get(self.provenance, {}).get(
            "label_smoothing_over", "vocabulary"
        )

    def as_dict(self) -> dict[str, Any]:
        """All options, as values that JSON and YAML can hold."""
        return {item.name: _plain(getattr(self, item.name)) for item in fields(self)}


# Hyper-parameters of the model, named as in its configuration; None takes the preset's value.
MODEL_OPTIONS = (
    "d_model",
    "encoder_layers",
    "decoder_layers",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "d_k",
    "d_v",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "activation_function",
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "position_embedding_type",
    "max_position_embeddings",
    "norm_position",
    "attention_bias",
    "share_encoder_decoder_embeddings",
    "tie_word_embeddings",
)

# Integer options, and the ranges (smallest, largest) of those that differ from 1 to `LARGEST_NUMBER`.
_WHOLE_NUMBERS = tuple(name for name, hint in get_type_hints(TrainingOptions).items() if hint in (int, int | None))
_RANGES = {
    "valid_bleu_sentences": (0,),
    "keep_best": (0,),
    "early_stopping_patience": (0,),
    "seed": (0, (1 << 63) - 1),
    # One token and </s>.
    "max_length": (2,),
    "vocab_size": (1, LARGEST_VOCABULARY),
    # The limits of translation.
    "num_beams": (1, 10_000),
}

# Names of the packages, and of Accelerate's trackers.
TRACKERS = ("tensorboard", "trackio", "wandb")

# Options that a resumed run may change, because nothing computed up to the checkpoint depends on them.
FREE_ON_RESUME = (
    "output_dir",
    "train_files",
    "valid_files",
    "dataset",
    "dataset_config",
    "dataset_revision",
    "train_split",
    "valid_split",
    "pair_keys",
    "tsv_columns",
    "language_column",
    "source_language",
    "target_language",
    "cache_dir",
    "tokenizer",
    "max_updates",
    "max_epochs",
    "max_time",
    "early_stopping_patience",
    "early_stopping_threshold",
    "num_processes",
    "device",
    "attention",
    "gradient_checkpointing",
    "log_every",
    "validate_every",
    "valid_bleu_sentences",
    "save_every",
    "keep_last",
    "keep_best",
    "result",
    "average_last",
    "num_beams",
    "length_penalty",
    "trackers",
    "push_to_hub",
    "hub_private",
    "hub_revision",
    "resume",
    "dry_run",
)


def _seconds(time: str) -> float | None:
    """Parse a time such as 1d2h30m10s into seconds; `None` if it has another form."""
    number = r"(\d{1,9})"
    match = re.fullmatch(rf"(?:{number}d)?(?:{number}h)?(?:{number}m)?(?:{number}s?)?", time.strip())
    if match is None or not any(match.groups()):
        return None
    return float(sum(int(part or 0) * unit for part, unit in zip(match.groups(), (86400, 3600, 60, 1), strict=True)))


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
