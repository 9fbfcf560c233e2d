"""Hyper-parameters of the Transformer of Vaswani et al. (2017), "Attention Is All You Need"."""

import copy
import math
import shutil
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig


# Sizes from here on are no sizes of a tensor that a machine has.
_TOO_LARGE = 2**31
# Every class gets a name, in memory and in `config.json`.
_MOST_LABELS = 2**20


@strict
class VanillaTransformerConfig(PreTrainedConfig):
    r"""Validated hyper-parameters of a `VanillaTransformer` model.

    The defaults are the paper's base model as printed (Table 3, first row). Its text is silent about the layer
    normalisation's epsilon and the initial values, which are those of the authors' code of June 2017, and about the
    first decoder input, for which that code has a vector of zeros. Other systems' choices are options.

    Args:
        vocab_size: Number of entries of the vocabulary shared by both languages, at least 1.
        decoder_vocab_size: Number of entries of the decoder's vocabulary. `None`, and any value while
            `share_encoder_decoder_embeddings` is true, means `vocab_size`.
        d_model: Width of the residual stream, $d_{model}$ (§3.1). Even for sinusoidal positions.
        encoder_layers: Number of encoder layers, $N$ (§3.1).
        decoder_layers: Number of decoder layers, $N$ (§3.1).
        encoder_attention_heads: Number of attention heads, $h$ (§3.2.2), in the encoder.
        decoder_attention_heads: Number of attention heads, $h$, in the decoder, for self- and cross-attention.
        d_k: Width of the queries and keys of one head. `None` means `d_model / heads`.
        d_v: Width of the values of one head. `None` means `d_model / heads`.
        encoder_ffn_dim: Inner width of the encoder's feed-forward sub-layers, $d_{ff}$ (§3.3).
        decoder_ffn_dim: Inner width of the decoder's feed-forward sub-layers, $d_{ff}$.
        activation_function: Name of the feed-forward activation; the paper's Eq. 2 is `relu`.
        dropout: Dropout probability $P_{drop}$ on every sub-layer output and on the sums of embeddings and positions
            (§5.4), in [0, 1).
        attention_dropout: Dropout probability on the attention weights, in [0, 1). The paper's text has none, the
            authors' code of June 2017 has 0 in its base model, and 0.1 from October 2017 on.
        activation_dropout: Dropout probability after the feed-forward activation, in [0, 1). As above.
        classifier_dropout: Dropout probability before the linear maps that classify texts or tokens, in [0, 1).
        position_embedding_type: `sinusoidal` (§3.5), for which no length limit exists, or `learned` (Table 3, row E).
        sinusoidal_layout: `interleaved` puts sin and cos in even and odd channels, as printed; `concatenated` puts all
            sines before all cosines (tensor2tensor, fairseq, Marian).
        sinusoidal_exponent: `paper` uses the printed $10000^{2i/d_{model}}$; `tensor2tensor` uses
            $10000^{i/(d_{model}/2-1)}$, which alone reaches the wavelength $10000 \cdot 2\pi$ that the text states.
        max_position_embeddings: Number of learned positions. Sinusoidal positions ignore it.
        norm_position: `post`: LayerNorm(x + Sublayer(x)) (§3.1); `pre`: x + Sublayer(LayerNorm(x)) with one more
            normalisation after each stack (tensor2tensor since October 2017).
        layer_norm_eps: Epsilon inside the layer normalisation's square root (tensor2tensor, June 2017).
        attention_bias: Whether the attention projections have biases; the paper's formulae have none.
        final_logits_bias: Whether a constant vector, a buffer of shape [1, V], is added to the logits (Marian).
        scale_embedding: Whether embeddings are multiplied by $\sqrt{d_{model}}$ (§3.4).
        tie_word_embeddings: Whether the output projection is the decoder's embedding matrix (§3.4).
        share_encoder_decoder_embeddings: Whether both embeddings are one matrix (§3.4).
        init_std: Standard deviation of the embeddings' initial values; `None` means $d_{model}^{-0.5}$
            (tensor2tensor). Matrices are Xavier-uniform.
        use_cache: Whether decoding keeps keys and values of past positions.
        is_encoder_decoder: Whether the model has both stacks; each model class sets it.
        is_decoder: Whether the model is a decoder alone; each model class sets it.
        pad_token_id: Id of `<pad>`.
        bos_token_id: Id of `<s>`.
        eos_token_id: Id of `</s>`, which ends sources and targets, or a list of ids that end targets.
        decoder_start_token_id: Id that the decoder starts from, `<s>` by default.
        **kwargs: Options that every `PreTrainedConfig` has.

    Raises:
        StrictDataclassFieldValidationError: A value has the wrong type.
        StrictDataclassClassValidationError: Values do not fit together; its cause is a `ValueError` that names them.

    Example:
        >>> from vanilla_transformer import VanillaTransformerConfig
        >>> config = VanillaTransformerConfig(d_model=128, encoder_attention_heads=4, decoder_attention_heads=4)
        >>> config.hidden_size
        128
    """

    model_type = "vanilla_transformer"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    attribute_map = {  # noqa: RUF012
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
    }

    vocab_size: int = 37000
    decoder_vocab_size: int | None = None
    d_model: int = 512
    encoder_layers: int = 6
    decoder_layers: int = 6
    encoder_attention_heads: int = 8
    decoder_attention_heads: int = 8
    d_k: int | None = None
    d_v: int | None = None
    encoder_ffn_dim: int = 2048
    decoder_ffn_dim: int = 2048
    activation_function: str = "relu"
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    classifier_dropout: float | int = 0.0
    position_embedding_type: Literal["sinusoidal", "learned"] = "sinusoidal"
    sinusoidal_layout: Literal["interleaved", "concatenated"] = "interleaved"
    sinusoidal_exponent: Literal["paper", "tensor2tensor"] = "paper"
    max_position_embeddings: int = 1024
    norm_position: Literal["post", "pre"] = "post"
    layer_norm_eps: float = 1e-6
    attention_bias: bool = False
    final_logits_bias: bool = False
    scale_embedding: bool = True
    tie_word_embeddings: bool = True
    share_encoder_decoder_embeddings: bool = True
    init_std: float | int | None = None
    use_cache: bool = True
    is_encoder_decoder: bool = True
    is_decoder: bool = False
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = 1

    def __post_init__(self, **kwargs):
        # What every configuration of transformers has, and trusts in.
        for name, value in (("dtype", self.dtype), ("torch_dtype", kwargs.get("torch_dtype"))):
            known = isinstance(getattr(torch, value, None) if isinstance(value, str) else value, torch.dtype)
            if value is not None and not known:
                raise ValueError(f'`{name}` is {value!r}; it must be the name of a type of torch, such as "float32".')
        if self.id2label is not None and not (
            isinstance(self.id2label, dict) and all(str(key).isdecimal() for key in self.id2label)
        ):
            raise ValueError(f"`id2label` is {self.id2label!r}; it must map the numbers of classes to their names.")
        if kwargs.get("num_labels") is None:
            kwargs.pop("num_labels", None)
        elif not (_is_count(kwargs["num_labels"], at_least=1) and kwargs["num_labels"] <= _MOST_LABELS):
            raise ValueError(
                f"`num_labels` is {kwargs['num_labels']!r}; it must be a whole number, at least 1 and at most "
                f"{_MOST_LABELS}."
            )
        # `get_text_config(decoder=True)` writes this value into `vocab_size`, which cannot be None.
        if self.decoder_vocab_size is None or self.share_encoder_decoder_embeddings:
            self.decoder_vocab_size = self.vocab_size
        super().__post_init__(**kwargs)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """This configuration, or a view of one stack whose sizes then stand under the general names.

        Args:
            decoder: Whether the decoder's view is asked for.
            encoder: Whether the encoder's view is asked for.

        Returns:
            The view; `num_hidden_layers` of a decoder alone is the number of its layers, by which caches are built.
        """
        if not (decoder and not encoder and self.is_decoder):
            return super().get_text_config(decoder=decoder, encoder=encoder)
        view = copy.deepcopy(self)
        view.encoder_layers = self.decoder_layers
        view.encoder_attention_heads = self.decoder_attention_heads
        view.vocab_size = self.decoder_vocab_size
        return view

    def save_pretrained(self, save_directory: str | PathLike, **kwargs: Any) -> None:
        """Save the configuration; one of a published model with the sources that it names.

        So a model that was loaded from there, with the sources or with this package, and that is saved or pushed again
        runs where the package is not installed, too.

        Args:
            save_directory: Folder, which is made if it is not there.
            **kwargs: As for every `PreTrainedConfig`.
        """
        if getattr(self, "auto_map", None):
            sources = {path.stem: path for path in Path(__file__).parent.glob("*_vanilla_transformer.py")}

            def named_here(value: Any) -> Any:
                """Names of classes without the repository that they were loaded from."""
                if isinstance(value, dict):
                    return {key: named_here(part) for key, part in value.items()}
                local = str(value).split("--")[-1]
                return local if local.split(".")[0] in sources else value

            self.auto_map = named_here(self.auto_map)
            if getattr(self, "custom_pipelines", None):
                self.custom_pipelines = named_here(self.custom_pipelines)
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            for path in sources.values():
                shutil.copy(path, save_directory)
        super().save_pretrained(save_directory, **kwargs)

    def validate_architecture(self) -> None:
        """Check that the values fit together; called once all fields are set.

        Raises:
            ValueError: Names the field, its value, the rule and the remedy.
        """
        # Types are checked again: values under the general names, such as `num_hidden_layers`, come past the fields.
        for name, at_least, otherwise in (
            ("vocab_size", 1, ""),
            ("decoder_vocab_size", 1, ""),
            ("d_model", 1, ""),
            ("encoder_layers", 0, ""),
            ("decoder_layers", 0, ""),
            ("encoder_attention_heads", 1, ""),
            ("decoder_attention_heads", 1, ""),
            ("d_k", 1, ", or null for d_model / heads"),
            ("d_v", 1, ", or null for d_model / heads"),
            ("encoder_ffn_dim", 1, ""),
            ("decoder_ffn_dim", 1, ""),
            ("max_position_embeddings", 1, ""),
        ):
            value = getattr(self, name)
            if not (_is_count(value, at_least=at_least) or (otherwise and value is None)):
                raise ValueError(
                    f"`{name}` is {value!r}; it must be a whole number, at least {at_least} and below 2^31{otherwise}."
                )
        if self.d_k is None or self.d_v is None:
            for name in ("encoder_attention_heads", "decoder_attention_heads"):
                heads = getattr(self, name)
                if self.d_model % heads != 0:
                    below = self.d_model - self.d_model % heads
                    nearest = f"{below} or {below + heads}" if below else f"{heads}"
                    raise ValueError(
                        f"`d_model` ({self.d_model}) must be divisible by `{name}` ({heads}); use a `d_model` of "
                        f"{nearest}, or set both `d_k` and `d_v`."
                    )
        if self.position_embedding_type == "sinusoidal":
            if self.d_model % 2 != 0:
                raise ValueError(
                    f"`d_model` ({self.d_model}) must be even for sinusoidal positions, which pair a sine with a "
                    f'cosine; use {self.d_model + 1}, or `position_embedding_type` "learned".'
                )
            if self.sinusoidal_exponent == "tensor2tensor" and self.d_model < 4:
                raise ValueError(
                    f"`d_model` ({self.d_model}) must be at least 4 for the tensor2tensor exponent, which divides by "
                    "d_model / 2 - 1; use 4 or more."
                )
        for name in ("dropout", "attention_dropout", "activation_dropout", "classifier_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must be at least 0 and below 1.")
        if not 0.0 < self.layer_norm_eps < math.inf:
            raise ValueError(f"`layer_norm_eps` is {self.layer_norm_eps}; it must be above 0 and finite.")
        if self.init_std is not None and not 0.0 <= self.init_std < math.inf:
            raise ValueError(
                f"`init_std` is {self.init_std}; it must be at least 0 and finite, or null for d_model ** -0.5."
            )
        if self.activation_function not in ACT2FN:
            raise ValueError(
                f"`activation_function` is {self.activation_function!r}; it must be one that transformers knows, "
                'such as "relu" (the paper\'s), "gelu" or "silu".'
            )
        for name, size in (
            ("pad_token_id", min(self.vocab_size, self.decoder_vocab_size)),
            ("bos_token_id", max(self.vocab_size, self.decoder_vocab_size)),
            ("eos_token_id", self.decoder_vocab_size),
            ("decoder_start_token_id", self.decoder_vocab_size),
        ):
            value = getattr(self, name)
            if value == []:
                raise ValueError(f"`{name}` is []; it must hold an id, or be null if no token ends a target.")
            for token_id in value if isinstance(value, list) else [value]:
                if token_id is not None and not 0 <= token_id < size:
                    raise ValueError(f"`{name}` is {value}; it must lie in the vocabulary, 0 to {size - 1}.")


def _is_count(value: object, *, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and at_least <= value < _TOO_LARGE


__all__ = ["VanillaTransformerConfig"]
