"""The Transformer of Vaswani et al. (2017), "Attention Is All You Need", as a Hugging Face model.

Shapes in comments: B batch, S source positions, T target positions (or positions of either side where a module serves
both), D d_model, H heads, K width of a query or key, V width of a value, F d_ff, W vocabulary entries.

Parameter names are those of BART and Marian.
"""

import copy
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_vanilla_transformer import VanillaTransformerConfig


if TYPE_CHECKING:
    # transformers saves a remote model with the files that this one's text imports, and the configuration of a
    # translation model names the pipeline. Importing it here would load all of transformers' own.
    from .pipeline_vanilla_transformer import TranslationPipeline  # noqa: F401


def shift_tokens_right(labels: torch.Tensor, *, pad_token_id: int, decoder_start_token_id: int) -> torch.Tensor:
    """Make decoder inputs out of labels: "the output embeddings are offset by one position" (§3.1).

    Args:
        labels: Target ids [B, T]; positions without a loss hold -100.
        pad_token_id: Id that stands in for -100.
        decoder_start_token_id: Id of the first decoder input.

    Returns:
        Ids [B, T]: the start id, then all labels but the last.
    """
    start = labels.new_full((labels.shape[0], 1), decoder_start_token_id)
    shifted = torch.cat([start, labels[:, :-1]], dim=1)
    return shifted.masked_fill(shifted == -100, pad_token_id)


def token_loss(
    logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """Cross-entropy of tokens or of their classes, without label smoothing, so that it compares across trainings.

    Args:
        logits: [B, T, W], position t scoring label t (nothing is shifted here).
        labels: [B, T]; -100 where there is no loss.
        num_items_in_batch: Number of target tokens that the sum is divided by: those of the whole optimiser step when
            a batch is cut into several. `None` means those of this batch.

    Returns:
        A scalar, in float32 or wider.
    """
    # Half-precision logits lose the small probabilities that make up most of the sum.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = nn.functional.cross_entropy(
        logits.flatten(0, -2), labels.flatten().to(logits.device), ignore_index=-100, reduction="sum"
    )
    if num_items_in_batch is None:
        num_items_in_batch = (labels != -100).sum()
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


def count_positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Number the tokens of each text, so that padding does not move them, whichever side it is on.

    Args:
        attention_mask: [B, T], 1 for tokens and 0 for padding.

    Returns:
        Positions [B, T]: 0 at a text's first token; padding repeats that of the token before it, or has 0.
    """
    return (attention_mask.bool().cumsum(dim=-1) - 1).clamp(min=0)


def keep_positions(hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    """Select the positions whose logits are wanted, before the projection to the vocabulary.

    Args:
        hidden_states: [B, T, D].
        logits_to_keep: The last so many positions, or their indices [N]; 0 keeps all.

    Returns:
        Hidden states [B, N, D].
    """
    positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
    return hidden_states[:, positions]


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Unpack[TransformersKwargs],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scaled dot-product attention, softmax(Q K^T / sqrt(d_k)) V (§3.2.1, Eq. 1), with the weights as second result.

    Args:
        module: The attention module; only its `training` flag is read.
        query: [B, H, T, K].
        key: [B, H, S, K].
        value: [B, H, S, V].
        attention_mask: Added to the scores, broadcast to [B, H, T, S]; the dtype's minimum where attention is barred.
        scaling: d_k^-0.5.
        dropout: Dropout probability on the weights.
        **kwargs: Ignored; other attention functions use them.

    Returns:
        The heads' outputs [B, T, H, V] and the weights [B, H, T, S].
    """
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    # Softmax in float32 or wider: in half precision the weights of a long sentence no longer sum to 1.
    wide = torch.promote_types(query.dtype, torch.float32)
    weights = nn.functional.softmax(scores, dim=-1, dtype=wide).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2), weights


def _initialize_as_one_matrix(*projections: nn.Linear) -> None:
    """Give projections of the same input the initial scale that they would have as rows of one Xavier matrix.

    The authors' code projects to queries, keys and values with one matrix, which makes their initial values smaller by
    2^-0.5 than those of three matrices. With the larger values, post-norm models can stay for long in a state in which
    the encoder's positions are all alike.
    """
    for projection in projections:
        projection.initial_fan_out = sum(other.out_features for other in projections)


