import gzip
import tracemalloc
from pathlib import Path
from xml.sax.saxutils import escape

import pytest

from vanilla_transformer.data.corpora import ParallelText, Rejections
from vanilla_transformer.data.tmx import TranslationMemory
from vanilla_transformer.errors import UserError


SENTENCES = tuple(Path(__file__).with_name(f"sentences.{language}") for language in ("en", "de"))
HEAD = (
    '<?xml version="1.0" encoding="UTF-8"?>\n<!DOCTYPE tmx SYSTEM "tmx14.dtd">\n<tmx version="1.4"><header/><body>\n'
)
TAIL = "</body></tmx>\n"


def unit(**segments: str) -> str:
    parts = (f'<tuv xml:lang="{code.replace("_", "-")}"><seg>{seg}</seg></tuv>' for code, seg in segments.items())
    return f"<tu><note>not text</note>{''.join(parts)}</tu>\n"


def memory(folder: Path, body: str, languages: tuple[str, str] = ("en", "de"), head: str = HEAD) -> TranslationMemory:
    path = folder / "memory.tmx"
    path.write_text(head + body + TAIL, encoding="utf-8")
    return TranslationMemory((path,), languages)


def sides(text: TranslationMemory, policy: str = "refuse") -> list[tuple[str, str]]:
    return [(source, target) for _, source, target in text.pairs(Rejections(policy))]


def test_a_memory_holds_the_pairs_of_the_files(tmp_path):
    pairs = [(source, target) for _, source, target in ParallelText(SENTENCES).pairs(Rejections("refuse"))]
    text = memory(tmp_path, "".join(unit(de=escape(de), en=escape(en)) for en, de in pairs))
    assert text.check_lines() == len(pairs) and sides(text) == pairs
    compressed = tmp_path / "memory.tmx.gz"
    compressed.write_bytes(gzip.compress(text.files[0].read_bytes()))
    assert sides(TranslationMemory((compressed,), ("en", "de"))) == pairs


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (("en", "de"), ("british", "german")),
        (("EN-gb", "de_DE"), ("british", "german")),
        (("en-US", "en-GB"), ("american", "british")),
        (("de", "fr"), ("german", None)),
        (("e", "de"), (None, "german")),
    ],
)
def test_languages_match_by_the_subtags_that_both_have(tmp_path, wanted, found):
    text = memory(tmp_path, unit(en_GB="british", en_US="american", de="german"), wanted)
    rejections = Rejections("drop")
    pairs = list(text.pairs(rejections))
    if None in found:
        missing = wanted[found.index(None)]
        assert pairs == [] and rejections.examples == {f"the unit has no segment in {missing}": f"{text}, unit 1"}
    else:
        assert pairs == [(1, *found)]


def test_mark_up_of_other_formats_is_no_text(tmp_path):
    source = 'Press <bpt i="1">&lt;b&gt;</bpt><hi>OK</hi><ept i="1">&lt;/b&gt;</ept> &amp; go<ph x="1">{0}</ph>.'
    text = memory(tmp_path, unit(en=source, de="<![CDATA[<OK>]]> dr&#252;cken<it pos='begin'>x</it>"))
    assert sides(text) == [("Press OK & go.", "<OK> drücken")]


def test_other_encodings_are_read_as_the_file_declares(tmp_path):
    path = tmp_path / "memory.tmx"
    path.write_bytes((HEAD.replace("UTF-8", "UTF-16") + unit(en="a", de="ü") + TAIL).encode("utf-16"))
    assert sides(TranslationMemory((path,), ("en", "de"))) == [("a", "ü")]


LAUGHS = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))


@pytest.mark.parametrize(
    "declarations",
    [
        '<!ENTITY l0 "laugh">' + LAUGHS,
        '<!ENTITY l9 SYSTEM "file:///etc/passwd">',
        '<!ENTITY % l9 SYSTEM "http://localhost/x.dtd"> %l9;',
    ],
)
def test_entities_are_refused_before_they_are_expanded(tmp_path, declarations):
    text = memory(tmp_path, unit(en="&l9;", de="b"), head=f"<!DOCTYPE tmx [\n{declarations}]><tmx><body>\n")
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=r"memory\.tmx, line 2: the entity l\d is not one of XML's own five"):
            text.check_lines()
        assert tracemalloc.get_traced_memory()[1] < 5 * 2**20
    finally:
        tracemalloc.stop()


