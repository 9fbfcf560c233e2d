import os
import random
import shutil
import subprocess
import sys
from itertools import count, islice
from pathlib import Path

import pytest
import torch

from vanilla_transformer import (
    Translator,
    VanillaTransformerModel,
)
from vanilla_transformer.errors import UserError
from vanilla_transformer.translation.translator import EXTRA_LENGTH


SENTENCES = (Path(__file__).parents[1] / "data" / "sentences.en").read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def translator(model, tokenizer):
    return Translator(model, tokenizer, num_beams=1)


class Recorder:
    """Stands in for `generate` and keeps what it was called with."""

    def __init__(self, generate):
        self.generate = generate
        self.calls = []

    def __call__(self, **options):
        self.calls.append(options)
        return self.generate(**options)


@pytest.fixture
def recorder(model, monkeypatch):
    recorder = Recorder(model.generate)
    monkeypatch.setattr(model, "generate", recorder)
    return recorder


# Order and completeness


@pytest.mark.parametrize("num_beams", [1, 3])
def test_translations_equal_plain_generate_sentence_by_sentence(model, tokenizer, num_beams):
    translator = Translator(model, tokenizer, num_beams=num_beams, tokens_per_batch=200)
    sentences = SENTENCES[:12]
    expected = []
    for sentence in sentences:
        batch = tokenizer([sentence], return_tensors="pt")
        search = {"num_beams": num_beams}
        if num_beams == 1:
            search.update(length_penalty=None, early_stopping=None)
        length = batch["input_ids"].shape[1] + EXTRA_LENGTH
        ids = model.generate(**batch, max_new_tokens=length, max_length=None, **search)
        text = tokenizer.decode(ids[0], skip_special_tokens=True)
        expected.append(" ".join(part for part in text.replace("\r", "\n").split("\n") if part).strip())
    got = [translator.translate(sentence) for sentence in sentences]
    assert got == expected
    assert len(set(got)) > len(got) // 2


@pytest.mark.parametrize("num_beams", [1, 3])
def test_batches_do_not_change_translations(model, tokenizer, num_beams):
    sentences = SENTENCES[:20]
    results = [
        Translator(model, tokenizer, num_beams=num_beams, tokens_per_batch=budget).translate(sentences)
        for budget in (1, 150, 100_000)
    ]
    # Sentences that end before the cap, which a batch shares.
    caps = [len(tokenizer(sentence)["input_ids"]) + EXTRA_LENGTH for sentence in sentences]
    ended = [
        i for i, text in enumerate(results[0]) if len(tokenizer(text, add_special_tokens=False)["input_ids"]) < caps[i]
    ]
    assert len(ended) > len(sentences) // 2
    for result in results[1:]:
        assert [result[i] for i in ended] == [results[0][i] for i in ended]


def test_the_order_of_the_texts_does_not_matter(translator):
    texts = [*SENTENCES[:10], "", " "]
    shuffled = random.Random(5).sample(range(len(texts)), len(texts))
    one_by_one = Translator(translator.model, translator.tokenizer, num_beams=1, tokens_per_batch=1)
    expected = one_by_one.translate(texts)
    assert one_by_one.translate([texts[i] for i in shuffled]) == [expected[i] for i in shuffled]


def test_every_sentence_comes_back_in_its_place_whatever_the_batches(model, tokenizer, monkeypatch):
    # A model that repeats the source: nothing may be lost, doubled or exchanged.
    monkeypatch.setattr(model, "generate", lambda *, input_ids, **_: input_ids)
    generator = random.Random(7)
    for _ in range(60):
        texts = [
            "".join(generator.choices("ab zé日🙂\t", k=generator.randint(0, 30)))
            for _ in range(generator.randint(0, 30))
        ]
        translator = Translator(model, tokenizer, tokens_per_batch=generator.choice([1, 40, 100, 4096]))
        assert translator.translate(texts) == [text.strip() for text in texts]
        assert translator.translate(tuple(texts)) == [text.strip() for text in texts]


