import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import yaml

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.errors import UserError
from vanilla_transformer.presets import PROVENANCE, SIZES, TRAINING_PAPER
from vanilla_transformer.training.options import FREE_ON_RESUME, MODEL_OPTIONS, TrainingOptions


FILES = (Path("train.en"), Path("train.de"))


def options(**values) -> TrainingOptions:
    return TrainingOptions(**{"train_files": FILES, **values})


def test_the_defaults_are_the_papers_and_pass():
    defaults = options()
    defaults.check()
    assert (defaults.adam_beta1, defaults.adam_beta2, defaults.adam_epsilon) == (0.9, 0.98, 1e-9)
    assert (defaults.warmup_steps, defaults.label_smoothing, defaults.max_updates) == (4000, 0.1, 100_000)
    assert (defaults.vocab_size, defaults.num_averaged, defaults.max_grad_norm) == (37000, 5, 0.0)
    assert defaults.model_settings() == {}


AT_LEAST_ONE = (
    "min_frequency",
    "vocabulary_pairs",
    "stream_window",
    "max_updates",
    "tokens_per_batch",
    "tokens_per_update",
    "warmup_steps",
    "log_every",
    "validate_every",
    "save_every",
    "keep_last",
    "average_last",
    "num_beams",
    "max_epochs",
)
AT_LEAST_ONE_OF_A_MODEL = (
    "d_model",
    "encoder_layers",
    "decoder_layers",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "d_k",
    "d_v",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "max_position_embeddings",
)

# Values that break one rule, and the rule.
BROKEN_RULES = [
    *[(name, value, "it must be at least 1.") for name in AT_LEAST_ONE for value in (0, -5)],
    *[("max_length", value, "it must be at least 2.") for value in (1, 0, -3)],
    *[
        (name, value, "it must be at least 0 and below 1.")
        for name in ("label_smoothing", "adam_beta1", "adam_beta2", "bpe_dropout")
        for value in (-0.1, 1.0, 1.5, float("nan"))
    ],
    *[
        (name, value, "it must be above 0 and finite.")
        for name in ("adam_epsilon", "learning_rate_scale")
        for value in (0.0, -1.0, float("nan"), float("inf"))
    ],
    *[
        ("length_penalty", float(value), "it must be a number from -10 to 10.")
        for value in ("nan", "inf", "-1e30", "10.1")
    ],
    *[
        (name, value, "it must be at least 0 and finite.")
        for name in ("max_grad_norm", "early_stopping_threshold")
        for value in (-1.0, float("nan"), float("inf"))
    ],
    ("valid_bleu_sentences", -1, "it must be at least 0."),
    ("seed", -1, "it must be at least 0."),
    ("seed", 2**63, f"it must be at most {2**63 - 1}."),
    *[("vocab_size", value, f"it must be at most {2**20}.") for value in (2**20 + 1, 99_999_999_999)],
    *[
        (name, 2**31, f"it must be at most {2**31 - 1}.")
        for name in (*AT_LEAST_ONE, *AT_LEAST_ONE_OF_A_MODEL)
        if name != "num_beams"
    ],
    ("num_beams", 10_001, "it must be at most 10000."),
    *[(name, value, "it must be at least 1.") for name in AT_LEAST_ONE_OF_A_MODEL for value in (0, -5)],
    *[
        (name, value, "it must be at least 0 and below 1.")
        for name in ("dropout", "attention_dropout", "activation_dropout")
        for value in (-0.1, 1.0, float("nan"))
    ],
    *[
        ("max_time", value, "it must be a time such as 90m,")
        for value in ("0", "-1", "9" * 5000, "1e9", "9999999999999d", "")
    ],
    ("invalid_pairs", "ignore", "it must be one of drop, refuse."),
    ("norm_position", "both", "it must be one of post, pre."),
    ("preset", "huge", "it must be one of base, big, "),
    ("provenance", "moses", "it must be paper, tensor2tensor-2017 or fairseq or marian."),
]


@pytest.mark.parametrize(("name", "value", "rule"), BROKEN_RULES)
def test_a_value_out_of_range_is_refused_by_name(name, value, rule):
    with pytest.raises(UserError) as caught:
        options(**{name: value}).check()
    assert str(caught.value).startswith(f"`{name}` is {value}; {rule}")


