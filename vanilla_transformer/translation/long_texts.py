"""Splits a text that is too long to be translated whole."""

import re
from collections.abc import Callable


# White space behind the end of a sentence, with what may close around it. Chinese and Japanese have none there:
# U+3002, U+FF01 and U+FF1F end a sentence, U+300D and U+300F close a quotation. U+2026 is an ellipsis.
_SENTENCE_ENDS = re.compile(
    "[.!?\u2026][\"'\u2019\u201c\u201d\u00bb)\\]]*\\s+|[\u3002\uff01\uff1f][\u300d\u300f\u201d]*\\s*"
)
_WORD_ENDS = re.compile(r"\s+")
# Characters that are tried first.
_FIRST_SIZE = 64


def split_to_fit(text: str, fits: Callable[[str], bool]) -> list[str]:
    """Split a text into parts that fit: at ends of sentences, if these do not do, between words, and else anywhere.

    Args:
        text: The text.
        fits: Whether a part is short enough.

    Returns:
        Parts without white space around them, none of them empty. Each holds as many sentences as fit into it, or
        words of one sentence. A single character is a part even where it does not fit.
    """
    parts = []
    text = text.strip()
    start = 0
    while start < len(text):
        window = _window(text, start, fits)
        is_rest = start + len(window) == len(text)
        end = len(window) if is_rest and fits(window) else _longest_start(window, fits)
        parts.append(window[:end].rstrip())
        start += end
        while start < len(text) and text[start].isspace():
            start += 1
    return parts


def _window(text: str, start: int, fits: Callable[[str], bool]) -> str:
    """What follows in a text, at least as far as it fits.

    It is not much longer: a long text must not be read anew for each part.
    """
    size = _FIRST_SIZE
    while start + size < len(text) and fits(text[start : start + size]):
        size *= 2
    # A word that is cut may take more tokens than the whole word.
    return text[start : start + 2 * size]


def _longest_start(text: str, fits: Callable[[str], bool]) -> int:
    """Where the longest part ends that fits at the start of a text."""
    for pattern in (_SENTENCE_ENDS, _WORD_ENDS):
        ends = [match.end() for match in pattern.finditer(text)]
        if ends and fits(text[: ends[0]].rstrip()):
            return _last(ends, lambda end: fits(text[:end].rstrip()))
    return _last(range(1, len(text) + 1), lambda end: fits(text[:end]))


def _last(ends: list[int] | range, fits: Callable[[int], bool]) -> int:
    """The last of ascending ends that fits, found by halving; the first if none does."""
    low, high = 0, len(ends)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(ends[middle]) else (low, middle)
    return ends[low]
