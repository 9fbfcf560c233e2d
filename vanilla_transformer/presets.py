"""Named hyper-parameters: the rows of the paper's Table 3, and what other systems chose, as data."""

from typing import Any


# Differences from the base model, which the configuration's defaults are. Table 3 of Vaswani et al. (2017).
PAPER: dict[str, dict[str, Any]] = {
    "base": {},
    "big": {
        "d_model": 1024,
        "encoder_ffn_dim": 4096,
        "decoder_ffn_dim": 4096,
        "encoder_attention_heads": 16,
        "decoder_attention_heads": 16,
        "dropout": 0.3,
    },
    "a-1-head": {"encoder_attention_heads": 1, "decoder_attention_heads": 1},
    "a-4-heads": {"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    "a-16-heads": {"encoder_attention_heads": 16, "decoder_attention_heads": 16},
    "a-32-heads": {"encoder_attention_heads": 32, "decoder_attention_heads": 32},
    "b-dk-16": {"d_k": 16},
    "b-dk-32": {"d_k": 32},
    "c-2-layers": {"encoder_layers": 2, "decoder_layers": 2},
    "c-4-layers": {"encoder_layers": 4, "decoder_layers": 4},
    "c-8-layers": {"encoder_layers": 8, "decoder_layers": 8},
    "c-d-256": {"d_model": 256, "d_k": 32, "d_v": 32},
    "c-d-1024": {"d_model": 1024, "d_k": 128, "d_v": 128},
    "c-dff-1024": {"encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024},
    "c-dff-4096": {"encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096},
    "d-dropout-0": {"dropout": 0.0},
    "d-dropout-0.2": {"dropout": 0.2},
    "d-label-smoothing-0": {},
    "d-label-smoothing-0.2": {},
    "e-learned-positions": {"position_embedding_type": "learned"},
}

# The training options among those differences.
TRAINING_PAPER: dict[str, dict[str, Any]] = {
    "d-label-smoothing-0": {"label_smoothing": 0.0},
    "d-label-smoothing-0.2": {"label_smoothing": 0.2},
}

# What other systems chose where the paper is silent or where they left it; applied on top of a size.
PROVENANCE: dict[str, dict[str, Any]] = {
    # tensor2tensor at commit 3d9c62f2 (15 June 2017), the paper's code. It starts decoding from a zero vector, which
    # no token id can express, and adds a learned vector for the target language to the source's embeddings.
    "tensor2tensor-2017": {
        "sinusoidal_layout": "concatenated",
        "sinusoidal_exponent": "tensor2tensor",
        "attention_bias": True,
    },
    "fairseq": {
        "sinusoidal_layout": "concatenated",
        "sinusoidal_exponent": "tensor2tensor",
        "attention_bias": True,
        "layer_norm_eps": 1e-5,
        "decoder_start_token_id": 2,
    },
    # `MarianMTModel` of transformers.
    "marian": {
        "sinusoidal_layout": "concatenated",
        "attention_bias": True,
        "final_logits_bias": True,
        "layer_norm_eps": 1e-5,
        "decoder_start_token_id": 0,
    },
}

# The training options among those choices. tensor2tensor and fairseq leave the label out of the smoothing, Marian and
# the Trainer of transformers do not; for all of them padding's entry of the vocabulary is one like any other.
TRAINING_PROVENANCE: dict[str, dict[str, Any]] = {
    "tensor2tensor-2017": {"label_smoothing_over": "others"},
    "fairseq": {"label_smoothing_over": "others"},
    "marian": {"label_smoothing_over": "vocabulary"},
}

# Small models for small corpora: the dimensions of "Transformer-Tiny" (Wu et al., 2021, arXiv 2105.14462).
SMALL: dict[str, dict[str, Any]] = {
    "tiny": {
        "d_model": 128,
        "encoder_layers": 4,
        "decoder_layers": 4,
        "encoder_ffn_dim": 256,
        "decoder_ffn_dim": 256,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "dropout": 0.3,
    },
}

SIZES: dict[str, dict[str, Any]] = {**PAPER, **SMALL}
