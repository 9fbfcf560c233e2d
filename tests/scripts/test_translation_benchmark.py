import json
import os
import sys
from pathlib import Path

import pytest
import torch

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizer,
)


BENCHMARKS = Path(__file__).parents[2] / "scripts" / "benchmarks"
TEXT = [str(Path(__file__).parents[1] / "data" / f"sentences.{side}") for side in ("en", "de")]

sys.path.insert(0, str(BENCHMARKS))
try:
    import systems
    import translation
finally:
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    config = VanillaTransformerConfig(
        vocab_size=261, d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=48, decoder_ffn_dim=48,
        encoder_attention_heads=2, decoder_attention_heads=2, final_logits_bias=True,
    )  # fmt: skip
    model = VanillaTransformerForConditionalGeneration(config).eval()
    with torch.no_grad():
        for values in model.parameters():
            values.add_(torch.randn_like(values) * 0.2)
        # So that translations end.
        model.final_logits_bias[0, 2] = 2.0
    return model


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    VanillaTransformerTokenizer().save_pretrained(folder)
    return folder


@torch.no_grad()
def test_marian_gets_the_same_function(model):
    ids, targets = torch.randint(5, 261, (3, 11)), torch.randint(5, 261, (3, 9))
    mine = model(ids, decoder_input_ids=targets).logits
    theirs = systems.to_marian(model)(ids, decoder_input_ids=targets).logits
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_larger_vocabulary_leaves_what_was_known(model, folder):
    larger = VanillaTransformerForConditionalGeneration.from_pretrained(folder).eval()
    systems.enlarge(larger, 400)
    ids = torch.randint(5, 261, (3, 11))
    larger.final_logits_bias, bias = None, model.final_logits_bias
    mine, theirs = (each(ids, decoder_input_ids=ids).logits for each in (model, larger))
    mine = mine - bias
    torch.testing.assert_close(theirs[..., :261], mine)
    torch.testing.assert_close(theirs[..., 261:], mine[..., 4:5].expand(-1, -1, 139))


@pytest.mark.parametrize("workers", [1, 2])
def test_systems_are_compared_and_measured(folder, tmp_path, capsys, monkeypatch, workers):
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    output = tmp_path / "record.json"
    names = ["ours-fp32", "ours-fp32-torch", "marian-fp32"]
    threads = torch.get_num_threads()
    try:
        status = translation.main(
            [
                str(folder),
                "--text",
                *TEXT,
                "--sentences",
                "6",
                "--rounds",
                "2",
                "--beams",
                "1",
                "--batches",
                "tokens",
                "2",
                "--workers",
                str(workers),
                "--no-memory",
                "--systems",
                *names,
                "--output",
                str(output),
            ]
        )
    finally:
        torch.set_num_threads(threads)
    assert status == 0
    settings = json.loads(output.read_text())["settings"]
    assert [each["setting"]["batch"] for each in settings] == ["tokens", "2"]
    for each in settings:
        assert sorted(each["summary"]) == sorted(names)
        assert len(each["measurements"]) == 2 * len(names)
        for row in each["summary"].values():
            assert row["agreement"]["sentences"] == 6
            assert row["sentences_per_cpu_second"]["median"] > 0
        assert each["summary"]["ours-fp32-torch"]["agreement"]["same"] == 6
        assert {*each["ratios"]} == {"ours-fp32 / marian-fp32", "ours-fp32-torch / marian-fp32"}
    assert "times as fast" in capsys.readouterr().out


def test_other_translations_are_not_timed(folder, monkeypatch):
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None, raising=False)
    monkeypatch.setitem(systems.SYSTEMS, "marian-fp32", lambda *_: lambda sources, beams: [[70]] * len(sources))
    with pytest.raises(RuntimeError, match="marian-fp32 translates other than ours-fp32"):
        translation.main([str(folder), "--text", *TEXT, "--sentences", "4", "--systems", "ours-fp32", "marian-fp32"])


def test_systems_are_those_that_the_device_has(folder, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(translation, "_version", lambda _: "4.8")
    arguments = [str(folder), "--text", *TEXT]
    assert translation.parse(arguments).systems == list(translation.DEFAULT_SYSTEMS)
    on_gpu = translation.parse([*arguments, "--device", "cuda"]).systems
    assert on_gpu == [name for name in translation.DEFAULT_SYSTEMS if name != "ours-int8"]
    for name in ("ours-int8", "ours-int8-torch-hf"):
        with pytest.raises(SystemExit):
            translation.parse([*arguments, "--device", "cuda", "--systems", "ours-bf16", name])
        assert f"--systems names {name}, but it rounds weights for CPUs only" in capsys.readouterr().err
    monkeypatch.setattr(translation, "_version", lambda _: None)
    assert not any(name.startswith("ct2") for name in translation.parse(arguments).systems)
    with pytest.raises(SystemExit):
        translation.parse([*arguments, "--systems", "ct2-int8"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batches", "many"], "neither `tokens` nor a number"),
        (["--workers", "1000"], "may use"),
        (["--text", "absent.en", "absent.de"], "no such file"),
    ],
)
def test_mistakes_are_told(folder, capsys, options, message):
    with pytest.raises(SystemExit) as stopped:
        translation.main([str(folder), "--text", *TEXT, *options])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
