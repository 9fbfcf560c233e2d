import gzip
import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
import pytest
from datasets import Dataset, DatasetDict
from transformers import AutoTokenizer

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerTokenizer
from vanilla_transformer.data import tmx
from vanilla_transformer.data.encoding import fingerprint_of_tokenizer
from vanilla_transformer.errors import UserError
from vanilla_transformer.presets import PROVENANCE, SIZES
from vanilla_transformer.training.options import TrainingOptions
from vanilla_transformer.training.preparation.texts import check_texts
from vanilla_transformer.training.preparation.vocabulary_and_ids import load_tokenizer, model_configuration, prepare


SENTENCES = tuple(Path(__file__).parents[2] / "data" / f"sentences.{language}" for language in ("en", "de"))


def options(**values) -> TrainingOptions:
    return TrainingOptions(**{"train_files": SENTENCES, "vocab_size": 300, **values})


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    VanillaTransformerTokenizer().save_pretrained(folder)
    return folder


# Vocabulary and encoded text


def test_preparing_trains_one_vocabulary_and_encodes_both_texts_with_it(tmp_path, part):
    files = part("valid", slice(30, None))
    data = prepare(options(valid_files=files), tmp_path / "cache")
    assert len(data.tokenizer) == 300
    for corpus, paths in ((data.train, SENTENCES), (data.valid, files)):
        assert len(corpus) == len(paths[0].read_text(encoding="utf-8").splitlines())
        rows = corpus.rows(np.arange(len(corpus)))
        for path, ids in zip(paths, rows, strict=True):
            texts = data.tokenizer.batch_decode([row.tolist() for row in ids], skip_special_tokens=True)
            assert texts == path.read_text(encoding="utf-8").splitlines()


