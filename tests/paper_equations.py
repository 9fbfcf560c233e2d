"""The equations of Vaswani et al. (2017) in NumPy and float64, one sentence at a time.

Written from the paper, as the oracle that the model is compared with. There is no batch and therefore no padding: what
a padded batch must not do shows as a difference. Matrices come in the [out, in] orientation of saved models; names are
those of the saved tensors.
"""

import numpy as np


Arrays = dict[str, np.ndarray]


def softmax(scores: np.ndarray) -> np.ndarray:
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def scaled_dot_product_attention(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, allowed: np.ndarray | None = None
) -> np.ndarray:
    """Eq. 1; illegal connections are set to minus infinity before the softmax (3.2.3)."""
    d_k = queries.shape[-1]
    scores = queries @ keys.T / np.sqrt(d_k)
    if allowed is not None:
        scores = np.where(allowed, scores, -np.inf)
    return softmax(scores) @ values


def affine(x: np.ndarray, weights: Arrays, name: str) -> np.ndarray:
    product = x @ weights[f"{name}.weight"].T
    return product + weights[f"{name}.bias"] if f"{name}.bias" in weights else product


def multi_head_attention(
    x: np.ndarray, memory: np.ndarray, weights: Arrays, name: str, *, heads: int, causal: bool = False
) -> np.ndarray:
    """Concat(head_1, ..., head_h) W^O with head_i = Attention(x W_i^Q, memory W_i^K, memory W_i^V) (3.2.2)."""
    queries = np.split(affine(x, weights, f"{name}.q_proj"), heads, axis=-1)
    keys = np.split(affine(memory, weights, f"{name}.k_proj"), heads, axis=-1)
    values = np.split(affine(memory, weights, f"{name}.v_proj"), heads, axis=-1)
    allowed = np.tril(np.ones((len(x), len(memory)), dtype=bool)) if causal else None
    attended = [scaled_dot_product_attention(q, k, v, allowed) for q, k, v in zip(queries, keys, values, strict=True)]
    return affine(np.concatenate(attended, axis=-1), weights, f"{name}.out_proj")


def feed_forward(x: np.ndarray, weights: Arrays, name: str) -> np.ndarray:
    """Eq. 2."""
    return affine(np.maximum(0.0, affine(x, weights, f"{name}.fc1")), weights, f"{name}.fc2")


def layer_norm(x: np.ndarray, gain: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
    """Ba et al. (2016), with the biased variance and epsilon inside the root."""
    mean = x.mean(axis=-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    return gain * (x - mean) / np.sqrt(variance + eps) + bias


def sinusoidal_positions(
    length: int, d_model: int, *, layout: str = "interleaved", exponent: str = "paper"
) -> np.ndarray:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d_model)), PE(pos, 2i+1) = cos(the same) (3.5), and two known variants."""
    table = np.empty((length, d_model))
    for pos in range(length):
        for i in range(d_model // 2):
            power = 2 * i / d_model if exponent == "paper" else i / (d_model / 2 - 1)
            angle = pos / 10000.0**power
            sine, cosine = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, d_model // 2 + i)
            table[pos, sine], table[pos, cosine] = np.sin(angle), np.cos(angle)
    return table


def cross_entropy(logits: np.ndarray, labels: np.ndarray, smoothing: float = 0.0) -> float:
    """Sum over the target tokens of H(q', p), where q' = (1 - eps) delta + eps / V (5.4; Szegedy et al., 2015)."""
    probabilities = softmax(logits)
    vocabulary = logits.shape[-1]
    wanted = (1.0 - smoothing) * np.eye(vocabulary)[labels] + smoothing / vocabulary
    return float(-(wanted * np.log(probabilities)).sum())


class PaperTransformer:
    """Encoder, decoder and output projection (3.1, Figure 1)."""

    def __init__(
        self,
        weights: Arrays,
        *,
        d_model: int,
        encoder_layers: int,
        decoder_layers: int,
        encoder_heads: int,
        decoder_heads: int,
        eps: float,
        pre_norm: bool = False,
        layout: str = "interleaved",
        exponent: str = "paper",
        learned_positions: bool = False,
        scaled_embeddings: bool = True,
    ):
        self.weights = weights
        self.d_model = d_model
        self.layers = {"encoder": encoder_layers, "decoder": decoder_layers}
        self.heads = {"encoder": encoder_heads, "decoder": decoder_heads}
        self.eps = eps
        self.pre_norm = pre_norm
        self.layout = layout
        self.exponent = exponent
        self.learned_positions = learned_positions
        self.scaled_embeddings = scaled_embeddings

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return layer_norm(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], self.eps)

    def residual(self, x: np.ndarray, name: str, sublayer) -> np.ndarray:
        """LayerNorm(x + Sublayer(x)) (3.1), or x + Sublayer(LayerNorm(x))."""
        if self.pre_norm:
            return x + sublayer(self.norm(x, name))
        return self.norm(x + sublayer(x), name)

    def embed(self, tokens: list[int], side: str) -> np.ndarray:
        """Embeddings times sqrt(d_model) (3.4), plus positions (3.5)."""
        vectors = self.weights[f"model.{side}.embed_tokens.weight"][tokens]
        if self.scaled_embeddings:
            vectors = vectors * np.sqrt(self.d_model)
        if self.learned_positions:
            return vectors + self.weights[f"model.{side}.embed_positions.weight"][: len(tokens)]
        return vectors + sinusoidal_positions(len(tokens), self.d_model, layout=self.layout, exponent=self.exponent)

    def encode(self, source: list[int]) -> np.ndarray:
        x = self.embed(source, "encoder")
        heads = self.heads["encoder"]
        for n in range(self.layers["encoder"]):
            layer = f"model.encoder.layers.{n}"
            x = self.residual(
                x,
                f"{layer}.self_attn_layer_norm",
                lambda y, layer=layer: multi_head_attention(y, y, self.weights, f"{layer}.self_attn", heads=heads),
            )
            x = self.residual(
                x, f"{layer}.final_layer_norm", lambda y, layer=layer: feed_forward(y, self.weights, layer)
            )
        return self.norm(x, "model.encoder.layer_norm") if self.pre_norm else x

    def decode(self, memory: np.ndarray, target: list[int]) -> np.ndarray:
        x = self.embed(target, "decoder")
        heads = self.heads["decoder"]
        for n in range(self.layers["decoder"]):
            layer = f"model.decoder.layers.{n}"
            x = self.residual(
                x,
                f"{layer}.self_attn_layer_norm",
                lambda y, layer=layer: multi_head_attention(
                    y, y, self.weights, f"{layer}.self_attn", heads=heads, causal=True
                ),
            )
            x = self.residual(
                x,
                f"{layer}.encoder_attn_layer_norm",
                lambda y, layer=layer: multi_head_attention(
                    y, memory, self.weights, f"{layer}.encoder_attn", heads=heads
                ),
            )
            x = self.residual(
                x, f"{layer}.final_layer_norm", lambda y, layer=layer: feed_forward(y, self.weights, layer)
            )
        return self.norm(x, "model.decoder.layer_norm") if self.pre_norm else x

    def project(self, decoded: np.ndarray) -> np.ndarray:
        logits = decoded @ self.weights["lm_head.weight"].T
        if "final_logits_bias" in self.weights:
            logits = logits + self.weights["final_logits_bias"]
        return logits
