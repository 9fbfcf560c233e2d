import json
from pathlib import Path

import pytest

from vanilla_transformer.errors import UserError
from vanilla_transformer.translation.files.layouts import Layout, layout_of
from vanilla_transformer.translation.translator import Translation


FOUND = [Translation("eins", -1.0, -0.5, True), Translation("zw\tei", -2.0, -1.25, False)]


@pytest.mark.parametrize(
    ("name", "layout"), [("a.tsv", "tsv"), ("a.JSONL", "jsonl"), ("a.en", "text"), ("tsv", "text"), (None, "text")]
)
def test_a_files_name_tells_its_layout(name, layout):
    assert layout_of(None if name is None else Path(name)) == layout


@pytest.mark.parametrize(
    ("layout", "line", "text"),
    [
        (Layout(), "a\tb", "a\tb"),
        (Layout(source="tsv"), "a\tb", "a"),
        (Layout(source="tsv", column=2), "a\tb\tc", "b"),
        (Layout(source="tsv", column=2), "", ""),
        (Layout(source="jsonl"), '{"source": "a\\nb", "x": 1}', "a b"),
        (Layout(source="jsonl", key="text"), '{"text": ""}', ""),
    ],
)
def test_the_text_of_a_line(layout, line, text):
    assert layout.text_of(line, "") == text


@pytest.mark.parametrize(
    ("layout", "line", "message"),
    [
        (Layout(source="tsv", column=3), "a\tb", "file, line 4, has 2 columns, and `column` is 3;"),
        (Layout(source="jsonl"), "{", "file, line 4, is not JSON ("),
        (Layout(source="jsonl"), "", "file, line 4, is not JSON ("),
        (Layout(source="jsonl"), "[1]", "file, line 4, is not a JSON object;"),
        (
            Layout(source="jsonl"),
            '{"text": "a"}',
            "file, line 4, has no text under 'source'; name its key with",
        ),
        (Layout(source="jsonl"), '{"source": 1}', "file, line 4, has no text under 'source';"),
        (Layout(source="jsonl"), '{"source": "a \\ud800 man"}', r"file, line 4, holds the lone surrogate '\ud800';"),
        (Layout(source="jsonl"), f'{{"source": {"1" * 5000}}}', "file, line 4, cannot be read as JSON ("),
        (Layout(source="jsonl"), "[" * 100_000, "file, line 4, cannot be read as JSON ("),
    ],
)
def test_lines_of_another_layout_are_refused(layout, line, message):
    with pytest.raises(UserError) as error:
        layout.text_of(line, "file, line 4")
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("layout", "line", "expected"),
    [
        (Layout(), "one", "eins"),
        (Layout(alternatives=True), "one", "eins\t-0.500000\tzw ei\t-1.250000"),
        (Layout(target="tsv"), "one", "eins"),
        (Layout(source="tsv", target="tsv", column=2), "x\tone", "x\tone\teins"),
        (Layout(source="tsv", target="text", column=2), "x\tone", "eins"),
        (Layout(source="tsv", target="tsv"), "", ""),
        (Layout(source="tsv", target="tsv"), "\t", "\t\teins"),
        (Layout(alternatives=True), " ", ""),
        (Layout(source="tsv", target="tsv", alternatives=True), "one", "one\teins\t-0.500000\tzw ei\t-1.250000"),
    ],
)
def test_a_line_of_output(layout, line, expected):
    assert layout.line_of(line, FOUND) == expected


def test_a_tab_stays_a_tab_where_it_begins_no_column():
    assert Layout().line_of("two", FOUND[1:]) == "zw\tei"
    assert Layout(source="tsv", target="tsv").line_of("two", FOUND[1:]) == "two\tzw ei"


def test_json_lines_keep_what_they_held():
    line = '{"id": 3, "source": "\u00fcber", "tags": ["a"]}'
    found = Layout(source="jsonl", target="jsonl").line_of(line, FOUND)
    assert json.loads(found) == {**json.loads(line), "translation": "eins"}
    assert "\u00fcber" in found
    assert json.loads(Layout(target="jsonl").line_of("one", FOUND)) == {"source": "one", "translation": "eins"}
    line = '{"source": "one", "\\udc80": "\\ud800 \\ud83d\\ude00"}'
    found = Layout(source="jsonl", target="jsonl").line_of(line, FOUND).encode("utf-8")
    assert json.loads(found) == {**json.loads(line), "translation": "eins"}
    found = json.loads(Layout(target="jsonl", alternatives=True).line_of("one", FOUND))
    assert found == {
        "source": "one",
        "translations": [
            {"text": "eins", "score": -0.5, "log_prob": -1.0},
            {"text": "zw\tei", "score": -1.25, "log_prob": -2.0},
        ],
    }