class VanillaTransformerAttention(nn.Module):
    """Multi-head attention, Concat(head_1, ..., head_h) W^O (§3.2.2), with free widths d_k and d_v."""

    def __init__(self, config: VanillaTransformerConfig, *, num_heads: int, is_causal: bool, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = is_causal
        self.num_heads = num_heads
        self.d_k = config.d_model // num_heads if config.d_k is None else config.d_k
        self.d_v = config.d_model // num_heads if config.d_v is None else config.d_v
        self.scaling = self.d_k**-0.5
        self.attention_dropout = config.attention_dropout
        self.q_proj = nn.Linear(config.d_model, num_heads * self.d_k, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.d_model, num_heads * self.d_k, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.d_model, num_heads * self.d_v, bias=config.attention_bias)
        self.out_proj = nn.Linear(num_heads * self.d_v, config.d_model, bias=config.attention_bias)

    def project(self, hidden_states: torch.Tensor, *projections: nn.Linear) -> list[torch.Tensor]:
        """Project hidden states [B, T, D] to queries, keys or values, each split into heads [B, H, T, K or V]."""
        # Counted by width: under tensor parallelism a process has some of the heads.
        return [
            projection(hidden_states)
            .unflatten(-1, (-1, self.d_v if projection is self.v_proj else self.d_k))
            .transpose(1, 2)
            for projection in projections
        ]

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend, join the heads and project them: output [B, T, D], and the weights where the backend has them."""
        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        heads, weights = attention_interface(
            self,
            queries,
            keys,
            values,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.out_proj(heads.flatten(2)), weights


class VanillaTransformerSelfAttention(VanillaTransformerAttention):
    """Attention of a sequence to itself; in the decoder, of every position to those up to it (§3.2.3)."""

    def __init__(self, config: VanillaTransformerConfig, **kwargs):
        super().__init__(config, **kwargs)
        _initialize_as_one_matrix(self.q_proj, self.k_proj, self.v_proj)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend within `hidden_states` [B, T, D] and, when decoding, to the positions that the cache holds."""
        queries, keys, values = self.project(hidden_states, self.q_proj, self.k_proj, self.v_proj)
        if past_key_values is not None:
            if isinstance(past_key_values, EncoderDecoderCache):
                past_key_values = past_key_values.self_attention_cache
            keys, values = past_key_values.update(keys, values, self.layer_idx)
        return self.attend(queries, keys, values, attention_mask, **kwargs)


class VanillaTransformerCrossAttention(VanillaTransformerAttention):
    """Attention of the decoder's positions to the encoder's output (§3.2.3)."""

    def __init__(self, config: VanillaTransformerConfig, **kwargs):
        super().__init__(config, **kwargs)
        _initialize_as_one_matrix(self.k_proj, self.v_proj)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from `hidden_states` [B, T, D] to `encoder_hidden_states` [B, S, D], projected once a sentence."""
        (queries,) = self.project(hidden_states, self.q_proj)
        if isinstance(past_key_values, EncoderDecoderCache):
            cache = past_key_values.cross_attention_cache
            if past_key_values.is_updated.get(self.layer_idx):
                keys, values = cache.layers[self.layer_idx].keys, cache.layers[self.layer_idx].values
            else:
                keys, values = self.project(encoder_hidden_states, self.k_proj, self.v_proj)
                keys, values = cache.update(keys, values, self.layer_idx)
                past_key_values.is_updated[self.layer_idx] = True
        else:
            keys, values = self.project(encoder_hidden_states, self.k_proj, self.v_proj)
        return self.attend(queries, keys, values, attention_mask, **kwargs)


class VanillaTransformerLayer(GradientCheckpointingLayer):
    """What encoder and decoder layers share: residual connections around sub-layers, and the feed-forward network."""

    def __init__(self, config: VanillaTransformerConfig, *, ffn_dim: int):
        super().__init__()
        self.pre_norm = config.norm_position == "pre"
        self.dropout = nn.Dropout(config.dropout)
        self.activation_dropout = nn.Dropout(config.activation_dropout)
        self.activation_fn = ACT2FN[config.activation_function]
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.fc1 = nn.Linear(config.d_model, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, config.d_model)
        self.final_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def feed_forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Position-wise feed-forward network, max(0, x W_1 + b_1) W_2 + b_2 (§3.3, Eq. 2), on [B, T, D]."""
        return self.fc2(self.activation_dropout(self.activation_fn(self.fc1(hidden_states))))

    def sublayer(
        self, hidden_states: torch.Tensor, norm: nn.LayerNorm, function: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """LayerNorm(x + Dropout(Sublayer(x))) (§3.1, §5.4), or the pre-norm order by configuration."""
        output = function(norm(hidden_states) if self.pre_norm else hidden_states)
        output = hidden_states + self.dropout(output)
        return output if self.pre_norm else norm(output)


class VanillaTransformerEncoderLayer(VanillaTransformerLayer):
    """Self-attention, then the feed-forward network (§3.1, Figure 1, left)."""

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int):
        super().__init__(config, ffn_dim=config.encoder_ffn_dim)
        self.self_attn = VanillaTransformerSelfAttention(
            config, num_heads=config.encoder_attention_heads, is_causal=False, layer_idx=layer_idx
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """Map hidden states [B, S, D] to hidden states [B, S, D]."""

        def attend(normed: torch.Tensor) -> torch.Tensor:
            return self.self_attn(normed, attention_mask, **kwargs)[0]

        hidden_states = self.sublayer(hidden_states, self.self_attn_layer_norm, attend)
        return self.sublayer(hidden_states, self.final_layer_norm, self.feed_forward)


class VanillaTransformerDecoderLayer(VanillaTransformerLayer):
    """Causal self-attention, attention to the encoder, then the feed-forward network (§3.1, Figure 1, right).

    A decoder without an encoder has no attention to it.
    """

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int):
        super().__init__(config, ffn_dim=config.decoder_ffn_dim)
        self.self_attn = VanillaTransformerSelfAttention(
            config, num_heads=config.decoder_attention_heads, is_causal=True, layer_idx=layer_idx
        )
        self.encoder_attn = None
        if config.is_encoder_decoder:
            self.encoder_attn = VanillaTransformerCrossAttention(
                config, num_heads=config.decoder_attention_heads, is_causal=False, layer_idx=layer_idx
            )
            self.encoder_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """Map hidden states [B, T, D] to hidden states [B, T, D], looking at `encoder_hidden_states` [B, S, D]."""

        def attend(normed: torch.Tensor) -> torch.Tensor:
            return self.self_attn(normed, attention_mask, past_key_values, **kwargs)[0]

        def attend_to_encoder(normed: torch.Tensor) -> torch.Tensor:
            return self.encoder_attn(normed, encoder_hidden_states, encoder_attention_mask, past_key_values, **kwargs)[
                0
            ]

        hidden_states = self.sublayer(hidden_states, self.self_attn_layer_norm, attend)
        if self.encoder_attn is not None:
            hidden_states = self.sublayer(hidden_states, self.encoder_attn_layer_norm, attend_to_encoder)
        return self.sublayer(hidden_states, self.final_layer_norm, self.feed_forward)


class VanillaTransformerScaledEmbedding(nn.Embedding):
    """Token embeddings multiplied by sqrt(d_model) (§3.4), inside, so that `inputs_embeds` need no further factor."""

    def __init__(self, config: VanillaTransformerConfig, vocab_size: int):
        super().__init__(vocab_size, config.d_model, padding_idx=config.pad_token_id)
        # PEFT looks for this name: its adapters of embeddings replace `forward`.
        self.embed_scale = config.d_model**0.5 if config.scale_embedding else 1.0

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Map ids [B, T] to vectors [B, T, D]."""
        return super().forward(input_ids) * self.embed_scale


class VanillaTransformerSinusoidalPositions(nn.Module):
    """Sine and cosine of the position at wavelengths in geometric progression (§3.5).

    PE(pos, 2i) = sin(pos / 10000^(2i/d_model)) and PE(pos, 2i+1) = cos(the same), computed from the position ids:
    there is no table to outgrow, to fill after loading or to round to half precision.
    """

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__()
        self.num_pairs = config.d_model // 2
        self.layout = config.sinusoidal_layout
        self.exponent_denominator = self.num_pairs - (1 if config.sinusoidal_exponent == "tensor2tensor" else 0)

    def forward(self, position_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Map position ids [B, T] to vectors [B, T, D] of `dtype`."""
        # In bfloat16 the angles of most positions beyond 256 coincide.
        wide = torch.promote_types(dtype, torch.float32)
        pair = torch.arange(self.num_pairs, dtype=wide, device=position_ids.device)
        angles = position_ids[..., None].to(wide) / torch.pow(10000.0, pair / self.exponent_denominator)
        if self.layout == "interleaved":
            return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2).to(dtype)
        return torch.cat([angles.sin(), angles.cos()], dim=-1).to(dtype)


