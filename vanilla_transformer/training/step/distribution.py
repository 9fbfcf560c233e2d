"""How a training step is spread over processes: DistributedDataParallel, or parameters sharded by FSDP2."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, parse_flag_from_env
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from vanilla_transformer.errors import UserError
from vanilla_transformer.training.options import TrainingOptions
from vanilla_transformer.training.records.tensors import whole

from .loss import SmoothedTranslationLoss


def distribute(loss: SmoothedTranslationLoss, accelerator: Accelerator) -> nn.Module:
    """Make the processes share their gradients, and with FSDP in Accelerate's configuration also the parameters.

    Every encoder and decoder layer is a group of parameters that is gathered when it is needed; the embeddings and
    what else there is form the last group, which stays gathered from the start of a step's forward pass to its end, so
    that the loss can read the output projection outside of the module that holds it.

    Accelerate's own preparation would turn FSDP into DistributedDataParallel on CPUs, without a word; `fully_shard` is
    the same on every device.

    Args:
        loss: Model and loss, on the accelerator's device; sharded in place.
        accelerator: Devices and processes.

    Returns:
        What to call in place of `loss`. The optimiser must be made afterwards, for parameters are replaced.

    Raises:
        UserError: The configuration asks for something of FSDP that this engine does not do.
    """
    if not parse_flag_from_env("ACCELERATE_USE_FSDP"):
        return accelerator.prepare(loss)
    plugin = FullyShardedDataParallelPlugin()
    if plugin.fsdp_version != 2:
        raise UserError(
            f"Accelerate's configuration asks for FSDP version {plugin.fsdp_version}; set fsdp_version: 2, as in "
            "scripts/launch/fsdp.yaml."
        )
    if plugin.activation_checkpointing:
        raise UserError(
            "Accelerate's configuration sets fsdp_activation_checkpointing; leave it out, and use "
            "--gradient_checkpointing."
        )
    if parse_flag_from_env("FSDP_OFFLOAD_PARAMS"):
        raise UserError(
            "Accelerate's configuration sets fsdp_offload_params, but parameters stay on their devices here; leave it "
            "out."
        )
    if accelerator.num_processes == 1:
        return loss
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for layer in (*loss.model.model.encoder.layers, *loss.model.model.decoder.layers):
        fully_shard(layer, mesh=mesh, reshard_after_forward=plugin.reshard_after_forward)
    return fully_shard(loss, mesh=mesh)


@contextmanager
def without_reduction(loss: nn.Module) -> Iterator[None]:
    """Leave gradients on their process, to be reduced with those of a later pass."""
    if isinstance(loss, DistributedDataParallel):
        with loss.no_sync():
            yield
    elif isinstance(loss, FSDPModule):
        loss.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            loss.set_requires_gradient_sync(True)
    else:
        yield


def with_idle_passes(
    share: Sequence[tuple[int, np.ndarray]], batches: Sequence[np.ndarray], num_processes: int
) -> list[tuple[int, np.ndarray, float]]:
    """Give every process as many forward passes: gathering parameters and reducing gradients take all of them.

    Args:
        share: This process's batches, pair numbers each, with their numbers.
        batches: The batches of all processes.
        num_processes: Number of processes.

    Returns:
        The share with a weight of 1, and as often as other processes have more batches, one pair with a weight of 0.
    """
    idle = math.ceil(len(batches) / num_processes) - len(share)
    return [(index, batch, 1.0) for index, batch in share] + [(0, batches[0][:1], 0.0)] * idle


def reshard(loss: nn.Module) -> None:
    """Drop what a forward pass without a backward pass leaves gathered; the optimiser does not know those tensors."""
    for module in loss.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_sharded(model: nn.Module) -> bool:
    """Whether each process holds a part of the parameters only."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def whole_model(model: PreTrainedModel, accelerator: Accelerator) -> PreTrainedModel | None:
    """The model with all of its parameters, to save it or to translate with it; every process must call this.

    Args:
        model: The model, sharded or not.
        accelerator: Devices and processes.

    Returns:
        A copy with whole parameters if the model is sharded, and then on the main process alone, else the model.
    """
    if not is_sharded(model):
        return model
    tensors = dict(model.named_buffers())
    for name, parameter in model.named_parameters():
        tensor = whole(parameter.detach())
        if accelerator.is_main_process:
            tensors[name] = tensor
    return plain_model(model, tensors) if accelerator.is_main_process else None


def plain_model(model: PreTrainedModel, tensors: dict[str, torch.Tensor] | None = None) -> PreTrainedModel:
    """A model as its class makes it, without the layers and operations that training puts in their place.

    Args:
        model: The model.
        tensors: Its parameters and buffers by name, of tied ones under one name at least; `None` takes the model's.

    Returns:
        A model that has these very tensors, and not copies of them.
    """
    with torch.device("meta"):
        copy = type(model)(model.config)
    # Tied parameters are one tensor there, under one of their names.
    copy.load_state_dict(model.state_dict() if tensors is None else tensors, strict=False, assign=True)
    copy.tie_weights()
    copy.generation_config = model.generation_config
    return copy


@dataclass(frozen=True, slots=True)
class Division:
    """How an optimiser step is divided; its size does not depend on the number of processes.

    Args:
        tokens_per_update: Largest number of tokens on either side of a step.
        batches_per_update: Number of batches of a step.
        tokens_per_batch: Largest number of tokens on either side of a batch.
        processes: Number of processes.
        fewest: Smallest number of batches of a process in a full step.
        most: Largest number.
    """

    tokens_per_update: int
    batches_per_update: int
    tokens_per_batch: int
    processes: int
    fewest: int
    most: int

    @classmethod
    def of(cls, options: TrainingOptions, num_processes: int) -> "Division":
        """The division of a run's steps."""
        fewest, remainder = divmod(options.batches_per_update, num_processes)
        return cls(
            tokens_per_update=options.tokens_per_update,
            batches_per_update=options.batches_per_update,
            tokens_per_batch=options.tokens_per_batch,
            processes=num_processes,
            fewest=fewest,
            most=fewest + (remainder > 0),
        )

    def __str__(self) -> str:
        batches = "1 batch" if self.batches_per_update == 1 else f"{self.batches_per_update:,} batches"
        text = f"{self.tokens_per_update:,} tokens an update = {batches} of {self.tokens_per_batch:,}"
        if self.processes == 1:
            return f"{text} on 1 process"
        each = str(self.most) if self.fewest == self.most else f"{self.fewest} or {self.most}"
        text = f"{text} over {self.processes} processes, {each} each"
        if self.fewest == 0:
            tokens = self.tokens_per_update // self.processes
            text += f"; a --tokens_per_batch of {tokens:,} or less would give every process work"
        return text
