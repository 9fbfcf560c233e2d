import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from paper_equations import PaperTransformer
from torch import nn

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration


PAD, BOS, EOS = 0, 1, 2
# `generate` of transformers 5.17 divides the decoder's scores by the size of the encoder's vocabulary.
BEAMS_OVER_TWO_VOCABULARIES = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"), reason="beam search over two vocabularies came with 5.18"
)
SOURCES = [[7, 12, 9, 25, 6, 2], [11, 5, 2], [29, 8, 14, 2]]
TARGETS = [[9, 7, 2], [22, 6, 13, 10, 2], [17, 2]]
# Terms of all sums on the longest way through the deepest of these models: 6 matrix products in each of 4 encoder
# layers, 10 in each of 4 decoder layers, and the projection to the vocabulary, of at most 40 terms each.
_TERMS = (4 * 6 + 4 * 10 + 1) * 40


def tiny_config(**changes) -> VanillaTransformerConfig:
    values = {
        "vocab_size": 30,
        "d_model": 24,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 3,
        "decoder_attention_heads": 3,
        "encoder_ffn_dim": 40,
        "decoder_ffn_dim": 40,
        "max_position_embeddings": 16,
        "dropout": 0.0,
    }
    return VanillaTransformerConfig(**{**values, **changes})


def build(*, seed: int = 0, **changes) -> VanillaTransformerForConditionalGeneration:
    """A float64 model in evaluation mode, without ones and zeros behind which a fault could hide."""
    torch.manual_seed(seed)
    model = VanillaTransformerForConditionalGeneration(tiny_config(**changes)).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm.weight" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(".bias"):
                parameter.normal_(std=0.3)
        # A pad row that is not zero, so that masks and not zeros keep padding out.
        model.get_input_embeddings().weight[PAD].normal_()
        model.model.decoder.embed_tokens.weight[PAD].normal_()
        if model.final_logits_bias is not None:
            model.final_logits_bias.normal_()
    return model


def padded(sequences: list[list[int]], value: int = PAD) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence([torch.tensor(s) for s in sequences], batch_first=True, padding_value=value)


def batch_of(sources: list[list[int]], targets: list[list[int]]) -> dict[str, torch.Tensor]:
    source = padded(sources)
    decoder_input = padded([[BOS, *target[:-1]] for target in targets])
    return {
        "input_ids": source,
        "attention_mask": padded([[1] * len(s) for s in sources], 0),
        "decoder_input_ids": decoder_input,
        "decoder_attention_mask": padded([[1] * len(t) for t in targets], 0),
    }


def batch_with_labels() -> dict[str, torch.Tensor]:
    batch = batch_of(SOURCES, TARGETS)
    return {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "labels": padded(TARGETS, -100),
    }


def oracle_of(model: VanillaTransformerForConditionalGeneration) -> PaperTransformer:
    config = model.config
    return PaperTransformer(
        {name: tensor.numpy() for name, tensor in model.state_dict().items()},
        d_model=config.d_model,
        encoder_layers=config.encoder_layers,
        decoder_layers=config.decoder_layers,
        encoder_heads=config.encoder_attention_heads,
        decoder_heads=config.decoder_attention_heads,
        eps=config.layer_norm_eps,
        pre_norm=config.norm_position == "pre",
        layout=config.sinusoidal_layout,
        exponent=config.sinusoidal_exponent,
        learned_positions=config.position_embedding_type == "learned",
        scaled_embeddings=config.scale_embedding,
    )


def assert_same_numbers(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that two results of the same weights and inputs differ by rounding alone.

    Equal bits are not promised: how a matrix product rounds depends on how its operands are aligned, and weights that
    were loaded from a file are aligned otherwise than new ones. A sum in another order differs by at most eps for each
    of its terms, relative to numbers that layer normalisation keeps near 1.
    """
    tolerance = _TERMS * torch.finfo(expected.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def largest_difference(actual: torch.Tensor, expected: np.ndarray) -> float:
    return float(np.abs(actual.detach().numpy() - expected).max())


ARCHITECTURES = {
    "default": {},
    "free_widths": {"d_k": 5, "d_v": 7},
    "one_head_of_narrow_values": {"encoder_attention_heads": 1, "decoder_attention_heads": 1, "d_v": 3},
    "pre_norm": {"norm_position": "pre"},
    "attention_bias": {"attention_bias": True},
    "final_logits_bias": {"final_logits_bias": True},
    "tensor2tensor_positions": {"sinusoidal_layout": "concatenated", "sinusoidal_exponent": "tensor2tensor"},
    "concatenated_layout": {"sinusoidal_layout": "concatenated"},
    "learned_positions": {"position_embedding_type": "learned"},
    "two_vocabularies": {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 33},
    "two_vocabularies_untied": {
        "share_encoder_decoder_embeddings": False,
        "decoder_vocab_size": 33,
        "tie_word_embeddings": False,
    },
    "untied": {"tie_word_embeddings": False},
    "unequal_stacks": {
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 6,
        "encoder_layers": 1,
        "decoder_layers": 3,
        "encoder_ffn_dim": 17,
    },
    "unscaled_embeddings_and_large_epsilon": {"scale_embedding": False, "layer_norm_eps": 0.1},
    "everything": {
        "d_k": 4,
        "d_v": 6,
        "norm_position": "pre",
        "attention_bias": True,
        "final_logits_bias": True,
        "share_encoder_decoder_embeddings": False,
        "decoder_vocab_size": 33,
        "tie_word_embeddings": False,
        "encoder_attention_heads": 2,
        "position_embedding_type": "learned",
    },
}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.requires_grad}