class VanillaTransformerLearnedPositions(nn.Embedding):
    """One learned vector for each of `max_position_embeddings` positions (Table 3, row E)."""

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config.max_position_embeddings, config.d_model)

    def forward(self, position_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Map position ids [B, T], each below `max_position_embeddings`, to vectors [B, T, D] of `dtype`."""
        return super().forward(position_ids).to(dtype)


def _sharded(*blocks: str) -> dict[str, str]:
    """Tensor-parallel plan of a stack: heads and inner units are divided among the processes."""
    plan = {"layers.*.fc1": "colwise", "layers.*.fc2": "rowwise"}
    for block in blocks:
        plan |= {f"layers.*.{block}.{part}_proj": "colwise" for part in "qkv"}
        plan[f"layers.*.{block}.out_proj"] = "rowwise"
    return plan


def _config_as(config: VanillaTransformerConfig, *, encoder: bool, decoder: bool) -> VanillaTransformerConfig:
    """The configuration of a model with these stacks: `config` itself, or a copy where it is that of other stacks."""
    wanted = {"is_encoder_decoder": encoder and decoder, "is_decoder": decoder and not encoder}
    if all(getattr(config, name) == value for name, value in wanted.items()):
        return config
    config = copy.deepcopy(config)
    for name, value in wanted.items():
        setattr(config, name, value)
    return config


class VanillaTransformerPreTrainedModel(PreTrainedModel):
    """What every model of the family shares: initialisation and what the library needs to know."""

    config: VanillaTransformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Xavier-uniform matrices and N(0, d_model^-0.5) embeddings, as the authors' code of June 2017 has them."""
        std = self.config.d_model**-0.5 if self.config.init_std is None else self.config.init_std
        if module is getattr(self, "lm_head", None) or module is getattr(self, "masked_lm_head", None):
            # An output projection that is not tied starts like the embedding that it replaces.
            init.normal_(module.weight, mean=0.0, std=std)
        elif isinstance(module, nn.Linear):
            # Xavier-uniform, where several projections may count as one matrix.
            fan_out = getattr(module, "initial_fan_out", module.out_features)
            bound = (6.0 / (module.in_features + fan_out)) ** 0.5
            init.uniform_(module.weight, -bound, bound)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=std)
            # The slice loses the mark of a loaded tensor, which `init` would respect.
            if module.padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
                init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif getattr(module, "final_logits_bias", None) is not None:
            init.zeros_(module.final_logits_bias)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Change the size of the vocabulary that encoder and decoder share.

        Args:
            new_num_tokens: New number of entries; `None` keeps it.
            pad_to_multiple_of: Round the number up to a multiple of this.
            mean_resizing: Draw new rows around the mean of the old ones, as transformers does.

        Returns:
            The resized embeddings.

        Raises:
            ValueError: Encoder and decoder have vocabularies of their own.
        """
        if not self.config.share_encoder_decoder_embeddings:
            raise ValueError(
                "`resize_token_embeddings` changes one vocabulary that both sides share, and this model has two "
                "(`share_encoder_decoder_embeddings` is false); build a model of the new sizes instead."
            )
        embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        self.config.decoder_vocab_size = self.config.vocab_size
        return embeddings


class VanillaTransformerStack(VanillaTransformerPreTrainedModel):
    """What encoder and decoder share: embeddings, positions, and the last normalisation of the pre-norm order."""

    def __init__(self, config: VanillaTransformerConfig, *, vocab_size: int):
        super().__init__(config)
        self.embed_tokens = VanillaTransformerScaledEmbedding(config, vocab_size)
        if config.position_embedding_type == "learned":
            self.embed_positions = VanillaTransformerLearnedPositions(config)
        else:
            self.embed_positions = VanillaTransformerSinusoidalPositions(config)
        self.dropout = nn.Dropout(config.dropout)
        self.layer_norm = (
            nn.LayerNorm(config.d_model, eps=config.layer_norm_eps) if config.norm_position == "pre" else None
        )
        self.gradient_checkpointing = False

    def embed(
        self,
        input_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None = None,
        num_past_positions: int | torch.Tensor = 0,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Add positions to embeddings, with dropout on the sum (§3.4, §3.5, §5.4).

        Args:
            input_ids: Ids [B, T], or `None`.
            inputs_embeds: Scaled token embeddings [B, T, D], or `None`.
            position_ids: [B or 1, T]; `None` numbers the tokens of each text as `attention_mask` has them.
            attention_mask: [B, past + T], 1 for tokens and 0 for padding; one of another rank tells no positions.
            num_past_positions: Number of positions in the cache.

        Returns:
            The hidden states that enter the first layer [B, T, D], the token embeddings [B, T, D] and the position ids
            [B or 1, T].
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(
                f"{type(self).__name__} got {'neither' if input_ids is None else 'both'} of token ids and embeddings; "
                "pass exactly one of them."
            )
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if position_ids is None:
            # A static cache counts its positions on the device; looking at that number would wait for the device.
            num_positions = inputs_embeds.shape[1] + (
                0 if isinstance(num_past_positions, torch.Tensor) else num_past_positions
            )
            if (
                self.config.position_embedding_type == "learned"
                and num_positions > self.config.max_position_embeddings
            ):
                raise ValueError(
                    f"{type(self).__name__} got {num_positions} positions, but `max_position_embeddings` is "
                    f"{self.config.max_position_embeddings}; shorten the text, or build a model with more learned or "
                    "with sinusoidal positions."
                )
            columns = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + num_past_positions
            position_ids = columns.unsqueeze(0)
            if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
                position_ids = count_positions(attention_mask).to(columns.device).index_select(1, columns)
        hidden_states = inputs_embeds + self.embed_positions(position_ids, inputs_embeds.dtype)
        device_type = hidden_states.device.type
        if device_type == "cpu" and torch.is_autocast_enabled(device_type):
            # There the sums of the residual connections are as slow as their bytes are many. Elsewhere they stay in
            # float32: in half precision each layer of the pre-norm order rounds what all before it have added up.
            hidden_states = hidden_states.to(torch.get_autocast_dtype(device_type))
        return self.dropout(hidden_states), inputs_embeds, position_ids


class VanillaTransformerEncoder(VanillaTransformerStack):
    """The stack of encoder layers (§3.1)."""

    _no_split_modules = ["VanillaTransformerEncoderLayer"]  # noqa: RUF012
    _tp_plan = _sharded("self_attn")
    _pp_plan = {  # noqa: RUF012
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
    }
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": VanillaTransformerEncoderLayer,
        "attentions": OutputRecorder(VanillaTransformerSelfAttention, index=1),
    }

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config, vocab_size=config.vocab_size)
        self.layers = nn.ModuleList([VanillaTransformerEncoderLayer(config, i) for i in range(config.encoder_layers)])
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """Encode source sentences.

        Args:
            input_ids: Source ids [B, S]; or pass `inputs_embeds`.
            attention_mask: [B, S], 1 for tokens and 0 for padding; `None` means no padding.
            inputs_embeds: Scaled token embeddings [B, S, D].
            position_ids: [B, S]; `None` numbers the tokens of each text from 0 on as a mask [B, S] has them, so that
                the side of the padding does not matter, and counts from the left without one.
            **kwargs: `output_attentions`, `output_hidden_states`, `return_dict` and the like.

        Returns:
            The last layer's hidden states [B, S, D] and what was asked for.
        """
        hidden_states, inputs_embeds, _ = self.embed(input_ids, inputs_embeds, position_ids, attention_mask)
        attention_mask = create_bidirectional_mask(
            config=self.config, inputs_embeds=inputs_embeds, attention_mask=attention_mask
        )
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask, **kwargs)
        if self.layer_norm is not None:
            hidden_states = self.layer_norm(hidden_states)
        return BaseModelOutput(last_hidden_state=hidden_states)


class VanillaTransformerDecoder(VanillaTransformerStack):
    """The stack of decoder layers (§3.1)."""

    _no_split_modules = ["VanillaTransformerDecoderLayer"]  # noqa: RUF012
    _tp_plan = _sharded("self_attn", "encoder_attn")
    _pp_plan = {  # noqa: RUF012
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask", "encoder_hidden_states"], ["hidden_states"]),
    }
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": VanillaTransformerDecoderLayer,
        "attentions": OutputRecorder(VanillaTransformerSelfAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(VanillaTransformerCrossAttention, index=1, layer_name="encoder_attn"),
    }

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config, vocab_size=config.decoder_vocab_size)
        self.layers = nn.ModuleList([VanillaTransformerDecoderLayer(config, i) for i in range(config.decoder_layers)])
        self.post_init()
        if not config.is_encoder_decoder:
            self._tp_plan = {name: how for name, how in self._tp_plan.items() if "encoder_attn" not in name}

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.FloatTensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decode target positions, each seeing those up to it and the whole source, where there is one.

        Args:
            input_ids: Target ids [B, T], shifted right; or pass `inputs_embeds`.
            attention_mask: [B, past + T], 1 for tokens and 0 for padding; `None` means no padding.
            encoder_hidden_states: The encoder's output [B, S, D]; `None` for a decoder without an encoder.
            encoder_attention_mask: [B, S], as the encoder had it.
            past_key_values: Keys and values of earlier positions, and of the source once it was seen.
            inputs_embeds: Scaled token embeddings [B, T, D].
            position_ids: [B, T]; `None` numbers the tokens of each text from 0 on as a mask [B, past + T] has them, so
                that the side of the padding does not matter, and counts on from the cache's length without one.
            use_cache: Whether to return keys and values for the next call.
            **kwargs: `output_attentions`, `output_hidden_states`, `return_dict` and the like.

        Returns:
            The last layer's hidden states [B, T, D], the cache and what was asked for.
        """
        if use_cache and past_key_values is None:
            # Without the configuration, which a cache would copy: torch 2.11 cannot compile that.
            past_key_values = DynamicCache()
            if self.config.is_encoder_decoder:
                past_key_values = EncoderDecoderCache(past_key_values, DynamicCache())
        num_past_positions = past_key_values.get_seq_length() if past_key_values is not None else 0
        hidden_states, inputs_embeds, position_ids = self.embed(
            input_ids, inputs_embeds, position_ids, attention_mask, num_past_positions
        )
        causal_mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=(
                past_key_values.self_attention_cache
                if isinstance(past_key_values, EncoderDecoderCache)
                else past_key_values
            ),
            position_ids=position_ids,
        )
        if encoder_hidden_states is not None:
            encoder_attention_mask = create_bidirectional_mask(
                config=self.config,
                inputs_embeds=inputs_embeds,
                attention_mask=encoder_attention_mask,
                encoder_hidden_states=encoder_hidden_states,
            )
        for layer in self.layers:
            # Positional, or re-entrant checkpointing loses the gradients of both.
            hidden_states = layer(
                hidden_states,
                causal_mask,
                encoder_hidden_states,
                encoder_attention_mask=encoder_attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
        if self.layer_norm is not None:
            hidden_states = self.layer_norm(hidden_states)
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden_states, past_key_values=past_key_values if use_cache else None
        )


