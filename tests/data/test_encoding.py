import gc
import json
import multiprocessing
import os
import random
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow
import pytest

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.data.corpora import ParallelText, Rejections
from vanilla_transformer.data.encoding import EncodedCorpus, encode, fingerprint_of_tokenizer, iterate_texts
from vanilla_transformer.errors import UserError


SENTENCES = tuple(Path(__file__).with_name(f"sentences.{language}") for language in ("en", "de"))


@pytest.fixture(scope="module")
def tokenizer():
    return VanillaTransformerTokenizer()


@pytest.fixture(scope="module")
def trained_tokenizer():
    return VanillaTransformerTokenizer.train_from_iterator(iterate_texts(ParallelText(SENTENCES)), 300)


def two_files(folder: Path, lines: list[tuple[str, str]]) -> ParallelText:
    files = (folder / "train.source", folder / "train.target")
    for side, path in enumerate(files):
        path.write_bytes("".join(f"{pair[side]}\n" for pair in lines).encode())
    return ParallelText(files)


def ids_of(corpus: EncodedCorpus) -> list[tuple[list[int], list[int]]]:
    return [(row["input_ids"], row["labels"]) for row in corpus.dataset]


def folders_in(cache_dir: Path) -> list[str]:
    return sorted(path.name for path in cache_dir.iterdir())


def test_ids_are_the_tokenizers_own(tmp_path, trained_tokenizer):
    text = ParallelText(SENTENCES)
    corpus = encode(text, trained_tokenizer, tmp_path, max_length=256)
    lines = [path.read_text(encoding="utf-8").splitlines() for path in SENTENCES]
    expected = [
        (trained_tokenizer(source)["input_ids"], trained_tokenizer(text_target=target)["input_ids"])
        for source, target in zip(*lines, strict=True)
    ]
    assert ids_of(corpus) == expected
    assert len(corpus) == len(expected)
    assert corpus.source_lengths.tolist() == [len(source) for source, _ in expected]
    assert corpus.target_lengths.tolist() == [len(target) for _, target in expected]
    assert all(row[-1] == trained_tokenizer.eos_token_id for pair in ids_of(corpus) for row in pair)


def test_random_text_is_encoded_row_by_row_or_rejected(tmp_path, tokenizer):
    generator = random.Random(11)
    alphabet = "ab zé日🙂\u2028\r\ufeff<s>"
    for trial in range(15):
        folder = tmp_path / str(trial)
        folder.mkdir()
        lines = [
            tuple("".join(generator.choices(alphabet, k=generator.randint(0, 12))) for _ in range(2))
            for _ in range(generator.randint(1, 40))
        ]
        lines.append(("always", "there"))
        max_length = generator.randint(8, 30)
        expected, dropped = [], 0
        for number, pair in enumerate(lines):
            sides = [(side.removeprefix("\ufeff") if number == 0 else side).strip() for side in pair]
            ids = tuple(tokenizer(side)["input_ids"] for side in sides)
            if all(sides) and max(map(len, ids)) <= max_length:
                expected.append(ids)
            else:
                dropped += 1
        corpus = encode(two_files(folder, lines), tokenizer, folder / "cache", max_length=max_length)
        assert ids_of(corpus) == expected
        assert (corpus.report["pairs_read"], corpus.report["pairs_kept"]) == (len(lines), len(expected))
        assert sum(corpus.report["dropped"].values()) == dropped


def test_blocks_of_which_no_pair_is_left_are_no_obstacle(tmp_path, tokenizer):
    lines = [("long" * 9, "b")] * 4100 + [("a", "b"), ("c", "d")]
    corpus = encode(two_files(tmp_path, lines), tokenizer, tmp_path / "cache", max_length=8)
    assert ids_of(corpus) == [tuple(tokenizer(side)["input_ids"] for side in pair) for pair in lines[-2:]]
    assert corpus.source_lengths.tolist() == [2, 2]
    assert [row.tolist() for row in corpus.rows(np.array([1, 0]))[0]] == [ids for ids, _ in reversed(ids_of(corpus))]


# Language tags


