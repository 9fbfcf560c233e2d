"""Model FLOPs utilisation (MFU): the share of a device's measured matrix rate that goes into the model.

The journal and `scripts/benchmarks/training.py` both count as Chowdhery et al. (2022, PaLM, appendix B): the
floating-point operations of the matrix products that one forward and one backward pass over the real tokens need,
divided by those that the device could do in the same time. It counts

- 2 operations for each entry of a matrix and each token that it multiplies, and 4 backwards; the output projection is
  such a matrix, a look-up of embeddings is not;
- 2 (d_k + d_v) for each head, layer and pair of a query and a key, and twice as many backwards. Pairs that the
  decoder's causal mask discards count too, as in PaLM.

Padding, recomputation, normalisation, softmax, dropout, the loss and the optimiser do not count. Where PaLM divides by
the rate on the data sheet, this divides by a measured one: that of large matrix products in the type that the run
computes in (`measure_matrix_rate`).
"""

import time
from collections.abc import Callable
from functools import cache

import numpy as np
import torch

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig


_MEASURED_SECONDS = 0.2


class ModelFlops:
    """Counts the floating-point operations of training on pairs of sentences.

    Args:
        config: Dimensions of the model.
    """

    def __init__(self, config: VanillaTransformerConfig):
        width = config.d_model
        # Without d_k and d_v, the heads divide d_model among them.
        encoder_channels, decoder_channels = (
            sum(heads * own if own else width for own in (config.d_k, config.d_v))
            for heads in (config.encoder_attention_heads, config.decoder_attention_heads)
        )
        encoder_layer = width * (2 * encoder_channels + 2 * config.encoder_ffn_dim)
        # Two attentions, the second of which projects its keys and values from the encoder's output.
        decoder_layer = width * (3 * decoder_channels + 2 * config.decoder_ffn_dim)
        self.source_weights = config.encoder_layers * encoder_layer + config.decoder_layers * width * decoder_channels
        self.target_weights = config.decoder_layers * decoder_layer + width * config.decoder_vocab_size
        self.encoder_attention = config.encoder_layers * encoder_channels
        self.decoder_attention = config.decoder_layers * decoder_channels

    def of(self, source_lengths: np.ndarray, target_lengths: np.ndarray) -> float:
        """Operations of one forward and one backward pass.

        Args:
            source_lengths: Number of tokens of each source, `</s>` included [num_pairs].
            target_lengths: The same of each target [num_pairs].
        """
        source, target = source_lengths.astype(np.float64), target_lengths.astype(np.float64)
        products = self.source_weights * source.sum() + self.target_weights * target.sum()
        attention = self.encoder_attention * (source**2).sum()
        attention += self.decoder_attention * (target**2 + source * target).sum()
        return 3.0 * 2.0 * float(products + attention)


@cache
def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """`measure_matrix_rate` by wall-clock time, measured once in a process."""
    return measure_matrix_rate(device, dtype)


def measure_matrix_rate(
    device: torch.device, dtype: torch.dtype, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Measure how fast the device multiplies large square matrices: of order 1,024 on CPUs, 8,192 elsewhere.

    Args:
        device: The device.
        dtype: Type of the matrices.
        clock: Tells seconds: `time.perf_counter`, or `time.process_time` for those of all threads.

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
        started = clock()
        left @ right
        synchronize()
        seconds.append(clock() - started)
    return 2.0 * size**3 / min(seconds)
