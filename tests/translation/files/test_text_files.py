import errno
import json
import os
import random
from dataclasses import replace

import pytest

from vanilla_transformer import Translator
from vanilla_transformer.errors import UserError
from vanilla_transformer.translation.files.layouts import Layout
from vanilla_transformer.translation.files.text_files import InputFile, check_partial, partial_files, translate_file


class Interruption(Exception):
    pass


@pytest.fixture
def texts(sentences):
    return [*sentences[:9], "", "  ", *sentences[9:20]]


@pytest.fixture
def source(tmp_path, texts):
    path = tmp_path / "source"
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture
def make_translator(model, tokenizer, monkeypatch):
    """A translator that is interrupted after a number of texts."""

    def make_translator(after: int | None = None, **options) -> Translator:
        translator = Translator(model, tokenizer, **{"num_beams": 1, "window": 3, **options})
        translate, begun = translator.translate_window, []

        def interrupted(texts, **more):
            begun.extend(texts)
            if after is not None and len(begun) > after:
                raise Interruption
            return translate(texts, **more)

        monkeypatch.setattr(translator, "translate_window", interrupted)
        return translator

    return make_translator


def run(translator, source, target, *, layout=None, resume=False):
    layout = layout or Layout()
    translate_file(translator, InputFile.check(source, layout), target, layout, model="user/name", resume=resume)


def test_an_interrupted_file_goes_on_without_losing_or_doubling_a_line(tmp_path, source, texts, make_translator):
    run(make_translator(), source, tmp_path / "whole")
    expected = (tmp_path / "whole").read_bytes()
    assert expected.decode().split("\n")[:-1] == make_translator().translate(texts)
    target = tmp_path / "target"
    partial, record = partial_files(target)
    chance = random.Random(4)
    for after, window in ((7, 3), (1, 1), (5, 2)):
        with pytest.raises(Interruption):
            run(make_translator(after, window=window), source, target, resume=True)
        assert not target.exists()
        assert expected.startswith(partial.read_bytes())
        # A process that is killed may leave a part of a line.
        with partial.open("ab") as file:
            file.write("Zé".encode()[: chance.randint(0, 2)])
    assert partial.read_bytes().count(b"\n") == 6 + 1 + 4
    run(make_translator(), source, target, resume=True)
    assert target.read_bytes() == expected
    assert not partial.exists() and not record.exists()
    # There is nothing left to go on with.
    run(make_translator(), source, target, resume=True)
    assert target.read_bytes() == expected


def test_samples_go_on_as_if_never_interrupted(tmp_path, source, make_translator):
    options = {"num_beams": None, "sample": True, "temperature": 2.0}
    run(make_translator(**options), source, tmp_path / "whole")
    with pytest.raises(Interruption):
        run(make_translator(7, **options), source, tmp_path / "target")
    run(make_translator(window=4, **options), source, tmp_path / "target", resume=True)
    assert (tmp_path / "target").read_bytes() == (tmp_path / "whole").read_bytes()


def test_what_was_left_is_neither_lost_nor_mixed(tmp_path, source, make_translator):
    target = tmp_path / "target"
    target.write_text("before\n")
    partial, record = partial_files(target)
    with pytest.raises(Interruption):
        run(make_translator(7), source, target)
    left = partial.read_bytes()
    with pytest.raises(UserError, match=r"target.partial holds what an interrupted translation left; continue"):
        run(make_translator(), source, target)
    for options, name in (
        ({"num_beams": 2}, "search"),
        ({"max_source_tokens": 99}, "long_texts"),
    ):
        with pytest.raises(UserError, match=f"cannot be continued, because these have changed: {name};"):
            run(make_translator(**options), source, target, resume=True)
    with pytest.raises(UserError, match="these have changed: layout;"):
        run(make_translator(), source, target, resume=True, layout=Layout(alternatives=True))
    source.write_text(source.read_text() + "One more.\n")
    with pytest.raises(UserError, match="these have changed: input;"):
        run(make_translator(), source, target, resume=True)
    record.unlink()
    with pytest.raises(
        UserError, match=r"target.partial cannot be continued, because .* is missing or damaged; delete both"
    ):
        run(make_translator(), source, target, resume=True)
    assert partial.read_bytes() == left
    assert target.read_text() == "before\n"


