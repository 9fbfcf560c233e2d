"""What a training run asks of its process: devices, signals and memory."""

import ctypes
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, contextmanager

from accelerate import Accelerator

from .configuration import TrainingOptions


def make_accelerator(options: TrainingOptions) -> Accelerator:
    """Devices, processes and precision, as options and launcher decide."""
    return Accelerator(cpu=options.device == "cpu", mixed_precision=options.mixed_precision)


@contextmanager
def catch_signals(handle: Callable[[int], None]):
    """Call `handle` for SIGINT and SIGTERM instead of stopping at once."""
    with ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous = signal.signal(number, lambda received, _frame: handle(received))
            stack.callback(signal.signal, number, previous)
        yield


def keep_freed_memory() -> None:
    """Have glibc keep freed tensors' memory: a small model would spend much of its time asking the kernel for it."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            trim_threshold, mmap_threshold = -1, -3
            libc.mallopt(mmap_threshold, 1 << 25)
            libc.mallopt(trim_threshold, 1 << 30)
