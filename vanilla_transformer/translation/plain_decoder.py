"""Step-by-step decoding with the modules of the network, on any device and in any dtype.

Shapes: S sentences, T source positions, R rows (hypotheses), B rows of a sentence, L past positions, D d_model,
H heads, K width of a query or key, V width of a value, W vocabulary entries.
"""

from dataclasses import dataclass

import torch
from torch import nn

from vanilla_transformer.modeling_vanilla_transformer import (
    VanillaTransformerAttention,
    VanillaTransformerDecoderLayer,
    VanillaTransformerForConditionalGeneration,
)


@dataclass(slots=True)
class PlainState:
    """What a search on a `PlainDecoder` remembers.

    Args:
        source: For each layer keys [S, H, T, K] and values [S, H, T, V] of the source.
        source_mask: Added to the scores of the source's positions [S, 1, 1, T]; `None` if there is no padding.
        past: For each layer keys [R, H, L, K] and values [R, H, L, V] of the tokens so far; empty before the first.
        num_past: L.
    """

    source: list[tuple[torch.Tensor, torch.Tensor]]
    source_mask: torch.Tensor | None
    past: list[tuple[torch.Tensor, torch.Tensor]]
    num_past: int


class PlainDecoder:
    """An `IncrementalDecoder` out of the modules of a model, which it does not change.

    Args:
        model: The model, in evaluation mode.
    """

    def __init__(self, model: VanillaTransformerForConditionalGeneration):
        self.vocab_size = model.config.decoder_vocab_size
        self._model = model
        self._decoder = model.get_decoder()

    def start(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> PlainState:
        """As `IncrementalDecoder.start`."""
        encoded = self._model.get_encoder()(input_ids=input_ids, attention_mask=attention_mask)
        return self.start_encoded(encoded.last_hidden_state, attention_mask)

    def start_encoded(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> PlainState:
        """Begin with sources that are encoded already.

        Args:
            hidden_states: The encoder's output [S, T, D].
            attention_mask: [S, T], 1 for tokens and 0 for padding; `None` means no padding.

        Returns:
            As `IncrementalDecoder.start`.
        """
        source = []
        for layer in self._decoder.layers:
            attention = layer.encoder_attn
            keys, values = attention.project(hidden_states, attention.k_proj, attention.v_proj)
            source.append((keys, values))
        mask = None
        if attention_mask is not None and not attention_mask.all():
            mask = torch.zeros_like(attention_mask, dtype=hidden_states.dtype)
            mask = mask.masked_fill(attention_mask == 0, torch.finfo(mask.dtype).min)[:, None, None]
        return PlainState(source, mask, past=[], num_past=0)

    def step(self, state: PlainState, tokens: torch.Tensor) -> torch.Tensor:
        """As `IncrementalDecoder.step`."""
        hidden_states, _, _ = self._decoder.embed(tokens[:, None], None, None, state.num_past)  # [R, 1, D]
        past = []
        for index, layer in enumerate(self._decoder.layers):
            hidden_states, cache = self._layer(layer, hidden_states, state, index)
            past.append(cache)
        state.past = past
        state.num_past += 1
        if self._decoder.layer_norm is not None:
            hidden_states = self._decoder.layer_norm(hidden_states)
        logits = self._model.lm_head(hidden_states[:, 0])  # [R, W]
        if self._model.final_logits_bias is not None:
            logits = logits + self._model.final_logits_bias
        return logits

    def select(self, state: PlainState, sentences: torch.Tensor | None, rows: torch.Tensor) -> None:
        """As `IncrementalDecoder.select`."""
        state.past = [(keys.index_select(0, rows), values.index_select(0, rows)) for keys, values in state.past]
        if sentences is None:
            return
        state.source = [
            (keys.index_select(0, sentences), values.index_select(0, sentences)) for keys, values in state.source
        ]
        if state.source_mask is not None:
            state.source_mask = state.source_mask.index_select(0, sentences)

    def _layer(
        self, layer: VanillaTransformerDecoderLayer, hidden_states: torch.Tensor, state: PlainState, index: int
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Hidden states [R, 1, D] of the new position behind a layer, and the layer's keys and values with it."""
        cache: tuple[torch.Tensor, ...] = ()

        def attend(normed: torch.Tensor) -> torch.Tensor:
            nonlocal cache
            attention = layer.self_attn
            queries, *cache = attention.project(normed, attention.q_proj, attention.k_proj, attention.v_proj)
            if state.past:
                cache = [torch.cat(parts, dim=2) for parts in zip(state.past[index], cache, strict=True)]
            return _attend(attention, queries, *cache)

        def attend_to_source(normed: torch.Tensor) -> torch.Tensor:
            attention = layer.encoder_attn
            # A sentence's rows are queries of the same keys, like positions of one text.
            by_sentence = normed.view(state.source[index][0].shape[0], -1, normed.shape[-1])  # [S, B, D]
            (queries,) = attention.project(by_sentence, attention.q_proj)
            return _attend(attention, queries, *state.source[index], state.source_mask).view(normed.shape)

        hidden_states = layer.sublayer(hidden_states, layer.self_attn_layer_norm, attend)
        hidden_states = layer.sublayer(hidden_states, layer.encoder_attn_layer_norm, attend_to_source)
        hidden_states = layer.sublayer(hidden_states, layer.final_layer_norm, layer.feed_forward)
        return hidden_states, tuple(cache)


def _attend(
    attention: VanillaTransformerAttention,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Output [N, Q, D] of attention from queries [N, H, Q, K] to keys and values."""
    heads = nn.functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, scale=attention.scaling
    )  # [N, H, Q, V]
    return attention.out_proj(heads.transpose(1, 2).flatten(2))
