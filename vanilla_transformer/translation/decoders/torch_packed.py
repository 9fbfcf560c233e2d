"""A decoder made of torch operators on weights that are packed once.

Shapes: S sentences, T source positions, P target positions so far, R rows (hypotheses, the same number for each
sentence), D d_model, H heads, K width of a query or key, U width of a value, L layers, V vocabulary entries.
"""

import copy
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.modeling_vanilla_transformer import (
    VanillaTransformerDecoderLayer,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerLayer,
    VanillaTransformerStack,
)

from .packed_weights import Packing, Product, can_pack, pack


@dataclass(slots=True)
class PackedState:
    """The state of a search.

    Args:
        beams: R / S.
        length: P.
        keys: Keys of the target positions [at least P, L, R, H * K]. Positions come first, so that a new one is
            appended, and rows are reordered, without a copy of the others.
        values: Values of the target positions [at least P, L, R, H * U].
        source_keys: Keys of the source [L, S, H, K, T], shared by all rows of a sentence.
        source_values: Values of the source [L, S, H, T, U], shared by all rows of a sentence.
        source_mask: Added to the attention scores, 0 or -inf, [S, 1, 1, T]; `None` without padding.
    """

    beams: int
    length: int
    keys: torch.Tensor
    values: torch.Tensor
    source_keys: torch.Tensor
    source_values: torch.Tensor
    source_mask: torch.Tensor | None


