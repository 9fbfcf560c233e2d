import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.visualization.tokens import SPACE, describe


@pytest.fixture(scope="module")
def trained():
    texts = ["the device is not supported", "the devices are unsupported", "größe der geräte"] * 5
    return VanillaTransformerTokenizer.train_from_iterator(texts, 300, languages=["de"])


@pytest.mark.parametrize("text", ["the device, isn't it?", "größe 漢字 🙂 ok", "  two  spaces ", "</s> <pad> <2de>"])
def test_labels_and_words_write_the_text(trained, text):
    tokens = describe(trained, trained(text)["input_ids"])
    bytes_of_characters = [label for label in tokens.labels if label.startswith("⟨")]
    shown = [label for label in tokens.labels[:-1] if label not in bytes_of_characters]
    assert "".join(shown) == text.replace(" ", SPACE)
    assert tokens.labels[-1] == tokens.word_labels[-1] == "</s>"
    assert list(tokens.words) == sorted(tokens.words)
    assert set(tokens.words) == set(range(len(tokens.word_labels)))


def test_words_are_those_of_the_vocabulary(trained):
    tokens = describe(trained, trained("the unsupported device.")["input_ids"])
    assert tokens.word_labels == ("the", "unsupported", "device", ".", "</s>")


def test_a_part_of_a_character_is_shown_as_bytes(tokenizer):
    tokens = describe(tokenizer, tokenizer("ß漢")["input_ids"])
    assert tokens.labels == ("⟨C3⟩", "ß", "⟨E6⟩", "⟨BC⟩", "漢", "</s>")
    assert tokens.words == (0, 0, 0, 0, 0, 1)


def test_special_tokens_are_words_and_their_names_in_a_text_are_not(trained):
    trained.tgt_lang = "de"
    try:
        tokens = describe(trained, trained("</s>the")["input_ids"])
    finally:
        trained.tgt_lang = None
        trained.update_post_processor()
    assert tokens.labels[0] == tokens.word_labels[0] == "<2de>"
    assert tokens.word_labels[1:] == ("</", "s", ">", "the", "</s>")


def test_what_was_cut_off_inside_a_character_is_shown(tokenizer):
    tokens = describe(tokenizer, tokenizer("aß")["input_ids"][:2])
    assert len(tokens) == 2
    assert tokens.labels[0] == "a"


def test_nothing_has_no_tokens(tokenizer):
    assert len(describe(tokenizer, [])) == 0


def test_a_vocabulary_that_splits_nothing_has_words_between_spaces():
    letters = {"<unk>": 0, " ": 1, "a": 2, "b": 3}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(letters, [], unk_token="<unk>")))
    ids = tokenizer("ab a")["input_ids"]
    assert ids == [2, 3, 1, 2]
    tokens = describe(tokenizer, ids)
    assert len(tokens.labels) == 4
    assert list(tokens.words) == sorted(tokens.words)
