from functools import cache
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from runs import D_MODEL, MAX_UPDATES, WARMUP_STEPS, train_anew

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.data.corpora import ParallelText
from vanilla_transformer.data.encoding import iterate_texts
from vanilla_transformer.training.options import TrainingOptions


SENTENCES = tuple(Path(__file__).parents[1] / "data" / f"sentences.{language}" for language in ("en", "de"))


@pytest.fixture(autouse=True)
def forget_mixed_precision():
    """Accelerate remembers its settings for the whole process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def part(tmp_path):
    """Write some of the sentences, source and target each to a file of its own; sides 1, 0 exchange the languages."""

    def part(name: str, lines: slice, sides: tuple[int, int] = (0, 1)) -> tuple[Path, Path]:
        files = (tmp_path / f"{name}.source", tmp_path / f"{name}.target")
        for path, side in zip(files, sides, strict=True):
            sentences = SENTENCES[side].read_text(encoding="utf-8").splitlines(keepends=True)
            path.write_text("".join(sentences[lines]), encoding="utf-8")
        return files

    return part


@pytest.fixture
def float64():
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(previous)


@pytest.fixture(scope="session")
def material(tmp_path_factory):
    """A folder with training and validation text, two vocabularies, and room for the encoded text."""
    folder = tmp_path_factory.mktemp("material")
    for path in SENTENCES:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / f"train{path.suffix}").write_text("".join(lines[:30]), encoding="utf-8")
        (folder / f"valid{path.suffix}").write_text("".join(lines[30:]), encoding="utf-8")
        (folder / f"changed{path.suffix}").write_text("".join(lines[1:31]), encoding="utf-8")
    VanillaTransformerTokenizer().save_pretrained(folder / "bytes")
    texts = iterate_texts(ParallelText(SENTENCES))
    VanillaTransformerTokenizer.train_from_iterator(texts, 300).save_pretrained(folder / "merges")
    return folder


@pytest.fixture(scope="session")
def make_options(material):
    def make(output_dir: Path, **values) -> TrainingOptions:
        defaults = {
            "output_dir": output_dir,
            "train_files": (material / "train.en", material / "train.de"),
            "valid_files": (material / "valid.en", material / "valid.de"),
            "cache_dir": material / "cache",
            "tokenizer": material / "bytes",
            "max_length": 100,
            "d_model": D_MODEL,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "dropout": 0.2,
            "max_updates": MAX_UPDATES,
            "tokens_per_batch": 160,
            "tokens_per_update": 480,
            "warmup_steps": WARMUP_STEPS,
            "device": "cpu",
            "log_every": 2,
            "validate_every": 3,
            "save_every": 4,
            "keep_last": 3,
            "keep_best": 0,
            "average_last": 2,
        }
        return TrainingOptions(**{**defaults, **values})

    return make


@pytest.fixture(scope="session")
def uninterrupted(make_options, tmp_path_factory):
    """Folders of runs that nothing stopped, by precision and other options."""

    @cache
    def run(mixed_precision: str, **values) -> Path:
        folder = tmp_path_factory.mktemp(f"uninterrupted_{mixed_precision}")
        assert train_anew(make_options(folder, mixed_precision=mixed_precision, **values)).is_complete
        return folder

    return run
