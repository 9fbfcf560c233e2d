"""Step-by-step decoding by calls of the model itself, on any device and in any dtype.

Hooks, adapters, quantised or replaced layers, offloaded weights and compiled modules therefore act as in any call.

Shapes: S sentences, T source positions, R rows (hypotheses), D d_model, W vocabulary entries.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from vanilla_transformer.errors import UserError
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration


@dataclass(slots=True)
class PlainState:
    """The state of a search on a `PlainDecoder`.

    Args:
        encoded: The encoder's output for each row [R, T, D].
        source_mask: [R, T], 1 for tokens and 0 for padding; `None` without padding.
        cache: Keys and values of the tokens so far and of the source; `None` before the first token.
        num_past: Number of tokens so far.
    """

    encoded: torch.Tensor
    source_mask: torch.Tensor | None
    cache: EncoderDecoderCache | None
    num_past: int


class PlainDecoder:
    """An `IncrementalDecoder` that calls a model and does not change it.

    The model computes as in `generate`: dropout acts in training mode.

    Args:
        model: The model.
    """

    def __init__(self, model: VanillaTransformerForConditionalGeneration):
        self.vocab_size = model.config.decoder_vocab_size
        self.device = execution_device(model)
        self._model = model

    def start(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> PlainState:
        """As `IncrementalDecoder.start`.

        Raises:
            UserError: The model is in training mode with gradient checkpointing.
        """
        with _ordinary_tensors():
            # A copy of an inference tensor made outside inference mode is an ordinary tensor.
            input_ids, attention_mask = input_ids.clone(), attention_mask.clone()
            encoded = self._model.get_encoder()(
                input_ids=input_ids, attention_mask=attention_mask, return_dict=True
            ).last_hidden_state
            return self.start_encoded(encoded, attention_mask)

    def start_encoded(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> PlainState:
        """Start from sources that are already encoded.

        Args:
            hidden_states: The encoder's output [S, T, D].
            attention_mask: [S, T], 1 for tokens and 0 for padding; `None` means no padding.

        Returns:
            As `IncrementalDecoder.start`.

        Raises:
            UserError: As `start`.
        """
        if any(
            module.training and getattr(module, "gradient_checkpointing", False) for module in self._model.modules()
        ):
            raise UserError(
                "The model is in training mode with gradient checkpointing, which keeps no cache to decode with; call "
                "`model.eval()` before translating."
            )
        if attention_mask is not None and attention_mask.all():
            attention_mask = None
        return PlainState(hidden_states, attention_mask, cache=None, num_past=0)

    def step(self, state: PlainState, tokens: torch.Tensor) -> torch.Tensor:
        """As `IncrementalDecoder.step`."""
        with _ordinary_tensors():
            output = self._model(
                encoder_outputs=BaseModelOutput(last_hidden_state=state.encoded),
                attention_mask=state.source_mask,
                decoder_input_ids=tokens[:, None].clone(),
                # The cache of a model without layers does not know its length.
                decoder_position_ids=torch.full_like(tokens[:, None], state.num_past),
                past_key_values=state.cache,
                use_cache=True,
                return_dict=True,
            )
            state.cache = output.past_key_values
            state.num_past += 1
            return output.logits[:, -1].to(self.device)  # [R, W]

    def select(self, state: PlainState, sentences: torch.Tensor | None, rows: torch.Tensor) -> None:
        """As `IncrementalDecoder.select`."""
        with _ordinary_tensors():
            rows = rows.to(state.encoded.device).clone()
            state.cache.self_attention_cache.reorder_cache(rows)
            # All rows of a sentence have the same source.
            if sentences is None and len(rows) == len(state.encoded):
                return
            state.cache.cross_attention_cache.reorder_cache(rows)
            state.encoded = state.encoded.index_select(0, rows)
            if state.source_mask is not None:
                state.source_mask = state.source_mask.index_select(0, rows)


def execution_device(model: nn.Module) -> torch.device:
    """The device where a model takes ids: its own, or the one where Accelerate's hooks compute its first layer.

    Args:
        model: A model.
    """
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for part in (hook, *getattr(hook, "hooks", ())):
            if (device := getattr(part, "execution_device", None)) is not None:
                return torch.device(device)
    return model.device


@contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """Neither gradients nor inference mode: weights that a hook loads or a layer rounds must stay ordinary tensors."""
    with torch.inference_mode(False), torch.no_grad():
        yield