class VanillaTransformerBaseModel(VanillaTransformerPreTrainedModel):
    """One stack or both over their token embeddings, which have the same names whatever else the model has."""

    _stacks: tuple[str, ...]

    def __init__(self, config: VanillaTransformerConfig):
        config = _config_as(config, encoder="encoder" in self._stacks, decoder="decoder" in self._stacks)
        super().__init__(config)
        if config.share_encoder_decoder_embeddings:
            self.shared = VanillaTransformerScaledEmbedding(config, config.vocab_size)
        for name, stack in (("encoder", VanillaTransformerEncoder), ("decoder", VanillaTransformerDecoder)):
            if name in self._stacks:
                setattr(self, name, stack(config))
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Ties of the embeddings. The library's rule would undo them with the tie of the output projection."""
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        return dict(self._tied_weights_keys) if self.config.share_encoder_decoder_embeddings else {}

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; whatever takes the place of `shared`, such as an adapter of PEFT, serves every stack."""
        is_replaced = name == "shared" and name in self.__dict__.get("_modules", {})
        super().__setattr__(name, value)
        if is_replaced:
            for stack in self._stacks:
                getattr(self, stack).embed_tokens = value

    def get_input_embeddings(self) -> nn.Module:
        """Token embeddings of the first stack, which are the other's too unless their tie is undone."""
        if self.config.share_encoder_decoder_embeddings:
            return self.shared
        return getattr(self, self._stacks[0]).embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embeddings: of all stacks where they are shared, else the first one's."""
        if self.config.share_encoder_decoder_embeddings:
            self.shared = value
        else:
            getattr(self, self._stacks[0]).embed_tokens = value


