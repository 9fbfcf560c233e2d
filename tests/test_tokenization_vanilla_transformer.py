import json
import random
import re
import secrets
import subprocess
import sys
import unicodedata
import weakref

import pytest
from tokenizers import AddedToken, pre_tokenizers
from transformers import AutoTokenizer

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerTokenizer


PAD, BOS, EOS, UNK, MASK = range(5)
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]

CORPUS = [
    f"{subject} {verb} {thing}{end}"
    for subject in ("Der Hund", "Die Katze", "Das große Haus", "The old house", "Ein Übersetzer", "Nobody")
    for verb in ("sieht", "liebt", "translates", "never sees", "überquert")
    for thing in ("den Fluss", "the river", "einen Satz", "a sentence", "seine Straße")
    for end in (".", "!", " ?")
]

AWKWARD = [
    "",
    " ",
    "   ",
    "a",
    " a",
    "a ",
    "  two  spaces   inside ",
    "\n",
    "line\nbreak\r\nand\ttab\n",
    "\r",
    "hello , world !  don 't n't 's .",
    "\u2581underscore\u2581of\u2581sentencepiece",
    "Ġbyte level's own letter for a space Ċ",
    "👩‍👩‍👧‍👦 🇩🇪 🙂",
    "e\u0301 and é, n\u0303 and ñ, ﬁ and fi, Ⅳ",
    "\u0301 a combining mark first",
    "ẞ ß SS İ ı",  # noqa: RUF001
    "日本語のテキスト、中文。",
    "\u200b\u200e\ufeff\u00a0\u2028\u2029\x85\x0b\x0c",
    "\x00\x01\x7f\x80\uffff\ufffe\U0010ffff",
    "<pad>",
    "a</s>b",
    "<s> <s></s><unk><mask> </s>",
    " </s>",
    "</s",
    "< / s >",
    "x" * 1000,
    " " * 300,
]


def random_texts(number: int, seed: int) -> list[str]:
    """Strings of any code points but surrogates, and of pieces that tokenizers treat in special ways."""
    source = random.Random(seed)
    planes = [(0x0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF)]
    pieces = [*SPECIAL_TOKENS, " ", "  ", "\n", "\u2581", "\u0301", "'s", ".", "Haus", "river"]
    texts = []
    for _ in range(number):
        characters = []
        for _ in range(source.randrange(40)):
            if source.random() < 0.3:
                characters.append(source.choice(pieces))
            else:
                characters.append(chr(source.randint(*source.choice(planes))))
        texts.append("".join(characters))
    return texts


# Not shared between tests: a call with padding or truncation changes the backend.
@pytest.fixture
def trained() -> VanillaTransformerTokenizer:
    return VanillaTransformerTokenizer.train_from_iterator(iter(CORPUS), 330)


@pytest.fixture(params=["untrained", "trained", "trained and reloaded"])
def tokenizer(request, trained, tmp_path) -> VanillaTransformerTokenizer:
    if request.param == "untrained":
        return VanillaTransformerTokenizer()
    if request.param == "trained":
        return trained
    trained.save_pretrained(tmp_path)
    return AutoTokenizer.from_pretrained(tmp_path)