def test_sources_begin_with_the_tag_of_their_targets_language(tmp_path):
    lines = ["one\teins\tde", "one\tun\tfr", "<2de> one\tun\tfr", "two\tdue\tit", "two\tdeux\t "]
    path = tmp_path / "train.tsv"
    path.write_text("\n".join(lines), encoding="utf-8")
    text = ParallelText((path,), (1, 2), 3)
    tokenizer = VanillaTransformerTokenizer.train_from_iterator(lines, 265, languages=["de", "fr"])
    tags, cache = tokenizer.language_tags, tmp_path / "cache"
    plain = encode(text, tokenizer, cache, max_length=64)
    tagged = encode(text, tokenizer, cache, max_length=64, language_tags=True, target_language="de")
    expected = [
        ([tags[language], *source], target)
        for (source, target), language in zip(ids_of(plain), ["de", "fr", "fr", None, "de"], strict=True)
        if language
    ]
    assert ids_of(tagged) == expected and tags["de"] not in expected[2][0]
    assert tagged.report["first_dropped"] == {
        "the vocabulary has no tag for the target's language": f"{text.place(4)} in it"
    }
    assert encode(text, tokenizer, cache, max_length=64, language_tags=True).report["pairs_kept"] == 3
    longest = len(ids_of(plain)[2][0])
    shorter = encode(text, tokenizer, cache, max_length=longest, language_tags=True, target_language="de")
    assert ids_of(shorter) == expected[:2] + expected[3:]


# What is kept


def test_a_second_call_opens_what_the_first_left(tmp_path, tokenizer):
    text = ParallelText(SENTENCES)
    first = encode(text, tokenizer, tmp_path, max_length=256)
    (folder,) = tmp_path.iterdir()
    times = {path.name: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())}

    class Unused(VanillaTransformerTokenizer):
        def __call__(self, *args, **kwargs):
            raise AssertionError("the text was tokenised again")

    second = encode(text, Unused(), tmp_path, max_length=256)
    assert {path.name: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())} == times
    assert second.fingerprint == first.fingerprint == folder.name
    assert ids_of(second) == ids_of(first)


def test_the_same_text_in_other_files_is_the_same_corpus(tmp_path, tokenizer):
    first = encode(ParallelText(SENTENCES), tokenizer, tmp_path / "cache", max_length=256)
    copies = tuple(tmp_path / path.name for path in SENTENCES)
    for path, copy in zip(SENTENCES, copies, strict=True):
        copy.write_bytes(path.read_bytes())
    second = encode(ParallelText(copies), tokenizer, tmp_path / "cache", max_length=256)
    assert second.fingerprint == first.fingerprint
    assert folders_in(tmp_path / "cache") == [first.fingerprint]


def test_text_vocabulary_and_options_each_make_another_corpus(tmp_path, tokenizer, trained_tokenizer):
    lines = [("one", "eins"), ("two", "zwei")]
    cache = tmp_path / "cache"
    fingerprints = []

    def add(text, tokenizer=tokenizer, max_length=64, **options):
        fingerprints.append(encode(text, tokenizer, cache, max_length=max_length, **options).fingerprint)

    text = two_files(tmp_path, lines)
    add(text)
    add(text, max_length=63)
    add(text, invalid_pairs="refuse")
    add(text, tokenizer=trained_tokenizer)
    add(text, tokenizer=VanillaTransformerTokenizer(split_special_tokens=False))
    add(text, tokenizer=VanillaTransformerTokenizer(add_eos_token=False))
    add(two_files(tmp_path, [lines[0], ("two", "zwo")]))
    add(two_files(tmp_path, [pair[::-1] for pair in lines]))
    table = tmp_path / "table.tsv"
    table.write_text("".join(f"{a}\t{b}\n" for a, b in lines))
    add(ParallelText((table,)))
    add(ParallelText((table,), (1, 2)))
    add(ParallelText((table,), (2, 1)))
    assert len(set(fingerprints)) == len(fingerprints)
    assert folders_in(cache) == sorted(fingerprints)