def test_a_text_alone_gives_a_text(translator):
    single = translator.translate(SENTENCES[0])
    assert isinstance(single, str)
    assert translator.translate([SENTENCES[0]]) == [single]


def test_blank_texts_stay_empty_and_cost_nothing(translator, recorder):
    assert translator.translate("") == ""
    assert translator.translate([]) == []
    assert translator.translate(["", " ", "\t\n"]) == ["", "", ""]
    assert recorder.calls == []


def test_surrounding_white_space_does_not_matter(translator):
    assert translator.translate(f"  {SENTENCES[0]} \n") == translator.translate(SENTENCES[0])


def test_a_translation_is_one_line(model, tokenizer, monkeypatch):
    ids = torch.tensor([tokenizer("one\ntwo\r\n\nthree\n")["input_ids"]])
    monkeypatch.setattr(model, "generate", lambda **_: ids)
    assert Translator(model, tokenizer).translate("anything") == "one two three"


# Many lines


@pytest.mark.parametrize("window", [1, 3, 7, 100])
def test_lines_are_translated_as_texts_are(model, tokenizer, window):
    translator = Translator(model, tokenizer, num_beams=1, tokens_per_batch=1)
    lines = [*SENTENCES[:7], "", "Last."]
    assert list(translator.translate_lines(iter(lines), window=window)) == translator.translate(lines)


def test_endless_lines_are_read_no_further_than_a_window(model, tokenizer, monkeypatch):
    monkeypatch.setattr(model, "generate", lambda *, input_ids, **_: input_ids)
    read = []
    lines = (read.append(number) or f"line {number}" for number in count())
    translations = Translator(model, tokenizer).translate_lines(lines, window=10)
    assert read == []
    assert list(islice(translations, 25)) == [f"line {number}" for number in range(25)]
    assert len(read) == 30


# Options


def test_batches_keep_the_budget_and_start_with_the_longest(model, tokenizer, recorder):
    Translator(model, tokenizer, num_beams=1, tokens_per_batch=120).translate(SENTENCES)
    shapes = [tuple(call["input_ids"].shape) for call in recorder.calls]
    assert sum(rows for rows, _ in shapes) == len(SENTENCES)
    assert all(rows * width <= 120 for rows, width in shapes)
    assert len(shapes) < len(SENTENCES)
    widths = [width for _, width in shapes]
    assert widths == sorted(widths, reverse=True)
    for call in recorder.calls:
        assert torch.equal(call["attention_mask"].bool(), call["input_ids"] != tokenizer.pad_token_id)
        assert call["max_new_tokens"] == call["input_ids"].shape[1] + EXTRA_LENGTH


def test_a_text_beyond_the_budget_makes_its_own_batch(model, tokenizer, recorder):
    Translator(model, tokenizer, num_beams=1, tokens_per_batch=5).translate(["a" * 30, "b", "c"])
    assert recorder.calls[0]["input_ids"].shape == (1, 31)


def test_search_options_reach_generate(model, tokenizer, recorder):
    Translator(model, tokenizer, num_beams=3, length_penalty=1.5).translate("a")
    assert (recorder.calls[-1]["num_beams"], recorder.calls[-1]["length_penalty"]) == (3, 1.5)
    # Unset ones are left to the model's generation configuration.
    Translator(model, tokenizer).translate("a")
    assert not {"num_beams", "length_penalty"} & recorder.calls[-1].keys()


def test_the_models_generation_configuration_is_the_default(tokenizer, make_model):
    # Without training, greedy and beam search find different outputs.
    model = make_model().double()
    config = model.generation_config
    explicit = Translator(model, tokenizer, num_beams=config.num_beams, length_penalty=config.length_penalty)
    greedy = Translator(model, tokenizer, num_beams=1)
    default = Translator(model, tokenizer).translate(SENTENCES[:8])
    assert default == explicit.translate(SENTENCES[:8])
    assert default != greedy.translate(SENTENCES[:8])


