import gzip
import os
import random
from pathlib import Path

import pytest

from vanilla_transformer.data.corpora import (
    ParallelText,
    Rejections,
    check_language_order,
    check_language_suffixes,
)
from vanilla_transformer.errors import UserError


SENTENCES = [Path(__file__).with_name(f"sentences.{language}") for language in ("en", "de")]


def two_files(folder: Path, source: bytes, target: bytes, name: str = "train") -> ParallelText:
    files = (folder / f"{name}.source", folder / f"{name}.target")
    for path, content in zip(files, (source, target), strict=True):
        path.write_bytes(content)
    return ParallelText(files)


def table(folder: Path, content: bytes, columns: tuple[int, int] | None = None) -> ParallelText:
    path = folder / "train.tsv"
    path.write_bytes(content)
    return ParallelText((path,), columns)


def read(text: ParallelText, policy: str = "drop") -> tuple[list[tuple[int, str, str]], Rejections]:
    rejections = Rejections(policy)
    return list(text.pairs(rejections)), rejections


# Files and tables


def test_line_n_of_one_file_stands_beside_line_n_of_the_other(tmp_path):
    text = two_files(tmp_path, b"one\ntwo\nthree\n", b"eins\nzwei\ndrei\n")
    assert text.check_lines() == 3
    pairs, rejections = read(text)
    assert pairs == [(1, "one", "eins"), (2, "two", "zwei"), (3, "three", "drei")]
    assert not rejections.counts and rejections.summary() == ""


def test_a_table_holds_the_same_pairs_as_two_files(tmp_path):
    sides = [path.read_text(encoding="utf-8").splitlines() for path in SENTENCES]
    rows = "".join(f"{source}\t{target}\n" for source, target in zip(*sides, strict=True))
    from_table, _ = read(table(tmp_path, rows.encode()))
    from_files, _ = read(ParallelText(tuple(SENTENCES)))
    assert from_table == from_files and len(from_files) == len(sides[0])


@pytest.mark.parametrize("columns", [(1, 2), (3, 1), (2, 4), (4, 3)])
def test_columns_are_chosen_by_number_from_one_on(tmp_path, columns):
    rows = [[f"r{row}c{column}" for column in range(1, 5)] for row in range(1, 4)]
    text = table(tmp_path, "\n".join("\t".join(row) for row in rows).encode(), columns)
    pairs, _ = read(text)
    assert pairs == [(n, row[columns[0] - 1], row[columns[1] - 1]) for n, row in enumerate(rows, start=1)]


def test_a_table_of_other_than_two_columns_wants_them_named(tmp_path):
    pairs, rejections = read(table(tmp_path, b"a\tb\nc\nd\te\tf\ng\th\n"))
    assert [number for number, *_ in pairs] == [1, 4]
    (reason,) = rejections.counts
    assert "`tsv_columns`" in reason and rejections.counts[reason] == 2
    assert rejections.examples[reason].endswith("line 2 with 1 columns")


def test_a_row_that_lacks_a_named_column_is_rejected(tmp_path):
    pairs, rejections = read(table(tmp_path, b"a\tb\tc\nd\te\nf\tg\th\n", (1, 3)))
    assert pairs == [(1, "a", "c"), (3, "f", "h")]
    (reason,) = rejections.counts
    assert "lacks a column" in reason and rejections.examples[reason].endswith("line 2 with 2 columns")


@pytest.mark.parametrize("columns", [(0, 1), (2, 2), (-1, 3)])
def test_column_numbers_must_differ_and_count_from_one(tmp_path, columns):
    with pytest.raises(UserError, match=f"`tsv_columns` is {columns[0]} {columns[1]}.*different column numbers"):
        table(tmp_path, b"a\tb\n", columns)


def test_columns_of_two_files_are_a_contradiction(tmp_path):
    files = two_files(tmp_path, b"a\n", b"b\n").files
    with pytest.raises(UserError, match="`tsv_columns` was given with two files"):
        ParallelText(files, (1, 2))


@pytest.mark.parametrize("number", [0, 3])
def test_parallel_text_is_one_file_or_two(tmp_path, number):
    with pytest.raises(UserError, match=f"given as {number} files"):
        ParallelText((tmp_path / "a",) * number)


def test_a_third_column_can_name_each_pairs_language(tmp_path):
    text = table(tmp_path, b"a\tde\tb\nc\tfr\td\ne\tf\n", (1, 3))
    text = ParallelText(text.files, (1, 3), 2)
    rejections = Rejections("drop")
    assert list(text.tagged_pairs(rejections)) == [(1, "a", "b", "de"), (2, "c", "d", "fr")]
    assert list(text.pairs(rejections)) == [(1, "a", "b"), (2, "c", "d")]
    for columns, language in (((1, 3), 3), ((1, 3), 0), (None, 2)):
        with pytest.raises(UserError, match=f"`language_column` is {language}; .* third column"):
            ParallelText(text.files, columns, language)


