"""The systems that the translation benchmark compares: the same weights, from token ids to token ids."""

import copy
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import MarianMTModel, PreTrainedTokenizerBase
from variants import marian

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.data.collation import pad
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.translation.decoders.choice import make_decoder
from vanilla_transformer.translation.decoders.torch_packed import PackedDecoder
from vanilla_transformer.translation.options import SearchOptions
from vanilla_transformer.translation.search.search import SpecialTokens, search


# Target tokens beyond the source's length (§6.1).
EXTRA_LENGTH = 50

# A batch of source ids and a beam size in, target ids without special tokens out.
Translate = Callable[[Sequence[np.ndarray], int], list[list[int]]]


class Ours:
    """This package's search over one of its decoders.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        workers: Number of batches that are translated at once.
        decoder: Makes the decoder.
        rules: As in `SearchOptions`: the paper's penalty and stop rule, or those of transformers.
    """

    def __init__(
        self,
        model: VanillaTransformerForConditionalGeneration,
        tokenizer: PreTrainedTokenizerBase,
        workers: int,
        *,
        decoder: Callable,
        rules: str,
    ):
        self.config = model.config
        self.decoder = decoder(model)
        self.rules = rules

    def __call__(self, sources: Sequence[np.ndarray], beams: int) -> list[list[int]]:
        config = self.config
        options = SearchOptions(num_beams=beams, rules=self.rules, length_penalty=0.6, extra_length=EXTRA_LENGTH)
        tokens = SpecialTokens(config.decoder_start_token_id, (config.eos_token_id,))
        ids, mask = pad(sources, config.pad_token_id)
        found = search(self.decoder, ids, mask, tokens, options, with_scores=beams > 1)
        return [without(best[0].tokens, config) for best in found]


class Generate:
    """`MarianMTModel.generate`.

    Args:
        model: The model whose weights it gets.
        tokenizer: Its tokenizer.
        workers: Number of batches that are translated at once.
        dtype: Floating-point type.
    """

    def __init__(
        self,
        model: VanillaTransformerForConditionalGeneration,
        tokenizer: PreTrainedTokenizerBase,
        workers: int,
        *,
        dtype: torch.dtype,
    ):
        self.config = model.config
        self.model = to_marian(model).to(dtype).to(model.device)

    def __call__(self, sources: Sequence[np.ndarray], beams: int) -> list[list[int]]:
        ids, mask = pad(sources, self.config.pad_token_id)
        device = self.model.device
        options = {"length_penalty": 0.6, "early_stopping": False} if beams > 1 else {}
        with torch.inference_mode():
            found = self.model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                num_beams=beams,
                do_sample=False,
                max_new_tokens=ids.shape[1] + EXTRA_LENGTH,
                max_length=None,
                **options,
            )
        return [without(row, self.config) for row in found.tolist()]


class CTranslate2:
    """CTranslate2, each of whose workers has one thread.

    Args:
        model: The model whose weights it gets.
        tokenizer: Its tokenizer.
        workers: Number of batches that are translated at once.
        compute_type: Type of its matrix products.
    """

    def __init__(
        self,
        model: VanillaTransformerForConditionalGeneration,
        tokenizer: PreTrainedTokenizerBase,
        workers: int,
        *,
        compute_type: str,
    ):
        import ctranslate2

        self.config = model.config
        known = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        self.names = [*known, *(f"<unused {number}>" for number in range(len(known), model.config.vocab_size))]
        self.numbers = {name: number for number, name in enumerate(self.names)}
        with tempfile.TemporaryDirectory() as folder:
            to_ctranslate2(model, self.names, Path(folder))
            self.translator = ctranslate2.Translator(
                folder, device=model.device.type, compute_type=compute_type, inter_threads=workers, intra_threads=1
            )

    def __call__(self, sources: Sequence[np.ndarray], beams: int) -> list[list[int]]:
        found = self.translator.translate_batch(
            [[self.names[token] for token in source] for source in sources],
            beam_size=beams,
            length_penalty=0.6,
            max_decoding_length=max(map(len, sources)) + EXTRA_LENGTH,
            max_input_length=0,
        )
        return [[self.numbers[name] for name in result.hypotheses[0]] for result in found]


def without(tokens: Sequence[int], config: VanillaTransformerConfig) -> list[int]:
    """Ids without padding, start and end."""
    special = (config.pad_token_id, config.decoder_start_token_id, config.eos_token_id)
    return [token for token in tokens if token not in special]


