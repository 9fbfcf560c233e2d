"""Token ids as people read them: a label for each token, and the words that tokens belong to."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase


# Stands for a space, which a label would not show.
SPACE = "·"


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a text.

    Args:
        ids: Ids [N].
        labels: What is shown of each token [N]; a space is shown as a middle dot.
        words: For each token the number of its word [N], from 0 on, never falling.
        word_labels: What is shown of each word.
    """

    ids: tuple[int, ...]
    labels: tuple[str, ...]
    words: tuple[int, ...]
    word_labels: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.ids)


def describe(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> Tokens:
    """Label tokens, and find the words that they are parts of.

    Words are the pieces that the tokenizer splits a text into before it cuts them into tokens; punctuation is a word
    of its own where the tokenizer says so. A special token is a word, too.

    Args:
        tokenizer: The tokenizer of these ids.
        ids: Ids [N], special tokens included.

    Returns:
        The tokens.
    """
    ids = tuple(int(token) for token in ids)
    spans, text = _spans(tokenizer, ids)
    names = tokenizer.convert_ids_to_tokens(list(ids))
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "language_tags", {}).values()}
    starts = _starts_of_words(tokenizer, text)
    labels, words, word_labels = [], [], []
    last = None
    for token, name, (start, end) in zip(ids, names, spans, strict=True):
        shown = text[start:end]
        label = name if token in special else shown.replace(" ", SPACE) or _bytes_of(name)
        labels.append(label)
        word = ("special", len(labels)) if token in special else starts[min(start, len(starts) - 1)] if starts else 0
        if word != last:
            word_labels.append("")
            last = word
        words.append(len(word_labels) - 1)
        word_labels[-1] += name if token in special else shown
    return Tokens(ids, tuple(labels), tuple(words), tuple(label.strip() or SPACE for label in word_labels))


def _byte_letters() -> dict[str, int]:
    """The letters that byte-level vocabularies write bytes with: printable ones stand for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_letters()


def _bytes_of(name: str) -> str:
    """A token that is a part of a character, as hexadecimal bytes."""
    if name and all(letter in _BYTES for letter in name):
        return "⟨" + " ".join(f"{_BYTES[letter]:02X}" for letter in name) + "⟩"
    return name


def _spans(tokenizer: PreTrainedTokenizerBase, ids: tuple[int, ...]) -> tuple[list[tuple[int, int]], str]:
    """Where each token's characters lie in the text, and the text.

    A character that several tokens write belongs to the last of them.
    """
    texts = [
        tokenizer.decode(list(ids[:length]), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for length in range(len(ids) + 1)
    ]
    text, spans, start = texts[-1], [], 0
    for length in range(1, len(ids) + 1):
        # An unfinished character is decoded to U+FFFD, until its last byte is there.
        known = texts[length] if length == len(ids) else texts[length].rstrip("�")
        end = max(start, min(len(known), len(text)))
        spans.append((start, end))
        start = end
    return spans, text


def _starts_of_words(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """For each character of a text, where its word starts."""
    splitter = getattr(getattr(tokenizer, "backend_tokenizer", None), "pre_tokenizer", None)
    if splitter is None:
        pieces, start = [], 0
        for index, character in enumerate(text):
            if character == " " and index > start:
                pieces.append((start, index))
                start = index
        pieces.append((start, len(text)))
    else:
        pieces = [span for _, span in splitter.pre_tokenize_str(text)]
    starts = list(range(len(text)))
    for start, end in pieces:
        starts[start:end] = [start] * (end - start)
    return starts
