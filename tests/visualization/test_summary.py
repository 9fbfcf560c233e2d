import json

import numpy as np
import pytest
from runs_on_disk import records, write_run

from vanilla_transformer.visualization.summary import draw_curve, run_summary


def test_a_run_is_summed_up(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "checkpoints").mkdir()
    text = run_summary(folder)
    valid = [record for record in records(50) if record["kind"] == "valid"]
    best = min(valid, key=lambda record: record["loss"])
    assert f"best {best['loss']:.4f} (update {best['update']}), last {valid[-1]['loss']:.4f}" in text
    assert "BLEU        best 50.00 (update 50), last 50.00" in text
    assert text.startswith("validation loss")
    assert all(len(line) <= 79 for line in text.splitlines() if str(tmp_path) not in line)
    for path in (folder, folder / "metrics.jsonl", folder / "checkpoints"):
        assert (
            str(path) in text.splitlines()[-3 + [folder, folder / "metrics.jsonl", folder / "checkpoints"].index(path)]
        )


def test_a_run_without_a_result_names_no_model(tmp_path):
    assert not [
        line for line in run_summary(write_run(tmp_path, is_over=False)).splitlines() if line.startswith("model")
    ]


def test_without_validation_the_training_loss_is_drawn(tmp_path):
    text = run_summary(write_run(tmp_path, 5))
    assert text.startswith("training loss")
    assert "best" not in text


def test_a_run_that_measured_nothing_has_no_summary(tmp_path):
    assert run_summary(tmp_path) == ""


def test_one_measurement_is_no_curve(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "valid", "update": 5, "loss": 2.0}) + "\n")
    assert run_summary(tmp_path).startswith("loss        best 2.0000 (update 5), last 2.0000")


@pytest.mark.parametrize("unicode", [True, False])
@pytest.mark.parametrize("values", [[3.0, 1.0], [2.0, 2.0], [0.0, 5.0, -5.0, 5.0]])
def test_every_column_of_a_curve_is_drawn(values, unicode):
    lines = draw_curve(np.arange(1, len(values) + 1), np.array(values), unicode=unicode)
    assert len(lines) == 10
    assert unicode or "".join(lines).isascii()
    edge = lines[0].index("│" if unicode else "|")
    columns = zip(*(line[edge + 1 :].ljust(60) for line in lines[:8]), strict=True)
    assert all(any(mark != " " for mark in column) for column in columns)
    assert lines[0].split()[0] == f"{max(values):.3g}"
    assert lines[-1].split() == ["1", str(len(values)), "updates"]


def test_a_falling_curve_falls():
    lines = draw_curve(np.array([1, 100]), np.array([9.0, 1.0]), unicode=False)
    starts = [line.index("*") for line in lines[:8]]
    assert starts == sorted(starts)
    assert lines[0].startswith("9 |*") and lines[7].startswith("1 |")
