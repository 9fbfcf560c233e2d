import os
import random
import shutil
import subprocess
import sys
from copy import deepcopy
from itertools import count, islice
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, MarianConfig, MarianMTModel

import vanilla_transformer.translation.translator as MODULE
from vanilla_transformer import Translator, VanillaTransformerModel, VanillaTransformerTokenizer
from vanilla_transformer.errors import UserError
from vanilla_transformer.translation.options import SearchOptions
from vanilla_transformer.translation.search.hypotheses import Hypothesis
from vanilla_transformer.translation.translator import Translation


SENTENCES = (Path(__file__).parents[1] / "data" / "sentences.en").read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def translator(model, tokenizer):
    return Translator(model, tokenizer, num_beams=1)


class Echo:
    """A backend that repeats the source as its own translation, and keeps what it was called with."""

    takes_threads = True

    def renew(self):
        pass

    def __init__(self, *tokens):
        self.tokens = tokens
        self.calls = []

    def translate(self, sources, **options):
        self.calls.append({"sources": sources, **options})
        return [[Hypothesis(self.tokens or tuple(row.tolist()), -1.0, -0.5, True)] for row in sources]


@pytest.fixture
def echo(monkeypatch):
    echo = Echo()
    monkeypatch.setattr(MODULE, "make_backend", lambda *_, **__: echo)
    return echo


# Order and completeness


@pytest.mark.parametrize("num_beams", [1, 3])
def test_translations_equal_plain_generate_sentence_by_sentence(model, tokenizer, num_beams):
    translator = Translator(model, tokenizer, num_beams=num_beams, rules="transformers", tokens_per_batch=200)
    sentences = SENTENCES[:12]
    expected = []
    for sentence in sentences:
        batch = tokenizer([sentence], return_tensors="pt")
        search = {"num_beams": num_beams, "length_penalty": 0.6, "early_stopping": "never"}
        if num_beams == 1:
            search.update(length_penalty=None, early_stopping=None)
        length = batch["input_ids"].shape[1] + 50
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
        Translator(model, tokenizer, num_beams=num_beams, tokens_per_batch=budget).hypotheses(sentences)
        for budget in (1, 150, 100_000)
    ]
    for result in results[1:]:
        for translations, others in zip(result, results[0], strict=True):
            assert [translation.text for translation in translations] == [other.text for other in others]
            assert translations[0].score == pytest.approx(others[0].score, abs=1e-9)


def test_the_order_of_the_texts_does_not_matter(translator):
    texts = [*SENTENCES[:10], "", " "]
    shuffled = random.Random(5).sample(range(len(texts)), len(texts))
    expected = translator.translate(texts)
    assert translator.translate([texts[i] for i in shuffled]) == [expected[i] for i in shuffled]


def test_every_sentence_comes_back_in_its_place_whatever_the_batches(model, tokenizer, echo):
    # A backend that repeats the source: nothing may be lost, doubled or exchanged.
    generator = random.Random(7)
    for _ in range(60):
        texts = [
            "".join(generator.choices("ab zé日🙂\t", k=generator.randint(0, 30)))
            for _ in range(generator.randint(0, 30))
        ]
        translator = Translator(
            model, tokenizer, tokens_per_batch=generator.choice([1, 40, 100, 4096]), window=generator.randint(1, 9)
        )
        expected = [text.strip() for text in texts]
        assert translator.translate(texts) == expected
        assert translator.translate(tuple(texts)) == expected
        assert list(translator.translate(iter(texts))) == expected


def test_a_text_alone_gives_a_text(translator):
    single = translator.translate(SENTENCES[0])
    assert isinstance(single, str)
    assert translator.translate([SENTENCES[0]]) == [single]
    assert [found.text for found in translator.hypotheses(SENTENCES[0])] == [single]


def test_blank_texts_stay_empty_and_cost_nothing(model, tokenizer, echo):
    translator = Translator(model, tokenizer)
    assert translator.translate("") == ""
    assert translator.translate([]) == []
    assert translator.translate(["", " ", "\t\n"]) == ["", "", ""]
    assert list(translator.translate(iter([]))) == []
    assert echo.calls == []