def test_compressed_files_are_read_as_they_were(tmp_path):
    text = two_files(tmp_path, b"one\ntwo\n", b"eins\nzwei\n")
    files = tuple(path.with_name(f"{path.name}.gz") for path in text.files)
    for path, compressed in zip(text.files, files, strict=True):
        compressed.write_bytes(gzip.compress(path.read_bytes()))
    assert ParallelText(files).check_lines() == 2 and read(ParallelText(files)) == read(text)
    for content in (b"one\ntwo\n", files[0].read_bytes()[:-9]):
        files[0].write_bytes(content)
        with pytest.raises(UserError, match=r"train.source.gz cannot be decompressed \(.*\); compress it again"):
            ParallelText(files).check_lines()


# Line ends and encodings


def test_byte_order_mark_and_carriage_returns_are_no_text(tmp_path):
    text = two_files(tmp_path, b"\xef\xbb\xbfone\r\ntwo\r\n", b"eins\nzwei\n")
    assert read(text)[0] == [(1, "one", "eins"), (2, "two", "zwei")]
    assert read(table(tmp_path, b"\xef\xbb\xbfone\teins\r\ntwo\tzwei\r\n"))[0] == read(text)[0]


def test_a_byte_order_mark_is_text_after_the_first_line(tmp_path):
    pairs, _ = read(two_files(tmp_path, "a\n\ufeffb\n".encode(), b"c\nd\n"))
    assert pairs[1][1] == "\ufeffb"


@pytest.mark.parametrize("separator", ["\r", "\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e"])
def test_only_the_line_feed_ends_a_line(tmp_path, separator):
    inside = f"one{separator}still one"
    text = two_files(tmp_path, f"{inside}\ntwo\n".encode(), f"eins\nzwei{separator}noch zwei\n".encode())
    assert text.check_lines() == 2
    assert read(text)[0] == [(1, inside, "eins"), (2, "two", f"zwei{separator}noch zwei")]
    assert read(table(tmp_path, f"{inside}\teins\ntwo\tzwei\n".encode()))[0][1] == (2, "two", "zwei")


def test_the_last_line_needs_no_end(tmp_path):
    with_end = two_files(tmp_path, b"one\ntwo\n", b"eins\nzwei\n", "with")
    without = two_files(tmp_path, b"one\ntwo", b"eins\nzwei\n", "without")
    assert without.check_lines() == with_end.check_lines() == 2
    assert read(without)[0] == read(with_end)[0]


def test_lines_are_counted_as_they_are_read_in_random_bytes(tmp_path):
    generator = random.Random(3)
    for _ in range(50):
        content = bytes(
            generator.choices(b"ab\r\n\t\x85\xff", weights=(9, 9, 3, 6, 3, 1, 1), k=generator.randint(1, 200))
        )
        text = table(tmp_path, content, (1, 2))
        pairs, rejections = read(text)
        assert text.check_lines() == len(pairs) + rejections.counts.total()
        lines = content.split(b"\n")
        for number, source, target in pairs:
            assert [source, target] == [cell.decode().strip() for cell in lines[number - 1].split(b"\t")[:2]]


def test_lines_are_counted_across_the_blocks_of_a_long_file(tmp_path):
    number = (1 << 20) // 3
    text = two_files(tmp_path, b"abcd\n" * number, b"e\n" * number)
    assert text.check_lines() == number


@pytest.mark.parametrize(
    ("content", "line", "byte", "value"),
    [
        (b"good\nbad \xff here\n", 2, 5, "ff"),
        (b"\xe9t\xe9\ngood\n", 1, 1, "e9"),
        (b"\xef\xbb\xbfgr\xfcn\ngood\n", 1, 6, "fc"),
        (b"good\ncut off \xc3\n", 2, 9, "c3"),
    ],
)
def test_bytes_that_are_not_utf8_are_named_by_file_line_and_byte(tmp_path, content, line, byte, value):
    assert content.split(b"\n")[line - 1][byte - 1] == int(value, 16)
    text = two_files(tmp_path, b"one\ntwo\n", content)
    pairs, rejections = read(text)
    assert [number for number, *_ in pairs] == [3 - line]
    assert rejections.counts == {"the text is not UTF-8": 1}
    place = f"{text.files[1]}, line {line}, byte {byte} (0x{value})"
    assert rejections.examples["the text is not UTF-8"] == place
    with pytest.raises(UserError) as caught:
        read(text, "refuse")
    assert str(caught.value).startswith(f"{place}: the text is not UTF-8")


