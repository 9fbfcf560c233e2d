"""Splits texts that are too long to be translated whole."""

import re
from collections.abc import Callable


# The end of a sentence, the quotation marks and brackets that may close after it, and the white space that follows.
# Chinese and Japanese need no white space: U+3002, U+FF01 and U+FF1F end a sentence, U+300D and U+300F close a
# quotation. U+2026 is an ellipsis.
_SENTENCE_ENDS = re.compile(
    "[.!?\u2026][\"'\u2019\u201c\u201d\u00bb)\\]]*\\s+|[\u3002\uff01\uff1f][\u300d\u300f\u201d]*\\s*"
)
_WORD_ENDS = re.compile(r"\s+")
# Number of characters of the first window that is tried.
_FIRST_SIZE = 64


def split_to_fit(text: str, fits: Callable[[str], bool]) -> list[str]:
    """Split a text into parts that fit.

    A text is split between sentences. A sentence that does not fit is split between words, and a word that does not
    fit anywhere.

    Args:
        text: The text.
        fits: Whether a part is short enough.

    Returns:
        Parts that are not empty and have no white space around them. Each holds as many sentences as fit, or as many
        words of one sentence. A single character is a part even if it does not fit.
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
    """The part of a text from `start` on that holds all that fits, and not much more.

    The work for a part must not grow with the length of the whole text.
    """
    size = _FIRST_SIZE
    while start + size < len(text) and fits(text[start : start + size]):
        size *= 2
    # A word that is cut may have more tokens than the whole word, so that the double size may still fit.
    return text[start : start + 2 * size]


def _longest_start(text: str, fits: Callable[[str], bool]) -> int:
    """The end of the longest part that begins a text and fits."""
    for pattern in (_SENTENCE_ENDS, _WORD_ENDS):
        ends = [match.end() for match in pattern.finditer(text)]
        if ends and fits(text[: ends[0]].rstrip()):
            return _last(ends, lambda end: fits(text[:end].rstrip()))
    return _last(range(1, len(text) + 1), lambda end: fits(text[:end]))


def _last(ends: list[int] | range, fits: Callable[[int], bool]) -> int:
    """The last of ascending ends that fits, found by bisection; the first end if none fits."""
    low, high = 0, len(ends)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(ends[middle]) else (low, middle)
    return ends[low]
