import random

import pytest

from vanilla_transformer.translation import long_texts
from vanilla_transformer.translation.long_texts import split_to_fit


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


def test_a_long_text_is_split_as_one_that_is_seen_whole(monkeypatch):
    generator = random.Random(5)
    texts = ["".join(generator.choices('aaaab.!? \u3002"', k=2000)) for _ in range(20)]
    short = [split(text, limit) for text in texts for limit in (3, 50, 300)]
    monkeypatch.setattr(long_texts, "_FIRST_SIZE", 10_000)
    assert [split(text, limit) for text in texts for limit in (3, 50, 300)] == short


@pytest.mark.parametrize("text", ["One two three. " * 4000, "a" * 60_000, "word " * 12_000])
def test_the_work_grows_with_the_length_of_the_text(text):
    seen = []

    def fits(part: str) -> bool:
        seen.append(len(part))
        return len(part) <= 200

    parts = split_to_fit(text, fits)
    assert len(parts) > len(text) / 250
    assert sum(seen) < 50 * len(text)