# Files that cannot be used


@pytest.mark.parametrize("position", [0, 1])
def test_an_empty_file_is_refused_by_name(tmp_path, position):
    contents = [b"a\n", b"a\n"]
    contents[position] = b""
    text = two_files(tmp_path, *contents)
    with pytest.raises(UserError, match=f"{text.files[position].name} is empty"):
        text.check_lines()


def test_unequal_numbers_of_lines_are_both_told(tmp_path):
    text = two_files(tmp_path, b"a\n" * 1234, b"b\n" * 1233)
    with pytest.raises(UserError, match=r"source has 1,234 lines and .*target has 1,233"):
        text.check_lines()


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    present = tmp_path / "present"
    present.write_text("a\n")
    with pytest.raises(UserError, match=r"absent does not exist; check the path"):
        ParallelText((present, tmp_path / "absent"))
    with pytest.raises(UserError, match="is a folder; give a text file"):
        ParallelText((tmp_path, present))


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX permissions")
@pytest.mark.parametrize("protected", ["file", "folder"])
def test_a_file_without_permission_is_refused(tmp_path, protected, ordinary_user):
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "text"
    path.write_text("a\n")
    target = path if protected == "file" else folder
    target.chmod(0)
    try:
        with ordinary_user(), pytest.raises(UserError, match=r"text cannot be read .*check its permissions"):
            ParallelText((path, path))
    finally:
        target.chmod(0o700)


# Empty sides, and what happens to unusable pairs


@pytest.mark.parametrize("empty", [b"", b"   ", b"\t \t", "\u00a0\u3000\u2028".encode(), b"\r"])
@pytest.mark.parametrize("side", [0, 1])
def test_a_side_of_white_space_is_empty(tmp_path, empty, side):
    contents = [b"one\ntwo\n", b"eins\nzwei\n"]
    contents[side] = b"full\n" + empty + b"\n"
    pairs, rejections = read(two_files(tmp_path, *contents))
    assert len(pairs) == 1
    assert rejections.counts == {f"the {('source', 'target')[side]} is empty": 1}


def test_white_space_around_a_sentence_is_left_out(tmp_path):
    pairs, _ = read(two_files(tmp_path, b"  one two \t\r\n", "\u00a0eins\u2003\n".encode()))
    assert pairs == [(1, "one two", "eins")]


def test_dropped_pairs_are_counted_by_reason_with_their_first_place(tmp_path):
    text = two_files(tmp_path, b"a\n\nb\n \n\xff\nc\n", b"1\n2\n\n4\n5\n6\n")
    pairs, rejections = read(text)
    assert pairs == [(1, "a", "1"), (6, "c", "6")]
    assert rejections.counts == {"the source is empty": 2, "the target is empty": 1, "the text is not UTF-8": 1}
    assert rejections.examples["the source is empty"] == text.place(2)
    assert rejections.examples["the target is empty"] == text.place(3)
    summary = rejections.summary()
    assert summary.startswith(f"dropped 2: the source is empty (first: {text.place(2)}); ")
    assert [clause.split(":")[0] for clause in summary.split("; ")] == ["dropped 2", "dropped 1", "dropped 1"]


def test_refusing_stops_at_the_first_unusable_pair(tmp_path):
    text = two_files(tmp_path, b"a\nb\n\nd\n", b"1\n2\n3\n\n")
    pairs = text.pairs(Rejections("refuse"))
    assert [next(pairs), next(pairs)] == [(1, "a", "1"), (2, "b", "2")]
    with pytest.raises(UserError) as caught:
        next(pairs)
    assert str(caught.value).startswith(f"{text.files[0]} / {text.files[1]}, line 3: the source is empty")
    assert '`invalid_pairs` "drop"' in str(caught.value)


# Languages


def part(folder: Path, name: str, lines: slice, order: tuple[int, int]) -> ParallelText:
    sides = [path.read_text(encoding="utf-8").splitlines(keepends=True)[lines] for path in SENTENCES]
    return two_files(folder, *("".join(sides[side]).encode() for side in order), name)


def test_validation_text_in_the_other_direction_is_refused(tmp_path):
    train = part(tmp_path, "train", slice(0, 30), (0, 1))
    check_language_order(train, part(tmp_path, "valid", slice(30, None), (0, 1)))
    swapped = part(tmp_path, "swapped", slice(30, None), (1, 0))
    with pytest.raises(UserError, match=r"opposite order: .* exchange the files") as caught:
        check_language_order(train, swapped)
    assert all(str(path) in str(caught.value) for path in (*train.files, *swapped.files))