@pytest.mark.parametrize(
    "values",
    [
        *[{name: 1} for name in AT_LEAST_ONE if name not in ("tokens_per_batch", "tokens_per_update", "keep_last")],
        {"tokens_per_batch": 256, "tokens_per_update": 256},
        {"tokens_per_batch": 2, "tokens_per_update": 2, "max_length": 2},
        {"keep_last": 1, "average_last": 1},
        {"label_smoothing": 0.0, "adam_beta1": 0.0, "adam_beta2": 0.0},
        {"length_penalty": 0.0},
        {"length_penalty": -1.5},
        {"seed": 0, "max_grad_norm": 0.0, "valid_bleu_sentences": 0},
        {"train_files": FILES[:1], "valid_files": FILES[1:]},
        {"valid_files": FILES},
        *[{"preset": preset} for preset in SIZES],
        *[{"provenance": provenance} for provenance in PROVENANCE],
    ],
)
def test_values_at_the_edge_of_their_range_pass(values):
    options(**values).check()


def test_training_text_must_be_named():
    with pytest.raises(UserError, match="No training text was given; give its files as `train_files`"):
        TrainingOptions().check()


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"dataset": "x"}, "Both `train_files` and `dataset` were given"),
        ({"dataset_config": "x"}, "`dataset_config` was given without `dataset`"),
        ({"dataset_revision": "x"}, "`dataset_revision` was given without `dataset`"),
        ({"valid_split": "x"}, "`valid_split` was given without `dataset`"),
        (
            {"train_files": (), "dataset": "x", "valid_split": "x", "valid_files": FILES},
            "Both `valid_files` and `valid_split` were given",
        ),
        ({"streaming": True}, "`streaming` was given without `dataset`"),
        *[
            (
                {"train_files": (), "dataset": "x", "streaming": True, **more},
                "with `streaming`; it needs text that is read",
            )
            for more in ({"dry_run": True}, {"bpe_dropout": 0.1}, {"max_epochs": 1})
        ],
        ({"language_column": "to"}, "`language_column` was given without `language_tags`"),
        ({"language_tags": True}, "`language_tags` was given without a language; name it with `target_language`"),
    ],
)
def test_sources_that_contradict_each_other_are_refused(values, sentence):
    with pytest.raises(UserError, match=sentence):
        options(**values).check()


def test_a_data_set_needs_no_files():
    options(train_files=(), dataset="x", valid_split="validation").check()
    options(train_files=(), dataset="x", valid_files=FILES).check()
    options(language_tags=True, target_language="de").check()


def test_a_batch_must_hold_the_longest_sentence():
    with pytest.raises(UserError, match=r"`max_length` is 300 and `tokens_per_batch` 299; .*raise .* to 300 or more"):
        options(max_length=300, tokens_per_batch=299, tokens_per_update=299).check()


@pytest.mark.parametrize(
    ("batch", "update", "advice"), [(1000, 2600, 3000), (1000, 2400, 2000), (1000, 999, 1000), (4096, 300, 4096)]
)
def test_an_update_must_be_whole_batches_and_the_advice_is(batch, update, advice):
    with pytest.raises(
        UserError, match=f"{update} and must be a multiple of `tokens_per_batch`, {batch}; use {advice}"
    ):
        options(tokens_per_batch=batch, tokens_per_update=update).check()
    advised = options(tokens_per_batch=batch, tokens_per_update=advice)
    advised.check()
    assert advised.batches_per_update * batch == advice


def test_no_more_checkpoints_are_averaged_than_are_kept():
    with pytest.raises(UserError, match="`average_last` is 6, but only 5 checkpoints are kept; raise `keep_last`"):
        options(average_last=6).check()


def test_training_and_validation_text_have_the_same_form():
    with pytest.raises(UserError, match="Training text is 2 and validation text 1 files"):
        options(valid_files=FILES[:1]).check()


# Names


def test_lists_of_options_name_real_fields():
    names = {field.name for field in dataclasses.fields(TrainingOptions)}
    assert set(MODEL_OPTIONS) <= names and len(set(MODEL_OPTIONS)) == len(MODEL_OPTIONS)
    assert set(FREE_ON_RESUME) <= names and len(set(FREE_ON_RESUME)) == len(FREE_ON_RESUME)
    assert not set(MODEL_OPTIONS) & set(FREE_ON_RESUME)


