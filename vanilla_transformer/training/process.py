"""What a training run asks of its process: devices and signals."""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, is_initialized

from vanilla_transformer.errors import UserError

from .configuration import TrainingOptions


# A reason to stop beside the numbers of the signals that are caught, and less pressing than any.
OUT_OF_TIME = 1


def make_accelerator(options: TrainingOptions) -> Accelerator:
    """Devices, processes and precision, as options and launcher decide.

    Raises:
        UserError: This process has an Accelerator of another precision or device already.
    """
    if is_initialized():
        # A process has one such state, which Accelerate refuses to change.
        state = AcceleratorState()
        if state.mixed_precision != options.mixed_precision:
            raise UserError(
                f"--mixed_precision is {options.mixed_precision}, but this process has an Accelerator with "
                f"{state.mixed_precision} already; use the same precision for both, or another process."
            )
        if options.device == "cpu" and state.device.type != "cpu":
            raise UserError(
                f"--device is cpu, but this process has an Accelerator on {state.device} already; use the same device "
                "for both, or another process."
            )
    accelerator = Accelerator(cpu=options.device == "cpu", mixed_precision=options.mixed_precision)
    if options.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        # Accelerate would compute in float32, without a word.
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler("cpu")
    return accelerator


@contextmanager
def accelerating(options: TrainingOptions) -> Iterator[Accelerator]:
    """`make_accelerator`, whose settings do not outlive the block: the process may train again with others."""
    lent = is_initialized()
    try:
        yield make_accelerator(options)
    finally:
        if not lent:
            AcceleratorState._reset_state(reset_partial_state=True)


@contextmanager
def catch_signals(handle: Callable[[int], None]):
    """Call `handle` for SIGINT and SIGTERM instead of stopping at once."""
    with ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous = signal.signal(number, lambda received, _frame: handle(received))
            stack.callback(signal.signal, number, previous)
        yield