class VanillaTransformerModel(VanillaTransformerBaseModel):
    """Encoder and decoder, without the output projection (§3.1, Figure 1)."""

    _stacks = ("encoder", "decoder")
    _tied_weights_keys = {  # noqa: RUF012
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
    }

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *args: Any,
        config: PreTrainedConfig | str | os.PathLike | None = None,
        **kwargs: Any,
    ) -> "VanillaTransformerBaseModel | tuple[VanillaTransformerBaseModel, dict[str, Any]]":
        """Load the model; what was saved with one stack alone is loaded as that stack through `AutoModel`.

        Args:
            pretrained_model_name_or_path: Folder, or name of a repository.
            *args: As for every `PreTrainedModel`.
            config: Configuration of the model. `AutoModel` passes the one that it found; where that is of an encoder
                or a decoder alone, the other stack would have random weights, and is left out.
            **kwargs: As for every `PreTrainedModel`.

        Returns:
            The model, or with `output_loading_info` the model and what is to be said of the weights.
        """
        kind = cls._kind_for(config)
        if kind is not cls:
            return kind.from_pretrained(pretrained_model_name_or_path, *args, config=config, **kwargs)
        return super().from_pretrained(pretrained_model_name_or_path, *args, config=config, **kwargs)

    @classmethod
    def _from_config(cls, config: PreTrainedConfig, **kwargs: Any) -> "VanillaTransformerBaseModel":
        """Build a new model for `AutoModel.from_config`, of the class that `AutoModel.from_pretrained` loads."""
        kind = cls._kind_for(config)
        return super()._from_config(config, **kwargs) if kind is cls else kind._from_config(config, **kwargs)

    @classmethod
    def _kind_for(cls, config: object) -> "type[VanillaTransformerBaseModel]":
        """The class with the stacks that a configuration is of."""
        if not isinstance(config, VanillaTransformerConfig) or config.is_encoder_decoder:
            return cls
        return VanillaTransformerDecoderModel if config.is_decoder else VanillaTransformerEncoderModel

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        decoder_inputs_embeds: torch.FloatTensor | None = None,
        decoder_position_ids: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        position_ids: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """Encode the source, unless `encoder_outputs` is given, and decode the target.

        Args:
            input_ids: Source ids [B, S]; or `inputs_embeds`, or `encoder_outputs`.
            attention_mask: [B, S], 1 for source tokens and 0 for padding; also masks `encoder_outputs`.
            decoder_input_ids: Target ids [B, T], shifted right; or `decoder_inputs_embeds`. Without either they are
                `input_ids`, shifted right, as with BART.
            decoder_attention_mask: [B, past + T], 1 for target tokens and 0 for padding.
            encoder_outputs: What the encoder returned for this source.
            past_key_values: The decoder's cache.
            inputs_embeds: Scaled source embeddings [B, S, D].
            decoder_inputs_embeds: Scaled target embeddings [B, T, D].
            decoder_position_ids: Of the target [B, T]; `None` numbers the tokens of `decoder_attention_mask`, and
                counts on from the cache's length without one.
            use_cache: Whether to return the cache.
            position_ids: Of the source [B, S]; `None` numbers the tokens of `attention_mask`, so that the side of the
                padding does not matter. Without effect when `encoder_outputs` is given.
            **kwargs: `output_attentions`, `output_hidden_states`, `return_dict` and the like.

        Returns:
            The decoder's hidden states [B, T, D], the encoder's [B, S, D], the cache and what was asked for.
        """
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            if input_ids is None or not self.config.share_encoder_decoder_embeddings:
                raise ValueError(
                    f"{type(self).__name__} got no decoder inputs; pass `decoder_input_ids`, or `labels` to a model "
                    "with a head. Only `input_ids` of a vocabulary that both sides share can stand in for them."
                )
            decoder_input_ids = shift_tokens_right(
                input_ids,
                pad_token_id=self.config.pad_token_id,
                decoder_start_token_id=self.config.decoder_start_token_id,
            )
            if decoder_attention_mask is None and attention_mask is not None and attention_mask.ndim == 2:
                # The start is a token, on whichever side the padding is.
                start = attention_mask.new_ones(attention_mask.shape[0], 1)
                decoder_attention_mask = torch.cat([start, attention_mask[:, :-1]], dim=1)
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids=input_ids,
                attention_mask=attention_mask,
                inputs_embeds=inputs_embeds,
                position_ids=position_ids,
                **kwargs,
            )
        elif not isinstance(encoder_outputs, BaseModelOutput):
            encoder_outputs = BaseModelOutput(*encoder_outputs)
        decoder_outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=encoder_outputs.last_hidden_state,
            encoder_attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=decoder_inputs_embeds,
            position_ids=decoder_position_ids,
            use_cache=use_cache,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            past_key_values=decoder_outputs.past_key_values,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )


