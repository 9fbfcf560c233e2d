import gzip
import json
import random
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from vanilla_transformer.data.corpora import Pair, PairSource, ParallelText, Rejections
from vanilla_transformer.data.records import DataSet, JsonLines, PairKeys
from vanilla_transformer.errors import UserError


SENTENCES = tuple(Path(__file__).with_name(f"sentences.{language}") for language in ("en", "de"))
PAIRS = [(source, target) for _, source, target in ParallelText(SENTENCES).pairs(Rejections("refuse"))]
EN_DE = ("en", "de")
HINT = " (choose fields with `pair_keys`)"


def json_lines(folder: Path, records: list, **keys) -> JsonLines:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return JsonLines((path,), PairKeys(**keys))


def read(text: PairSource, policy: str = "drop") -> tuple[list[Pair], Rejections]:
    rejections = Rejections(policy)
    return list(text.tagged_pairs(rejections)), rejections


def sides(text: PairSource) -> list[tuple[str, str]]:
    return [(source, target) for _, source, target in text.pairs(Rejections("refuse"))]


SHAPES = {
    "translation": ({"languages": EN_DE}, lambda en, de: {"id": 7, "translation": {"en": en, "de": de}}),
    "languages": ({"languages": EN_DE}, lambda en, de: {"de": de, "en": en}),
    "source and target": ({}, lambda en, de: {"source": en, "target": de}),
    "undeclared languages": ({"languages": ("a", "b")}, lambda en, de: {"source": en, "target": de}),
    "keys": (
        {"keys": ("text", "gold"), "languages": EN_DE},
        lambda en, de: {"text": en, "gold": de, "en": "not this"},
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_records_of_every_shape_hold_the_pairs_of_the_files(tmp_path, shape):
    keys, record = SHAPES[shape]
    records = [record(*pair) for pair in PAIRS]
    text = json_lines(tmp_path, records, **keys)
    assert text.check_lines() == len(PAIRS) and sides(text) == PAIRS
    Dataset.from_list(records).save_to_disk(tmp_path / "saved")
    assert sides(DataSet(str(tmp_path / "saved"), "train", PairKeys(**keys))) == PAIRS


def test_a_compressed_file_is_read_as_it_was(tmp_path):
    text = json_lines(tmp_path, [{"source": source, "target": target} for source, target in PAIRS])
    compressed = text.files[0].with_name("train.jsonl.gz")
    compressed.write_bytes(gzip.compress(text.files[0].read_bytes()))
    other = JsonLines((compressed,), text.fields)
    assert other.check_lines() == text.check_lines() and sides(other) == PAIRS


def test_lines_that_hold_no_pair_are_told_with_their_number(tmp_path):
    lines = {
        b'{"source": "a", "target": "b"}': None,
        b"": "the line is not JSON",
        b'{"source": "a", "target": "b"': "the line is not JSON",
        b"[" * 100_000: "the line is not JSON",
        b'["a", "b"]': "the record is not an object with named fields",
        b'{"source": "\xff", "target": "b"}': "the text is not UTF-8",
        b'{"source": "a"}': "the record lacks the field 'target'" + HINT,
        b'{"source": null, "target": "b"}': "the record has no text in the field 'source'" + HINT,
        b'{"source": "a", "target": "\\ud800"}': "the field 'target' holds half a surrogate pair",
        b'{"source": "a", "target": " "}': "the target is empty",
        b'{"translation": {"en": "a"}}': "the field 'translation' needs `source_language` and `target_language`",
    }
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    text = JsonLines((path,), PairKeys())
    pairs, rejections = read(text)
    assert pairs == [(1, "a", "b", None)]
    expected = [(reason, f"{path}, line {number}") for number, reason in enumerate(lines.values(), 1) if reason]
    assert rejections.counts.total() == len(expected)
    for reason, place in expected:
        assert reason in rejections.counts and (reason != "the line is not JSON" or rejections.counts[reason] == 3)
        assert rejections.examples[reason] == place or reason == "the line is not JSON"
    with pytest.raises(UserError, match=r"x.jsonl, line 2: the line is not JSON"):
        read(text, "refuse")


def test_a_field_can_name_each_pairs_language(tmp_path):
    records = [{"source": "a", "target": "b", "to": "de"}, {"source": "c", "target": "d", "to": "fr"}, {"source": "e"}]
    text = json_lines(tmp_path, [*records, {"source": "a", "target": "b"}], language_key="to")
    pairs, rejections = read(text)
    assert [pair.language for pair in pairs] == ["de", "fr"] and rejections.counts.total() == 2


# Data sets


def folder_of_parquet(folder: Path) -> str:
    folder.mkdir()
    for split, part in (("train", PAIRS[:30]), ("validation", PAIRS[30:])):
        records = [{"translation": dict(zip(EN_DE, pair, strict=True))} for pair in part]
        Dataset.from_list(records).to_parquet(folder / f"{split}.parquet")
    return str(folder)


def folder_of_json(folder: Path) -> str:
    folder.mkdir()
    for split, part in (("train", PAIRS[:30]), ("validation", PAIRS[30:])):
        lines = [json.dumps({"translation": dict(zip(EN_DE, pair, strict=True))}) for pair in part]
        (folder / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return str(folder)


def saved_splits(folder: Path) -> str:
    parts = {"train": PAIRS[:30], "validation": PAIRS[30:]}
    DatasetDict(
        {
            split: Dataset.from_list([dict(zip(EN_DE, pair, strict=True)) for pair in part])
            for split, part in parts.items()
        }
    ).save_to_disk(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hub-cache")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("make", [folder_of_parquet, folder_of_json, saved_splits])
def test_local_folders_are_data_sets(tmp_path, make, streaming):
    path = make(tmp_path / "data")
    fields = PairKeys(languages=EN_DE)
    train, valid = (DataSet(path, split, fields, streaming=streaming) for split in ("train", "validation"))
    assert (sides(train), sides(valid)) == (PAIRS[:30], PAIRS[30:])
    assert train.check_lines() == (None if streaming else 30)
    assert train.names == (f"{path} (train)",) and train.place(3) == f"{path} (train), record 3"
    with pytest.raises(UserError, match=r"has no readable split test \(.*\); give the name"):
        DataSet(path, "test", fields, streaming=streaming).check_lines()


def test_a_data_set_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"The data set .*absent has no readable split train"):
        DataSet(str(tmp_path / "absent"), "train", PairKeys()).check_lines()


def test_a_data_sets_digest_is_that_of_its_pairs(tmp_path):
    def digests(name, records, fields=PairKeys()):  # noqa: B008
        Dataset.from_list(records).save_to_disk(tmp_path / name)
        return list(DataSet(str(tmp_path / name), "train", fields).digests())

    records = [{"source": source, "target": target, "n": n} for n, (source, target) in enumerate(PAIRS)]
    first = digests("one", records)
    assert digests("two", [{**record, "n": 0} for record in records]) == first
    assert digests("three", [*records[:-1], {**records[-1], "target": "other"}]) != first
    shuffled = list(records)
    random.Random(0).shuffle(shuffled)
    assert digests("four", shuffled) != first


def test_a_record_without_a_pair_is_named(tmp_path):
    Dataset.from_list([{"source": "a", "target": "b"}, {"source": None, "target": "d"}]).save_to_disk(
        tmp_path / "data"
    )
    text = DataSet(str(tmp_path / "data"), "train", PairKeys())
    assert read(text)[0] == [(1, "a", "b", None)]
    with pytest.raises(UserError, match=r"record 2: the record has no text in the field 'source'"):
        read(text, "refuse")
    Dataset.from_dict({"source": [], "target": []}).save_to_disk(tmp_path / "empty")
    with pytest.raises(UserError, match="empty has no readable split train"):
        DataSet(str(tmp_path / "empty"), "train", PairKeys()).check_lines()
