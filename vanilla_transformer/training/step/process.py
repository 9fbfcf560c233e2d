"""What a training run asks of its process: devices and signals."""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, is_initialized
from accelerate.utils import broadcast_object_list, get_int_from_env, parse_flag_from_env

from vanilla_transformer.errors import UserError
from vanilla_transformer.signals import stopping_signals
from vanilla_transformer.training.options import TrainingOptions


T = TypeVar("T")

# A reason to stop beside the numbers of the signals that are caught.
OUT_OF_TIME = -1
# What launchers set, in the order in which Accelerate reads it.
_NUMBERS_OF_PROCESSES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def make_accelerator(options: TrainingOptions) -> Accelerator:
    """Devices, processes and precision, as options and launcher decide.

    Raises:
        UserError: This process has an Accelerator of another precision or device already, or not every process that
            the launcher started can take part in the run.
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
    # Without being told, Accelerate forms no group of processes on CPUs: each would train a model of its own. One
    # process is none, whatever started it: in a group it would round otherwise.
    cpu = options.device == "cpu" or (_is_on_cpus(options) and _started(default=1) > 1)
    accelerator = Accelerator(cpu=cpu, mixed_precision=options.mixed_precision)
    _check_group(accelerator)
    if options.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        # Accelerate would compute in float32, without a word.
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler("cpu")
    return accelerator


def _is_on_cpus(options: TrainingOptions) -> bool:
    told = options.device == "cpu" or parse_flag_from_env("ACCELERATE_USE_CPU")
    return told or not torch.accelerator.is_available()


def check_devices(options: TrainingOptions, num_processes: int) -> None:
    """Refuse more processes on this machine than it has devices, unless they run on CPUs.

    Args:
        options: Training options.
        num_processes: Number of processes, all of which see the same devices.

    Raises:
        UserError: Two of them would have the same device.
    """
    devices = torch.accelerator.device_count()
    if not _is_on_cpus(options) and num_processes > devices:
        raise UserError(
            f"--num_processes is {num_processes}; it must be at most {devices}, as many as there are devices "
            f"({torch.accelerator.current_accelerator()}) on this machine, unless --device cpu is given."
        )


def _started(default: int) -> int:
    """How many processes a launcher says that it has started, on all machines."""
    return get_int_from_env(_NUMBERS_OF_PROCESSES, default)


def _check_group(accelerator: Accelerator) -> None:
    """Refuse processes that do not know of one another: each would train a model, all of them into one folder."""
    started = _started(accelerator.num_processes)
    if started != accelerator.num_processes:
        name = next(name for name in _NUMBERS_OF_PROCESSES if get_int_from_env([name], -1) == started)
        raise UserError(
            f"A launcher has started {started} processes ({name}), but on {accelerator.device} Accelerate joins "
            f"{accelerator.num_processes}; start them with `accelerate launch`, torchrun or --num_processes, give "
            f"--device cpu if such devices cannot be joined, or unset {name}."
        )


@contextmanager
def accelerating(options: TrainingOptions) -> Iterator[Accelerator]:
    """`make_accelerator`, whose settings do not outlive the block: the process may train again with others."""
    lent = is_initialized()
    try:
        yield make_accelerator(options)
    finally:
        if not lent:
            AcceleratorState._reset_state(reset_partial_state=True)


def main_process_first(accelerator: Accelerator, work: Callable[[], T]) -> T:
    """Do work on the main process, and then on the others.

    Where the main process refuses to, all do: they would else wait for one that is gone, and end with a traceback.

    Args:
        accelerator: Processes.
        work: What each of them does.

    Returns:
        What `work` returned.

    Raises:
        UserError: The main process refused, or this one.
    """
    refusal, result = None, None
    if accelerator.is_main_process:
        try:
            result = work()
        except UserError as error:
            refusal = error
    told = broadcast_object_list([None if refusal is None else str(refusal)])[0]
    if told is not None:
        raise refusal or UserError(told)
    return result if accelerator.is_main_process else work()


def most_pressing(wishes: Iterable[int]) -> int:
    """Which of the processes' wishes to stop decides: a signal before `OUT_OF_TIME`, and that before 0, to go on."""
    wishes = list(wishes)
    return max(wishes) or min(wishes)


@contextmanager
def catch_signals(handle: Callable[[int], None]):
    """Call `handle` for SIGINT, SIGTERM and, unless it is ignored, SIGHUP instead of stopping at once."""
    with ExitStack() as stack:
        for number in stopping_signals():
            previous = signal.signal(number, lambda received, _frame: handle(received))
            stack.callback(signal.signal, number, previous)
        yield
