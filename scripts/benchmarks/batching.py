"""BLEU after training with batches of similar lengths and random ones: `python scripts/benchmarks/batching.py`.

    python scripts/benchmarks/batching.py --source val.en --references val.de --tokenize none --output_dir batching \
        --seeds 1 2 -- --config multi30k --train_files train.en train.de --valid_files val.en val.de \
        --tokens_per_batch 4096 --tokens_per_update 4096 --max_updates 800 --warmup_steps 400

What follows `--` goes to `vanilla-transformer train`. Every seed trains once with `--batching lengths` and once with
`--batching random`, and else with the same options. BLEU is that of `evaluate`, with the run's own search; tokens are
those of source and target without padding, by the wall clock, from the runs' `metrics.jsonl`.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import mean, stdev

from vanilla_transformer.cli import main as run_command


BATCHINGS = ("lengths", "random")


def measure(batching: str, seed: int, arguments: argparse.Namespace) -> dict:
    """Train, and score the result; a run that has been scored is not repeated."""
    folder = arguments.output_dir / f"{batching}-{seed}"
    scores = folder / "scores.json"
    if not scores.exists():
        _run("train", *arguments.train, "--batching", batching, "--seed", str(seed), "--output_dir", str(folder))
        _run(
            *("evaluate", "--model", str(folder), "--source", str(arguments.source)),
            *("--references", str(arguments.references), "--tokenize", arguments.tokenize, "--output", str(scores)),
        )
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    records = [record for record in records if record["kind"] == "train"]
    seconds = sum(record["seconds"] for record in records)
    return {
        "batching": batching,
        "seed": seed,
        "bleu": json.loads(scores.read_text(encoding="utf-8"))["bleu"],
        "tokens_per_second": sum(record["tokens_per_second"] * record["seconds"] for record in records) / seconds,
        "fill_rate": mean(record["fill_rate"] for record in records),
        "seconds": seconds,
    }


def main() -> None:
    """Train all, print a table, and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="source sentences to translate, one a line")
    parser.add_argument("--references", type=Path, required=True, help="their references")
    parser.add_argument("--tokenize", default="13a", help="sacreBLEU's tokenisation")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--output_dir", type=Path, required=True, help="folder of the runs, which are kept")
    parser.add_argument("train", nargs="+", help="options of `train`, behind --")
    arguments = parser.parse_args()
    results = [measure(batching, seed, arguments) for seed in arguments.seeds for batching in BATCHINGS]
    print(f"{'batching':<10}{'mean BLEU':>10}{'fill':>8}{'tokens/s':>10}{'minutes':>9}  BLEU of each seed")
    for batching in BATCHINGS:
        own = [result for result in results if result["batching"] == batching]
        means = {name: mean(result[name] for result in own) for name in own[0] if name != "batching"}
        print(
            f"{batching:<10}{means['bleu']:>10.2f}{means['fill_rate']:>8.1%}{means['tokens_per_second']:>10,.0f}"
            f"{means['seconds'] / 60:>9.1f}  {', '.join(format(result['bleu'], '.2f') for result in own)}"
        )
    gains = [random["bleu"] - lengths["bleu"] for lengths, random in zip(results[::2], results[1::2], strict=True)]
    error = f", standard error {stdev(gains) / len(gains) ** 0.5:.2f}" if len(gains) > 1 else ""
    print(f"Random batches gain {mean(gains):+.2f} BLEU{error}.")
    (arguments.output_dir / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def _run(*words: str) -> None:
    if status := run_command(list(words)):
        sys.exit(status)


if __name__ == "__main__":
    main()