def assert_round_trip(tokenizer: VanillaTransformerTokenizer, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert ids[-1] == EOS
    assert min(ids[:-1], default=MASK) >= MASK, f"an id that steers the model in {ids}"
    assert ids.count(MASK) == text.count("<mask>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.decode(ids[:-1]) == text


@pytest.mark.parametrize("text", AWKWARD, ids=ascii)
def test_awkward_text_comes_back_unchanged(tokenizer, text):
    assert_round_trip(tokenizer, text)


def test_random_text_comes_back_unchanged(tokenizer):
    seed = secrets.randbits(32)
    for text in random_texts(1000, seed):
        try:
            assert_round_trip(tokenizer, text)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, text {text!r}") from error


def test_nothing_is_normalised(tokenizer):
    composed, decomposed = unicodedata.normalize("NFC", "é"), unicodedata.normalize("NFD", "é")
    assert tokenizer(composed)["input_ids"] != tokenizer(decomposed)["input_ids"]
    assert tokenizer("Haus")["input_ids"] != tokenizer("haus")["input_ids"]


def test_special_tokens_then_bytes_open_every_vocabulary(tokenizer):
    assert tokenizer.convert_ids_to_tokens(list(range(5))) == SPECIAL_TOKENS
    ids = (
        tokenizer.pad_token_id,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.unk_token_id,
        tokenizer.mask_token_id,
    )
    assert ids == (PAD, BOS, EOS, UNK, MASK)
    assert sorted(tokenizer.all_special_ids) == [PAD, BOS, EOS, UNK, MASK]
    letters = tokenizer.convert_ids_to_tokens(list(range(5, 261)))
    assert set(letters) == set(pre_tokenizers.ByteLevel.alphabet())
    assert letters == VanillaTransformerTokenizer().convert_ids_to_tokens(list(range(5, 261)))


def test_special_ids_are_those_of_the_default_configuration(tokenizer):
    config = VanillaTransformerConfig()
    assert config.pad_token_id == tokenizer.pad_token_id
    assert config.bos_token_id == config.decoder_start_token_id == tokenizer.bos_token_id
    assert config.eos_token_id == tokenizer.eos_token_id


def test_targets_become_labels_that_end_with_eos(tokenizer):
    batch = tokenizer(["ein Haus", "a"], text_target=["a house", "</s>"])
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert batch["labels"] == [tokenizer("a house")["input_ids"], tokenizer("</s>")["input_ids"]]
    assert [labels.count(EOS) for labels in batch["labels"]] == [1, 1]
    assert [labels[-1] for labels in batch["labels"]] == [EOS, EOS]
    assert tokenizer(text_target="a house")["input_ids"] == batch["labels"][0]


def test_the_ending_is_an_option(tokenizer, tmp_path):
    assert tokenizer("a b", add_special_tokens=False)["input_ids"] == tokenizer("a b")["input_ids"][:-1]
    bare = VanillaTransformerTokenizer(add_eos_token=False)
    bare.save_pretrained(tmp_path)
    for other in (bare, AutoTokenizer.from_pretrained(tmp_path)):
        assert not other.add_eos_token
        assert EOS not in other("a b")["input_ids"]


@pytest.mark.parametrize("ends", [True, False])
def test_a_vocabulary_learned_by_a_reloaded_tokenizer_has_its_ending(ends, tmp_path):
    VanillaTransformerTokenizer(add_eos_token=ends).save_pretrained(tmp_path)
    reloaded = VanillaTransformerTokenizer.from_pretrained(tmp_path)
    again = reloaded.train_new_from_iterator(["aa ab"], 261, show_progress=False)
    for tokenizer in (reloaded, again):
        assert tokenizer.add_eos_token == ends
        assert tokenizer("a").input_ids == ([69, 2] if ends else [69])


def test_pairs_are_separated_by_eos(tokenizer):
    first, second = tokenizer("eine Frage")["input_ids"], tokenizer("an answer")["input_ids"]
    assert tokenizer("eine Frage", "an answer")["input_ids"] == [*first, *second]
    assert first[-1] == second[-1] == EOS


def test_batches_are_padded_on_the_right_and_decoded(tokenizer):
    texts = ["Die Katze sieht den Fluss.", "", " a ", "</s>"]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    lengths = [len(tokenizer(text)["input_ids"]) for text in texts]
    assert batch["input_ids"].shape == (4, max(lengths))
    for row, mask, text, length in zip(batch["input_ids"], batch["attention_mask"], texts, lengths, strict=True):
        assert row[:length].tolist() == tokenizer(text)["input_ids"]
        assert set(row[length:].tolist()) <= {PAD}
        assert mask.tolist() == [1] * length + [0] * (max(lengths) - length)
    assert tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True) == texts
    assert tokenizer.batch_decode(batch["input_ids"])[1] == "</s>" + "<pad>" * (max(lengths) - 1)


def test_truncation_keeps_the_ending(tokenizer):
    ids = tokenizer("Die Katze sieht den Fluss.", truncation=True, max_length=4)["input_ids"]
    assert len(ids) == 4 and ids[-1] == EOS


def test_special_tokens_in_text_can_be_asked_for(tokenizer):
    assert tokenizer("a</s>b", split_special_tokens=False)["input_ids"].count(EOS) == 2
    assert tokenizer("a</s>b")["input_ids"].count(EOS) == 1


ADDING = {
    "add_tokens": lambda tokenizer: tokenizer.add_tokens("<ph>"),
    "add_tokens, special": lambda tokenizer: tokenizer.add_tokens(["<ph>"], special_tokens=True),
    "AddedToken": lambda tokenizer: tokenizer.add_tokens([AddedToken("<ph>", special=False)]),
    "AddedToken, special": lambda tokenizer: tokenizer.add_tokens([AddedToken("<ph>", special=True)]),
    "add_special_tokens": lambda tokenizer: tokenizer.add_special_tokens({"extra_special_tokens": ["<ph>"]}),
}


@pytest.mark.parametrize("way", ADDING)
def test_masks_and_added_tokens_are_found_in_texts_and_what_steers_the_model_is_not(way, trained, tmp_path):
    text = "a</s> <s><mask> <ph> x<ph>y <pad><unk> b"
    added = len(trained)
    ADDING[way](trained)
    trained.save_pretrained(tmp_path)
    expected = trained(text)["input_ids"]
    for tokenizer in (trained, AutoTokenizer.from_pretrained(tmp_path)):
        ids = tokenizer(text)["input_ids"]
        assert ids == expected
        assert [index for index in ids if index < 5 or index >= added] == [MASK, added, added, EOS]
        assert tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text)) == ids[:-1]
        assert tokenizer([text, "b"], padding=True)["input_ids"][0] == ids
        assert tokenizer(text, "<ph>")["input_ids"] == [*ids, added, EOS]
        assert tokenizer.decode(ids[:-1]) == text


