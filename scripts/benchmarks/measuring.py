"""Measuring instruments of the training benchmark: clocks, memory, the device's GEMM rate."""

import time
from dataclasses import dataclass, field

import numpy as np
import torch

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.training.watching.utilization import ModelFlops, measure_matrix_rate


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(slots=True)
class Meter:
    """Clocks that run from the last warm-up update to the end of the last update.

    What lies between two updates, such as reading and padding the next batch, is inside.

    Args:
        device: Where the updates are computed.
        warmup: Number of first updates that do not count, at least 1.
        seconds: Measure at least so long; on a CPU in CPU time, which does not pass while others have the core.
        updates: Measure at least so many updates.
        padded: Whether the sentences of a batch are padded to the longest.
        batches: Source and target lengths of each measured batch.
        wall_seconds: Elapsed time.
        cpu_seconds: Time of all threads of this process.
    """

    device: torch.device
    warmup: int
    seconds: float
    updates: int
    padded: bool = True
    batches: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    done: int = 0
    _started: tuple[float, float] = (0.0, 0.0)

    def update_done(self, *batches: tuple[np.ndarray, np.ndarray]) -> bool:
        """Count an update.

        Args:
            *batches: Source and target lengths of each of its batches, `</s>` included.

        Returns:
            Whether enough was measured.
        """
        self.done += 1
        if self.done <= self.warmup:
            if self.done == self.warmup:
                synchronize(self.device)
                self._started = _clocks()
            return False
        self.batches.extend(batches)
        wall, cpu = _since(self._started)
        if self.done - self.warmup < self.updates or (cpu if self.device.type == "cpu" else wall) < self.seconds:
            return False
        synchronize(self.device)
        self.wall_seconds, self.cpu_seconds = _since(self._started)
        return True

    def counts(self, config: VanillaTransformerConfig) -> dict[str, float]:
        """The measurements, as plain numbers."""
        flops = ModelFlops(config)
        sides = [side for batch in self.batches for side in batch]
        real_tokens = sum(int(side.sum()) for side in sides)
        return {
            "updates": self.done - self.warmup,
            "pairs": sum(len(source) for source, _ in self.batches),
            "wall_seconds": self.wall_seconds,
            "cpu_seconds": self.cpu_seconds,
            "real_tokens": real_tokens,
            "padded_tokens": sum(int(side.max()) * len(side) for side in sides) if self.padded else real_tokens,
            "operations": sum(flops.of(*batch) for batch in self.batches),
        }


def matrix_rates(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """The present rate of large GEMMs, in operations per second of wall time and of CPU time."""
    clocks = {"wall": time.perf_counter, "cpu": time.process_time}
    return {name: measure_matrix_rate(device, dtype, clock) for name, clock in clocks.items()}


def count_parameters(model: torch.nn.Module) -> dict[str, int]:
    """Number of a model's trained parameters: in matrices, in scaling vectors, and in biases."""
    counts = {"matrices": 0, "scales": 0, "biases": 0}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = "matrices" if parameter.ndim > 1 else "biases" if name.endswith("bias") else "scales"
            counts[kind] += parameter.numel()
    return counts


def peak_memory(device: torch.device) -> int | None:
    """Peak memory of this process in bytes, on the accelerator if there is one; `None` if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status_bytes("VmHWM")


def current_memory(device: torch.device) -> int | None:
    """Present memory of this process in bytes, on the accelerator if there is one; `None` if unknown."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _status_bytes("VmRSS")


def _clocks() -> tuple[float, float]:
    """Wall time and CPU time of all threads, in seconds from some moment on."""
    return time.perf_counter(), time.process_time()


def _since(started: tuple[float, float]) -> tuple[float, float]:
    return tuple(now - then for now, then in zip(_clocks(), started, strict=True))


def _status_bytes(name: str) -> int | None:
    # Not getrusage: its maximum survives the exec that starts a process.
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{name}:"))
    except OSError:
        return None