def to_marian(model: VanillaTransformerForConditionalGeneration) -> MarianMTModel:
    """A `MarianMTModel` with the same weights and positions; its additional biases are 0."""
    theirs = marian(model.config).eval()
    weights = model.state_dict()
    extra = {name for name in theirs.state_dict() if name not in weights}
    theirs.load_state_dict(weights, strict=False)
    with torch.no_grad():
        for name, parameter in theirs.state_dict().items():
            if name in extra and name.endswith("bias"):
                parameter.zero_()
        for mine, stack in ((model.model.encoder, theirs.model.encoder), (model.model.decoder, theirs.model.decoder)):
            stack.embed_positions.weight.copy_(positions(mine, len(stack.embed_positions.weight)))
    for module in theirs.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = model.config.layer_norm_eps
    theirs.generation_config.update(bad_words_ids=None, forced_eos_token_id=None, max_length=None)
    return theirs


def to_ctranslate2(model: VanillaTransformerForConditionalGeneration, names: Sequence[str], folder: Path) -> None:
    """Write a model of CTranslate2 with the same weights."""
    from ctranslate2.converters.transformers import BartLoader
    from ctranslate2.specs import TransformerSpec

    class Loader(BartLoader):
        def set_common_layers(self, spec, stack):
            spec.scale_embeddings = stack.embed_tokens.embed_scale
            spec.position_encodings.encodings = positions(stack, model.config.max_position_embeddings).numpy()
            embeddings = spec.embeddings[0] if isinstance(spec.embeddings, list) else spec.embeddings
            self.set_embeddings(embeddings, stack.embed_tokens)
            if stack.layer_norm is not None:
                self.set_layer_norm(spec.layer_norm, stack.layer_norm)

    config = model.config
    spec = TransformerSpec.from_config(
        (config.encoder_layers, config.decoder_layers),
        config.encoder_attention_heads,
        pre_norm=config.norm_position == "pre",
    )
    loader = Loader()
    loader.set_encoder(spec.encoder, model.model.encoder)
    loader.set_decoder(spec.decoder, model.model.decoder)
    loader.set_linear(spec.decoder.projection, model.lm_head)
    if model.final_logits_bias is not None:
        spec.decoder.projection.bias = model.final_logits_bias[0].numpy()
    spec.register_source_vocabulary(list(names))
    spec.register_target_vocabulary(list(names))
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = (
        names[1],
        names[config.eos_token_id],
        names[3],
    )
    spec.config.decoder_start_token = names[config.decoder_start_token_id]
    # The ids hold what the model expects.
    spec.config.add_source_bos = spec.config.add_source_eos = False
    spec.config.layer_norm_epsilon = config.layer_norm_eps
    spec.validate()
    spec.save(str(folder))


def positions(stack: torch.nn.Module, count: int) -> torch.Tensor:
    """The vectors that a stack adds to the first embeddings."""
    with torch.no_grad():
        return stack.embed_positions(torch.arange(count), torch.float32)


def enlarge(model: VanillaTransformerForConditionalGeneration, size: int) -> None:
    """Give a model a larger vocabulary, whose further entries are copies of one that no text contains.

    What it translates to stays what it was, but for the share of probability that the copies take.
    """
    unused = 4  # <mask>
    rows = model.get_input_embeddings().weight.detach()
    copies = rows[unused].expand(size - len(rows), -1)
    model.resize_token_embeddings(size, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[-len(copies) :] = copies


def _ours(model: VanillaTransformerForConditionalGeneration, dtype: torch.dtype, quantization: str | None = None):
    return make_decoder(copy.deepcopy(model).to(dtype), quantization=quantization)


# Makers of systems, from a model, its tokenizer and the number of batches that are translated at once.
SYSTEMS: dict[str, Callable[..., Translate]] = {
    **{
        f"ours-{name}{suffix}": partial(Ours, decoder=decoder, rules=rules)
        for name, decoder in (
            ("fp32", partial(_ours, dtype=torch.float32)),
            ("bf16", partial(_ours, dtype=torch.bfloat16)),
            ("int8", partial(_ours, dtype=torch.float32, quantization="int8")),
            ("fp32-torch", partial(PackedDecoder, dtype=torch.float32)),
            ("bf16-torch", partial(PackedDecoder, dtype=torch.bfloat16)),
            ("int8-torch", partial(PackedDecoder, dtype=torch.float32, packing="int8")),
        )
        for suffix, rules in (("", "paper"), ("-hf", "transformers"))
    },
    "marian-fp32": partial(Generate, dtype=torch.float32),
    "marian-bf16": partial(Generate, dtype=torch.bfloat16),
    "ct2-fp32": partial(CTranslate2, compute_type="float32"),
    "ct2-int8": partial(CTranslate2, compute_type="int8"),
}
