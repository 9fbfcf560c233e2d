"""How a vocabulary cuts texts, and how two languages share it."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from vanilla_transformer.errors import UserError

from .panels import Bars, Panel, Picture, Pieces
from .tokens import describe


def tokenizer_picture(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    corpora: tuple[Sequence[str], Sequence[str]] | None = None,
    languages: tuple[str, str] = ("source", "target"),
    model_name: str = "",
) -> Picture:
    """How texts are cut, and which entries each of two languages uses.

    Args:
        tokenizer: The vocabulary.
        texts: Texts to show in pieces.
        corpora: Lines of both languages, whose use of the vocabulary is counted; `None` leaves that out.
        languages: What to call them.
        model_name: Whose vocabulary it is.

    Returns:
        The picture.

    Raises:
        UserError: There is neither a text nor a corpus, or a corpus has no token.
    """
    if not texts and corpora is None:
        raise UserError("No text was given; give texts, or two files with --files.")
    panels: list[Panel] = []
    arrays = {}
    for number, text in enumerate(texts, start=1):
        tokens = describe(tokenizer, tokenizer(text, verbose=False)["input_ids"])
        panels.append(
            Pieces(
                f"Text {number}" if len(texts) > 1 else "Text",
                f"{len(tokens)} tokens, {len(text.split())} words between spaces; the number below a token is its id.",
                tokens.labels,
                tokens.ids,
                tokens.words,
            )
        )
        arrays[f"text_{number}_ids"] = np.array(tokens.ids)
    if corpora is not None:
        extra, more = _shared(tokenizer, corpora, languages)
        panels += extra
        arrays |= more
    about = f"{len(tokenizer):,} entries{' of ' + model_name if model_name else ''}; both languages share them."
    return Picture("Vocabulary", about, tuple(panels), arrays)


def counts_of(tokenizer: PreTrainedTokenizerBase, lines: Sequence[str]) -> np.ndarray:
    """How often each entry of the vocabulary occurs in lines, special tokens not counted.

    Args:
        tokenizer: The vocabulary.
        lines: Texts.

    Returns:
        Counts [V].
    """
    found: Counter[int] = Counter()
    for start in range(0, len(lines), 1000):
        batch = tokenizer(list(lines[start : start + 1000]), add_special_tokens=False, verbose=False)
        for ids in batch["input_ids"]:
            found.update(ids)
    counts = np.zeros(len(tokenizer), dtype=np.int64)
    counts[list(found)] = list(found.values())
    return counts


def _shared(
    tokenizer: PreTrainedTokenizerBase, corpora: tuple[Sequence[str], Sequence[str]], languages: tuple[str, str]
) -> tuple[list[Panel], dict[str, np.ndarray]]:
    source, target = (counts_of(tokenizer, lines) for lines in corpora)
    for counts, language in ((source, languages[0]), (target, languages[1])):
        if not counts.any():
            raise UserError(f"The text of {language} has no token; give a file with text.")
    both, only_source, only_target = (
        (source > 0) & (target > 0),
        (source > 0) & (target == 0),
        (source == 0) & (target > 0),
    )
    labels = (f"{languages[0]} alone", "both", f"{languages[1]} alone", "neither")
    entries = [mask.sum() for mask in (only_source, both, only_target, (source == 0) & (target == 0))]
    share = [float(counts[both].sum() / counts.sum()) for counts in (source, target)]
    fertility = [
        float(counts.sum() / max(1, sum(len(line.split()) for line in lines)))
        for counts, lines in ((source, corpora[0]), (target, corpora[1]))
    ]
    panels: list[Panel] = [
        Bars(
            "Who uses which entries",
            f"Entries that both languages use are {share[0]:.0%} of the running tokens of {languages[0]} and "
            f"{share[1]:.0%} of those of {languages[1]}.",
            labels, tuple(int(count) for count in entries), "entries of the vocabulary",
        ),
        Bars(
            "Tokens per word", "Words are what stands between spaces.",
            languages, tuple(fertility), "tokens",
        ),
    ]  # fmt: skip
    return panels, {"source_counts": source, "target_counts": target}
