import numpy as np
import pytest
from runs_on_disk import records, write_run

from vanilla_transformer.errors import UserError
from vanilla_transformer.visualization.runs import best_of, read_run, run_picture


def titles(picture):
    return [panel.title for panel in picture.panels]


def test_a_run_is_read_and_drawn(tmp_path):
    run = read_run(write_run(tmp_path / "a"))
    assert run.is_over and run.name == "a"
    picture = run_picture([run])
    assert titles(picture) == ["Loss", "Perplexity", "BLEU", "Throughput", "Gradient norm", "Learning rate"]
    updates, losses = picture.arrays["a/loss/valid"]
    expected = [record for record in records(50) if record["kind"] == "valid"]
    assert updates.tolist() == [record["update"] for record in expected]
    np.testing.assert_array_equal(losses, [record["loss"] for record in expected])
    # What is not a number is not there, and not zero.
    assert len(picture.arrays["a/gradient_norm"][0]) == 49
    best = min(expected, key=lambda record: record["loss"])
    assert best_of(run, "loss", less_is_better=True) == (best["update"], best["loss"])
    assert best_of(run, "bleu", less_is_better=False) == (50, 50.0)
    assert f"{best['loss']:.4f} at update {best['update']}" in picture.about
    assert picture.panels[1].logarithmic


def test_a_run_that_goes_on_is_read_up_to_its_last_whole_line(tmp_path):
    folder = write_run(tmp_path / "a", 11, is_over=False, tail='{"kind": "train", "upd')
    run = read_run(folder)
    assert not run.is_over
    assert len(run.records) == len(records(11))
    assert "11 updates so far" in run_picture([run]).about
    write_run(folder, 12, is_over=False, tail="12\nnull\n")
    assert len(read_run(folder).records) == len(records(12))


def test_several_runs_share_panels_and_one_colour_each(tmp_path):
    runs = [read_run(write_run(tmp_path / place / "run", last)) for place, last in (("x", 20), ("y", 30))]
    picture = run_picture(runs)
    loss = picture.panels[0]
    assert [series.name.split(",")[0] for series in loss.series] == ["run (1)", "run (1)", "run (2)", "run (2)"]
    assert [series.colour for series in loss.series] == [0, 0, 1, 1]
    assert [series.dashed for series in loss.series] == [True, False, True, False]


def test_what_was_not_measured_has_no_panel(tmp_path):
    assert "BLEU" not in titles(run_picture([read_run(write_run(tmp_path / "a", bleu=False))]))


def test_of_long_curves_the_last_point_is_shown(tmp_path):
    picture = run_picture([read_run(write_run(tmp_path / "a", 5001))])
    (series,) = picture.panels[4].series
    assert len(series.x) <= 2000 and series.x[-1] == 5001
    assert len(picture.arrays["a/gradient_norm"][0]) == 5000


def test_folders_without_measurements_are_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match="no measurement yet"):
        read_run(tmp_path)