def test_the_vocabularys_digest_does_not_depend_on_calls_or_on_saving(tmp_path, trained_tokenizer):
    before = fingerprint_of_tokenizer(trained_tokenizer)
    trained_tokenizer(["a b c", "d"], padding=True, truncation=True, max_length=3)
    trained_tokenizer.save_pretrained(tmp_path)
    assert fingerprint_of_tokenizer(trained_tokenizer) == before
    assert fingerprint_of_tokenizer(VanillaTransformerTokenizer.from_pretrained(tmp_path)) == before
    assert fingerprint_of_tokenizer(VanillaTransformerTokenizer()) != before


def test_the_report_tells_what_was_read_kept_and_dropped(tmp_path, tokenizer):
    lines = [("one", "eins"), ("", "zwei"), ("three", " "), ("toolong" * 3, "x"), ("", "y"), ("six", "sechs")]
    text = two_files(tmp_path, lines)
    corpus = encode(text, tokenizer, tmp_path / "cache", max_length=10)
    report = json.loads((tmp_path / "cache" / corpus.fingerprint / "report.json").read_text(encoding="utf-8"))
    assert report == corpus.report
    assert report["files"] == [str(path) for path in text.files]
    assert (report["pairs_read"], report["pairs_kept"]) == (6, 2)
    too_long = "a side is longer than `max_length`, 10 tokens"
    assert report["dropped"] == {"the source is empty": 2, "the target is empty": 1, too_long: 1}
    assert report["first_dropped"] == {
        "the source is empty": text.place(2),
        "the target is empty": text.place(3),
        too_long: f"{text.place(4)} with 22 tokens",
    }
    assert all(f"dropped {count}: {reason}" in report["summary"] for reason, count in report["dropped"].items())


# Pairs that cannot be used


@pytest.mark.parametrize("side", [0, 1])
def test_a_pair_may_have_max_length_tokens_and_no_more(tmp_path, tokenizer, side):
    lines = [["ok", "ok"], ["ok", "ok"], ["ok", "ok"]]
    lines[1][side] = "x" * 15
    corpus = encode(two_files(tmp_path, lines), tokenizer, tmp_path / "cache", max_length=16)
    assert max(corpus.source_lengths.max(), corpus.target_lengths.max()) == 16 and len(corpus) == 3
    lines[1][side] = "x" * 16
    text = two_files(tmp_path, lines)
    assert len(encode(text, tokenizer, tmp_path / "cache", max_length=16)) == 2
    with pytest.raises(UserError, match=r"line 2 with 17 tokens: .*`max_length`, 16 tokens.*`invalid_pairs` .drop"):
        encode(text, tokenizer, tmp_path / "cache", max_length=16, invalid_pairs="refuse")


def test_text_of_which_no_pair_is_left_is_refused(tmp_path, tokenizer):
    text = two_files(tmp_path, [("", "a"), ("b", " "), ("c" * 99, "c")])
    with pytest.raises(UserError, match=r"None of the 3 lines of .* can be used: dropped 1: .*; dropped 1: "):
        encode(text, tokenizer, tmp_path / "cache", max_length=16)
    assert folders_in(tmp_path / "cache") == []


def test_files_of_unequal_length_are_refused_before_anything_is_written(tmp_path, tokenizer):
    text = two_files(tmp_path, [("a", "b")])
    text.files[0].write_text("a\nb\n")
    with pytest.raises(UserError, match=r"2 lines and .* has 1"):
        encode(text, tokenizer, tmp_path / "cache", max_length=16)
    assert not (tmp_path / "cache").exists()


# Interruption and concurrency


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("no space left on device")])
def test_an_interrupted_encoding_leaves_nothing_and_the_next_call_works(tmp_path, tokenizer, error):
    lines = [(f"source {number}", f"target {number}") for number in range(4100)]
    text, cache = two_files(tmp_path, lines), tmp_path / "cache"

    class Interrupted(VanillaTransformerTokenizer):
        def __call__(self, texts, *args, **kwargs):
            if "source 2000" in texts:
                assert [path.name for path in cache.rglob("*.arrow")] == ["pairs.arrow"]
                raise error
            return super().__call__(texts, *args, **kwargs)

    with pytest.raises(error if isinstance(error, type) else type(error)):
        encode(text, Interrupted(), cache, max_length=32)
    assert folders_in(cache) == []
    corpus = encode(text, tokenizer, cache, max_length=32)
    assert len(corpus) == len(lines) and folders_in(cache) == [corpus.fingerprint]
    assert corpus.dataset[4099]["labels"] == tokenizer("target 4099")["input_ids"]


