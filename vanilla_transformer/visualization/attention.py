"""Attention weights of a sentence and its translation, of every layer and head, as arrays.

Shapes: L layers, H heads, S source positions, T target positions, Q positions that look, K positions looked at.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vanilla_transformer.errors import UserError
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

from .tokens import Tokens, describe


# Weights of one picture; a page has a byte and a third for each.
MOST_WEIGHTS = 30_000_000


@dataclass(frozen=True, slots=True)
class Attention:
    """Where every position of a sentence pair looks.

    Position t of the decoder has read the target up to token t - 1, and writes token t; so its rows are named after
    the tokens of `target`, and what self-attention looks at after those of `read`.

    Args:
        source: Tokens of the source [S].
        target: Tokens that the decoder writes [T].
        read: Tokens that the decoder reads [T]: the start, and the target without its last token.
        probabilities: Of each target token, given the source and the target before it [T].
        encoder: Weights of the encoder's self-attention [L, H, S, S].
        decoder: Weights of the decoder's self-attention [L, H, T, T], zero above the diagonal.
        cross: Weights of the decoder's attention to the source [L, H, T, S].
    """

    source: Tokens
    target: Tokens
    read: Tokens
    probabilities: np.ndarray
    encoder: np.ndarray
    decoder: np.ndarray
    cross: np.ndarray

    @property
    def parts(self) -> dict[str, tuple[np.ndarray, Tokens, Tokens]]:
        """For each kind of attention its weights [L, H, Q, K], who looks [Q], and what is looked at [K]."""
        return {
            "encoder": (self.encoder, self.source, self.source),
            "decoder": (self.decoder, self.target, self.read),
            "cross": (self.cross, self.target, self.source),
        }

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays by name, tokens and ids among them, as `numpy.savez` takes them."""
        arrays = {name: weights for name, (weights, _, _) in self.parts.items()}
        for name in ("source", "target", "read"):
            tokens: Tokens = getattr(self, name)
            arrays |= {
                f"{name}_ids": np.array(tokens.ids),
                f"{name}_tokens": np.array(tokens.labels),
                f"{name}_words": np.array(tokens.words),
            }
        return {**arrays, "probabilities": self.probabilities, "alignment": alignment(self)}


@contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Have a model compute attention in the one way that returns its weights, without dropout.

    Args:
        model: The model. Afterwards it has its own attention again, and each of its modules its own mode.
    """
    before = model.config._attn_implementation
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        model.set_attn_implementation("eager")
        yield
    finally:
        model.set_attn_implementation(before)
        for module, training in modes:
            module.training = training


@torch.inference_mode()
def attention_of(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    source_ids: Sequence[int],
    target_ids: Sequence[int],
) -> Attention:
    """Compute all attention weights for a source and a target, which the decoder is given token by token.

    Args:
        model: A translation model. It computes with eager attention for this call alone.
        tokenizer: Its tokenizer, which names the tokens.
        source_ids: Ids of the source [S], with its `</s>`.
        target_ids: Ids of the target [T], with its `</s>` unless the translation was cut off.

    Returns:
        The weights, in float32.

    Raises:
        UserError: The texts are too long for a picture or for the model's learned positions, or the weights of a
            position do not sum to one, as those of a damaged model.
    """
    source_ids, target_ids = list(source_ids), list(target_ids)
    _check_lengths(model, len(source_ids), len(target_ids))
    read_ids = [model.generation_config.decoder_start_token_id, *target_ids[:-1]]
    with eager_attention(model):
        outputs = model(
            input_ids=torch.tensor([source_ids], device=model.device),
            decoder_input_ids=torch.tensor([read_ids], device=model.device),
            output_attentions=True,
            use_cache=False,
        )
    wide = torch.promote_types(outputs.logits.dtype, torch.float32)
    probabilities = outputs.logits[0].to(wide).softmax(dim=-1).cpu()
    shapes = {
        "encoder": (outputs.encoder_attentions, len(source_ids), len(source_ids)),
        "decoder": (outputs.decoder_attentions, len(target_ids), len(target_ids)),
        "cross": (outputs.cross_attentions, len(target_ids), len(source_ids)),
    }
    return Attention(
        source=describe(tokenizer, source_ids),
        target=describe(tokenizer, target_ids),
        read=describe(tokenizer, read_ids),
        probabilities=probabilities[torch.arange(len(target_ids)), target_ids].float().numpy(),
        **{name: _weights(name, *rest) for name, rest in shapes.items()},
    )


@torch.inference_mode()
def encoder_attention_of(
    model: VanillaTransformerForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, source_ids: Sequence[int]
) -> Attention:
    """Compute the attention weights of the encoder alone, for models whose decoder was never trained.

    Args:
        model: A model with an encoder, which computes with eager attention for this call alone.
        tokenizer: Its tokenizer, which names the tokens.
        source_ids: Ids of the text [S], with its `</s>`.

    Returns:
        The weights, in float32, with nothing of the decoder.

    Raises:
        UserError: As for `attention_of`.
    """
    source_ids = list(source_ids)
    _check_lengths(model, len(source_ids), None)
    with eager_attention(model):
        outputs = model.get_encoder()(
            input_ids=torch.tensor([source_ids], device=model.device), output_attentions=True
        )
    nothing = describe(tokenizer, [])
    return Attention(
        source=describe(tokenizer, source_ids),
        target=nothing,
        read=nothing,
        probabilities=np.zeros(0, dtype=np.float32),
        encoder=_weights("encoder", outputs.attentions, len(source_ids), len(source_ids)),
        decoder=_weights("decoder", (), 0, 0),
        cross=_weights("cross", (), 0, len(source_ids)),
    )


def alignment(attention: Attention, layer: int | None = None) -> np.ndarray:
    """How much each target word looks at each source word, by the decoder's attention to the source.

    Tokens are merged to words: weights are summed over the source tokens of a word and averaged over the target
    tokens of one. Heads are averaged.

    Args:
        attention: Weights of a sentence pair.
        layer: Number of the layer, from 0 on; `None` is the last but one, whose mean aligns best in many models (Garg
            et al., 2019), or the only one.

    Returns:
        Weights [words of the target, words of the source]; rows sum to one.
    """
    if not len(attention.cross):
        return np.zeros((0, 0), dtype=np.float32)
    layer = max(len(attention.cross) - 2, 0) if layer is None else layer
    return merge(attention.cross[layer].mean(axis=0), attention.target.words, attention.source.words)


def merge(weights: np.ndarray, rows: Sequence[int], columns: Sequence[int]) -> np.ndarray:
    """Merge tokens to words: the sum over what is looked at, the mean over who looks.

    Args:
        weights: [..., Q, K].
        rows: Number of the word of each row [Q].
        columns: Number of the word of each column [K].

    Returns:
        Weights [..., words of the rows, words of the columns].
    """
    by_row = np.eye(max(rows) + 1, dtype=weights.dtype)[list(rows)]
    by_column = np.eye(max(columns) + 1, dtype=weights.dtype)[list(columns)]
    return (by_row / by_row.sum(axis=0)).T @ weights @ by_column


def _check_lengths(model: PreTrainedModel, source: int, target: int | None) -> None:
    config = model.config
    if source == 0 or target == 0:
        raise UserError("A text is empty; give a source and a target of at least one token each.")
    target = target or 0
    if config.position_embedding_type == "learned" and max(source, target) > config.max_position_embeddings:
        raise UserError(
            f"A text has {max(source, target)} tokens, and the model has learned {config.max_position_embeddings} "
            "positions; shorten it."
        )
    weights = config.encoder_layers * config.encoder_attention_heads * source**2
    weights += config.decoder_layers * config.decoder_attention_heads * target * (target + source)
    if weights > MOST_WEIGHTS:
        raise UserError(
            f"Texts of {source} and {target} tokens have {weights:,} attention weights in this model, and a picture "
            f"shows at most {MOST_WEIGHTS:,}; shorten them."
        )


def _weights(name: str, layers: Sequence[torch.Tensor], rows: int, columns: int) -> np.ndarray:
    """The layers' weights of one sentence [L, H, Q, K] in float32, after a check that they are probabilities."""
    if not layers:
        return np.zeros((0, 0, rows, columns), dtype=np.float32)
    stacked = torch.stack([layer[0] for layer in layers])
    # Rounding to the model's dtype moves a sum by at most half a unit in the last place of each of its terms.
    tolerance = max(1e-5, torch.finfo(stacked.dtype).eps)
    weights = stacked.float().cpu().numpy()
    off = np.abs(weights.sum(axis=-1) - 1.0).max()
    if not off <= tolerance or weights.min() < 0.0:
        raise UserError(
            f"The {name} attention weights of a position sum to {1.0 + off:.4g} instead of 1, so that they are no "
            "probabilities; the model's weights are damaged: use another checkpoint."
        )
    if name == "decoder" and np.triu(weights, k=1).any():
        raise UserError(
            "The decoder looks at tokens that it has not read; use a translation model with a causal mask."
        )
    return weights