def contents(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_second_call_uses_what_the_first_left(tmp_path, monkeypatch):
    first = prepare(options(), tmp_path)
    before = contents(tmp_path)
    assert len(list(tmp_path.glob("vocabulary-*"))) == 1

    def fail(*args, **kwargs):
        raise AssertionError("the vocabulary was trained again")

    monkeypatch.setattr(VanillaTransformerTokenizer, "train_from_iterator", fail)
    second = prepare(options(max_updates=3, seed=9, preset="tiny"), tmp_path)
    assert contents(tmp_path) == before
    assert fingerprint_of_tokenizer(second.tokenizer) == fingerprint_of_tokenizer(first.tokenizer)
    assert second.train.fingerprint == first.train.fingerprint
    assert second.valid is None


def test_text_size_and_frequency_each_make_another_vocabulary(tmp_path, part):
    variants = [
        options(),
        options(vocab_size=290),
        options(min_frequency=3),
        options(train_files=part("part", slice(0, 35))),
        options(train_files=SENTENCES[::-1]),
    ]
    for number, variant in enumerate(variants, start=1):
        data = prepare(variant, tmp_path / "cache")
        assert len(data.tokenizer) == variant.vocab_size
        assert len(list((tmp_path / "cache").glob("vocabulary-*"))) == number


def test_a_vocabulary_that_another_process_finished_first_is_used(tmp_path, monkeypatch):
    finished = []
    train = VanillaTransformerTokenizer.train_from_iterator

    def overtaken(*args, **kwargs):
        if not finished:
            finished.append(None)
            finished.append(prepare(options(), tmp_path))
        return train(*args, **kwargs)

    monkeypatch.setattr(VanillaTransformerTokenizer, "train_from_iterator", overtaken)
    data = prepare(options(), tmp_path)
    assert fingerprint_of_tokenizer(data.tokenizer) == fingerprint_of_tokenizer(finished[1].tokenizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [data.train.fingerprint, *(path.name for path in tmp_path.glob("vocabulary-????????????????????????????????"))]
    )


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and glibc keeps what was freed")
def test_what_the_training_of_a_vocabulary_took_is_given_back(tmp_path):
    # Letters alone: a vocabulary takes letters and digits for words of their own.
    letters = str.maketrans("0123456789", "ghijklmnop")
    words = (f"{number * 2654435761 % 2**32:08x}".translate(letters) for number in range(120_000))
    for side in ("source", "target"):
        (tmp_path / side).write_text("".join(" ".join(islice(words, 20)) + "\n" for _ in range(3000)))
    command = """
from pathlib import Path
from vanilla_transformer.training.options import TrainingOptions
from vanilla_transformer.training.preparation.vocabulary_and_ids import train_vocabulary
from vanilla_transformer.training.preparation.texts import check_texts

def kibibytes(name):
    return int(Path("/proc/self/status").read_text(encoding="ascii").split(name + ":")[1].split()[0])

options = TrainingOptions(train_files=(Path("source"), Path("target")), vocab_size=300)
text, _ = check_texts(options)
before, peak = kibibytes("RssAnon"), kibibytes("VmHWM")
train_vocabulary(text, options, Path("cache"))
print(kibibytes("RssAnon") - before, kibibytes("VmHWM") - peak)
"""
    run = subprocess.run([sys.executable, "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
    kept, taken = map(int, run.stdout.split())
    assert taken > 50_000 and kept < 0.3 * taken


def test_a_vocabulary_larger_than_the_text_allows_is_refused_with_the_largest(tmp_path):
    with pytest.raises(UserError, match=r"is 37000, but the corpus allows only (\d+) entries") as caught:
        prepare(options(vocab_size=37000), tmp_path)
    largest = int(str(caught.value).split("allows only ")[1].split()[0])
    assert list(tmp_path.iterdir()) == []
    assert len(prepare(options(vocab_size=largest), tmp_path).tokenizer) == largest
    with pytest.raises(UserError, match="must be at least 261"):
        prepare(options(vocab_size=260), tmp_path)


def test_a_pair_that_is_refused_is_named_by_the_first_reader(tmp_path, tokenizer_folder, part):
    files = part("train", slice(0, 10))
    files[0].write_text(files[0].read_text().replace("She reads a book in the garden.", ""))
    for values in ({}, {"tokenizer": tokenizer_folder}):
        with pytest.raises(UserError, match="line 3: the source is empty"):
            prepare(options(train_files=files, invalid_pairs="refuse", **values), tmp_path / "cache")
        assert list((tmp_path / "cache").glob("*")) == []


def test_a_given_tokenizer_is_used_as_it_is(tmp_path, tokenizer_folder):
    data = prepare(options(tokenizer=tokenizer_folder), tmp_path)
    assert fingerprint_of_tokenizer(data.tokenizer) == fingerprint_of_tokenizer(VanillaTransformerTokenizer())
    assert [path.name for path in tmp_path.iterdir()] == [data.train.fingerprint]


# Other sources


def test_a_memory_is_parsed_once_to_be_checked_and_once_for_each_use(tmp_path, monkeypatch):
    sides = [path.read_text(encoding="utf-8").splitlines() for path in SENTENCES]
    units = "".join(
        f'<tu><tuv xml:lang="en"><seg>{escape(source)}</seg></tuv>'
        f'<tuv xml:lang="de"><seg>{escape(target)}</seg></tuv></tu>'
        for source, target in zip(*sides, strict=True)
    )
    path = tmp_path / "text.tmx"
    path.write_text(f"<tmx><body>{units}</body></tmx>", encoding="utf-8")
    parsed = []
    original = tmx._units

    def count(path):
        yield from original(path)
        parsed.append(path)

    monkeypatch.setattr(tmx, "_units", count)
    chosen = options(train_files=(path,), source_language="en", target_language="de")
    for expected in (3, 0):
        parsed.clear()
        check_texts(chosen)
        check_texts(chosen)
        assert len(prepare(chosen, tmp_path / "cache").train) == 40
        # Check, vocabulary, ids; then nothing is left to read.
        assert len(parsed) == expected
    path.write_text(f"<tmx><body>{units * 2}</body></tmx>", encoding="utf-8")
    assert len(prepare(chosen, tmp_path / "cache").train) == 80


def json_lines(folder: Path, **more) -> tuple[Path]:
    sides = [path.read_text(encoding="utf-8").splitlines() for path in SENTENCES]
    path = folder / "train.jsonl"
    lines = [json.dumps({"en": source, "de": target, **more}) for source, target in zip(*sides, strict=True)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return (path,)


def test_the_same_pairs_are_the_same_ids_from_every_source(tmp_path, tokenizer_folder):
    (path,) = json_lines(tmp_path)
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    table, memory = tmp_path / "train.tsv", tmp_path / "train.tmx.gz"
    table.write_text("".join(f"{row['de']}\t{row['en']}\n" for row in records), encoding="utf-8")
    units = (
        "".join(f'<tuv xml:lang="{code}"><seg><![CDATA[{text}]]></seg></tuv>' for code, text in row.items())
        for row in records
    )
    body = "".join(f"<tu>{unit}</tu>" for unit in units)
    memory.write_bytes(gzip.compress(f"<tmx><body>{body}</body></tmx>".encode()))
    Dataset.from_list(records).save_to_disk(tmp_path / "saved")
    languages = {"source_language": "en", "target_language": "de"}
    sources = [
        {},
        {"train_files": (path,), **languages},
        {"train_files": (path,), "pair_keys": ("en", "de")},
        {"train_files": (table,), "tsv_columns": (2, 1)},
        {"train_files": (memory,), **languages},
        {"train_files": (), "dataset": str(tmp_path / "saved"), **languages},
    ]
    corpora = [prepare(options(tokenizer=tokenizer_folder, **values), tmp_path / "cache").train for values in sources]
    assert len(corpora[0]) == len(records)
    assert all(corpus.dataset[:] == corpora[0].dataset[:] for corpus in corpora)


def test_validation_text_may_be_a_split(tmp_path, tokenizer_folder):
    records = [json.loads(line) for line in json_lines(tmp_path)[0].read_text(encoding="utf-8").splitlines()]
    parts = {"train": records[:30], "test": records[30:]}
    DatasetDict({name: Dataset.from_list(part) for name, part in parts.items()}).save_to_disk(tmp_path / "data")
    values = {"train_files": (), "dataset": str(tmp_path / "data"), "pair_keys": ("en", "de"), "valid_split": "test"}
    data = prepare(options(tokenizer=tokenizer_folder, **values), tmp_path / "cache")
    assert (len(data.train), len(data.valid)) == (30, len(records) - 30)


def test_a_vocabulary_of_tagged_text_has_its_languages_tags(tmp_path, tokenizer_folder):
    (path,) = json_lines(tmp_path, to="de")
    path.write_text(path.read_text(encoding="utf-8").replace('"to": "de"', '"to": "fr"', 3), encoding="utf-8")
    values = {"train_files": (path,), "pair_keys": ("en", "de"), "language_tags": True}
    data = prepare(options(**values, language_column="to"), tmp_path / "cache")
    tags = data.tokenizer.language_tags
    assert list(tags) == ["de", "fr"] and len(data.tokenizer) == 300
    assert [row[0] for row in data.train.dataset["input_ids"]][:4] == [tags[code] for code in ("fr", "fr", "fr", "de")]
    assert data.tokenizer.tgt_lang is None
    data = prepare(options(**values, target_language="de"), tmp_path / "cache")
    assert list(data.tokenizer.language_tags) == ["de"] and data.tokenizer.tgt_lang == "de"
    assert (
        data.train.dataset[0]["input_ids"]
        == data.tokenizer(json.loads(path.read_text(encoding="utf-8").splitlines()[0])["en"])["input_ids"]
    )
    # What was saved with a language begins with one tag, not two.
    data.tokenizer.save_pretrained(tmp_path / "tagged")
    again = prepare(options(**values, target_language="de", tokenizer=tmp_path / "tagged"), tmp_path / "cache")
    assert again.train.fingerprint == data.train.fingerprint
    with pytest.raises(UserError, match="has no language tags; train the vocabulary with --language_tags"):
        prepare(options(**values, target_language="de", tokenizer=tokenizer_folder), tmp_path / "cache")


# Tokenizers that cannot be used


def altered(source: Path, folder: Path, name: str, change) -> Path:
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    content = json.loads((folder / name).read_text(encoding="utf-8"))
    change(content)
    (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError, match=rf"{folder.name} holds no tokenizer.json; give a folder that"):
            load_tokenizer(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer_is_refused(tmp_path, tokenizer_folder, name):
    folder = altered(tokenizer_folder, tmp_path / "damaged", name, lambda content: None)
    (folder / name).write_bytes((folder / name).read_bytes()[:150])
    with pytest.raises(UserError, match="is not JSON"):
        load_tokenizer(folder)


@pytest.mark.parametrize("token", ["pad_token", "bos_token", "eos_token"])
def test_a_tokenizer_without_a_token_that_translation_needs_is_refused(tmp_path, tokenizer_folder, token):
    def remove(content):
        content[token] = None
        content["tokenizer_class"] = "PreTrainedTokenizerFast"

    folder = altered(tokenizer_folder, tmp_path / "lacking", "tokenizer_config.json", remove)
    assert getattr(AutoTokenizer.from_pretrained(folder), token) is None
    with pytest.raises(UserError, match=rf"lacking has no {token}_id; use one that defines it"):
        load_tokenizer(folder)


def test_a_tokenizer_that_does_not_end_sentences_is_refused(tmp_path, tokenizer_folder):
    folder = altered(
        tokenizer_folder,
        tmp_path / "endless",
        "tokenizer_config.json",
        lambda content: content.update(tokenizer_class="PreTrainedTokenizerFast"),
    )
    assert load_tokenizer(folder)("a")["input_ids"][-1] == 2
    altered(folder, tmp_path / "other", "tokenizer.json", lambda content: content.update(post_processor=None))
    with pytest.raises(UserError, match="does not append its end-of-sentence token; use one that does"):
        load_tokenizer(tmp_path / "other")


# The model's configuration


def test_the_configuration_follows_vocabulary_and_options():
    tokenizer = VanillaTransformerTokenizer()
    config = model_configuration(options(preset="tiny", dropout=0.25), tokenizer)
    assert config.to_dict() == VanillaTransformerConfig(vocab_size=261, **{**SIZES["tiny"], "dropout": 0.25}).to_dict()
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)
    assert config.decoder_start_token_id == 1


@pytest.mark.parametrize("provenance", PROVENANCE)
def test_provenance_decides_what_decoding_starts_from(provenance):
    config = model_configuration(options(provenance=provenance), VanillaTransformerTokenizer())
    for name, value in PROVENANCE[provenance].items():
        assert getattr(config, name) == value
    assert config.decoder_start_token_id == PROVENANCE[provenance].get("decoder_start_token_id", 1)


def test_learned_positions_must_suffice_for_the_longest_sentence():
    tokenizer = VanillaTransformerTokenizer()
    learned = {"position_embedding_type": "learned", "max_length": 100}
    assert (
        model_configuration(options(**learned, max_position_embeddings=100), tokenizer).max_position_embeddings == 100
    )
    with pytest.raises(UserError, match="--max_position_embeddings is 99, but sentences may have --max_length 100"):
        model_configuration(options(**learned, max_position_embeddings=99), tokenizer)
    # Computed positions have no end.
    model_configuration(options(max_length=100, max_position_embeddings=99), tokenizer)


def test_without_a_number_of_learned_positions_the_models_own_counts():
    tokenizer = VanillaTransformerTokenizer()
    own = VanillaTransformerConfig().max_position_embeddings
    model_configuration(options(preset="e-learned-positions", max_length=own), tokenizer)
    with pytest.raises(UserError, match=f"--max_position_embeddings is {own}, .* --max_length {own + 1}"):
        model_configuration(options(preset="e-learned-positions", max_length=own + 1), tokenizer)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"d_model": 100},
            r"^`d_model` \(100\) must be divisible by `encoder_attention_heads` \(8\); use a `d_model` of",
        ),
        ({"dropout": 1.0}, r"^`dropout` is 1.0; it must be at least 0 and below 1"),
        (
            {"activation_function": "rellu"},
            r"^`activation_function` is 'rellu'; it must be one that transformers knows",
        ),
        ({"norm_position": "middle"}, "norm_position"),
        ({"encoder_layers": "six"}, "encoder_layers"),
    ],
)
def test_hyper_parameters_that_do_not_fit_are_refused_in_the_configurations_words(values, sentence):
    with pytest.raises(UserError, match=sentence):
        model_configuration(options(**values), VanillaTransformerTokenizer())


