"""The page on which a sentence pair's attention, its alignment and its beam search are looked at."""

import base64
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from .attention import Attention
from .beam_tree import BeamTree
from .page import page
from .tokens import Tokens, describe


_TITLES = {
    "encoder": "Encoder: the source looks at itself",
    "decoder": "Decoder: the target looks at what it has written",
    "cross": "Decoder: the target looks at the source",
}


def attention_page(
    attention: Attention,
    tokenizer: PreTrainedTokenizerBase,
    *,
    model_name: str,
    tree: BeamTree | None = None,
    target_is_given: bool = False,
) -> str:
    """Build the page.

    Args:
        attention: Weights of a sentence pair.
        tokenizer: Names the tokens of the tree.
        model_name: What the page calls the model.
        tree: The beam search of the source; `None` leaves it out.
        target_is_given: Whether the target of `attention` was given, and is not what the search found.

    Returns:
        The text of an HTML file.
    """
    data: dict[str, Any] = {
        "model": model_name,
        "source": _tokens(attention.source),
        "target": _tokens(attention.target),
        "read": _tokens(attention.read),
        "sourceText": tokenizer.decode(list(attention.source.ids), skip_special_tokens=True),
        "targetText": tokenizer.decode(list(attention.target.ids), skip_special_tokens=True),
        "probabilities": [round(float(value), 4) for value in attention.probabilities],
        "targetIsGiven": target_is_given,
        "parts": [
            _part(name, weights, *sides)
            for (name, (weights, _, _)), sides in zip(attention.parts.items(), _SIDES, strict=True)
            if len(weights)
        ],
        "tree": None if tree is None else _tree(tree, tokenizer),
    }
    return page(f"Attention of {model_name}", data, ["common.js", "attention.js", "alignment.js", "beams.js"])


# Who looks, and what is looked at: encoder, decoder, and decoder at source.
_SIDES = (("source", "source"), ("target", "read"), ("target", "source"))


def quantise(weights: np.ndarray) -> bytes:
    """A byte for each probability: 255 times its square root, so that small ones keep their size.

    Args:
        weights: Probabilities of any shape.

    Returns:
        Bytes in C order; (byte / 255)^2 is at most 0.004 away from the probability.
    """
    return np.rint(255.0 * np.sqrt(np.clip(weights, 0.0, 1.0))).astype(np.uint8).tobytes()


def _part(name: str, weights: np.ndarray, rows: str, columns: str) -> dict[str, Any]:
    layers, heads = weights.shape[:2]
    return {
        "name": name,
        "title": _TITLES[name],
        "rows": rows,
        "columns": columns,
        "layers": layers,
        "heads": heads,
        "weights": base64.b64encode(quantise(weights)).decode("ascii"),
    }


def _tokens(tokens: Tokens) -> dict[str, Any]:
    return {"tokens": tokens.labels, "words": tokens.words, "wordLabels": tokens.word_labels}


def _tree(tree: BeamTree, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    labels: dict[int, str] = {}
    for node in tree.nodes:
        if node.token not in labels:
            labels[node.token] = describe(tokenizer, [node.token]).labels[0]
    return {
        "nodes": [
            [labels[node.token], node.parent, round(node.log_prob, 4), round(node.total, 4), int(node.ends)]
            for node in tree.nodes
        ],
        "hypotheses": [
            {
                "text": tokenizer.decode(list(hypothesis.tokens), skip_special_tokens=True),
                "score": round(hypothesis.score, 4),
                "logProb": round(hypothesis.log_prob, 4),
                "finished": hypothesis.finished,
                "node": node,
            }
            for hypothesis, node in zip(tree.hypotheses, tree.last_nodes, strict=True)
        ],
    }
