"""How much of what a device can do goes into the model: model FLOPs utilisation, against a measured rate.

Chowdhery et al. (2022, PaLM, appendix B) divide the floating-point operations that the model needs, not those that
were done, by what the hardware can do in the same time. A matrix of n weights takes 2 n operations a token forwards
and 4 n backwards; attention adds 2 (d_k + d_v) a head, a layer and a pair of positions forwards and twice as many
backwards. Embedding look-ups, normalisation, softmax and recomputation do not count, nor does padding. Their
denominator is the data sheet's; this one is the rate of a large matrix product on the device, in the type that the run
computes in.
"""

import time
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from transformers import PreTrainedModel

from vanilla_transformer.data.encoding import EncodedCorpus


_MEASURED_SECONDS = 0.2


class ModelFlops:
    """Counts the floating-point operations of training on batches.

    Args:
        model: The model.
    """

    def __init__(self, model: PreTrainedModel):
        config = model.config
        matrices = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.ndim == 2}
        layers = {name: size for name, size in matrices.items() if ".layers." in name}
        # The decoder's second attention projects its keys and values from the encoder's output.
        of_source = [
            name
            for name in layers
            if ".encoder.layers." in name or ".encoder_attn.k_proj." in name or ".encoder_attn.v_proj." in name
        ]
        self.source_weights = sum(layers[name] for name in of_source)
        self.target_weights = sum(layers.values()) - self.source_weights + model.lm_head.weight.numel()
        # Without widths of their own, the heads share d_model.
        self.encoder_attention, self.decoder_attention = (
            num_layers * sum(heads * width if width else config.d_model for width in (config.d_k, config.d_v))
            for num_layers, heads in (
                (config.encoder_layers, config.encoder_attention_heads),
                (config.decoder_layers, config.decoder_attention_heads),
            )
        )

    def of(self, batches: Sequence[np.ndarray], corpus: EncodedCorpus) -> float:
        """Operations of one forward and backward pass over each batch, padding left out.

        Args:
            batches: Pair numbers of each batch.
            corpus: Corpus of the pairs.
        """
        pairs = np.concatenate(batches)
        source, target = (
            lengths[pairs].astype(np.float64) for lengths in (corpus.source_lengths, corpus.target_lengths)
        )
        products = self.source_weights * source.sum() + self.target_weights * target.sum()
        attention = self.encoder_attention * (source**2).sum()
        attention += self.decoder_attention * (target**2 + source * target).sum()
        return 3.0 * 2.0 * float(products + attention)


@cache
def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure how fast the device multiplies large matrices.

    Args:
        device: The device.
        dtype: Type of the matrices.

    Returns:
        Floating-point operations a second, the fastest of the products within a fifth of a second.
    """
    size = 1024 if device.type == "cpu" else 8192
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))
    synchronize = torch.accelerator.synchronize if device.type != "cpu" else lambda: None
    left @ right
    synchronize()
    seconds, end = [], time.perf_counter() + _MEASURED_SECONDS
    while not seconds or time.perf_counter() < end:
        started = time.perf_counter()
        left @ right
        synchronize()
        seconds.append(time.perf_counter() - started)
    return 2.0 * size**3 / min(seconds)