@pytest.mark.parametrize("way", ADDING)
def test_masks_do_not_decide_which_tokens_are_left_out(way, trained):
    ADDING[way](trained)
    without = trained.decode(trained("a <ph>b")["input_ids"], skip_special_tokens=True)
    assert trained.decode(trained("<mask>a <ph>b")["input_ids"], skip_special_tokens=True) == "<mask>" + without
    assert trained.decode(MASK, skip_special_tokens=True) == "<mask>"


def test_lone_surrogates_are_a_type_error(tokenizer):
    # They are no characters and have no UTF-8 bytes.
    with pytest.raises(TypeError):
        tokenizer("a \ud800 b")


def test_reloading_changes_nothing(trained, tmp_path):
    trained.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert type(loaded) is VanillaTransformerTokenizer
    assert len(loaded) == len(trained)
    assert json.loads(loaded.backend_tokenizer.to_str()) == json.loads(trained.backend_tokenizer.to_str())
    seed = secrets.randbits(32)
    for text in [*CORPUS, *AWKWARD, *random_texts(500, seed)]:
        assert loaded(text)["input_ids"] == trained(text)["input_ids"], f"seed {seed}, text {text!r}"
    assert loaded.padding_side == "right" and loaded.split_special_tokens and not loaded.clean_up_tokenization_spaces
    loaded.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again/tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()