def test_what_a_killed_process_left_is_not_mistaken_for_a_corpus(tmp_path, tokenizer):
    text = ParallelText(SENTENCES)
    whole = encode(text, tokenizer, tmp_path / "other", max_length=256)
    leftover = tmp_path / "cache" / f"{whole.fingerprint}.partial-{'0' * 32}"
    leftover.mkdir(parents=True)
    (leftover / "pairs.arrow").write_bytes(b"half")
    assert ids_of(encode(text, tokenizer, tmp_path / "cache", max_length=256)) == ids_of(whole)


def test_the_slower_of_two_processes_takes_what_the_faster_one_finished(tmp_path, tokenizer):
    text = two_files(tmp_path, [("one", "eins"), ("two", "zwei")])
    finished = []

    class Overtaken(VanillaTransformerTokenizer):
        def __call__(self, *args, **kwargs):
            if not finished:
                finished.append(encode(text, tokenizer, tmp_path / "cache", max_length=16))
            return super().__call__(*args, **kwargs)

    corpus = encode(text, Overtaken(), tmp_path / "cache", max_length=16)
    assert folders_in(tmp_path / "cache") == [finished[0].fingerprint] == [corpus.fingerprint]
    assert ids_of(corpus) == ids_of(finished[0])


class Meeting(VanillaTransformerTokenizer):
    """Tokenises nothing before the other process has come as far."""

    folder: Path
    processes: tuple[str, str]

    def __call__(self, *args, **kwargs):
        mine, other = (self.folder / name for name in self.processes)
        mine.touch()
        for _ in range(12_000):
            if other.exists():
                return super().__call__(*args, **kwargs)
            time.sleep(0.01)
        raise TimeoutError


def encode_together(folder: Path, *processes: str) -> EncodedCorpus:
    Meeting.folder, Meeting.processes = folder, processes
    return encode(ParallelText(SENTENCES), Meeting(), folder / "cache", max_length=256)


def test_two_processes_that_encode_at_once_leave_one_corpus(tmp_path, tokenizer):
    other = multiprocessing.get_context("spawn").Process(target=encode_together, args=(tmp_path, "other", "this"))
    other.start()
    corpus = encode_together(tmp_path, "this", "other")
    other.join(timeout=120)
    assert other.exitcode == 0
    assert folders_in(tmp_path / "cache") == [corpus.fingerprint]
    reference = encode(ParallelText(SENTENCES), tokenizer, tmp_path / "reference", max_length=256)
    assert ids_of(EncodedCorpus(tmp_path / "cache" / corpus.fingerprint)) == ids_of(reference) == ids_of(corpus)


# Reading


def test_rows_are_those_of_the_dataset_in_the_order_asked_for(tmp_path, tokenizer):
    generator = np.random.default_rng(5)
    lines = [
        tuple("".join(generator.choice(list("abc déf"), generator.integers(1, 20))) + "." for _ in range(2))
        for _ in range(4500)
    ]
    corpus = encode(two_files(tmp_path, lines), tokenizer, tmp_path / "cache", max_length=64)
    assert corpus.dataset.data.column("input_ids").num_chunks > 1
    expected = ids_of(corpus)
    draws = [generator.integers(0, len(corpus), size) for size in (1, 2, 7, 300)]
    draws += [np.array([5, 5, 5]), np.arange(10), np.arange(1990, 2010), np.arange(30)[::-1], np.array([4499, 0])]
    draws += [generator.permutation(len(corpus))]
    for indices in draws:
        sources, targets = corpus.rows(indices)
        rows = [(source.tolist(), target.tolist()) for source, target in zip(sources, targets, strict=True)]
        assert rows == [expected[index] for index in indices]
        assert {row.dtype for row in (*sources, *targets)} == {np.dtype(np.int32)}


