import os
from pathlib import Path

import pytest

from vanilla_transformer.cli.files import check_output_file, read_lines, write_lines
from vanilla_transformer.errors import UserError


def test_lines_are_split_at_line_feeds_alone(tmp_path):
    path = tmp_path / "text"
    path.write_bytes("\ufeffone\r\ntw\u2028o\r\n\n\x0cfour\r".encode())
    assert read_lines(path) == ["one", "tw\u2028o", "", "\x0cfour"]


def test_what_is_written_is_read_again(tmp_path):
    lines = ["one", "", "dr\u00ed\u2028\U0001f642", " four "]
    write_lines(tmp_path / "text", lines)
    assert read_lines(tmp_path / "text") == lines


def test_lines_that_end_early_leave_the_file_as_it_was(tmp_path):
    path = tmp_path / "text"
    path.write_text("what was there\n")

    def lines():
        yield from ["new"] * 10_000
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_lines(path, lines())
    assert path.read_text() == "what was there\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_beside_the_output_is_safe(tmp_path):
    neighbours = {tmp_path / name for name in ("partial-text", "text.partial", "text~")}
    for path in neighbours:
        path.write_text("precious\n")
    write_lines(tmp_path / "text", ["new"])
    assert {path.read_text() for path in neighbours} == {"precious\n"}


@pytest.mark.parametrize("barred", ["file", "folder", "folder of the link's file", "folder of a new file"])
def test_a_file_that_cannot_be_replaced_is_refused(tmp_path, monkeypatch, barred):
    # The superuser may write anything, so the answer of the system is given here.
    real, linked = tmp_path / "real", tmp_path / "linked"
    for folder in (real, linked):
        folder.mkdir()
    (linked / "link").symlink_to(real / "file")
    if barred != "folder of a new file":
        (real / "file").write_text("precious\n")
    path = linked / "link" if barred == "folder of the link's file" else real / "file"
    denied = real / "file" if barred == "file" else real
    monkeypatch.setattr(os, "access", lambda place, mode: os.path.realpath(place) != str(denied))
    with pytest.raises(UserError, match="cannot be written; choose another file or correct its permissions"):
        check_output_file(path)
    check_output_file(linked / "other")


def test_a_device_needs_no_room_beside_it(monkeypatch):
    monkeypatch.setattr(os, "access", lambda place, mode: str(place) == os.devnull)
    check_output_file(Path(os.devnull))