# What is wrong with the text comes first


def test_when_every_pair_is_dropped_the_reasons_are_told(tmp_path):
    files = (tmp_path / "source", tmp_path / "target")
    files[0].write_bytes(b"stra\xdfe\n" * 3 + b"\n")
    files[1].write_bytes(b"street\n" * 4)
    sentence = r"None of the 4 lines of .* can be used: dropped 3: the text is not UTF-8 .*; dropped 1: the sour"
    with pytest.raises(UserError, match=sentence):
        prepare(options(train_files=files, vocab_size=37000), tmp_path / "cache")


def test_pairs_that_were_dropped_explain_a_vocabulary_that_is_too_large(tmp_path, part):
    files = part("train", slice(0, 10))
    files[0].write_bytes(files[0].read_bytes() + b"stra\xdfe\n" * 90)
    files[1].write_bytes(files[1].read_bytes() + b"street\n" * 90)
    sentence = r"^Of the training text, dropped 90: the text is not UTF-8 .*\. Of the rest: `vocab_size` is 37000, but"
    with pytest.raises(UserError, match=sentence):
        prepare(options(train_files=files, vocab_size=37000), tmp_path / "cache")


# Caches


@pytest.mark.parametrize("damage", [b"", b"{", b"[1, 2]", b"\xff\xfe"])
def test_a_damaged_vocabulary_of_the_cache_is_learned_again(tmp_path, damage, capsys):
    first = prepare(options(), tmp_path)
    (path,) = tmp_path.glob("vocabulary-*/tokenizer.json")
    path.write_bytes(damage)
    second = prepare(options(), tmp_path)
    assert fingerprint_of_tokenizer(second.tokenizer) == fingerprint_of_tokenizer(first.tokenizer)
    assert "(tokenizer.json was changed after it was written); it is made again" in capsys.readouterr().err


def test_a_cache_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="file is a file; give a folder for the encoded text"):
        prepare(options(), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("values", [{"d_model": 1_000_000_000}, {"encoder_layers": 2**31 - 1}, {"d_k": 2**31 - 1}])
def test_a_model_without_room_is_refused_before_any_work(tmp_path, values):
    with pytest.raises(UserError, match="The model would have"):
        prepare(options(**values), tmp_path)
    assert list(tmp_path.iterdir()) == []
