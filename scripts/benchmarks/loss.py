"""Memory and speed of the training loss, forward and backward, beside its peers: `python scripts/benchmarks/loss.py`.

    python scripts/benchmarks/loss.py --width 512 --vocab_size 32000 --tokens 8192 --output loss.json

Each variant gets decoder output, the output projection and labels, and leaves gradients of the first two:

- sliced: this package's loss;
- full: `F.cross_entropy` on float32 logits, with label smoothing, as the Trainer computes it;
- torch: `F.linear_cross_entropy` in chunks, where this torch has it; it cannot smooth labels, and does not.

Memory is the peak above what inputs take, in a process of its own for each variant: of the resident set, or of the
GPU's allocator. Times are those of variants that take turns, in CPU time of one thread or in wall time of a GPU;
medians with the range of the rounds. Ratios are this package's loss to the others.
"""

import argparse
import json
import multiprocessing
import platform
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import torch
from measuring import current_memory, peak_memory, synchronize
from torch.nn import functional as F

from vanilla_transformer.training.cpu.memory import keep_freed_memory
from vanilla_transformer.training.step.loss import smoothed_cross_entropy


LABEL_SMOOTHING = 0.1
MEBIBYTE = 2**20


def sliced(hidden_states: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """This package's loss."""
    return smoothed_cross_entropy(hidden_states, weight, None, labels, LABEL_SMOOTHING)[0]


def full(hidden_states: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of logits that are computed as a whole, in float32."""
    logits = F.linear(hidden_states, weight).float()
    return F.cross_entropy(logits, labels, label_smoothing=LABEL_SMOOTHING, reduction="sum")


def torch_chunked(hidden_states: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """torch's own chunked loss, without label smoothing. Autocast does not apply to it."""
    device_type = hidden_states.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        hidden_states, weight = hidden_states.to(dtype), weight.to(dtype)
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden_states, weight, labels, reduction="sum", options=options)


VARIANTS = {"sliced": sliced, "full": full}
if hasattr(F, "linear_cross_entropy"):
    VARIANTS["torch"] = torch_chunked


def make_step(name: str, tokens: int, precision: str, arguments: argparse.Namespace) -> Callable[[], None]:
    """Make inputs, and a function that computes a variant's loss and gradients from them."""
    torch.manual_seed(0)
    device = torch.device(arguments.device)
    hidden_states = torch.randn(tokens, arguments.width, device=device).requires_grad_()
    weight = (
        torch.randn(arguments.vocab_size, arguments.width, device=device) * arguments.width**-0.5
    ).requires_grad_()
    labels = torch.randint(arguments.vocab_size, (tokens,), device=device)

    def step() -> None:
        hidden_states.grad = weight.grad = None
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = VARIANTS[name](hidden_states, weight, labels)
        (loss / tokens).backward()
        synchronize(device)

    return step


def measure_memory(name: str, precision: str, arguments: argparse.Namespace) -> int:
    """Peak memory in bytes above that of the inputs; to be called in a fresh process."""
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    # The first GEMMs load the libraries' code and allocate their workspace.
    make_step(name, 8, precision, arguments)()
    step = make_step(name, arguments.tokens, precision, arguments)
    before = current_memory(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        # Resets the peak to the present value.
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    step()
    return peak_memory(device) - before


def measure_times(precision: str, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Microseconds a token of each variant in each round."""
    clock = perf_counter if arguments.device == "cuda" else process_time
    steps = {name: make_step(name, arguments.tokens, precision, arguments) for name in VARIANTS}
    times = {name: [] for name in steps}
    for number in range(arguments.rounds + 1):
        for name, step in steps.items():
            started = clock()
            step()
            # The first round warms up.
            if number > 0:
                times[name].append((clock() - started) / arguments.tokens * 1e6)
    return times


def compare(precision: str, arguments: argparse.Namespace) -> dict[str, dict]:
    """Measure all variants in one precision."""
    times = measure_times(precision, arguments)
    results = {}
    for name in VARIANTS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            memory = pool.apply(measure_memory, (name, precision, arguments))
        results[name] = {
            "peak_memory_bytes": memory,
            "microseconds_per_token": median(times[name]),
            "range": [min(times[name]), max(times[name])],
        }
    for result in results.values():
        result["memory_ratio"] = results["sliced"]["peak_memory_bytes"] / result["peak_memory_bytes"]
        result["time_ratio"] = results["sliced"]["microseconds_per_token"] / result["microseconds_per_token"]
    return results


def print_table(precision: str, results: dict[str, dict]) -> None:
    """Print one precision's results."""
    print(f"{precision:10s} {'MiB':>8s} {'ratio':>6s} {'us/token':>10s} {'range':>17s} {'ratio':>6s}")
    for name, result in results.items():
        low, high = result["range"]
        print(
            f"{name:10s} {result['peak_memory_bytes'] / MEBIBYTE:8.0f} {result['memory_ratio']:6.2f} "
            f"{result['microseconds_per_token']:10.1f} {low:8.1f}-{high:8.1f} {result['time_ratio']:6.2f}",
            flush=True,
        )


def main() -> None:
    """Measure, print, and write what was measured."""
    parser = argparse.ArgumentParser(description="Memory and speed of the training loss beside its peers.")
    parser.add_argument("--width", type=int, default=512, help="Width of the decoder's output.")
    parser.add_argument("--vocab_size", type=int, default=32_000, help="Entries of the vocabulary.")
    parser.add_argument("--tokens", type=int, default=8192, help="Number of target tokens.")
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=("fp32", "bf16"))
    parser.add_argument("--rounds", type=int, default=5, help="How often each variant is timed.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="JSON file to write.")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.device == "cpu":
        # As the training engine does.
        keep_freed_memory()
    record = {
        "options": {name: value for name, value in vars(arguments).items() if name != "output"},
        "torch": torch.__version__,
        "processor": torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor(),
        "results": {},
    }
    for precision in arguments.precisions:
        record["results"][precision] = compare(precision, arguments)
        print_table(precision, record["results"][precision])
        if arguments.output is not None:
            arguments.output.write_text(json.dumps(record, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