class PackedDecoder:
    """Decodes step by step with fewer and larger operators than the model, to the same logits.

    One GEMM computes queries, keys and values. Another computes the keys and values of the source for all layers, once
    a sentence. The rows of a sentence attend to the source together.

    Args:
        model: The model; its weights are not changed, and are copied if they are packed.
        dtype: Floating-point type to compute in.
        packing: How weights are packed; `None` chooses the fastest way for the device and the dtype.
    """

    def __init__(
        self,
        model: VanillaTransformerForConditionalGeneration,
        *,
        dtype: torch.dtype = torch.float32,
        packing: Packing | None = None,
    ):
        if packing is None:
            on_cpu = model.device.type == "cpu"
            packing = "onednn" if on_cpu and dtype == torch.bfloat16 and can_pack("onednn") else "plain"
        config = model.config
        self._encoder_widths = _widths(config, config.encoder_attention_heads)
        self._decoder_widths = _widths(config, config.decoder_attention_heads)
        self.config = config
        self.device = model.device
        self.dtype = dtype
        self.vocab_size = config.decoder_vocab_size
        packer = _Packing(dtype, packing)
        self._encoder = _Stack(model.model.encoder, packer)
        self._decoder = _Stack(model.model.decoder, packer)
        attentions = [layer.encoder_attn for layer in model.model.decoder.layers]
        # Without layers, nothing attends to the source.
        self._source = attentions and packer(
            *[each.k_proj for each in attentions], *[each.v_proj for each in attentions]
        )
        bias = model.final_logits_bias
        self._output = pack(
            model.lm_head.weight.detach().to(dtype), None if bias is None else bias[0].to(dtype), packing
        )

    @torch.inference_mode()
    def start(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> PackedState:
        """Encode sources; see `IncrementalDecoder`."""
        input_ids, attention_mask = input_ids.to(self.device), attention_mask.to(self.device)
        heads, d_k, d_v = self._decoder_widths
        layers = self.config.decoder_layers
        num_sentences, length = input_ids.shape
        mask = positions = None
        if not attention_mask.all():
            mask = torch.zeros(attention_mask.shape, dtype=self.dtype, device=self.device)
            mask = mask.masked_fill_(attention_mask == 0, -torch.inf)[:, None, None]
            # Positions count tokens only, so that padding may be on either side.
            positions = (attention_mask.cumsum(1) - 1).clamp_(min=0)
        hidden = self._encode(input_ids, mask, positions)
        joined = self._source(hidden) if self._source else hidden[:, :0]
        keys, values = joined.split([layers * heads * d_k, layers * heads * d_v], dim=1)
        keys = keys.view(num_sentences, length, layers, heads, d_k).permute(2, 0, 3, 4, 1).contiguous()
        values = values.view(num_sentences, length, layers, heads, d_v).permute(2, 0, 3, 1, 4).contiguous()
        return PackedState(
            beams=1,
            length=0,
            keys=hidden.new_empty(8, layers, num_sentences, heads * d_k),
            values=hidden.new_empty(8, layers, num_sentences, heads * d_v),
            source_keys=keys,
            source_values=values,
            source_mask=mask,
        )

    @torch.inference_mode()
    def step(self, state: PackedState, tokens: torch.Tensor) -> torch.Tensor:
        """Append a token to each row; see `IncrementalDecoder`."""
        heads, d_k, d_v = self._decoder_widths
        if state.length == len(state.keys):
            state.keys, state.values = (torch.cat([x, torch.empty_like(x)]) for x in (state.keys, state.values))
        position, num_rows = state.length, len(tokens)
        state.length += 1
        rows_of_heads = num_rows * heads
        hidden = self._decoder.embed(tokens.to(self.device)[:, None], position)
        for number, layer in enumerate(self._decoder.layers):
            joined = layer.self_attention(layer.self_residual.before(hidden))
            queries, keys, values = joined.split([heads * d_k, heads * d_k, heads * d_v], dim=1)
            state.keys[position, number] = keys
            state.values[position, number] = values
            keys = state.keys[: state.length, number].view(-1, rows_of_heads, d_k)
            values = state.values[: state.length, number].view(-1, rows_of_heads, d_v)
            scores = torch.bmm(queries.reshape(rows_of_heads, 1, d_k), keys.permute(1, 2, 0))
            weights = torch.softmax(scores.mul_(d_k**-0.5), dim=-1)
            outputs = torch.bmm(weights, values.transpose(0, 1)).view(num_rows, -1)
            hidden = layer.self_residual.after(hidden, layer.self_output(outputs))

            queries = layer.source_queries(layer.source_residual.before(hidden))
            queries = queries.view(-1, state.beams, heads, d_k).transpose(1, 2)
            scores = torch.matmul(queries, state.source_keys[number]).mul_(d_k**-0.5)
            if state.source_mask is not None:
                scores += state.source_mask
            outputs = torch.matmul(torch.softmax(scores, dim=-1), state.source_values[number])
            outputs = layer.source_output(outputs.transpose(1, 2).reshape(num_rows, -1))
            hidden = layer.source_residual.after(hidden, outputs)

            hidden = layer.feed_forward(hidden)
        return self._output(self._decoder.finish(hidden))

    @torch.inference_mode()
    def select(self, state: PackedState, sentences: torch.Tensor | None, rows: torch.Tensor) -> None:
        """Keep some sentences and continue some rows; see `IncrementalDecoder`."""
        rows = rows.to(self.device)
        for name in ("keys", "values"):
            old = getattr(state, name)
            new = old.new_empty(*old.shape[:2], len(rows), old.shape[3])
            torch.index_select(old[: state.length], 2, rows, out=new[: state.length])
            setattr(state, name, new)
        if sentences is not None:
            sentences = sentences.to(self.device)
            state.source_keys = state.source_keys.index_select(1, sentences)
            state.source_values = state.source_values.index_select(1, sentences)
            if state.source_mask is not None:
                state.source_mask = state.source_mask.index_select(0, sentences)
        state.beams = len(rows) // state.source_keys.shape[1]

    def _encode(
        self, input_ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None
    ) -> torch.Tensor:
        """The encoder's output [S * T, D]."""
        num_sentences, length = input_ids.shape
        heads, d_k, d_v = self._encoder_widths
        hidden = self._encoder.embed(input_ids, 0, positions)
        for layer in self._encoder.layers:
            joined = layer.self_attention(layer.self_residual.before(hidden)).view(num_sentences, length, -1)
            queries, keys, values = (
                x.unflatten(2, (heads, -1)).transpose(1, 2)
                for x in joined.split([heads * d_k, heads * d_k, heads * d_v], dim=2)
            )
            outputs = nn.functional.scaled_dot_product_attention(queries, keys, values, mask)
            outputs = layer.self_output(outputs.transpose(1, 2).reshape(num_sentences * length, -1))
            hidden = layer.feed_forward(layer.self_residual.after(hidden, outputs))
        return self._encoder.finish(hidden)


def _widths(config: VanillaTransformerConfig, heads: int) -> tuple[int, int, int]:
    """Number of heads, and widths of a query and of a value, of a stack's attention (H, K, U)."""
    width = config.d_model // heads
    return heads, config.d_k or width, config.d_v or width


class _Packing:
    """Packs a model's projections; several projections of the same input become one."""

    def __init__(self, dtype: torch.dtype, packing: Packing):
        self.dtype = dtype
        self.packing = packing

    def __call__(self, *projections: nn.Linear, relu: bool = False) -> Product:
        weight = torch.cat([projection.weight.detach() for projection in projections]).to(self.dtype)
        bias = None
        if projections[0].bias is not None:
            bias = torch.cat([projection.bias.detach() for projection in projections]).to(self.dtype)
        return pack(weight, bias, self.packing, relu=relu)


class _Residual:
    """The residual connection and the normalisation of a sub-layer, in either order."""

    def __init__(self, norm: nn.LayerNorm, layer: VanillaTransformerLayer, dtype: torch.dtype):
        self.pre_norm = layer.pre_norm
        self.norm = partial(
            nn.functional.layer_norm,
            normalized_shape=norm.normalized_shape,
            weight=norm.weight.detach().to(dtype),
            bias=norm.bias.detach().to(dtype),
            eps=norm.eps,
        )

    def before(self, hidden: torch.Tensor) -> torch.Tensor:
        """The sub-layer's input."""
        return self.norm(hidden) if self.pre_norm else hidden

    def after(self, hidden: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """The residual connection of a sub-layer's input and output, normalised in the post-norm order."""
        hidden = hidden + output
        return hidden if self.pre_norm else self.norm(hidden)


class _Layer:
    """One layer of either stack."""

    def __init__(self, layer: VanillaTransformerLayer, pack: _Packing):
        attention = layer.self_attn
        self.self_attention = pack(attention.q_proj, attention.k_proj, attention.v_proj)
        self.self_output = pack(attention.out_proj)
        self.self_residual = _Residual(layer.self_attn_layer_norm, layer, pack.dtype)
        if isinstance(layer, VanillaTransformerDecoderLayer):
            self.source_queries = pack(layer.encoder_attn.q_proj)
            self.source_output = pack(layer.encoder_attn.out_proj)
            self.source_residual = _Residual(layer.encoder_attn_layer_norm, layer, pack.dtype)
        # The GEMM can apply ReLU (Eq. 2) itself.
        relu = isinstance(layer.activation_fn, nn.ReLU)
        self._activation = nn.Identity() if relu else layer.activation_fn
        self._fc1 = pack(layer.fc1, relu=relu)
        self._fc2 = pack(layer.fc2)
        self._residual = _Residual(layer.final_layer_norm, layer, pack.dtype)

    def feed_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The feed-forward sub-layer with residual connection and normalisation."""
        inner = self._activation(self._fc1(self._residual.before(hidden)))
        return self._residual.after(hidden, self._fc2(inner))


class _Stack:
    """Embeddings, positions and layers of encoder or decoder, and its last normalisation in the pre-norm order."""

    def __init__(self, stack: VanillaTransformerStack, pack: _Packing):
        self.layers = [_Layer(layer, pack) for layer in stack.layers]
        self._dtype = pack.dtype
        self._scale = stack.embed_tokens.embed_scale
        self._embeddings = stack.embed_tokens.weight.detach().to(pack.dtype)
        self._positions = stack.embed_positions
        self._table = self._embeddings.new_empty(0, self._embeddings.shape[1])
        self._norm = None if stack.layer_norm is None else copy.deepcopy(stack.layer_norm).to(pack.dtype)

    def embed(self, input_ids: torch.Tensor, first: int = 0, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Sums of scaled embeddings and positions [N * n, D] for ids [N, n], at positions [N, n] or from `first`."""
        end = first + input_ids.shape[1]
        table = self._up_to(end)
        hidden = nn.functional.embedding(input_ids, self._embeddings) * self._scale
        return hidden.add_(table[first:end] if positions is None else table[positions]).flatten(0, 1)

    def _up_to(self, length: int) -> torch.Tensor:
        """The vectors of at least `length` positions, or of all learned ones."""
        # Another thread may replace the table at any time.
        table = self._table
        if len(table) < length:
            # The number of learned positions is limited.
            size = min(2 * length, getattr(self._positions, "num_embeddings", 2 * length))
            positions = torch.arange(size, device=self._embeddings.device)
            wide = torch.promote_types(self._dtype, torch.float32)
            self._table = table = self._positions(positions, wide).detach().to(self._dtype)
        return table

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        """The stack's output, computed from that of its last layer."""
        return hidden if self._norm is None else self._norm(hidden)