def test_surrounding_white_space_does_not_matter(translator):
    assert translator.translate(f"  {SENTENCES[0]} \n") == translator.translate(SENTENCES[0])


def test_a_translation_is_one_line(model, tokenizer, echo):
    echo.tokens = tuple(tokenizer("one\ntwo\r\n\nthree\n")["input_ids"])
    assert Translator(model, tokenizer).translate("anything") == "one two three"


# Iterators


@pytest.mark.parametrize("window", [1, 3, 7, 100])
def test_an_iterator_is_translated_as_a_list_is(model, tokenizer, window):
    translator = Translator(model, tokenizer, num_beams=1, window=window)
    texts = [*SENTENCES[:7], "", "Last."]
    assert list(translator.translate(iter(texts))) == translator.translate(texts)


def test_an_endless_iterator_is_read_no_further_than_a_window(model, tokenizer, echo):
    read = []
    lines = (read.append(number) or f"line {number}" for number in count())
    translations = Translator(model, tokenizer, window=10).translate(lines)
    assert read == []
    assert list(islice(translations, 25)) == [f"line {number}" for number in range(25)]
    assert len(read) == 30


@pytest.mark.parametrize("shape", [list, iter])
def test_samples_differ_by_place_and_not_by_window(model, tokenizer, shape):
    texts = [SENTENCES[0]] * 6
    options = {"sample": True, "num_hypotheses": 2, "temperature": 2.0, "seed": 3}
    expected = Translator(model, tokenizer, **options).hypotheses(texts)
    assert len({found[0].text for found in expected}) > 1
    for window, budget in ((4, 4096), (1, 1), (100, 60)):
        translator = Translator(model, tokenizer, window=window, tokens_per_batch=budget, **options)
        assert [[x.text for x in found] for found in translator.hypotheses(shape(texts))] == [
            [x.text for x in found] for found in expected
        ]
    for seed in (4, (1 << 63) - 1):
        other = Translator(model, tokenizer, **{**options, "seed": seed}).hypotheses(texts)
        assert [found[0].text for found in other] != [found[0].text for found in expected]


# Several translations, scores, prefixes


def test_several_translations_come_with_scores_the_best_first(model, tokenizer):
    translator = Translator(model, tokenizer, num_beams=4, num_hypotheses=3)
    found = translator.hypotheses(SENTENCES[:5])
    assert [len(translations) for translations in found] == [3] * 5
    for translations in found:
        assert len({translation.text for translation in translations}) == 3
        scores = [translation.score for translation in translations]
        assert scores == sorted(scores, reverse=True)
        assert all(translation.log_prob <= translation.score < 0.0 for translation in translations)
    assert translator.translate(SENTENCES[:5]) == [translations[0].text for translations in found]
    assert translator.hypotheses("") == [Translation("", 0.0, 0.0, True)]


@pytest.mark.parametrize("shape", [list, iter])
def test_translations_begin_with_their_prefix(model, tokenizer, shape):
    prefixes = ["", "Zz", "", "Die ", "é"]
    for options in ({"num_beams": 1}, {"num_beams": 3}, {"sample": True}):
        translator = Translator(model, tokenizer, window=2, **options)
        free = translator.translate(SENTENCES[:5])
        found = list(translator.translate(shape(SENTENCES[:5]), prefixes=shape(prefixes)))
        assert all(text.startswith(prefix.strip()) for text, prefix in zip(found, prefixes, strict=True))
        assert [found[0], found[2]] == [free[0], free[2]]
        assert translator.translate(SENTENCES[0], prefixes="Zz").startswith("Zz")
    with pytest.raises(UserError, match=r"^There are 5 texts and 4 prefixes;"):
        translator.translate(SENTENCES[:5], prefixes=prefixes[:4])
    with pytest.raises(UserError, match=r"^There are more prefixes than texts"):
        list(translator.translate(iter(SENTENCES[:4]), prefixes=iter(prefixes)))
    with pytest.raises(UserError, match=r"^There is one prefix and several texts"):
        translator.translate(shape(SENTENCES[:2]), prefixes="xy")


