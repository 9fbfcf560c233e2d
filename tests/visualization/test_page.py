import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from vanilla_transformer.visualization.attention import attention_of
from vanilla_transformer.visualization.attention_page import attention_page, quantise
from vanilla_transformer.visualization.page import json_in_html, page
from vanilla_transformer.visualization.panels import Heatmap, Lines, Picture, Series, picture_page


# What ends a script, opens a comment, ends a line of old JavaScript, or looks like a place to fill.
HOSTILE = "</script><script>alert(1)</script><!-- ]]> \u2028\u2029 & &lt; %%code%% \"' 🙂 \ud800 \x00"


class Reader(HTMLParser):
    """Reads a page as a browser does: its elements, and the text of scripts and styles."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.raw: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, text):
        if self.elements and self.elements[-1][0] in ("script", "style") and text.strip():
            self.raw.append((self.elements[-1][0], text))


def data_of(text: str) -> dict:
    scripts = [raw for tag, raw in Reader(text).raw if tag == "script"]
    return json.loads(scripts[0])


def test_data_that_look_like_markup_stay_data():
    text = page(HOSTILE.replace("\ud800", ""), {"text": HOSTILE, "list": [HOSTILE]}, ["common.js"])
    read = Reader(text)
    assert [tag for tag, _ in read.elements].count("script") == 2
    assert data_of(text) == {"text": HOSTILE, "list": [HOSTILE]}
    assert json_in_html(HOSTILE).isascii()
    assert not re.search(r"[<>&]", json_in_html(HOSTILE))


def test_numbers_that_json_does_not_have_are_refused():
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_in_html({"value": float("nan")})


def test_a_page_may_run_its_own_script_and_load_nothing(model, tokenizer, ids):
    text = attention_page(attention_of(model, tokenizer, *ids), tokenizer, model_name="m")
    read = Reader(text)
    (policy,) = [attributes["content"] for tag, attributes in read.elements if "http-equiv" in attributes]
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    for tag, raw in read.raw:
        if tag == "style" or raw != read.raw[1][1]:
            digest = base64.b64encode(hashlib.sha256(raw.encode()).digest()).decode()
            assert f"'sha256-{digest}'" in policy, tag
    for tag, attributes in read.elements:
        assert not {"src", "srcset", "action", "style"} & attributes.keys(), tag
        assert attributes.get("href", "#").startswith("#")
        assert not [name for name in attributes if name.startswith("on")]
    assert "\nimport " not in text and "innerHTML" not in text and "fetch(" not in text


def test_the_page_holds_the_weights(model, tokenizer, ids):
    attention = attention_of(model, tokenizer, *ids)
    data = data_of(attention_page(attention, tokenizer, model_name="m"))
    for part, name in zip(data["parts"], ("encoder", "decoder", "cross"), strict=True):
        weights = attention.parts[name][0]
        assert (part["layers"], part["heads"]) == weights.shape[:2]
        levels = np.frombuffer(base64.b64decode(part["weights"]), dtype=np.uint8).reshape(weights.shape)
        assert np.abs((levels / 255.0) ** 2 - weights).max() <= 0.004
        assert tuple(data[part["rows"]]["tokens"]) == attention.parts[name][1].labels
        assert tuple(data[part["columns"]]["tokens"]) == attention.parts[name][2].labels
    assert data["tree"] is None


def test_a_byte_keeps_a_probability():
    weights = np.linspace(0.0, 1.0, 10001)
    levels = np.frombuffer(quantise(weights), dtype=np.uint8)
    errors = np.abs((levels / 255.0) ** 2 - weights)
    assert errors.max() <= 0.004
    assert errors[weights <= 0.01].max() <= 0.0005
    assert levels[0] == 0 and levels[-1] == 255


def test_panels_are_told_with_what_json_holds():
    values = np.array([[0.0, -2.0], [1.0, 0.5]])
    picture = Picture(
        "title", "about",
        (
            Lines("a", "", "x", "y", (Series("s", np.array([1, 2]), np.array([0.5, np.nan])),)),
            Heatmap("b", "", "x", "y", values),
        ),
    )  # fmt: skip
    lines, heatmap = data_of(picture_page(picture))["panels"]
    assert lines["kind"] == "Lines"
    assert lines["series"][0]["x"] == [1, 2]
    assert lines["series"][0]["y"] == [0.5, None]
    steps = np.frombuffer(base64.b64decode(heatmap["values"]["steps"]), dtype="<i2")
    shown = steps.reshape(heatmap["values"]["shape"]) / 32767 * heatmap["values"]["largest"]
    np.testing.assert_allclose(shown, values, atol=1e-4)
