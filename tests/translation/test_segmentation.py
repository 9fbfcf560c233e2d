import random

import pytest

from vanilla_transformer.translation.segmentation import split_to_fit


def split(text: str, limit: int) -> list[str]:
    return split_to_fit(text, lambda part: len(part) <= limit)


@pytest.mark.parametrize(
    ("text", "limit", "parts"),
    [
        ("One. Two. Three.", 99, ["One. Two. Three."]),
        ("One. Two. Three.", 9, ["One. Two.", "Three."]),
        ("One. Two. Three.", 8, ["One.", "Two.", "Three."]),
        # What closes around a sentence belongs to it.
        ('"Yes!"  (No?) Well\u2026 so', 10, ['"Yes!"', "(No?)", "Well\u2026 so"]),
        # A point inside a word ends nothing.
        ("At 3.14 p.m.x it is. Go.", 20, ["At 3.14 p.m.x it is.", "Go."]),
        # Between words where sentences are too long, and inside a word that is too long itself.
        ("aa bb cc. dd", 6, ["aa bb", "cc. dd"]),
        ("aa bb cc dd. e", 7, ["aa bb", "cc dd.", "e"]),
        ("abcdefgh ij", 5, ["abcde", "fgh", "ij"]),
        ("\u6f22\u5b57\u3002\u4eee\u540d\uff01\u672b", 3, ["\u6f22\u5b57\u3002", "\u4eee\u540d\uff01", "\u672b"]),
        # What does not fit at all.
        ("abc", 0, ["a", "b", "c"]),
        ("  ", 5, []),
    ],
)
def test_texts_are_split_at_the_best_places(text, limit, parts):
    assert split(text, limit) == parts


def test_nothing_is_lost_whatever_the_text():
    generator = random.Random(3)
    for _ in range(300):
        text = "".join(generator.choices("ab.!? \u3002\u2026\"'\n", k=generator.randint(0, 60)))
        limit = generator.randint(1, 20)
        parts = split(text, limit)
        assert all(0 < len(part) <= limit and part == part.strip() for part in parts)
        assert "".join("".join(parts).split()) == "".join(text.split())
