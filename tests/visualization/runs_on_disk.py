"""Folders of runs as training leaves them, made up."""

import json
import math
from pathlib import Path


def records(last: int, *, bleu: bool = True) -> list[dict]:
    found = []
    for update in range(1, last + 1):
        nll = 1.0 + 5.0 * math.exp(-update / 20)
        norm = None if update == 2 else 1.5
        measured = {"gradient_norm": norm, "learning_rate": update * 1e-5, "tokens_per_second": 1000.0 + update}
        found.append({"kind": "train", "update": update, "nll": nll, "loss": nll + 1, **measured})
        if update % 10 == 0:
            valid = nll + 0.1 + max(0, update - 30) * 0.02
            scores = {"bleu": float(update)} if bleu else {}
            found.append({"kind": "valid", "update": update, "loss": valid, "perplexity": math.exp(valid), **scores})
    return found


def write_run(folder: Path, last: int = 50, *, is_over: bool = True, tail: str = "", bleu: bool = True) -> Path:
    """Write the record of a run of so many updates, with a line that is cut off if asked to."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in records(last, bleu=bleu))
    (folder / "metrics.jsonl").write_text(lines + tail, encoding="utf-8")
    result = {"result": {"updates": [last]} if is_over else None}
    (folder / "run.json").write_text(json.dumps(result), encoding="utf-8")
    return folder
