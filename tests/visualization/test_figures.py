import sys

import numpy as np
import pytest
from runs_on_disk import write_run

from vanilla_transformer.errors import UserError
from vanilla_transformer.visualization.attention import attention_of
from vanilla_transformer.visualization.figures import attention_figure, check_matplotlib, picture_figure, save_figure
from vanilla_transformer.visualization.panels import Picture, Pieces
from vanilla_transformer.visualization.positions import positions_picture
from vanilla_transformer.visualization.runs import read_run, run_picture
from vanilla_transformer.visualization.vocabulary import tokenizer_picture


BEGINNINGS = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.fixture
def attention(model, tokenizer, ids):
    return attention_of(model, tokenizer, *ids)


@pytest.mark.parametrize("suffix", BEGINNINGS)
def test_figures_are_written_in_every_format(attention, tmp_path, suffix):
    path = tmp_path / f"figure{suffix}"
    assert save_figure(attention_figure(attention, "cross", layer=1), path) == []
    assert path.read_bytes().startswith(BEGINNINGS[suffix])


@pytest.mark.parametrize(
    ("part", "layer", "head", "drawn"),
    [
        ("cross", None, None, 9),
        ("encoder", None, None, 4),
        ("decoder", 2, None, 3),
        ("cross", 0, 1, 1),
        ("cross", None, 2, 3),
    ],
)
def test_every_head_is_drawn_with_its_weights(attention, part, layer, head, drawn):
    figure = attention_figure(attention, part, layer=layer, head=head)
    assert len(figure.axes) == drawn
    weights, rows, columns = attention.parts[part]
    chosen = weights[slice(None) if layer is None else [layer]][:, slice(None) if head is None else [head]]
    images = [axes.images[0].get_array() for axes in figure.axes]
    np.testing.assert_allclose(np.square(images), chosen.reshape(-1, *chosen.shape[2:]), atol=1e-6)
    if layer is not None:
        assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == list(rows.labels)
        assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == list(columns.labels)


def test_tokens_are_text_and_no_formulae(attention, tmp_path):
    assert "$x_1$" in "".join(attention.source.labels)
    path = tmp_path / "figure.svg"
    assert save_figure(attention_figure(attention, "encoder", layer=0), path) == []
    text = path.read_text(encoding="utf-8")
    assert text.count(">$<") >= 2 and "&lt;" in text
    picture = Picture("$a$", "", (Pieces("$\\frac$", "", ("$\\frac{", "ß"), (1, 2), (0, 1)),))
    assert save_figure(picture_figure(picture), path) == []
    assert "$\\frac{" in path.read_text(encoding="utf-8")


def test_the_same_figure_is_the_same_file(attention, tmp_path):
    for name in ("a.svg", "b.svg"):
        save_figure(attention_figure(attention, "cross", layer=0), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_characters_that_the_font_lacks_are_told(tokenizer, tmp_path):
    figure = picture_figure(tokenizer_picture(tokenizer, ["漢"]))
    (remark,) = save_figure(figure, tmp_path / "figure.png")
    assert "the font lacks 1 of the characters" in remark
    assert save_figure(figure, tmp_path / "figure.svg") == []
    assert "漢" in (tmp_path / "figure.svg").read_text(encoding="utf-8")


def test_every_panel_of_a_picture_is_drawn(make_model, tokenizer, tmp_path):
    config = make_model().config
    pictures = [
        positions_picture(config, length=20, trained_length=10, learned=np.ones((12, 24)), model_name="m"),
        run_picture([read_run(write_run(tmp_path / name)) for name in "ab"]),
        tokenizer_picture(tokenizer, ["one two " * 30], corpora=(["a"], ["b"])),
    ]
    for picture in pictures:
        figure = picture_figure(picture)
        drawn = [axes.get_title() for axes in figure.axes if axes.get_title()]
        assert drawn == [panel.title for panel in picture.panels]
    # The last one, whose letters are many.
    assert save_figure(figure, tmp_path / "figure.svg") == []


def test_without_matplotlib_figures_are_refused_and_name_the_extra(monkeypatch):
    check_matplotlib()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"vanilla-transformer\[visualization\]"):
        check_matplotlib()