class VanillaTransformerEncoderModel(VanillaTransformerBaseModel):
    """The encoder alone, as it is in the translation model."""

    _stacks = ("encoder",)
    _tied_weights_keys = {"encoder.embed_tokens.weight": "shared.weight"}  # noqa: RUF012
    # What else a translation model has.
    _keys_to_ignore_on_load_unexpected = [r"^(model\.)?decoder\.", r"^lm_head\.", r"^final_logits_bias$"]  # noqa: RUF012

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """Encode texts; arguments and result are those of `VanillaTransformerEncoder`."""
        return self.encoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            position_ids=position_ids,
            **kwargs,
        )


class VanillaTransformerDecoderModel(VanillaTransformerBaseModel):
    """The decoder alone, as it is in the translation model but for the attention to the encoder."""

    _stacks = ("decoder",)
    _tied_weights_keys = {"decoder.embed_tokens.weight": "shared.weight"}  # noqa: RUF012
    # What else a translation model has.
    _keys_to_ignore_on_load_unexpected = [r"^(model\.)?encoder\.", r"\.encoder_attn(_layer_norm)?\."]  # noqa: RUF012

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Continue texts; arguments and result are those of `VanillaTransformerDecoder`."""
        return self.decoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            position_ids=position_ids,
            use_cache=use_cache,
            **kwargs,
        )


class VanillaTransformerLanguageModel(VanillaTransformerPreTrainedModel):
    """A decoder, with or without an encoder, and its projection to the vocabulary (§3.4)."""

    _tied_weights_keys = {"lm_head.weight": "model.shared.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}  # noqa: RUF012

    def __init__(self, config: VanillaTransformerConfig, model: VanillaTransformerBaseModel):
        super().__init__(model.config)
        self.model = model
        self.lm_head = nn.Linear(config.d_model, config.decoder_vocab_size, bias=False)
        self.final_logits_bias = (
            nn.Buffer(torch.zeros(1, config.decoder_vocab_size)) if config.final_logits_bias else None
        )
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Tie of the output projection to the decoder's embedding, which `shared` holds where both sides share it."""
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        if not self.config.tie_word_embeddings:
            return {}
        source = "shared" if self.config.share_encoder_decoder_embeddings else "decoder.embed_tokens"
        return {"lm_head.weight": f"model.{source}.weight"}

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Change the size of the vocabulary that encoder, decoder and output share.

        Args:
            new_num_tokens: New number of entries; `None` keeps it.
            pad_to_multiple_of: Round the number up to a multiple of this.
            mean_resizing: Draw new rows around the mean of the old ones, as transformers does.

        Returns:
            The resized embeddings.

        Raises:
            ValueError: Encoder and decoder have vocabularies of their own.
        """
        embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        if self.final_logits_bias is not None:
            resized = self.final_logits_bias.new_zeros(1, self.config.vocab_size)
            kept = min(self.final_logits_bias.shape[1], self.config.vocab_size)
            resized[:, :kept] = self.final_logits_bias[:, :kept]
            self.final_logits_bias = nn.Buffer(resized)
        return embeddings

    def score(self, hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
        """Project the wanted positions of the decoder's hidden states [B, T, D] to logits [B, N, W]."""
        logits = self.lm_head(keep_positions(hidden_states, logits_to_keep))
        return logits if self.final_logits_bias is None else logits + self.final_logits_bias