def test_an_interruption_before_the_first_line_leaves_nothing_in_the_way(tmp_path, source, make_translator):
    with pytest.raises(Interruption):
        run(make_translator(0), source, tmp_path / "target")
    check_partial(tmp_path / "target", resume=False)
    # Even with other options.
    run(make_translator(num_beams=2), source, tmp_path / "target")
    assert (tmp_path / "target").exists()


def test_a_changed_model_is_noticed(tmp_path, source, make_translator):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    checked = InputFile.check(source, Layout())
    with pytest.raises(Interruption):
        translate_file(make_translator(7), checked, tmp_path / "target", Layout(), model=folder)
    (folder / "model.safetensors").write_bytes(b"Weights")
    with pytest.raises(UserError, match="these have changed: model;"):
        translate_file(make_translator(), checked, tmp_path / "target", Layout(), model=folder, resume=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    translate_file(make_translator(), checked, tmp_path / "target", Layout(), model=folder, resume=True)


@pytest.mark.skipif(os.name == "nt", reason="there are no such locks")
def test_two_processes_do_not_write_one_file(tmp_path, source, make_translator):
    import fcntl

    target = tmp_path / "target"
    with pytest.raises(Interruption):
        run(make_translator(7), source, target)
    partial, _ = partial_files(target)
    before = partial.read_bytes()
    # A lock is that of an open file, here as in another process.
    with partial.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="is being written by another process"):
            run(make_translator(), source, target, resume=True)
    assert partial.read_bytes() == before
    run(make_translator(), source, target, resume=True)


@pytest.mark.skipif(os.name == "nt", reason="there are no such locks")
def test_a_second_process_leaves_the_record_of_the_first(tmp_path, source, make_translator):
    import fcntl

    target = tmp_path / "target"
    partial, record = partial_files(target)
    # The first process has begun, and written no line yet.
    with pytest.raises(Interruption):
        run(make_translator(0), source, target)
    before = record.read_bytes()
    with partial.open("ab") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="is being written by another process"):
            run(make_translator(num_beams=2), source, target)
    assert record.read_bytes() == before


@pytest.mark.skipif(os.name == "nt", reason="there are no such locks")
def test_a_file_that_was_renamed_before_its_lock_is_not_written(tmp_path, source, make_translator, monkeypatch):
    import fcntl

    target = tmp_path / "target"
    partial, _ = partial_files(target)
    lock = fcntl.flock

    def finished_first(file, flags):
        partial.replace(target)
        lock(file, flags)

    monkeypatch.setattr(fcntl, "flock", finished_first)
    with pytest.raises(UserError, match="is being written by another process"):
        run(make_translator(), source, target)
    assert target.read_bytes() == b""


def test_a_file_system_without_locks_is_written_all_the_same(tmp_path, source, make_translator, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def unsupported(file, flags):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    run(make_translator(), source, tmp_path / "target")
    expected = make_translator().translate(source.read_text(encoding="utf-8").splitlines())
    assert (tmp_path / "target").read_text(encoding="utf-8").splitlines() == expected


def test_one_line_of_output_for_each_line_of_input_in_every_layout(tmp_path, sentences, make_translator):
    records = [{"id": number, "source": text} for number, text in enumerate([*sentences[:5], "", "a\nb"])]
    source = tmp_path / "source.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    layout = Layout(source="jsonl", target="jsonl", alternatives=True)
    options = {"num_beams": 3, "num_hypotheses": 2}
    run(make_translator(**options), source, tmp_path / "target", layout=layout)
    found = [json.loads(line) for line in (tmp_path / "target").read_text(encoding="utf-8").splitlines()]
    assert [{name: record[name] for name in ("id", "source")} for record in found] == records
    expected = make_translator(**options).hypotheses([record["source"].replace("\n", " ") for record in records])
    for record, translations in zip(found, expected, strict=True):
        assert [entry["text"] for entry in record["translations"]] == [entry.text for entry in translations]
        scores = [entry["score"] for entry in record["translations"]]
        assert scores == pytest.approx([entry.score for entry in translations], abs=1e-9)
    plain = tmp_path / "plain"
    run(make_translator(**options), source, plain, layout=replace(layout, target="text", alternatives=False))
    assert plain.read_text(encoding="utf-8").split("\n")[:-1] == [found[0].text for found in expected]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; give at least one line."),
        (b"\xef\xbb\xbfa\nb\xdf\n", "source, line 2, byte 2: the text is not UTF-8; convert it."),
        (b"a\nb\0\n", "source, line 2: the text has a NUL character"),
        ("a\nb\n".encode("utf-16"), "source is UTF-16, and text must be UTF-8; convert it: iconv -f UTF-16 -t UTF-8"),
        (b"ok\tx\na\n", "source, line 2, has 1 columns, and `column` is 2;"),
    ],
)
def test_an_input_is_checked_to_its_end(tmp_path, content, message):
    (tmp_path / "source").write_bytes(content)
    with pytest.raises(UserError) as error:
        InputFile.check(tmp_path / "source", Layout(source="tsv" if b"\t" in content else "text", column=2))
    assert message in str(error.value)
    with pytest.raises(UserError, match=r"nosuch cannot be read \(No such file or directory\)"):
        InputFile.check(tmp_path / "nosuch", Layout())


