"""Distributes a training step over processes: with DistributedDataParallel, or with parameters sharded by FSDP2."""

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
    """Make the processes share gradients and, if Accelerate's configuration asks for FSDP, also shard the parameters.

    Each encoder and decoder layer is a group of parameters that is gathered when it is needed. All other parameters,
    such as the embeddings, form the last group. It stays gathered during the whole forward pass, so that the loss can
    read the output projection outside the module that holds it.

    `fully_shard` is called directly, because Accelerate silently replaces FSDP by DistributedDataParallel on CPUs.

    Args:
        loss: Model and loss, on the accelerator's device; sharded in place.
        accelerator: Devices and processes.

    Returns:
        The module to call instead of `loss`. Make the optimiser afterwards: sharding replaces the parameters.

    Raises:
        UserError: The configuration asks for an FSDP setting that this engine does not support.
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
            "`gradient_checkpointing`."
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
    """Accumulate gradients on each process, without reducing them; a later pass reduces the sum."""
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
    """Give every process the same number of forward passes: all must join in gathering and reducing.

    Args:
        share: Index and pair numbers [B] of each of this process's batches.
        batches: The batches of all processes.
        num_processes: Number of processes.

    Returns:
        Index, pair numbers and weight of each pass: the share with a weight of 1; then, while other processes have
        more batches, a single pair with a weight of 0.
    """
    idle = math.ceil(len(batches) / num_processes) - len(share)
    return [(index, batch, 1.0) for index, batch in share] + [(0, batches[0][:1], 0.0)] * idle


def reshard(loss: nn.Module) -> None:
    """Shard again the parameters that a forward pass without backward leaves gathered: the optimiser has shards."""
    for module in loss.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_sharded(model: nn.Module) -> bool:
    """Whether each process holds only a shard of the parameters."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def whole_model(model: PreTrainedModel, accelerator: Accelerator) -> PreTrainedModel | None:
    """The model with whole parameters, to save it or to translate with it; every process must call this.

    Args:
        model: The model, sharded or not.
        accelerator: Devices and processes.

    Returns:
        The model itself if it is not sharded; else a copy with whole parameters on the main process, and `None` on the
        others.
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
    """A model of the same class with its plain layers, without the dropout and fused layers of training.

    Args:
        model: The model.
        tensors: Parameters and buffers by name; tied ones under at least one of their names. `None` takes the model's.

    Returns:
        A model that shares these tensors, without copies.
    """
    with torch.device("meta"):
        copy = type(model)(model.config)
    # `strict=False`, because tied parameters may have one of their names only.
    copy.load_state_dict(model.state_dict() if tensors is None else tensors, strict=False, assign=True)
    copy.tie_weights()
    copy.generation_config = model.generation_config
    return copy


@dataclass(frozen=True, slots=True)
class Division:
    """How an optimiser step is divided into batches and processes; the step's size does not depend on it.

    Args:
        tokens_per_update: Largest number of tokens on either side of a step.
        batches_per_update: Number of batches of a step.
        tokens_per_batch: Largest number of tokens on either side of a batch.
        processes: Number of processes.
        fewest: Smallest number of batches of a process in a full step.
        most: Largest number of batches of a process in a full step.
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
            text += f"; a `tokens_per_batch` of {tokens:,} or less would give every process work"
        return text