@pytest.mark.parametrize("shape", [list, iter])
def test_texts_that_are_not_unicode_are_refused(model, tokenizer, echo, shape):
    translator = Translator(model, tokenizer, window=2)
    with pytest.raises(UserError, match=r"^Text 3, holds the lone surrogate '\\ud800';"):
        list(translator.translate(shape(["a", "b", "a \ud800 man"])))
    with pytest.raises(UserError, match=r"^Prefix 2, holds the lone surrogate '\\ud800';"):
        translator.translate(["a", "b"], prefixes=["", "\ud800"])


# Options


def test_batches_keep_the_budget_and_start_with_the_longest(model, tokenizer, echo):
    Translator(model, tokenizer, tokens_per_batch=120).translate(SENTENCES)
    shapes = [(len(call["sources"]), max(map(len, call["sources"]))) for call in echo.calls]
    assert sum(rows for rows, _ in shapes) == len(SENTENCES)
    assert all(rows * width <= 120 for rows, width in shapes)
    assert len(shapes) < len(SENTENCES)
    widths = [width for _, width in shapes]
    assert widths == sorted(widths, reverse=True)


def test_the_number_of_short_texts_in_a_batch_is_bounded(model, tokenizer, echo):
    texts = [f"{number % 10}" for number in range(1500)]
    assert Translator(model, tokenizer, workers=1).translate(texts) == texts
    assert max(len(call["sources"]) for call in echo.calls) <= 4096 // 16


def test_a_text_beyond_the_budget_makes_its_own_batch(model, tokenizer, echo):
    Translator(model, tokenizer, tokens_per_batch=5).translate(["a" * 30, "b", "c"])
    assert [len(row) for row in echo.calls[0]["sources"]] == [31]


def test_progress_counts_every_text_once(model, tokenizer):
    counted = []
    translator = Translator(model, tokenizer, num_beams=1, max_source_tokens=8, tokens_per_batch=30)
    texts = ["", "One two three four.", *SENTENCES[:9]]
    translator.translate_window(texts, on_progress=counted.append)
    assert sum(counted) == len(texts)


def test_the_models_generation_configuration_is_the_default(tokenizer, make_model):
    # Without training, greedy and beam search find different outputs.
    model = make_model().double()
    config = model.generation_config
    config.suppress_tokens, config.bad_words_ids = [77], [[78], [79]]
    translator = Translator(model, tokenizer)
    assert (translator.options.num_beams, translator.options.length_penalty) == (2, 0.6)
    assert translator.options.banned_tokens == (77, 78, 79)
    explicit = Translator(model, tokenizer, num_beams=2, length_penalty=0.6, banned_tokens=(77, 78, 79))
    greedy = Translator(model, tokenizer, num_beams=1)
    default = translator.translate(SENTENCES[:8])
    assert default == explicit.translate(SENTENCES[:8])
    assert default != greedy.translate(SENTENCES[:8])
    # A model that says nothing is translated as in the paper.
    model.generation_config = GenerationConfig(decoder_start_token_id=1, eos_token_id=[2], pad_token_id=0)
    assert Translator(model, tokenizer).options == SearchOptions()
    assert Translator(model, tokenizer, sample=True).options.num_beams == 1


@pytest.mark.parametrize(
    ("name", "value"), [("num_beams", 0), ("tokens_per_batch", -1), ("window", 0), ("length_penalty", float("nan"))]
)
def test_options_out_of_range_are_refused(model, tokenizer, name, value):
    with pytest.raises(UserError, match=f"^`{name}` is {value}; it must be"):
        Translator(model, tokenizer, **{name: value})


def test_a_model_that_does_not_generate_is_refused(tokenizer, model):
    with pytest.raises(UserError, match=r"^VanillaTransformerModel does not generate text"):
        Translator(VanillaTransformerModel(model.config), tokenizer)