def test_what_was_computed_with_is_not_free_on_resuming():
    decisive = {
        "max_length",
        "invalid_pairs",
        "preset",
        "provenance",
        "tokens_per_batch",
        "tokens_per_update",
        "warmup_steps",
        "learning_rate_scale",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "label_smoothing",
        "label_smoothing_over",
        "max_grad_norm",
        "seed",
        "mixed_precision",
    }
    assert not decisive & set(FREE_ON_RESUME)


def test_model_options_are_hyper_parameters_that_default_to_the_presets():
    fields = {field.name: field for field in dataclasses.fields(TrainingOptions)}
    known = {field.name for field in dataclasses.fields(VanillaTransformerConfig)}
    for name in MODEL_OPTIONS:
        assert name in known
        assert fields[name].default is None and type(None) in get_args(fields[name].type)
    # And no option that has a hyper-parameter's name is forgotten; the vocabulary has its own.
    assert {name for name in fields if name in known} - {"vocab_size"} == set(MODEL_OPTIONS)


def test_every_option_has_a_help_text_that_is_a_sentence():
    for field in dataclasses.fields(TrainingOptions):
        text = field.metadata["help"]
        assert text[0].isupper() or text.startswith("bf16") or text.startswith("cpu"), field.name
        assert text.endswith("."), field.name


# Precedence


def test_an_explicit_value_wins_over_provenance_and_that_over_the_preset(monkeypatch):
    monkeypatch.setitem(SIZES, "base", {"dropout": 0.5, "d_model": 64, "attention_bias": False})
    monkeypatch.setitem(PROVENANCE, "marian", {"attention_bias": True, "d_model": 32, "layer_norm_eps": 1e-5})
    assert options().model_settings() == {"dropout": 0.5, "d_model": 64, "attention_bias": False}
    marian = {"dropout": 0.5, "d_model": 32, "attention_bias": True, "layer_norm_eps": 1e-5}
    assert options(provenance="marian").model_settings() == marian
    explicit = options(provenance="marian", d_model=16, dropout=0.0, attention_bias=False)
    assert explicit.model_settings() == marian | {"d_model": 16, "dropout": 0.0, "attention_bias": False}


def test_provenance_decides_over_what_labels_are_smoothed_unless_told():
    assert {name: options(provenance=name).smoothed_entries for name in ("paper", *PROVENANCE)} == {
        "paper": "vocabulary",
        "tensor2tensor-2017": "others",
        "fairseq": "others",
        "marian": "vocabulary",
    }
    for chosen in ("vocabulary", "others"):
        assert options(provenance="fairseq", label_smoothing_over=chosen).smoothed_entries == chosen


@pytest.mark.parametrize("value", [0.0, 0.3])
def test_an_explicit_label_smoothing_wins_over_the_presets(value):
    for preset in TRAINING_PAPER:
        assert options(preset=preset).label_smoothing == TRAINING_PAPER[preset]["label_smoothing"]
        assert options(preset=preset, label_smoothing=value).label_smoothing == value
        # Also in what a run writes and is repeated by.
        again = TrainingOptions(**options(preset=preset, label_smoothing=value).as_dict())
        assert again.label_smoothing == value


@pytest.mark.parametrize("preset", SIZES)
@pytest.mark.parametrize("provenance", ["paper", *PROVENANCE])
def test_without_explicit_values_settings_are_preset_and_provenance(preset, provenance):
    settings = options(preset=preset, provenance=provenance).model_settings()
    assert settings == SIZES[preset] | PROVENANCE.get(provenance, {})


# Writing


def test_all_options_survive_json_and_yaml():
    values = options(valid_files=FILES, tsv_columns=(2, 1), cache_dir=Path("cache"), d_k=16).as_dict()
    assert values.keys() == {field.name for field in dataclasses.fields(TrainingOptions)}
    assert json.loads(json.dumps(values)) == values
    assert yaml.safe_load(yaml.safe_dump(values)) == values
    assert values["train_files"] == ["train.en", "train.de"] and values["tsv_columns"] == [2, 1]
    assert values["cache_dir"] == "cache" and values["tokenizer"] is None


def test_options_are_checked_without_importing_torch():
    program = (
        "import sys; sys.argv = ['vanilla-transformer']\n"
        "from vanilla_transformer.training.options import TrainingOptions\n"
        "try:\n    TrainingOptions().check()\nexcept ValueError:\n"
        "    print(sorted({'torch', 'transformers', 'datasets', 'numpy'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr
