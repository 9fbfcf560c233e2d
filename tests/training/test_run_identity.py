"""What a resumed run may change, and what it must not."""

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from runs import make_run, train_anew

from vanilla_transformer.errors import UserError
from vanilla_transformer.presets import PROVENANCE
from vanilla_transformer.training import options as configuration
from vanilla_transformer.training.options import FREE_ON_RESUME, TrainingOptions


@pytest.fixture(scope="module")
def trained(make_options, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    train_anew(make_options(folder, max_updates=2))
    return folder


@pytest.fixture(scope="module")
def copies(material, tmp_path_factory):
    """The same text and vocabulary under other names."""
    folder = tmp_path_factory.mktemp("copies")
    for language in ("en", "de"):
        shutil.copy(material / f"train.{language}", folder / f"copy.{language}")
    shutil.copytree(material / "bytes", folder / "tokenizer")
    return folder


def changed(options: TrainingOptions, name: str, material: Path, copies: Path) -> Any:
    """Another value of an option, under which a run can be made."""
    elsewhere = {
        "output_dir": options.output_dir.with_name("moved"),
        "train_files": (copies / "copy.en", copies / "copy.de"),
        "valid_files": (material / "changed.en", material / "changed.de"),
        "cache_dir": options.output_dir.with_name("other cache"),
        "tokenizer": copies / "tokenizer",
        "source_language": "en",
        "target_language": "de",
        "tsv_columns": (2, 1),
        "preset": "big",
        "provenance": next(iter(PROVENANCE)),
        "activation_function": "gelu",
        "dataset": str(copies),
        "dataset_config": "another",
        "dataset_revision": "another",
        "train_split": "test",
        "valid_split": "test",
        "pair_keys": ("source", "target"),
        "language_column": "language",
        "init_from": str(copies),
        "max_time": "1h",
        "trackers": ("none",),
        "push_to_hub": "user/model",
        "hub_revision": "draft",
    }
    if name in elsewhere:
        return elsewhere[name]
    value, hint = getattr(options, name), get_type_hints(TrainingOptions)[name]
    kinds = [kind for kind in (hint, *get_args(hint)) if kind is not type(None)]
    for kind in kinds:
        if get_origin(kind) is Literal:
            return next(choice for choice in reversed(get_args(kind)) if choice != value)
    if bool in kinds:
        return not value
    if int in kinds:
        return 8 if value is None else 2 * value + (value == 0)
    if float in kinds:
        return 0.05 if value is None else value / 2 + 0.01
    raise AssertionError(f"say in `changed` what another value of {name} is")


# Options that say where text is or what it holds, which plain text files have no use for.
OF_OTHER_TEXT = (
    "dataset", "dataset_config", "dataset_revision", "valid_split", "pair_keys", "tsv_columns", "language_column",
    "language_tags",
)  # fmt: skip
# These two choose what is done.
OPTIONS = [field.name for field in fields(TrainingOptions) if field.name not in ("resume", "dry_run")]


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_either_free_or_refused_by_name(trained, make_options, material, copies, tmp_path, name):
    options = make_options(Path(shutil.copytree(trained, tmp_path / "run")), max_updates=2, resume=True)
    others = replace(options, **{name: changed(options, name, material, copies)})
    assert getattr(others, name) != getattr(options, name)
    if name in OF_OTHER_TEXT:
        with pytest.raises(UserError, match=rf"`{name}`"):
            others.check()
            make_run(others)
        return
    if name not in FREE_ON_RESUME:
        before = {path: path.read_bytes() for path in options.output_dir.rglob("*") if path.is_file()}
        with pytest.raises(
            UserError, match=rf"cannot be resumed, because these differ: (.*; )?{name} \(.* then, .* now"
        ):
            make_run(others)
        assert {path: path.read_bytes() for path in options.output_dir.rglob("*") if path.is_file()} == before
        return
    if name == "output_dir":
        options.output_dir.rename(others.output_dir)
    resumed = []
    for each in (others, replace(options, output_dir=others.output_dir)):
        run = make_run(each)
        assert run.update == 2
        resumed.append(run.step(run.batches.updates(0)[2], 3).tolist())
    # Another backend rounds differently.
    assert resumed[0] == (pytest.approx(resumed[1], rel=1e-5) if name == "attention" else resumed[1])


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("tokenizer", "merges", "vocabulary"),
        ("train_files", ("changed.en", "changed.de"), "training text"),
        ("train_files", ("train.de", "train.en"), "training text"),
    ],
)
def test_data_is_compared_by_content(trained, make_options, material, name, value, named):
    value = material / value if isinstance(value, str) else tuple(material / part for part in value)
    # Without validation text: its languages would be found exchanged.
    more = {"valid_files": (), name: value}
    with pytest.raises(UserError, match=rf"these differ: (.*; )?{named} \('\w+' then, '\w+' now\)"):
        make_run(make_options(trained, resume=True, **more))


def test_columns_of_a_table_are_part_of_the_data(make_options, material, tmp_path):
    sides = [(material / f"train.{language}").read_text().splitlines() for language in ("en", "de")]
    table = tmp_path / "table.tsv"
    table.write_text("".join(f"{source}\t{target}\t{source}\n" for source, target in zip(*sides, strict=True)))
    table_options = {"train_files": (table,), "valid_files": (), "tsv_columns": (1, 2)}
    options = make_options(tmp_path / "run", **table_options, max_updates=1)
    train_anew(options)
    assert make_run(replace(options, resume=True)).update == 1
    with pytest.raises(UserError, match=r"these differ: training text \("):
        make_run(replace(options, resume=True, tsv_columns=(3, 2)))


def test_everything_that_differs_is_listed(trained, make_options, material):
    others = make_options(trained, resume=True, tokenizer=material / "merges", seed=5, dropout=0.4)
    with pytest.raises(UserError) as raised:
        make_run(others)
    for part in ("seed (1 then, 5 now)", "dropout (0.2 then, 0.4 now)", "vocabulary (", " vocab_size ("):
        assert str(raised.value).count(part) == 1, part


def test_the_architecture_is_compared_also_where_the_options_are_the_same(trained, make_options, monkeypatch):
    options = make_options(trained, resume=True)
    assert options.activation_function is None and options.norm_position is None
    # As if another version of the package had another base model.
    sizes = {**configuration.SIZES, "base": {"activation_function": "gelu", "norm_position": "pre"}}
    monkeypatch.setattr(configuration, "SIZES", sizes)
    with pytest.raises(UserError, match=r"differ: activation_function \('relu' then, 'gelu' now\); norm_position \("):
        make_run(options)


def test_the_result_has_the_beam_search_of_the_resumed_run(trained, make_options, tmp_path):
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    train_anew(make_options(run, max_updates=2, resume=True, num_beams=3, length_penalty=0.7))
    saved = json.loads((run / "generation_config.json").read_text())
    assert (saved["num_beams"], saved["length_penalty"]) == (3, 0.7)
