"""Tensors that are spread over processes, as the disk holds them and as a process holds them."""

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with all of its values; if it is sharded, every process must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_for(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """What a process keeps of a tensor, which every process has, beside its part of a parameter of the same shape."""
    tensor = tensor.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
