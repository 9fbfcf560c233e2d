import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import MarianConfig, MarianMTModel

from vanilla_transformer import (
    Translator,
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizer,
)
from vanilla_transformer.cli.evaluate import _circumstances


def test_evaluation_writes_what_it_prints(call, run_folder, corpus, tmp_path):
    files = ["--source", corpus[0], "--references", corpus[1]]
    outputs = ["--output", tmp_path / "scores.json", "--translations", tmp_path / "out.de"]
    status, out, _ = call("evaluate", "--model", run_folder, *files, *outputs)
    assert status == 0
    scores = json.loads(out)
    assert scores == json.loads((tmp_path / "scores.json").read_text())
    status, out, _ = call("score", "--translations", tmp_path / "out.de", "--references", corpus[1])
    assert status == 0
    again = json.loads(out)
    assert again.items() <= scores.items()
    about = {name: value for name, value in scores.items() if name not in again}
    assert about.pop("seconds") > 0 and about.pop("threads") == about.pop("workers") == torch.get_num_threads()
    assert about == {
        "model": str(run_folder), "test_set": "sentences", "num_beams": 2, "length_penalty": 0.6, "rules": "paper",
        "device": "cpu", "dtype": "float32", "quantization": None,
    }  # fmt: skip


def test_what_was_searched_with_is_recorded():
    sizes = {
        "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
        "encoder_attention_heads": 1, "decoder_attention_heads": 1, "vocab_size": 261, "pad_token_id": 0,
        "eos_token_id": 2, "decoder_start_token_id": 1,
    }  # fmt: skip
    tokenizer = VanillaTransformerTokenizer()
    marian = MarianMTModel(MarianConfig(**sizes)).bfloat16().eval()
    recorded = _circumstances(Translator(marian, tokenizer))
    assert (recorded["rules"], recorded["dtype"], recorded["workers"]) == ("transformers", "bfloat16", 1)
    ours = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**sizes)).eval()
    ours.generation_config.update(eos_token_id=2, pad_token_id=0, decoder_start_token_id=1)
    recorded = _circumstances(Translator(ours, tokenizer, quantization="int8", workers=3))
    assert (recorded["rules"], recorded["quantization"], recorded["workers"]) == ("paper", "int8", 3)


@pytest.mark.parametrize("flag", ["--output", "--translations"])
def test_a_full_disk_leaves_what_was_there(refused, run_folder, corpus, tmp_path, write, contents, file_limit, flag):
    output = write(tmp_path / "out", "before")
    before = contents(tmp_path)
    files = ["--source", corpus[0], "--references", corpus[1]]
    with file_limit(10):
        line = refused("evaluate", "--model", run_folder, *files, flag, output)
    assert "File too large" in line
    assert contents(tmp_path) == before


def test_an_output_that_is_an_input_of_the_evaluation(refused, run_folder, corpus, tmp_path, contents):
    source, references = (Path(shutil.copy(path, tmp_path)) for path in corpus)
    before = contents(tmp_path)
    arguments = ["evaluate", "--model", run_folder, "--source", source, "--references", references]
    for flags in (
        ["--translations", references],
        ["--output", tmp_path / "." / source.name],
        ["--output", tmp_path / "same", "--translations", tmp_path / "same"],
    ):
        assert "was given twice" in refused(*arguments, *flags)
    assert contents(tmp_path) == before


def test_evaluating_files_of_unequal_length(refused, run_folder, corpus, tmp_path, write):
    short = write(tmp_path / "short.de", "eins", "zwei")
    files = ["--source", corpus[0], "--references", short, "--output", tmp_path / "scores.json"]
    assert "40 sources and 2 references" in refused("evaluate", "--model", run_folder, *files)
    assert not (tmp_path / "scores.json").exists()


def test_scoring_files_of_unequal_length(refused, corpus, tmp_path, write):
    short = write(tmp_path / "short.de", "eins", "zwei")
    assert "2 translations and 40 references" in refused("score", "--translations", short, "--references", corpus[1])


@pytest.mark.parametrize("verb", ["score", "evaluate"])
def test_an_unknown_tokenisation(refused, run_folder, corpus, verb):
    files = {
        "score": ["--translations", corpus[0], "--references", corpus[1]],
        "evaluate": ["--model", run_folder, "--source", corpus[0], "--references", corpus[1]],
    }[verb]
    line = refused(verb, *files, "--tokenize", "14a")
    assert "--tokenize is 14a" in line
    assert "13a" in line
