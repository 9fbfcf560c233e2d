import gzip

import pytest

from vanilla_transformer.data.utf8 import check_beginning, decode_lines, foreign_encoding
from vanilla_transformer.errors import UserError


TEXTS = {
    "English": "A house stands in the garden.\nTwo men read a book.\n",
    "German": "Straße und Häuser, schön\nZwei Männer lesen.\n",
    "Russian": "Дым.\nДым, дым.\n",
    "Japanese": "庭に家があります。\n二人の男性が本を読んでいます。\n",
    "emoji": "\U0001f642 ok \U0001f600\n" * 3,
}
# What Python writes with a mark, and what `iconv` calls text with and without one.
MARKED = {"utf-16": "UTF-16", "utf-32": "UTF-32"}
UNMARKED = {"utf-16-le": "UTF-16LE", "utf-16-be": "UTF-16BE", "utf-32-le": "UTF-32LE", "utf-32-be": "UTF-32BE"}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize(("encoding", "name"), [*MARKED.items(), *UNMARKED.items()])
def test_wide_characters_are_recognised_with_and_without_their_mark(text, encoding, name):
    content = text.encode(encoding)
    found = foreign_encoding(content)
    if encoding.startswith("utf-16-") and content.count(0) < 2:
        # Two line ends are too little to tell it by; the lines are refused for what they are.
        assert found in (None, name)
    else:
        assert found == name
    with pytest.raises(UserError) as error:
        list(decode_lines(content.splitlines(keepends=True), "text"))
    if found is not None:
        with pytest.raises(UserError, match=f"file is {name}, and text must be UTF-8; convert it: iconv -f {name} "):
            check_beginning("file", content)
    assert "UTF-8" in str(error.value)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_utf8_is_not_taken_for_anything_else(text, encoding):
    content = text.encode(encoding)
    check_beginning("file", content)
    assert list(decode_lines(content.splitlines(keepends=True), "file")) == text.split("\n")[:-1]


def test_text_of_seven_bits_is_recognised_by_its_escape_sequences():
    assert foreign_encoding(TEXTS["Japanese"].encode("iso-2022-jp")) == "ISO-2022-JP"


@pytest.mark.parametrize("encoding", ["latin-1", "gb18030", "shift_jis", "cp1251"])
def test_bytes_that_are_not_utf8_are_named_by_line_and_byte(encoding):
    text = {"latin-1": "ok\nStra\u00dfe\n", "cp1251": "ok\nДым\n"}.get(encoding, "ok\n庭に\n").encode(encoding)
    with pytest.raises(UserError, match=r"file, line 2, byte \d: the text is not UTF-8; convert it\.$"):
        list(decode_lines(text.splitlines(keepends=True), "file"))


def test_a_lone_nul_character_is_no_text():
    with pytest.raises(UserError, match="file, line 3: the text has a NUL character"):
        list(decode_lines([b"one\n", b"two\n", b"th\0ree\n"], "file"))


def test_compressed_files_are_named_by_their_program():
    with pytest.raises(UserError, match=r"file is compressed with gzip, .*; decompress it"):
        check_beginning("file", gzip.compress(b"text"))
