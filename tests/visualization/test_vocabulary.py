import numpy as np
import pytest

from vanilla_transformer.errors import UserError
from vanilla_transformer.visualization.vocabulary import counts_of, tokenizer_picture


def test_texts_are_shown_in_the_tokens_that_the_model_sees(tokenizer):
    picture = tokenizer_picture(tokenizer, ["a b", "ß"])
    first, second = picture.panels
    assert first.ids == tuple(tokenizer("a b")["input_ids"]) == tuple(picture.arrays["text_1_ids"])
    assert first.labels == ("a", "·", "b", "</s>")
    assert "4 tokens, 2 words" in first.note
    assert second.labels == ("⟨C3⟩", "ß", "</s>")


def test_shared_entries_are_counted(tokenizer):
    picture = tokenizer_picture(tokenizer, [], corpora=(["abc", "ab"], ["bcd"]), languages=("en", "de"))
    who, words = picture.panels
    assert dict(zip(who.labels, who.values, strict=True)) == {
        "en alone": 1, "both": 2, "de alone": 1, "neither": len(tokenizer) - 4,
    }  # fmt: skip
    assert dict(zip(words.labels, words.values, strict=True)) == {"en": 2.5, "de": 3.0}
    assert picture.arrays["source_counts"].sum() == 5


def test_counts_do_not_depend_on_how_lines_are_batched(tokenizer):
    lines = [chr(97 + i % 26) * (i % 3) for i in range(2500)]
    expected = sum(
        np.bincount(tokenizer(line, add_special_tokens=False)["input_ids"], minlength=261) for line in lines
    )
    np.testing.assert_array_equal(counts_of(tokenizer, lines), expected)


def test_nothing_to_show_is_refused(tokenizer):
    with pytest.raises(UserError, match="No text was given"):
        tokenizer_picture(tokenizer, [])
    with pytest.raises(UserError, match="text of target has no token"):
        tokenizer_picture(tokenizer, [], corpora=(["a"], [""]))