def test_an_entity_that_is_not_declared_is_refused_rather_than_left_out(tmp_path):
    with pytest.raises(UserError, match="line 4: the entity nbsp is not one of XML's own five"):
        memory(tmp_path, unit(en="a&nbsp;b", de="c")).check_lines()


def test_damaged_xml_is_refused_with_its_line(tmp_path):
    text = memory(tmp_path, unit(en="a", de="b") + "<tu></tuv>\n")
    with pytest.raises(
        UserError, match=r"memory.tmx, line 5, column \d+: the XML is not well-formed \(mismatched tag"
    ):
        text.check_lines()
    with pytest.raises(UserError, match="has no <tu>"):
        memory(tmp_path, "").check_lines()
    path = tmp_path / "empty.tmx"
    path.write_bytes(b"")
    with pytest.raises(UserError, match=r"empty.tmx, line 1, column 1: .*no element found"):
        TranslationMemory((path,), ("en", "de")).check_lines()


def test_a_memory_is_read_as_a_stream(tmp_path):
    text = memory(tmp_path, "".join(unit(en=f"source {n} " * 20, de=f"target {n} " * 20) for n in range(20_000)))
    size = text.files[0].stat().st_size
    tracemalloc.start()
    try:
        assert text.check_lines() == 20_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size / 2


@pytest.mark.parametrize("encoding", ["gb2312", "Shift_JIS", "EUC-KR", "windows-1252", "big5", "UTF-32", "koi8-r"])
@pytest.mark.parametrize("compressed", [False, True])
def test_encodings_that_python_knows_are_read(tmp_path, encoding, compressed):
    target = {"EUC-KR": "집", "windows-1252": "Häuser, schön", "koi8-r": "Дым"}.get(encoding, "家")
    content = (HEAD.replace("UTF-8", encoding) + unit(en="house", de=target) + TAIL).encode(encoding)
    path = tmp_path / f"memory.tmx{'.gz' * compressed}"
    path.write_bytes(gzip.compress(content) if compressed else content)
    assert sides(TranslationMemory((path,), ("en", "de"))) == [("house", target)]


@pytest.mark.parametrize("encoding", ["klingon", "rot13", "hex", "undefined", ""])
@pytest.mark.parametrize("written", ["utf-8", "utf-16"])
def test_encodings_that_do_not_exist_are_refused(tmp_path, encoding, written):
    path = tmp_path / "memory.tmx"
    path.write_bytes((HEAD.replace("UTF-8", encoding) + unit(en="a", de="b") + TAIL).encode(written))
    with pytest.raises(UserError, match=r"memory\.tmx.*(unknown|not well-formed)"):
        TranslationMemory((path,), ("en", "de")).check_lines()


def test_bytes_that_are_not_of_the_declared_encoding_are_refused(tmp_path):
    path = tmp_path / "memory.tmx"
    head = HEAD.replace("UTF-8", "gb2312").encode()
    path.write_bytes(head + unit(en="a", de="b").encode() + b"\xff\xff" + TAIL.encode())
    with pytest.raises(UserError, match=r"memory\.tmx is not gb2312 \(.*\); correct it, or convert it to UTF-8"):
        TranslationMemory((path,), ("en", "de")).check_lines()


@pytest.mark.parametrize(
    "body",
    [
        unit(en="a<seg>b</seg>c", de="d"),
        unit(en="a", de="d").replace("<tu>", "<tu><tu>").replace("</tu>", "</tu></tu>"),
        '<tu><tuv xml:lang="en"><seg>a</seg><tuv xml:lang="de"><seg>d</seg></tuv></tuv></tu>',
    ],
)
def test_elements_inside_their_own_kind_are_refused(tmp_path, body):
    with pytest.raises(UserError, match=r"memory\.tmx, line 4: a <(tu|tuv|seg)> begins inside another one"):
        memory(tmp_path, body).check_lines()