def test_lengths_are_those_of_the_rows(tmp_path, tokenizer):
    corpus = encode(ParallelText(SENTENCES), tokenizer, tmp_path, max_length=256)
    sources, targets = corpus.rows(np.arange(len(corpus)))
    assert corpus.source_lengths.tolist() == [len(row) for row in sources]
    assert corpus.target_lengths.tolist() == [len(row) for row in targets]
    assert corpus.source_lengths.dtype == corpus.target_lengths.dtype == np.int32


def test_ids_stay_on_the_disk(tmp_path, tokenizer):
    generator = random.Random(0)
    lines = [tuple("".join(generator.choices("abcdefgh ", k=300)) for _ in range(2)) for _ in range(2500)]
    corpus = encode(two_files(tmp_path, lines), tokenizer, tmp_path / "cache", max_length=400)
    folder = tmp_path / "cache" / corpus.fingerprint
    (file,) = corpus.dataset.cache_files
    assert Path(file["filename"]) == folder / "pairs.arrow"
    size = (folder / "pairs.arrow").stat().st_size
    assert size > 2 * 4 * 2500 * 250
    del corpus
    gc.collect()
    before = pyarrow.total_allocated_bytes()
    corpus = EncodedCorpus(folder)
    rows = [corpus.rows(np.array([index, 2499 - index])) for index in range(8)]
    assert pyarrow.total_allocated_bytes() - before < size / 50
    assert len(rows) == 8


def test_encoding_holds_a_block_of_pairs_however_many_there_are(tmp_path, tokenizer):
    peaks = []
    for number in (4000, 16_000):
        folder = tmp_path / str(number)
        folder.mkdir()
        text = two_files(folder, [(f"source sentence {line}", f"target {line}") for line in range(number)])
        gc.collect()
        tracemalloc.start()
        try:
            corpus = encode(text, tokenizer, folder / "cache", max_length=64)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert len(corpus) == number
    assert peaks[1] - peaks[0] < 12_000 * 32


# Text for the vocabulary


def test_the_vocabulary_sees_both_sides_of_every_usable_pair(tmp_path):
    text = two_files(tmp_path, [("one", "eins"), ("", "zwei"), ("three", "drei")])
    assert list(iterate_texts(text)) == ["one", "eins", "three", "drei"]
    with pytest.raises(UserError, match="line 2: the source is empty"):
        list(iterate_texts(text, Rejections("refuse")))


@pytest.mark.parametrize("number", [1, 7, 50, 99, 100, 1000])
def test_the_vocabulary_sees_evenly_spaced_pairs_of_more_text_than_it_wants(tmp_path, number):
    text = two_files(tmp_path, [(f"s{line}", f"t{line}") for line in range(100)])
    texts = list(iterate_texts(text, num_pairs=number))
    lines = [int(source[1:]) for source in texts[::2]]
    assert texts[1::2] == [f"t{line}" for line in lines] and len(lines) == min(number, 100)
    steps = np.diff([-1, *lines])
    assert steps.max() - steps.min() <= 1 and lines[-1] == 99


@pytest.mark.parametrize("place", [0.02, 0.5, 0.98])
def test_flipped_bits_are_noticed_before_anything_is_read(tmp_path, tokenizer, place, capsys):
    text = ParallelText(SENTENCES)
    whole = ids_of(encode(text, tokenizer, tmp_path, max_length=256))
    (path,) = tmp_path.glob("*/pairs.arrow")
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 0x01
    path.write_bytes(content)
    capsys.readouterr()
    assert ids_of(encode(text, tokenizer, tmp_path, max_length=256)) == whole
    assert "(pairs.arrow was changed after it was written); it is made again" in capsys.readouterr().err
    assert len(folders_in(tmp_path)) == 1


@pytest.mark.skipif(os.name != "posix", reason="needs names that are bytes")
def test_files_may_have_names_that_are_not_utf8(tmp_path, tokenizer):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    folder.mkdir()
    corpus = encode(two_files(folder, [("one", "eins")]), tokenizer, tmp_path / "cache", max_length=256)
    assert corpus.report["files"][0].startswith(str(folder))