@pytest.mark.parametrize("decoder", ["packed", "called"])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_model_of_numbers_that_are_not_finite_is_named(tokenizer, make_model, num_beams, decoder):
    model = make_model(tie_word_embeddings=False).double()
    with torch.no_grad():
        model.lm_head.weight[200, 3] = float("nan")
    if decoder == "called":
        model.lm_head.register_forward_hook(lambda module, args, output: None)
    translator = Translator(model, tokenizer, num_beams=num_beams)
    for translate in (translator.hypotheses, translator.translate):
        with pytest.raises(UserError, match=r"^The model finds no translation of text 2: its weights are not finite"):
            translate(["", "a"])


# Long texts


def test_long_texts_are_split_at_ends_of_sentences(model, tokenizer, echo):
    translator = Translator(model, tokenizer, max_source_tokens=12)
    text = "One two. Three! Four five six seven eight nine.  Ten? abcdefghijklmnop"
    assert translator.translate(["", text, "b"]) == ["", text.replace("  ", " ").replace("klm", "k lm"), "b"]
    parts = {tokenizer.decode(row, skip_special_tokens=True) for call in echo.calls for row in call["sources"]}
    assert parts == {
        "One two.", "Three!", "Four five", "six seven", "eight nine.", "Ten?", "abcdefghijk", "lmnop", "b",
    }  # fmt: skip
    (found,) = translator.hypotheses([text])
    assert (found[0].log_prob, found[0].score) == (-8.0, -4.0)


def test_a_prefix_begins_the_first_part_of_a_split_text(model, tokenizer, echo):
    translator = Translator(model, tokenizer, max_source_tokens=8, tokens_per_batch=1)
    translator.translate(["One. Two. Three.", "Four."], prefixes=["A", ""])
    given = {
        tokenizer.decode(source, skip_special_tokens=True): tokenizer.decode(prefix)
        for call in echo.calls
        for source, prefix in zip(call["sources"], call["prefixes"], strict=True)
    }
    assert given == {"One.": "A", "Two.": "", "Three.": "", "Four.": ""}


def test_long_texts_are_refused_or_translated_as_asked(model, tokenizer, echo):
    texts = ["a", "", "b" * 20]
    translator = Translator(model, tokenizer, max_source_tokens=20, long_texts="translate")
    assert translator.translate(texts) == texts
    translator = Translator(model, tokenizer, max_source_tokens=20, long_texts="refuse", window=1)
    assert translator.translate(["b" * 19]) == ["b" * 19]
    with pytest.raises(UserError, match=r"^Text 3 has 21 tokens, and at most 20 are translated; split the text,"):
        translator.translate(texts)
    with pytest.raises(UserError, match=r"^Text 3 has"):
        list(translator.translate(iter(texts)))


def test_the_tokenizer_says_how_long_a_text_may_be(model):
    tokenizer = VanillaTransformerTokenizer(model_max_length=30)
    assert Translator(model, tokenizer).max_source_tokens == 30
    assert Translator(model, tokenizer, max_source_tokens=50).max_source_tokens == 50
    assert Translator(model, VanillaTransformerTokenizer()).max_source_tokens is None


@pytest.mark.parametrize("num_beams", [1, 2])
def test_learned_positions_bound_the_text_and_its_translation(tokenizer, make_model, num_beams):
    model = make_model(position_embedding_type="learned", max_position_embeddings=20)
    # 19 bytes and the end of the sentence; the longer text is split.
    translator = Translator(model, tokenizer, num_beams=num_beams, banned_tokens=(2,), max_source_tokens=99)
    assert len(translator.translate(["a" * 19, "b", "c" * 30])) == 3
    for long_texts in ("refuse", "translate"):
        translator = Translator(model, tokenizer, long_texts=long_texts)
        with pytest.raises(UserError, match=r"^Text 3 has 21 tokens, and at most 20 are translated;"):
            translator.translate(["a", "", "b" * 20])


# Languages


