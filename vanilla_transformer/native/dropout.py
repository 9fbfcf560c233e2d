"""Dropout for CPUs, where drawing the masks is a tenth of the work of a training step."""

import torch
from torch import nn


class SixteenBitDropout(nn.Module):
    """Dropout with masks made of 16 random bits an element, out of torch's generator for CPUs.

    Torch draws a Bernoulli number for each element, which takes about seven times as long as a quarter of a 64-bit
    integer. The price is a probability rounded to a multiple of 2^-16; the scale of what is kept is the exact inverse
    of the rounded probability, so that expectations stay exact.

    Args:
        p: Probability that an element is dropped, in [0, 1).
    """

    def __init__(self, p: float):
        super().__init__()
        self.p = p
        self.num_dropped = min(round(p * 2**16), 2**16 - 1)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Drop elements of a floating-point tensor of any shape and scale the others."""
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
        num_dropped: How many of 2^16 are dropped, in [1, 2^16 - 1].
        out: Where to write, of any shape and dtype.

    Returns:
        `out`.
    """
    return torch.ge(draw_words(out.numel()).view(out.shape), num_dropped - 2**15, out=out)


def draw_words(count: int) -> torch.Tensor:
    """Draw so many numbers of 16 random bits [count], which are dropped if they are below `num_dropped` - 2^15."""
    words = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)
    return words.view(torch.int16)[:count]


def use_sixteen_bit_dropout(model: nn.Module) -> None:
    """Replace every `nn.Dropout` of a model on a CPU.

    Args:
        model: Changed in place; its parameters and their names stay.
    """
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Dropout):
                setattr(module, name, SixteenBitDropout(child.p))
