"""Dropout for CPUs, with masks that cost less to draw: torch's take a tenth of a training step."""

import torch
from torch import nn


# The smallest int16, so that words below SMALLEST_WORD + n are n of the 2^16.
SMALLEST_WORD = -(2**15)


class SixteenBitDropout(nn.Module):
    """Dropout that draws 16 random bits for each element from torch's generator for CPUs.

    Torch draws a Bernoulli variable for each element, which takes about seven times as long as a quarter of a random
    64-bit integer. In return, the probability is rounded to a multiple of 2^-16. Kept elements are scaled by the exact
    inverse of the rounded probability of keeping them, so that expectations stay exact.

    Args:
        p: Probability that an element is dropped, in [0, 1).
    """

    def __init__(self, p: float):
        super().__init__()
        self.p = p
        self.num_dropped = min(round(p * 2**16), 2**16 - 1)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Drop elements of a floating-point tensor of any shape, and scale the others; keeps shape and dtype."""
        if not self.training or self.num_dropped == 0:
            return hidden_states
        kept = draw_kept(self.num_dropped, out=torch.empty(hidden_states.shape, dtype=hidden_states.dtype))
        return hidden_states * kept.mul_(2**16 / (2**16 - self.num_dropped))

    def extra_repr(self) -> str:
        """The probability, for printing the model."""
        return f"p={self.p}"


def draw_kept(num_dropped: int, *, out: torch.Tensor) -> torch.Tensor:
    """Draw a mask: 0 with probability `num_dropped` / 2^16, else 1.

    Args:
        num_dropped: Number of the 2^16 possible words for which an element is dropped, in [1, 2^16 - 1].
        out: Tensor of any shape and dtype that receives the mask.

    Returns:
        `out`.
    """
    return torch.ge(draw_words(out.numel()).view(out.shape), SMALLEST_WORD + num_dropped, out=out)


def draw_words(count: int) -> torch.Tensor:
    """Draw random words [count] in int16; those below SMALLEST_WORD + `num_dropped` drop their elements."""
    words = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)
    return words.view(torch.int16)[:count]


def use_sixteen_bit_dropout(model: nn.Module) -> None:
    """Replace every `nn.Dropout` in a model on a CPU by `SixteenBitDropout`.

    Args:
        model: Changed in place; its parameters and their names stay.
    """
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Dropout):
                setattr(module, name, SixteenBitDropout(child.p))