def test_the_tag_of_a_language_begins_the_source(model, echo):
    tokenizer = VanillaTransformerTokenizer.train_from_iterator(
        ["a b c"], 263, min_frequency=1, languages=["de", "fr"]
    )
    with pytest.raises(UserError, match=r"for several target languages; set `target_language` to one of de, fr\.$"):
        Translator(model, tokenizer)
    with pytest.raises(UserError, match=r"^`target_language` is es, but the vocabulary has tags for de, fr;"):
        Translator(model, tokenizer, target_language="es")
    for language, tag in tokenizer.language_tags.items():
        Translator(model, tokenizer, target_language=language, max_source_tokens=4).translate(["ab", "abcd"])
        assert all(row[0] == tag for row in echo.calls[-1]["sources"])
    assert tokenizer.tgt_lang is None
    tokenizer.tgt_lang = "fr"
    Translator(model, tokenizer).translate("ab")
    assert echo.calls[-1]["sources"][0][0] == tokenizer.language_tags["fr"]


def test_a_language_for_a_model_without_tags(model, tokenizer):
    with pytest.raises(UserError, match=r"^`target_language` is de, but the vocabulary has no language tags;"):
        Translator(model, tokenizer, target_language="de")


# Models of other classes


@pytest.fixture(scope="module")
def marian():
    torch.manual_seed(1)
    sizes = {
        "vocab_size": 261, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    }  # fmt: skip
    config = MarianConfig(**sizes, pad_token_id=0, eos_token_id=2, bos_token_id=1, decoder_start_token_id=1)
    model = MarianMTModel(config).eval()
    # What is forced has no probability.
    model.generation_config.forced_eos_token_id = None
    # Probabilities that differ.
    with torch.no_grad():
        model.model.shared.weight.mul_(20.0)
    return model


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("with_scores", [False, True])
def test_other_models_whose_weights_are_not_finite_are_named(marian, tokenizer, num_beams, with_scores):
    broken = deepcopy(marian)
    broken.model.decoder.layers[0].fc1.weight.data[3, 4] = torch.nan
    translator = Translator(broken, tokenizer, num_beams=num_beams)
    with pytest.raises(UserError, match="its weights are not finite"):
        translator.hypotheses(SENTENCES[:3], with_scores=with_scores)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_other_models_translate_with_generate(marian, tokenizer, num_beams):
    # A batch has one cap.
    search = {"num_beams": num_beams, "num_hypotheses": num_beams, "length_penalty": 1.0}
    translator = Translator(marian, tokenizer, tokens_per_batch=1, **search)
    found = translator.hypotheses(SENTENCES[:3])
    for sentence, translations in zip(SENTENCES[:3], found, strict=True):
        batch = tokenizer([sentence], return_tensors="pt")
        beams = {"length_penalty": 1.0} if num_beams > 1 else {}
        rows = marian.generate(
            **batch, num_beams=num_beams, num_return_sequences=num_beams, **beams,
            max_length=None, max_new_tokens=batch["input_ids"].shape[1] + 50,
        )  # fmt: skip
        texts = [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
        # Line ends aside.
        assert [translation.text.split() for translation in translations] == [text.split() for text in texts]
        for row, translation in zip(rows.tolist(), translations, strict=True):
            target = row[1:]
            target = target[: target.index(2) + 1] if 2 in target else target
            logits = marian(**batch, decoder_input_ids=torch.tensor([[1, *target[:-1]]])).logits[0]
            total = logits.log_softmax(dim=-1).gather(1, torch.tensor(target)[:, None]).sum().item()
            assert translation.log_prob == pytest.approx(total, abs=1e-3)
            assert translation.score == pytest.approx(total / len(target), abs=1e-4)
    assert translator.translate(SENTENCES[:3]) == [translations[0].text for translations in found]


@pytest.mark.parametrize("options", [{"sample": True}, {"rules": "transformers"}, {"quantization": "int8"}])
def test_what_other_models_cannot_do_is_refused(marian, tokenizer, options):
    with pytest.raises(UserError, match=r"^MarianMTModel translates with its own `generate`"):
        Translator(marian, tokenizer, **options)
    with pytest.raises(UserError, match=r"^MarianMTModel takes no forced prefix"):
        Translator(marian, tokenizer).translate("a", prefixes="b")


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
        assert (loaded.options.num_beams, loaded.tokens_per_batch) == (2, 77)
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