def test_both_directions_are_told_apart_in_a_table_too(tmp_path):
    sides = [path.read_text(encoding="utf-8").splitlines() for path in SENTENCES]
    table(tmp_path, "".join(f"{a}\t{b}\n" for a, b in zip(*sides, strict=True)).encode())
    straight, swapped = (ParallelText((tmp_path / "train.tsv",), columns) for columns in ((1, 2), (2, 1)))
    check_language_order(straight, straight)
    with pytest.raises(UserError, match="`tsv_columns`"):
        check_language_order(straight, swapped)


def test_a_script_without_spaces_is_compared_by_character(tmp_path):
    train = two_files(
        tmp_path, "我们去市场\n他在家里看书\n".encode(), b"we go to the market\nhe reads at home\n", "train"
    )
    swapped = two_files(tmp_path, b"he reads the book\n", "他看书\n".encode(), "swapped")
    with pytest.raises(UserError, match="opposite order"):
        check_language_order(train, swapped)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_tiny_corpora_in_the_same_direction_pass(tmp_path, size):
    for start in range(0, 40 - 2 * size + 1, size):
        check_language_order(
            part(tmp_path, "train", slice(start, start + size), (0, 1)),
            part(tmp_path, "valid", slice(start + size, start + 2 * size), (0, 1)),
        )


def test_text_that_shows_no_direction_passes(tmp_path):
    same = part(tmp_path, "same", slice(0, 20), (0, 0))
    check_language_order(same, part(tmp_path, "other", slice(20, None), (0, 0)))
    digits = two_files(tmp_path, b"1 2 3\n4 5\n", b"3 2 1\n5 4\n", "digits")
    check_language_order(digits, two_files(tmp_path, b"2 4\n", b"4 2\n", "more"))
    symbols = two_files(tmp_path, b"! ?\n", b"? !\n", "symbols")
    check_language_order(symbols, digits)


@pytest.mark.parametrize(
    ("names", "languages"),
    [
        (("train.en", "train.de"), ("en", "de")),
        (("train.EN", "train.DE"), ("en", "de")),
        (("train.txt", "train.txt.1"), ("en", "de")),
        (("train.de", "train.en"), (None, "de")),
        (("train.de", "train.en"), ("en", None)),
        (("train.de", "train.en"), ("fr", "es")),
    ],
)
def test_file_names_that_do_not_contradict_the_languages_pass(tmp_path, names, languages):
    for name in names:
        (tmp_path / name).touch()
    check_language_suffixes(ParallelText(tuple(tmp_path / name for name in names)), *languages)


@pytest.mark.parametrize("names", [("a.de", "a.en"), ("a.DE", "b.txt"), ("a.txt", "b.en")])
def test_file_names_of_the_opposite_languages_are_refused(tmp_path, names):
    for name in names:
        (tmp_path / name).touch()
    text = ParallelText(tuple(tmp_path / name for name in names))
    with pytest.raises(UserError, match="declared as en to de; exchange the files or the languages"):
        check_language_suffixes(text, "en", "de")


def test_a_table_has_no_suffix_to_check(tmp_path):
    path = tmp_path / "pairs.de"
    path.touch()
    check_language_suffixes(ParallelText((path,)), "en", "de")


# What is no text


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
@pytest.mark.parametrize("position", [0, 1])
def test_text_in_another_encoding_is_refused_as_a_whole(tmp_path, encoding, position):
    paths = (tmp_path / "source", tmp_path / "target")
    for number, path in enumerate(paths):
        path.write_bytes("one\ntwo\nthree\n".encode(encoding if number == position else "utf-8"))
    with pytest.raises(UserError, match=rf"{paths[position].name} is UTF-\d\d\w*, and text must be UTF-8; convert"):
        ParallelText(paths).check_lines()


def test_a_pair_with_a_nul_character_is_no_pair(tmp_path):
    path = tmp_path / "table"
    path.write_bytes(b"one\teins\nt\0wo\tzwei\nthree\td\0rei\n")
    rejections = Rejections("drop")
    assert list(ParallelText((path,)).pairs(rejections)) == [(1, "one", "eins")]
    ((reason, count),) = rejections.counts.items()
    assert count == 2 and "NUL" in reason and rejections.examples[reason] == f"{path}, line 2"
    with pytest.raises(UserError, match="line 2: the text has a NUL character"):
        list(ParallelText((path,)).pairs(Rejections("refuse")))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
@pytest.mark.parametrize("place", ["fifo", "/dev/null"])
def test_what_can_be_read_only_once_is_refused_without_waiting(tmp_path, place):
    path = tmp_path / place
    if place == "fifo":
        os.mkfifo(path)
    with pytest.raises(UserError, match=r"is a pipe or a device, .*; write it to a file first"):
        ParallelText((path, path))
