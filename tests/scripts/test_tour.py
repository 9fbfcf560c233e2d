"""The guided tour is what the script makes of today's code: no line, number or picture of it is older."""

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest


ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "tour.py"
STALE = "run `python scripts/tour.py` (with --compute, if numbers changed) and look at what it wrote"


@pytest.fixture(scope="module")
def tour():
    spec = importlib.util.spec_from_file_location("tour", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def values(tour):
    return json.loads(tour.VALUES.read_text(encoding="utf-8"))


def numbers_in(value) -> list[float]:
    if isinstance(value, dict):
        return [number for key in sorted(value) for number in numbers_in(value[key])]
    if isinstance(value, list):
        return [number for part in value for number in numbers_in(part)]
    return [float(value)] if isinstance(value, int | float) else []


def words_in(value) -> list[str]:
    if isinstance(value, dict):
        return [word for key in sorted(value) for word in [key, *words_in(value[key])]]
    if isinstance(value, list):
        return [word for part in value for word in words_in(part)]
    return [re.sub(r"[\d.e-]+", "", value)] if isinstance(value, str) else []


def test_the_text_has_todays_lines_of_code(tour, values):
    assert tour.TOUR.read_text(encoding="utf-8") == tour.text_of(values), STALE


def test_every_piece_of_code_and_every_picture_has_its_place(tour, values):
    template = tour.TEMPLATE.read_text(encoding="utf-8")
    assert sorted(re.findall(r"^<!-- code (\w+) -->$", template, flags=re.MULTILINE)) == sorted(tour.CODE)
    pictures = re.findall(r"^<!-- picture (\w+) \| .+ -->$", template, flags=re.MULTILINE)
    assert sorted(pictures) == sorted(values) == sorted({**tour.EXACT, **tour.EXPERIMENTS})
    assert {path.name for path in tour.PICTURES.iterdir()} == {*(f"{name}.svg" for name in pictures), "values.json"}
    text = tour.TOUR.read_text(encoding="utf-8")
    assert "<!--" not in text and "{{" not in text
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert (tour.TOUR.parent / target).is_file(), target


@pytest.mark.parametrize(
    "name",
    [
        "scaling",
        "masks",
        "feed_forward",
        "residual",
        "embedding",
        "positions",
        "schedule",
        "smoothing",
        "table_3",
        "penalty",
    ],
)
def test_pictures_show_what_todays_code_computes(tour, values, name):
    assert name in tour.EXACT
    computed = json.loads(json.dumps(tour.compute(name)))
    assert words_in(computed) == words_in(values[name]), STALE
    scale = max(map(abs, numbers_in(computed["panels"])))
    np.testing.assert_allclose(
        numbers_in(computed["panels"]), numbers_in(values[name]["panels"]), rtol=2e-3, atol=2e-4 * scale, err_msg=STALE
    )


def test_the_pictures_are_drawn_from_these_numbers(tour, values):
    for name, told in values.items():
        drawn = (tour.PICTURES / f"{name}.svg").read_text(encoding="utf-8")
        for panel in told["panels"]:
            assert panel["title"].replace("'", "").split("(")[0].strip()[:12] in drawn.replace("'", ""), (name, STALE)
        assert len(drawn) < 400_000


def test_the_experiments_show_what_the_text_says(values):
    warm_up, backwards = values["warm_up"]["numbers"], values["backwards"]["numbers"]
    assert warm_up["with_warm_up"] < warm_up["without_warm_up"] - 0.5
    for kind in ("sinusoidal", "learned"):
        assert backwards[f"right_8_{kind}"] > 0.9
        assert backwards[f"right_16_{kind}"] < 0.2
    assert backwards["right_9_sinusoidal"] > backwards["right_9_learned"]


def test_excerpts_leave_out_docstrings_and_nothing_else(tour):
    text = tour.excerpt(*tour.CODE["attention"])
    assert '"""' not in text
    assert "scores = torch.matmul(query, key.transpose(2, 3)) * scaling" in text
    assert "return torch.matmul(weights, value).transpose(1, 2), weights" in text
    with pytest.raises(ValueError, match="unpack"):
        tour.excerpt(tour.MODELING, "no_such_function")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["warm_up", "backwards"])
def test_experiments_come_out_alike(tour, values, name):
    numbers = tour.compute(name)["numbers"]
    for key, value in values[name]["numbers"].items():
        assert numbers[key] == pytest.approx(value, abs=0.3)
