"""Whatever is wrong with a model's folder, every verb that loads it says so in one sentence, and writes nothing."""

import json
import shutil
import struct
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vanilla_transformer import VanillaTransformerForConditionalGeneration


WEIGHTS, CONFIG, GENERATION = "model.safetensors", "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
NAN = float("nan")


def content(name: str, change):
    def damage(folder: Path) -> None:
        path = folder / name
        path.write_bytes(change(path.read_bytes()) if callable(change) else change)

    return damage


def value(name: str, key: str, new: object):
    return content(name, lambda old: json.dumps({**json.loads(old), key: new}).encode())


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def without_a_shard(folder: Path) -> None:
    model = VanillaTransformerForConditionalGeneration.from_pretrained(folder)
    (folder / WEIGHTS).unlink()
    model.save_pretrained(folder, max_shard_size="8KB")
    next(folder.glob("model-00002-*")).unlink()


def with_a_tensor_more(folder: Path) -> None:
    tensors = {**load_file(folder / WEIGHTS), "extra": torch.zeros(2)}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def a_folder_for(name: str):
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return damage


ONE_MORE = {
    "id": 300, "content": "<x>", "special": True, "single_word": False, "lstrip": False, "rstrip": False,
    "normalized": False,
}  # fmt: skip
# JSON that a hand or a disk has damaged, by the file.
BROKEN = {
    "a list": b"[1]", "a number": b"3", "null": b"null", "no JSON": b"hello", "empty": b"", "zeros": bytes(64),
    "a byte order mark": lambda old: b"\xef\xbb\xbf" + old, "UTF-16": lambda old: old.decode().encode("utf-16"),
    "cut": lambda old: old[: len(old) // 2], "nested without end": b"[" * 100_000,
}  # fmt: skip
DAMAGES = {
    **{
        f"{name} is {what}": content(name, new)
        for name in (CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG)
        for what, new in BROKEN.items()
    },
    **{f"{name} is a folder": a_folder_for(name) for name in (CONFIG, GENERATION, TOKENIZER_CONFIG, WEIGHTS)},
    **{
        f"{CONFIG} has {new} as {key}": value(CONFIG, key, new)
        for key, values in {
            "d_model": ("16", -16, None, NAN, [16], 24), "vocab_size": ("x", 0, 10**12), "encoder_layers": (5, 10**12),
            "dropout": (NAN, 2, "0"), "eos_token_id": ("</s>", NAN, 10**6), "decoder_start_token_id": (-1, [1]),
            "dtype": ("float7",), "model_type": ("nothing", None, [1]), "quantization_config": ("x", [1]),
            "activation_function": ("x", 1), "position_embedding_type": (None, "x"), "auto_map": (None, 1),
            "transformers_weights": ("../x.safetensors", "pytorch_model.bin", 1),
        }.items()
        for new in values
    },
    **{
        f"{GENERATION} has {new} as {key}": value(GENERATION, key, new)
        for key, values in {
            "num_beams": ("4", -1, 0, NAN, [4], 10**9), "length_penalty": ("x", NAN, [1]),
            "eos_token_id": (None, "2", -1, []), "decoder_start_token_id": (None, 10**6, [1]),
            "suppress_tokens": (3, ["x"], [10**6]), "bad_words_ids": ([3], "x"),
        }.items()
        for new in values
    },
    **{
        f"{TOKENIZER_CONFIG} has {new} as {key}": value(TOKENIZER_CONFIG, key, new)
        for key, values in {
            "model_max_length": ("512", -1, NAN, [1]), "tgt_lang": (3, "xx"), "pad_token": (3, [1]),
            "eos_token": (3, "<new>"), "tokenizer_class": (3, [1]),
        }.items()
        for new in values
    },
    f"{TOKENIZER} is another object": content(TOKENIZER, b"{}"),
    f"{TOKENIZER} is larger than the model": value(TOKENIZER, "added_tokens", [ONE_MORE]),
    f"{WEIGHTS} is missing": lambda folder: (folder / WEIGHTS).unlink(),
    f"{WEIGHTS} is a pickle": pickled,
    f"{WEIGHTS} lacks a shard": without_a_shard,
    f"{WEIGHTS} has a tensor more": with_a_tensor_more,
    f"{WEIGHTS} is empty": content(WEIGHTS, b""),
    f"{WEIGHTS} is cut": content(WEIGHTS, lambda old: old[: len(old) // 2]),
    f"{WEIGHTS} is cut in its header": content(WEIGHTS, lambda old: old[:100]),
    f"{WEIGHTS} has bytes more": content(WEIGHTS, lambda old: old + b"12345"),
    f"{WEIGHTS} has a header beyond memory": content(WEIGHTS, lambda old: struct.pack("<Q", 2**62) + old[8:]),
    f"{WEIGHTS} has a header beyond its end": content(WEIGHTS, lambda old: struct.pack("<Q", 2 * len(old)) + old[8:]),
    f"{WEIGHTS} has a header of another kind": content(WEIGHTS, b"\2" + bytes(7) + b"[]"),
}  # fmt: skip


@pytest.fixture
def verbs(corpus, small, tmp_path, write):
    """The verbs that load a model, as command lines."""
    lines = write(tmp_path / "lines", "A house.")

    def verbs(folder: Path) -> dict[str, list]:
        train = ["train", "--train_files", *corpus, "--device", "cpu", "--max_updates", "1"]
        return {
            "translate": ["translate", "--model", folder, "--device", "cpu", "A house."],
            "evaluate": ["evaluate", "--model", folder, "--device", "cpu", "--source", lines, "--references", lines],
            "average": ["average", folder, "--output_dir", tmp_path / "out"],
            "publish": ["publish", folder, "--repo", "user/name", "--dry_run"],
            "--init_from": [*train, "--init_from", folder, "--output_dir", tmp_path / "out"],
            "--tokenizer": [*train, *small, "--tokenizer", folder, "--output_dir", tmp_path / "out", "--dry_run"],
        }

    return verbs


@pytest.fixture(scope="module")
def sound(run_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound") / "model"
    shutil.copytree(run_folder, folder, ignore=shutil.ignore_patterns("checkpoints", "cache", "*.yaml", "*.jsonl"))
    return folder


def damaged(sound: Path, tmp_path: Path, damage: str) -> Path:
    folder = Path(shutil.copytree(sound, tmp_path / "model"))
    DAMAGES[damage](folder)
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_verb_refuses_it_in_one_sentence(refused, sound, verbs, tmp_path, damage):
    folder = damaged(sound, tmp_path, damage)
    for verb, arguments in verbs(folder).items():
        if verb == "--tokenizer" and not damage.startswith("tokenizer"):
            continue
        if "larger" in damage and verb == "--tokenizer":
            # Where no model is, no tokenizer is too large.
            continue
        line = refused(*arguments)
        assert str(folder) in line, verb
        assert len(line) < 700
        assert not (tmp_path / "out" / WEIGHTS).exists()


def test_the_sound_model_is_taken(call, sound, verbs):
    for verb, arguments in verbs(sound).items():
        if verb != "--init_from":
            status, _, err = call(*arguments)
            assert status == 0, (verb, err)


def test_a_file_in_place_of_the_folder(refused, verbs, tmp_path, sound):
    for arguments in verbs(sound / WEIGHTS).values():
        assert str(sound / WEIGHTS) in refused(*arguments)


def test_a_folder_that_may_not_be_read(refused, verbs, tmp_path, sound, ordinary_user):
    folder = Path(shutil.copytree(sound, tmp_path / "model"))
    for name in (CONFIG, WEIGHTS, TOKENIZER):
        (folder / name).chmod(0)
    tmp_path.chmod(0o777)
    for parent in (tmp_path, *tmp_path.parents):
        if parent.is_relative_to(tempfile.gettempdir()) and parent != Path(tempfile.gettempdir()):
            parent.chmod(0o777)
    with ordinary_user():
        for arguments in verbs(folder).values():
            line = refused(*arguments)
            assert str(folder) in line and "Permission denied" in line


@pytest.mark.parametrize("what", ["config", "weights"])
def test_a_checkpoint_whose_manifest_was_written_anew(refused, run_folder, corpus, small, tmp_path, what):
    """Digests say that nothing changed since; whether weights and configuration fit, they do not."""
    from vanilla_transformer.files import write_manifest
    from vanilla_transformer.training.records.checkpoints import list_checkpoints

    run = Path(shutil.copytree(run_folder, tmp_path / "run"))
    for checkpoint in list_checkpoints(run / "checkpoints"):
        if what == "config":
            value(CONFIG, "decoder_layers", 4)(checkpoint)
        else:
            with_a_tensor_more(checkpoint)
        (checkpoint / "manifest.json").unlink()
        write_manifest(checkpoint, "sha256")
    files = ["--train_files", *corpus, "--valid_files", *corpus]
    line = refused("train", *files, *small, "--output_dir", run, "--max_updates", "8", "--resume")
    assert {"config": "decoder_layers", "weights": "do not fit its config.json"}[what] in line
    assert "do not fit its config.json" in refused("average", run, "--last", "2", "--output_dir", tmp_path / "mean")