def test_a_fresh_process_reloads_the_same_tokenizer(trained, tmp_path):
    trained.save_pretrained(tmp_path)
    texts = [*CORPUS[:20], *AWKWARD]
    (tmp_path / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
    program = """
import json, sys, vanilla_transformer
from transformers import AutoTokenizer
folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder)
texts = json.load(open(folder + "/texts.json", encoding="utf-8"))
print(json.dumps([type(tokenizer).__name__, tokenizer.backend_tokenizer.to_str(), tokenizer(texts)["input_ids"]]))
"""
    finished = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    name, backend, ids = json.loads(finished.stdout)
    assert name == "VanillaTransformerTokenizer"
    assert json.loads(backend) == json.loads(trained.backend_tokenizer.to_str())
    assert ids == [trained(text)["input_ids"] for text in texts]


@pytest.mark.parametrize("vocab_size", [261, 262, 300, 330])
def test_a_trained_vocabulary_has_exactly_the_size_asked_for(vocab_size):
    tokenizer = VanillaTransformerTokenizer.train_from_iterator(CORPUS, vocab_size)
    assert len(tokenizer) == tokenizer.vocab_size == vocab_size
    assert sorted(tokenizer.get_vocab().values()) == list(range(vocab_size))


def test_training_shortens_the_corpus(trained):
    bytes_alone = VanillaTransformerTokenizer()
    text = "Der Hund sieht den Fluss."
    assert len(trained(text)["input_ids"]) < len(bytes_alone(text)["input_ids"]) == len(text) + 1


def largest_vocabulary(texts: list[str], min_frequency: int = 2) -> int:
    with pytest.raises(ValueError, match="`vocab_size` is 9000, but the corpus allows only") as caught:
        VanillaTransformerTokenizer.train_from_iterator(texts, 9000, min_frequency=min_frequency)
    return int(re.search(r"use at most (\d+), or more text", str(caught.value)).group(1))


def test_training_is_deterministic():
    first = VanillaTransformerTokenizer.train_from_iterator(CORPUS, 330)
    second = VanillaTransformerTokenizer.train_from_iterator(CORPUS, 330)
    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()


class Line(str):
    """A string that can be referred to weakly."""


def test_an_iterator_is_read_once_and_lazily():
    alive = weakref.WeakSet()
    most = drawn = 0

    def lines():
        nonlocal most, drawn
        for number in range(20_000):
            line = Line(f"{number} the river")
            alive.add(line)
            most, drawn = max(most, len(alive)), drawn + 1
            yield line

    VanillaTransformerTokenizer.train_from_iterator(lines(), 270)
    assert drawn == 20_000
    # `tokenizers` takes some hundreds at a time.
    assert most < 2_000


@pytest.mark.parametrize("vocab_size", [260, 5, 0, -1])
def test_a_vocabulary_holds_at_least_the_bytes(vocab_size):
    with pytest.raises(ValueError, match=f"`vocab_size` is {vocab_size}; it must be at least 261"):
        VanillaTransformerTokenizer.train_from_iterator(CORPUS, vocab_size)


@pytest.mark.parametrize("min_frequency", [0, -2])
def test_pairs_occur_at_least_once(min_frequency):
    with pytest.raises(ValueError, match=f"`min_frequency` is {min_frequency}; it must be at least 1"):
        VanillaTransformerTokenizer.train_from_iterator(CORPUS, 300, min_frequency=min_frequency)


@pytest.mark.parametrize("min_frequency", [1, 2, 50])
def test_a_corpus_that_is_too_small_names_the_size_that_it_allows(min_frequency):
    allowed = largest_vocabulary(CORPUS, min_frequency)
    assert 261 < allowed < 9000
    tokenizer = VanillaTransformerTokenizer.train_from_iterator(CORPUS, allowed, min_frequency=min_frequency)
    assert len(tokenizer) == allowed
    with pytest.raises(ValueError, match=f"allows only {allowed} entries with `min_frequency` {min_frequency}"):
        VanillaTransformerTokenizer.train_from_iterator(CORPUS, allowed + 1, min_frequency=min_frequency)


def test_an_empty_corpus_allows_the_bytes_alone():
    assert len(VanillaTransformerTokenizer.train_from_iterator([], 261)) == 261
    with pytest.raises(ValueError, match="allows only 261 entries"):
        VanillaTransformerTokenizer.train_from_iterator([], 262)


def test_special_names_in_the_corpus_are_learnt_as_text():
    tokenizer = VanillaTransformerTokenizer.train_from_iterator(["</s> <unk>"] * 50, 265)
    assert_round_trip(tokenizer, "</s> <unk>")
    assert len(tokenizer("</s>")["input_ids"]) < len(VanillaTransformerTokenizer()("</s>")["input_ids"])


# Language tags


@pytest.fixture
def tagged():
    return VanillaTransformerTokenizer.train_from_iterator(
        ["hello world", "hallo welt"] * 3, 270, languages=["de", "fr"]
    )


def test_tags_stand_behind_the_other_entries(tagged):
    assert len(tagged) == 270 and tagged.language_tags == {"de": 268, "fr": 269}
    plain = VanillaTransformerTokenizer.train_from_iterator(["hello world", "hallo welt"] * 3, 268)
    assert tagged("hello welt") == plain("hello welt") and plain.language_tags == {}


def test_sources_have_the_tag_of_the_language_and_targets_have_none(tagged):
    plain = tagged("a", text_target="b")
    tagged.tgt_lang = "fr"
    assert tagged("a", text_target="b") == {**plain, "input_ids": [269, 69, 2], "attention_mask": [1, 1, 1]}
    assert tagged("a", text_target="b")["labels"] == [70, 2]
    assert tagged(["a", "b"])["input_ids"] == [[269, 69, 2], [269, 70, 2]]
    assert tagged.decode(tagged("a")["input_ids"], skip_special_tokens=True) == "a"
    tagged.tgt_lang = None
    assert tagged("a", text_target="b") == plain


def test_a_tag_written_in_a_text_stays_text(tagged):
    text = "<2de> hello <2fr>"
    for language in (None, "de"):
        tagged.tgt_lang = language
        ids = tagged(text)["input_ids"]
        assert not set(ids[1:]) & set(tagged.language_tags.values())
        assert (ids[0] == 268) == (language == "de")
        assert tagged.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("language", [None, "fr"])
def test_tags_and_language_survive_saving(tagged, tmp_path, language):
    tagged.tgt_lang = language
    tagged.save_pretrained(tmp_path)
    reloaded = VanillaTransformerTokenizer.from_pretrained(tmp_path)
    assert (reloaded.tgt_lang, reloaded.language_tags) == (language, tagged.language_tags)
    for _ in range(2):
        assert reloaded("hello <2de>", text_target="b") == tagged("hello <2de>", text_target="b")
        assert reloaded.add_eos_token
        reloaded.tgt_lang = tagged.tgt_lang = "de"


def test_a_language_without_a_tag_is_refused(tagged):
    with pytest.raises(ValueError, match="`tgt_lang` is 'it', but the vocabulary has tags for de, fr; use one"):
        tagged.tgt_lang = "it"
    with pytest.raises(ValueError, match="the vocabulary has tags for none"):
        VanillaTransformerTokenizer().tgt_lang = "de"
    with pytest.raises(ValueError, match=r"must be at least 263, which is 7 special tokens and 256 bytes"):
        VanillaTransformerTokenizer.train_from_iterator(["a"], 262, languages=["de", "fr"])
