"""The exponential moving average of the weights."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file

from vanilla_transformer.training.records.checkpoints import EMA_WEIGHTS
from vanilla_transformer.training.records.tensors import part, part_for, whole


class MovingAverage:
    """Follows the weights of a model, in float32 or wider.

    After update n the average is d times itself and 1 - d times the weights, where d = min(decay, (1 + n) / (10 + n)):
    the average forgets the initial weights quickly, and is as slow as `decay` says later. So do Marian
    (`--exponential-smoothing`, `ExponentialSmoothing::updateAvgParams`) and TensorFlow
    (`tf.train.ExponentialMovingAverage` with `num_updates`).

    Args:
        parameters: Names and parameters; the average starts from their values.
        decay: Largest d, above 0 and below 1.
    """

    def __init__(self, parameters: Iterable[tuple[str, torch.nn.Parameter]], decay: float):
        self.decay = decay
        self.parameters = dict(parameters)
        self.averages = {
            name: parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
            for name, parameter in self.parameters.items()
        }

    @torch.no_grad()
    def follow(self, number: int) -> None:
        """Take in the weights after an optimiser step.

        Args:
            number: Number of the step, from 1 on.
        """
        decay = min(self.decay, (1 + number) / (10 + number))
        averages = list(self.averages.values())
        weights = [
            part(parameter).to(average.dtype)
            for parameter, average in zip(self.parameters.values(), averages, strict=True)
        ]
        torch._foreach_lerp_([part(average) for average in averages], weights, 1.0 - decay)

    @contextmanager
    @torch.no_grad()
    def in_place(self) -> Iterator[None]:
        """Have the model compute with the average; its own weights come back afterwards, bit for bit."""
        weights = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self._copy(self.averages)
        try:
            yield
        finally:
            self._copy(weights)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The average under the weights' names, whole and on the CPU; if it is sharded, all processes must call it."""
        return {name: whole(average).cpu().contiguous() for name, average in self.averages.items()}

    def load(self, folder: Path) -> None:
        """Read the average that a checkpoint has beside its weights."""
        tensors = load_file(folder / EMA_WEIGHTS)
        for name, average in self.averages.items():
            average.copy_(part_for(tensors[name], average))

    @torch.no_grad()
    def _copy(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(tensors[name])
