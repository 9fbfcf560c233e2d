"""Results of the training benchmark: medians, ranges, ratios, tables."""

import sys
from statistics import median

from worker import Setting


CLOCKS = ("wall", "cpu")


def check_parameters(measurements: list[dict]) -> None:
    """Refuse to compare models that differ in more than biases."""
    counts = {
        measured["variant"]: (measured["parameters"]["matrices"], measured["parameters"]["scales"])
        for measured in measurements
    }
    if len(set(counts.values())) > 1:
        raise RuntimeError(f"The variants are not the same model: (matrices, scales) are {counts}.")


def rate(measured: dict, clock: str) -> float:
    """Tokens without padding per second of `wall` or `cpu` time."""
    return measured["real_tokens"] / measured[f"{clock}_seconds"]


def names_of(measurements: list[dict]) -> list[str]:
    """The variants, this engine's first."""
    names = {measured["variant"] for measured in measurements}
    return sorted(names, key=lambda name: (not name.startswith("engine"), name))


def best_matrix_rates(measurements: list[dict], clock: str) -> dict[str, float]:
    """The highest GEMM rate that was measured in each precision, per second of `wall` or `cpu` time."""
    best: dict[str, float] = {}
    for measured in measurements:
        precision = measured["precision"]
        best[precision] = max(best.get(precision, 0.0), measured["matrix_rate"][clock])
    return best


def summarise(measurements: list[dict], memory: dict[str, int | None]) -> dict[str, dict]:
    """Median and range of each variant's rates, its share of real tokens and its model FLOPs utilisation."""
    summary = {}
    for name in names_of(measurements):
        mine = [measured for measured in measurements if measured["variant"] == name]
        row = {
            "parameters": sum(mine[0]["parameters"].values()),
            "peak_memory": memory[name],
            "fill_rate": sum(m["real_tokens"] for m in mine) / sum(m["padded_tokens"] for m in mine),
        }
        for clock in CLOCKS:
            row[f"tokens_per_{clock}_second"] = spread([rate(measured, clock) for measured in mine])
            done = spread([measured["operations"] / measured[f"{clock}_seconds"] for measured in mine])
            possible = best_matrix_rates(measurements, clock)[mine[0]["precision"]]
            row[f"model_flops_utilization_per_{clock}_second"] = done["median"] / possible
        summary[name] = row
    return summary


def ratios(measurements: list[dict]) -> dict[str, dict[str, dict]]:
    """How many times as fast this engine is as each peer: median and range of the rounds' ratios, by either clock."""
    of = {(measured["variant"], measured["round"]): measured for measured in measurements}
    rounds = sorted({number for _, number in of})
    names = names_of(measurements)
    return {
        f"{ours} / {peer}": {
            clock: spread([rate(of[ours, number], clock) / rate(of[peer, number], clock) for number in rounds])
            for clock in CLOCKS
        }
        for ours in names
        if ours.startswith("engine")
        for peer in names
        if not peer.startswith("engine")
    }


def print_tables(setting: Setting, summary: dict[str, dict], measurements: list[dict]) -> None:
    """Print rates and ratios of one setting."""
    clock = "wall" if setting.device == "cuda" else "cpu"
    for precision, best in best_matrix_rates(measurements, clock).items():
        print(f"Matrix products in {precision}: {best / 1e9:,.0f} GFLOP/s of {clock} time.")
    rows = [("variant", "parameters", "tokens/s", "range", "tokens/CPU-s", "range", "fill", "MFU", "memory")]
    for name, row in summary.items():
        memory = row["peak_memory"]
        rows.append(
            (
                name,
                f"{row['parameters']:,}",
                *cells(row["tokens_per_wall_second"], ",.0f"),
                *cells(row["tokens_per_cpu_second"], ",.0f"),
                f"{row['fill_rate']:.1%}",
                f"{row[f'model_flops_utilization_per_{clock}_second']:.1%}",
                "" if memory is None else f"{memory / 2**30:.2f} GiB",
            )
        )
    print_columns(rows)
    rows = [("times as fast", "wall", "range", "CPU", "range")]
    for name, clocks in ratios(measurements).items():
        rows.append((name, *cells(clocks["wall"], ".2f"), *cells(clocks["cpu"], ".2f")))
    if len(rows) > 1:
        print()
        print_columns(rows)


def spread(values: list[float]) -> dict:
    return {"median": median(values), "range": [min(values), max(values)]}


def cells(spread: dict, style: str) -> tuple[str, str]:
    smallest, largest = (format(value, style) for value in spread["range"])
    return format(spread["median"], style), f"{smallest} to {largest}"


def print_columns(rows: list[tuple[str, ...]]) -> None:
    """Print rows with the first column left and the others right aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
        print("  ".join([first.ljust(widths[0]), *cells]))
    sys.stdout.flush()