class VanillaTransformerForConditionalGeneration(VanillaTransformerLanguageModel, GenerationMixin):
    """The translation model: encoder, decoder and the projection to the vocabulary (§3.1, §3.4)."""

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config, VanillaTransformerModel(config))

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        decoder_inputs_embeds: torch.FloatTensor | None = None,
        decoder_position_ids: torch.LongTensor | None = None,
        labels: torch.LongTensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        position_ids: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """Score every next target token, and compute the loss when `labels` are given.

        Args:
            input_ids: Source ids [B, S]; or `inputs_embeds`, or `encoder_outputs`.
            attention_mask: [B, S], 1 for source tokens and 0 for padding; also masks `encoder_outputs`.
            decoder_input_ids: Target ids [B, T], shifted right; made from `labels` when absent, and without these from
                `input_ids`.
            decoder_attention_mask: [B, past + T], 1 for target tokens and 0 for padding.
            encoder_outputs: What the encoder returned for this source.
            past_key_values: The decoder's cache.
            inputs_embeds: Scaled source embeddings [B, S, D].
            decoder_inputs_embeds: Scaled target embeddings [B, T, D].
            decoder_position_ids: Of the target [B, T]; `None` numbers the tokens of `decoder_attention_mask`, and
                counts on from the cache's length without one.
            labels: Target ids [B, T] ending with `</s>`; -100 where there is no loss.
            num_items_in_batch: Number of target tokens that divides the summed loss; `None` means this batch's.
            use_cache: Whether to return the cache; without effect when `labels` are given.
            logits_to_keep: Compute only the last so many positions' logits, or those at these indices; 0 means all.
            position_ids: Of the source [B, S]; `None` numbers the tokens of `attention_mask`, so that the side of the
                padding does not matter. Without effect when `encoder_outputs` is given.
            **kwargs: `output_attentions`, `output_hidden_states`, `return_dict` and the like.

        Returns:
            Logits [B, T, W], the loss when there are labels, the cache and what was asked for.
        """
        if labels is not None:
            use_cache = False
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = shift_tokens_right(
                    labels,
                    pad_token_id=self.config.pad_token_id,
                    decoder_start_token_id=self.config.decoder_start_token_id,
                )
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            decoder_position_ids=decoder_position_ids,
            use_cache=use_cache,
            position_ids=position_ids,
            **kwargs,
        )
        logits = self.score(outputs.last_hidden_state, logits_to_keep)
        return Seq2SeqLMOutput(
            loss=None if labels is None else token_loss(logits, labels, num_items_in_batch),
            logits=logits,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
        )

    def prepare_inputs_for_generation(self, input_ids: torch.LongTensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Inputs of the next step of `generate`."""
        if kwargs.get("decoder_position_ids") is None:
            mask = kwargs.get("decoder_attention_mask")
            if mask is not None and mask.ndim == 2:
                # With a static cache the mask arrives with four dimensions, which tell no positions.
                kwargs["decoder_position_ids"] = count_positions(mask)
            elif self.config.decoder_layers == 0:
                # A cache without layers counts no positions.
                kwargs["decoder_position_ids"] = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        return super().prepare_inputs_for_generation(input_ids, *args, **kwargs)

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Decoder inputs [B, T] for labels [B, T]; the name is the one that transformers' data collators call."""
        return shift_tokens_right(
            labels, pad_token_id=self.config.pad_token_id, decoder_start_token_id=self.config.decoder_start_token_id
        )


class VanillaTransformerForCausalLM(VanillaTransformerLanguageModel, GenerationMixin):
    """A language model: the decoder without an encoder, and the projection to the vocabulary."""

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config, VanillaTransformerDecoderModel(config))

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """Score every next token, and compute the loss when `labels` are given.

        Args:
            input_ids: Ids [B, T]; or pass `inputs_embeds`.
            attention_mask: [B, past + T], 1 for tokens and 0 for padding.
            position_ids: [B, T]; `None` numbers the tokens of `attention_mask`, so that the side of the padding does
                not matter, and counts on from the cache's length without one.
            past_key_values: The cache.
            inputs_embeds: Scaled token embeddings [B, T, D].
            labels: Ids [B, T], normally `input_ids`: position t is scored against label t + 1. -100 for no loss.
            num_items_in_batch: Number of tokens that divides the summed loss; `None` means this batch's.
            use_cache: Whether to return the cache.
            logits_to_keep: Compute only the last so many positions' logits, or those at these indices; 0 means all.
            **kwargs: `output_attentions`, `output_hidden_states` and the like; `shift_labels` are labels
                [B, T] that position t is scored against as they stand, in the place of `labels`.

        Returns:
            Logits [B, T, W], the loss when there are labels, the cache and what was asked for.
        """
        # `Trainer` takes every parameter with "label" in its name for a column that evaluation data must have.
        shift_labels = kwargs.pop("shift_labels", None)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.score(outputs.last_hidden_state, logits_to_keep)
        if shift_labels is None and labels is not None:
            shift_labels = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        return CausalLMOutputWithPast(
            loss=None if shift_labels is None else token_loss(logits, shift_labels, num_items_in_batch),
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class VanillaTransformerForMaskedLM(VanillaTransformerPreTrainedModel):
    """The encoder with a projection to its vocabulary, which tells the tokens behind `<mask>`."""

    # Not `lm_head`: that of a translation model reads the decoder's states, and may have another vocabulary.
    _tied_weights_keys = {"masked_lm_head.weight": "model.shared.weight"}  # noqa: RUF012
    _tp_plan = {"masked_lm_head": "colwise_gather_output"}  # noqa: RUF012
    _pp_plan = {"masked_lm_head": (["hidden_states"], ["logits"])}  # noqa: RUF012

    def __init__(self, config: VanillaTransformerConfig):
        model = VanillaTransformerEncoderModel(config)
        super().__init__(model.config)
        self.model = model
        self.masked_lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Tie of the output projection to the embedding."""
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        if not self.config.tie_word_embeddings:
            return {}
        source = "shared" if self.config.share_encoder_decoder_embeddings else "encoder.embed_tokens"
        return {"masked_lm_head.weight": f"model.{source}.weight"}

    def get_output_embeddings(self) -> nn.Linear:
        """The projection to the vocabulary."""
        return self.masked_lm_head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the projection to the vocabulary."""
        self.masked_lm_head = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        labels: torch.LongTensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedLMOutput:
        """Score the token of every position, and compute the loss when `labels` are given.

        Args:
            input_ids: Ids [B, S]; or pass `inputs_embeds`.
            attention_mask: [B, S], 1 for tokens and 0 for padding.
            inputs_embeds: Scaled token embeddings [B, S, D].
            position_ids: [B, S]; `None` numbers the tokens of `attention_mask`.
            labels: Ids [B, S] of the tokens that were hidden; -100 where there is no loss.
            num_items_in_batch: Number of labels that divides the summed loss; `None` means this batch's.
            **kwargs: `output_attentions`, `output_hidden_states`, `return_dict` and the like.

        Returns:
            Logits [B, S, W], the loss when there are labels, and what was asked for.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            position_ids=position_ids,
            **kwargs,
        )
        logits = self.masked_lm_head(outputs.last_hidden_state)
        return MaskedLMOutput(
            loss=None if labels is None else token_loss(logits, labels, num_items_in_batch),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class VanillaTransformerForSequenceClassification(VanillaTransformerPreTrainedModel):
    """The encoder with a linear map from the mean of its hidden states to the classes of a text, or to a number."""

    def __init__(self, config: VanillaTransformerConfig):
        model = VanillaTransformerEncoderModel(config)
        super().__init__(model.config)
        self.num_labels = config.num_labels
        self.model = model
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.d_model, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        """Classify texts, and compute the loss when `labels` are given.

        Args:
            input_ids: Ids [B, S]; or pass `inputs_embeds`.
            attention_mask: [B, S], 1 for tokens and 0 for padding, which the mean leaves out.
            inputs_embeds: Scaled token embeddings [B, S, D].
            position_ids: [B, S]; `None` numbers the tokens of `attention_mask`.
            labels: Classes [B], or what `problem_type` of the configuration asks for: numbers [B] or [B, C] for
                `regression`, zeros and ones [B, C] for `multi_label_classification`.
            num_items_in_batch: Number of texts that divides the summed loss of `single_label_classification`.
            **kwargs: `output_attentions`, `output_hidden_states`, `return_dict` and the like.

        Returns:
            Logits [B, C], the loss when there are labels, and what was asked for.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            position_ids=position_ids,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        if attention_mask is None:
            mean = hidden_states.mean(dim=1)
        else:
            weights = attention_mask.to(hidden_states.dtype).unsqueeze(-1)
            mean = (hidden_states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)
        logits = self.classifier(self.dropout(mean))
        loss = None
        if labels is not None:
            loss = self.loss_function(
                labels=labels, pooled_logits=logits, config=self.config, num_items_in_batch=num_items_in_batch
            )
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class VanillaTransformerForTokenClassification(VanillaTransformerPreTrainedModel):
    """The encoder with a linear map from each hidden state to the classes of a token."""

    def __init__(self, config: VanillaTransformerConfig):
        model = VanillaTransformerEncoderModel(config)
        super().__init__(model.config)
        self.num_labels = config.num_labels
        self.model = model
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.d_model, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        labels: torch.LongTensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TokenClassifierOutput:
        """Classify tokens, and compute the loss when `labels` are given.

        Args:
            input_ids: Ids [B, S]; or pass `inputs_embeds`.
            attention_mask: [B, S], 1 for tokens and 0 for padding.
            inputs_embeds: Scaled token embeddings [B, S, D].
            position_ids: [B, S]; `None` numbers the tokens of `attention_mask`.
            labels: Classes [B, S]; -100 where there is no loss.
            num_items_in_batch: Number of labels that divides the summed loss; `None` means this batch's.
            **kwargs: `output_attentions`, `output_hidden_states`, `return_dict` and the like.

        Returns:
            Logits [B, S, C], the loss when there are labels, and what was asked for.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            position_ids=position_ids,
            **kwargs,
        )
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        return TokenClassifierOutput(
            loss=None if labels is None else token_loss(logits, labels, num_items_in_batch),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class VanillaTransformerForQuestionAnswering(VanillaTransformerPreTrainedModel):
    """The encoder with a linear map from each hidden state to the scores that an answer starts or ends there."""

    def __init__(self, config: VanillaTransformerConfig):
        model = VanillaTransformerEncoderModel(config)
        super().__init__(model.config)
        self.model = model
        self.qa_outputs = nn.Linear(config.d_model, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> QuestionAnsweringModelOutput:
        """Score where an answer starts and ends, and compute the loss when both positions are given.

        Args:
            input_ids: Ids [B, S] of question and text; or pass `inputs_embeds`.
            attention_mask: [B, S], 1 for tokens and 0 for padding.
            inputs_embeds: Scaled token embeddings [B, S, D].
            position_ids: [B, S]; `None` numbers the tokens of `attention_mask`.
            start_positions: [B], the answer's first position; one outside the text has no loss.
            end_positions: [B], the answer's last position; one outside the text has no loss.
            num_items_in_batch: Number of texts that divides the summed loss; `None` means this batch's.
            **kwargs: `output_attentions`, `output_hidden_states`, `return_dict` and the like.

        Returns:
            Scores [B, S] of starts and of ends, the loss when there are positions, and what was asked for.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            position_ids=position_ids,
            **kwargs,
        )
        start_logits, end_logits = self.qa_outputs(outputs.last_hidden_state).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(
                start_logits, end_logits, start_positions, end_positions, num_items_in_batch=num_items_in_batch
            )
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


__all__ = [
    "VanillaTransformerEncoderModel",
    "VanillaTransformerForCausalLM",
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerForMaskedLM",
    "VanillaTransformerForQuestionAnswering",
    "VanillaTransformerForSequenceClassification",
    "VanillaTransformerForTokenClassification",
    "VanillaTransformerModel",
    "VanillaTransformerPreTrainedModel",
]