def test_only_line_feeds_end_lines(tmp_path):
    (tmp_path / "source").write_bytes("\ufeffa\u2028b\r\n\n\x0bc\x85".encode())
    checked = InputFile.check(tmp_path / "source", Layout())
    assert list(checked.lines()) == ["a\u2028b", "", "\x0bc\x85"]
    assert checked.num_lines == 3


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_a_pipe_is_no_input(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=r"pipe is not a regular file; give one, or pipe it"):
        InputFile.check(tmp_path / "pipe", Layout())


@pytest.mark.parametrize("change", [lambda text: "", lambda text: text[:40], lambda text: text.replace("e", "a")])
def test_an_input_that_changes_meanwhile_gives_no_output(tmp_path, source, make_translator, change):
    checked = InputFile.check(source, Layout())
    source.write_text(change(source.read_text(encoding="utf-8")), encoding="utf-8")
    target = tmp_path / "target"
    with pytest.raises(UserError, match="source has changed while it was translated"):
        translate_file(make_translator(), checked, target, Layout(), model="user/name")
    assert not target.exists()


@pytest.mark.parametrize("name", ["target", "target.txt", "target.json"])
def test_an_output_in_the_models_folder_is_resumed(tmp_path, source, make_translator, name):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    checked = InputFile.check(source, Layout())
    with pytest.raises(Interruption):
        translate_file(make_translator(7), checked, tmp_path / name, Layout(), model=tmp_path)
    (tmp_path / "target-before.txt").write_text("another output\n")
    translate_file(make_translator(), checked, tmp_path / name, Layout(), model=tmp_path, resume=True)
    assert (tmp_path / name).exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"5", b"\xff\xfe\0", b"{}", b"[" * 5000, b"9" * 5000])
def test_an_odd_record_is_neither_followed_nor_overwritten(tmp_path, source, make_translator, content):
    target = tmp_path / "target"
    partial, record = partial_files(target)
    record.write_bytes(content)
    with pytest.raises(UserError, match=r"target\.partial\.json is not what a translation left.*; move it away"):
        run(make_translator(), source, target)
    partial.write_text("one\n")
    with pytest.raises(UserError, match=r"cannot be continued, because .* is missing or damaged; delete both"):
        run(make_translator(), source, target, resume=True)
    assert record.read_bytes() == content and partial.read_text() == "one\n"


def test_more_lines_than_the_input_has_are_not_continued(tmp_path, source, make_translator):
    target = tmp_path / "target"
    partial, _ = partial_files(target)
    with pytest.raises(Interruption):
        run(make_translator(7), source, target)
    partial.write_bytes(b"a line\n" * 1000)
    with pytest.raises(UserError, match=r"cannot be continued, because it has 1,000 lines, and .* delete it"):
        run(make_translator(), source, target, resume=True)
    assert not target.exists()


@pytest.mark.parametrize("number", [0, 1])
def test_what_stands_in_the_way_of_an_unfinished_output_is_told(tmp_path, number):
    partial_files(tmp_path / "target")[number].mkdir()
    with pytest.raises(UserError, match=r"target\.partial.* is in the way: it must be a file"):
        check_partial(tmp_path / "target", resume=False)
