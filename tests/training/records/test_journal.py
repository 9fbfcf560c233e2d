import json
import math

import pytest

from vanilla_transformer.errors import UserError
from vanilla_transformer.training.records.journal import Journal, read_journal


def test_records_come_back_in_order(tmp_path):
    path = tmp_path / "metrics.jsonl"
    journal = Journal(path)
    journal.write("train", 50, {"loss": 3.25, "note": "naïve\u2028\n"})
    journal.write("valid", 50, {"loss": 1e-300, "bleu": 0.1 + 0.2})
    journal.write("train", 100, {"loss": math.inf})
    assert read_journal(path) == [
        {"kind": "train", "update": 50, "loss": 3.25, "note": "naïve\u2028\n"},
        {"kind": "valid", "update": 50, "loss": 1e-300, "bleu": 0.1 + 0.2},
        {"kind": "train", "update": 100, "loss": math.inf},
    ]
    assert path.read_text().count("\n") == 3


def test_a_new_run_starts_an_empty_journal(tmp_path):
    path = tmp_path / "metrics.jsonl"
    Journal(path).write("train", 1, {})
    Journal(path)
    assert read_journal(path) == []


def test_records_beyond_the_checkpoint_are_written_once_again(tmp_path):
    whole, resumed = tmp_path / "whole.jsonl", tmp_path / "resumed.jsonl"

    def run(journal, first, last):
        for update in range(first, last + 1):
            journal.write("train", update, {"loss": 1.0 / update})
            if update % 3 == 0:
                journal.write("valid", update, {"loss": 2.0 / update})

    run(Journal(whole), 1, 12)
    # Stopped after update 8, saved at 6; then stopped at once; then stopped after 11, saved at 9.
    run(Journal(resumed), 1, 8)
    Journal(resumed, 6)
    run(Journal(resumed, 6), 7, 11)
    run(Journal(resumed, 9), 10, 12)
    assert read_journal(resumed) == read_journal(whole)
    assert resumed.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["resumed.jsonl", "whole.jsonl"]


def test_a_line_that_was_cut_off_anywhere_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    journal = Journal(path)
    for update in (1, 2, 3):
        journal.write("train", update, {"loss": 0.5, "note": "text"})
    content = path.read_bytes()
    last = len(content.splitlines(keepends=True)[-1])
    for cut in range(2, last + 1):
        path.write_bytes(content[:-cut])
        assert [record["update"] for record in read_journal(path)] == [1, 2]
    # A resumed run goes on behind the last whole line, not in the middle of the broken one.
    path.write_bytes(content[:-5])
    Journal(path, 3).write("train", 3, {"loss": 0.5, "note": "text"})
    assert path.read_bytes() == content


def test_what_a_crash_may_leave_at_the_end_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    Journal(path).write("train", 1, {})
    with path.open("ab") as file:
        file.write(b"\x00" * 100)
    assert [record["update"] for record in read_journal(path)] == [1]


def test_a_line_is_plain_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    Journal(path).write("train", 7, {"loss": 0.25})
    assert json.loads(path.read_text()) == {"kind": "train", "update": 7, "loss": 0.25}


@pytest.mark.parametrize(
    "line",
    [
        *("5", "[]", "null", "{}"),
        *('{"update": 1}', '{"kind": 1, "update": 1}', '{"kind": "train", "update": "1"}'),
        '{"kind": "train", "update": true}',
    ],
)
def test_lines_that_are_json_and_no_records_are_refused(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    content = f"{json.dumps({'kind': 'train', 'update': 1})}\n{line}\n"
    path.write_text(content, encoding="utf-8")
    for read in (read_journal, Journal):
        with pytest.raises(UserError, match="which is no record of an update; take the line out"):
            read(path)
    assert path.read_text(encoding="utf-8") == content


@pytest.mark.parametrize("line", ["[" * 5000, "9" * 5000, "\0\ufffd", '{"kind": "tr'])
def test_lines_that_are_not_json_are_left_out(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    records = [{"kind": "train", "update": update, "loss": 1.0} for update in (1, 2)]
    path.write_text("\n".join([json.dumps(records[0]), line, json.dumps(records[1]), ""]), encoding="utf-8")
    assert read_journal(path) == records
    Journal(path, 2)
    assert read_journal(path) == records


def test_a_journal_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"cannot be read \(Is a directory\)"):
        Journal(tmp_path)