@pytest.mark.parametrize(
    ("name", "value"), [("num_beams", 0), ("tokens_per_batch", -1), ("length_penalty", float("nan"))]
)
def test_options_out_of_range_are_refused(model, tokenizer, name, value):
    with pytest.raises(UserError, match=f"^--{name} is {value}; it must be"):
        Translator(model, tokenizer, **{name: value})


def test_a_model_that_does_not_generate_is_refused(tokenizer, model):
    with pytest.raises(UserError, match=r"^VanillaTransformerModel does not generate text"):
        Translator(VanillaTransformerModel(model.config), tokenizer)


def test_learned_positions_bound_the_text_and_its_translation(tokenizer, make_model):
    model = make_model(position_embedding_type="learned", max_position_embeddings=20)
    translator = Translator(model, tokenizer, num_beams=1)
    # 19 bytes and the end of the sentence.
    assert len(translator.translate(["a" * 19, "b"])) == 2
    with pytest.raises(UserError, match=r"^Text 3 has 21 tokens, and the model has learned 20 positions"):
        translator.translate(["a", "", "b" * 20])


# Loading


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model, tokenizer):
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_saved_model_translates_as_before(folder, model, tokenizer):
    for name in (folder, str(folder)):
        loaded = Translator.from_pretrained(name, device="cpu", num_beams=2, tokens_per_batch=77)
        assert not loaded.model.training
        assert loaded.model.dtype == torch.float64
        assert (loaded.num_beams, loaded.tokens_per_batch) == (2, 77)
        expected = Translator(model, tokenizer, num_beams=2, tokens_per_batch=77).translate(SENTENCES[:6])
        assert loaded.translate(SENTENCES[:6]) == expected
    assert Translator.from_pretrained(folder, device="cpu", dtype=torch.float32).model.dtype == torch.float32


def test_a_model_that_was_downloaded_before_loads_without_the_hub(folder, tmp_path, monkeypatch):
    # What huggingface_hub's cache looks like.
    snapshot = tmp_path / "models--user--name" / "snapshots" / ("0" * 40)
    shutil.copytree(folder, snapshot)
    (tmp_path / "models--user--name" / "refs").mkdir()
    (tmp_path / "models--user--name" / "refs" / "main").write_text("0" * 40)
    result = load_in_a_process("user/name", HF_HUB_CACHE=str(tmp_path))
    assert (result.returncode, result.stdout) == (0, "loaded\n"), result.stderr


@pytest.mark.parametrize("name", ["no-such-model", "nobody/no-such-model", "/no/such/folder", "./nowhere"])
def test_a_model_that_is_nowhere_is_one_sentence(name):
    with pytest.raises(UserError) as error:
        Translator.from_pretrained(name)
    assert name in str(error.value)
    assert "\n" not in str(error.value)
    assert str(error.value).endswith(".")


def test_a_hub_that_cannot_be_reached_is_asked_once():
    result = load_in_a_process("nobody/no-such-model")
    assert result.returncode == 1
    assert result.stdout.startswith("No translation model can be loaded from nobody/no-such-model (")
    # A request that is repeated waits in between.
    assert "waited" not in result.stdout


def load_in_a_process(name: str, **environment: str) -> subprocess.CompletedProcess:
    """Load a model where the network is allowed, but no Hub answers; says so when the process waits for anything."""
    code = """
import sys, time
time.sleep = lambda seconds: print("waited", seconds)
from vanilla_transformer import Translator
from vanilla_transformer.errors import UserError
try:
    Translator.from_pretrained(sys.argv[1], device="cpu")
except UserError as error:
    print(error)
    sys.exit(1)
print("loaded")
"""
    # Port 9 of this machine discards, where anything listens at all.
    hub = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    return subprocess.run(
        [sys.executable, "-c", code, name],
        env={**os.environ, **hub, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
