import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.data.bpe_dropout import DropoutCorpus, MergeTable, drop_merges
from vanilla_transformer.data.corpora import ParallelText
from vanilla_transformer.data.encoding import EncodedCorpus, encode
from vanilla_transformer.errors import UserError


LINES = [
    line
    for language in ("en", "de")
    for line in Path(__file__).with_name(f"sentences.{language}").read_text(encoding="utf-8").splitlines()
]


@pytest.fixture(scope="module")
def tokenizer():
    return VanillaTransformerTokenizer.train_from_iterator(LINES, 400, languages=["de"])


@pytest.fixture(scope="module")
def table(tokenizer):
    return MergeTable(tokenizer)


def marked(tokenizer, texts: list[str]) -> np.ndarray:
    """Ids of texts, of each word by itself; those that begin one as complements."""
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str
    values = []
    for text in texts:
        for _, (start, end) in split(text):
            first, *others = tokenizer(text[start:end], add_special_tokens=False)["input_ids"]
            values += [~first, *others]
        values.append(~tokenizer.eos_token_id)
    return np.array(values, dtype=np.int32)


def texts_with_repetitions() -> list[str]:
    generator = random.Random(3)
    return LINES + ["".join(generator.choices("aabn eé日.'1", k=generator.randint(0, 40))) for _ in range(300)]


def test_without_dropout_it_is_the_tokenizers_segmentation(tokenizer, table):
    texts = texts_with_repetitions()
    values = marked(tokenizer, texts)
    ids, _ = drop_merges(table, values, 0.0, np.random.default_rng(0))
    assert ids.tolist() == [index for row in tokenizer(texts)["input_ids"] for index in row]


def plain_dropout(word: list[str], ranks: dict[tuple[str, str], int], dropout: float, chance: random.Random) -> tuple:
    """Algorithm 1 of Provilkov et al. (2020), one word at a time."""
    while True:
        possible = [
            (ranks[pair], place)
            for place, pair in enumerate(pairwise(word))
            if pair in ranks and chance.random() >= dropout
        ]
        if not possible:
            return tuple(word)
        _, place = min(possible)
        word = [*word[:place], word[place] + word[place + 1], *word[place + 2 :]]


def test_segmentations_are_distributed_as_the_papers_algorithm_draws_them():
    names = ["a", "b", "n", "e", "ab", "an", "ban", "ana", "abn", "anan", "nan"]
    vocabulary = {token: index for index, token in enumerate(names)}
    merges = [("a", "b"), ("a", "n"), ("b", "an"), ("an", "a"), ("ab", "n"), ("an", "an"), ("n", "an")]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    table = MergeTable(PreTrainedTokenizerFast(tokenizer_object=backend))
    word, draws, chance = list("banananab"), 40_000, random.Random(1)
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    expected = Counter(plain_dropout(word, ranks, 0.4, chance) for _ in range(draws))
    symbols = np.tile([vocabulary[symbol] for symbol in word], draws).astype(np.int32)
    ids, words = table.merge(symbols, np.repeat(np.arange(draws), len(word)), 0.4, np.random.default_rng(2))
    rows = np.split([names[index] for index in ids], np.flatnonzero(np.diff(words)) + 1)
    found = Counter(tuple(str(token) for token in row) for row in rows)
    assert all("".join(row) == "".join(word) for row in found)
    for row in expected.keys() | found.keys():
        # Five standard deviations of the difference of two binomial counts.
        assert abs(found[row] - expected[row]) < 5 * (2 * max(found[row], expected[row], 5)) ** 0.5


def test_dropout_changes_the_segmentation_and_not_the_text(tokenizer, table):
    values = marked(tokenizer, LINES)
    plain, _ = drop_merges(table, values, 0.0, np.random.default_rng(0))
    lengths = [len(plain)]
    for dropout in (0.1, 0.5, 0.9):
        ids, _ = drop_merges(table, values, dropout, np.random.default_rng(0))
        assert tokenizer.decode(ids.tolist()) == tokenizer.decode(plain.tolist())
        lengths.append(len(ids))
    assert lengths == sorted(set(lengths))


def test_tokens_stay_in_their_words_and_special_tokens_are_kept(tokenizer, table):
    tag = tokenizer.language_tags["de"]
    values = np.concatenate([[~tag], marked(tokenizer, ["the the", "the"])])
    ids, firsts = drop_merges(table, values, 0.7, np.random.default_rng(5))
    ends = np.flatnonzero(~values == tokenizer.eos_token_id)
    assert ids[0] == tag and (ids == tag).sum() == 1
    assert firsts[ids == tokenizer.eos_token_id].tolist() == ends.tolist()
    assert sorted(set(firsts)) == np.flatnonzero(values < 0).tolist()
    assert (np.diff(firsts) >= 0).all()


def test_chance_is_the_generators(tokenizer, table):
    values = marked(tokenizer, LINES)
    draws = [drop_merges(table, values, 0.3, np.random.default_rng(seed))[0].tolist() for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_vocabularies_of_another_kind_are_refused():
    word_level = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(UserError, match="not plain byte-pair encoding; leave it out"):
        MergeTable(PreTrainedTokenizerFast(tokenizer_object=word_level))
    prefixed = Tokenizer(models.BPE(vocab={"a": 0, "##b": 1}, merges=[], continuing_subword_prefix="##"))
    with pytest.raises(UserError, match="not plain byte-pair encoding"):
        MergeTable(PreTrainedTokenizerFast(tokenizer_object=prefixed))
    incomplete = Tokenizer(models.BPE(vocab={"a": 0, "bc": 1}, merges=[]))
    with pytest.raises(UserError, match="lacks single symbols"):
        MergeTable(PreTrainedTokenizerFast(tokenizer_object=incomplete))


# Corpora


def table_of(folder: Path, lines: list[str]) -> ParallelText:
    path = folder / "train.tsv"
    path.write_text("".join(f"{line}\t{line[::-1]}\n" for line in lines), encoding="utf-8")
    return ParallelText((path,))


def ids_of(corpus, number: int) -> list[list[list[int]]]:
    return [[row.tolist() for row in side] for side in corpus.rows(np.arange(number))]


def redrawn(base: EncodedCorpus, table: MergeTable, folder: Path, **values) -> DropoutCorpus:
    return DropoutCorpus(base, table, folder, **{"dropout": 0.2, "seed": 1, "max_length": 200, **values})


def test_marked_words_are_those_of_the_pre_tokenizer(tmp_path, tokenizer):
    text = table_of(tmp_path, LINES)
    corpus = encode(text, tokenizer, tmp_path, max_length=200, mark_words=True)
    sources, targets = corpus.rows(np.arange(len(LINES)))
    assert np.concatenate(sources).tolist() == marked(tokenizer, LINES).tolist()
    assert np.concatenate(targets).tolist() == marked(tokenizer, [line[::-1] for line in LINES]).tolist()


def test_each_epoch_is_a_function_of_seed_and_epoch(tmp_path, tokenizer, table):
    lines = LINES * 30
    number = len(lines)
    base = encode(table_of(tmp_path, lines), tokenizer, tmp_path, max_length=200, mark_words=True)
    assert base.dataset.data.column("labels").num_chunks > 1
    epochs = {}
    for seed in (1, 2):
        corpus = redrawn(base, table, tmp_path / "one", seed=seed)
        for epoch in (0, 1):
            corpus.begin_epoch(epoch)
            epochs[seed, epoch] = ids_of(corpus, number)
            assert [len(row) for row in epochs[seed, epoch][0]] == corpus.source_lengths.tolist()
    for key, ids in epochs.items():
        assert all(ids != other for name, other in epochs.items() if name != key)
        decoded = tokenizer.batch_decode(ids[0], skip_special_tokens=True)
        assert decoded == [line.strip() for line in lines]
    # Another process, or a resumed run, that begins with the epoch.
    corpus = redrawn(base, table, tmp_path / "other")
    corpus.begin_epoch(1)
    assert ids_of(corpus, number) == epochs[1, 1]
    # The same pair is segmented in many ways within an epoch too.
    copies = {tuple(row) for row in epochs[1, 1][0][:: len(LINES)]}
    assert len(copies) > 5


def test_older_epochs_leave_the_disk(tmp_path, tokenizer, table):
    base = encode(table_of(tmp_path, LINES), tokenizer, tmp_path / "base", max_length=200, mark_words=True)
    corpus = redrawn(base, table, tmp_path / "epochs")
    for epoch in range(3):
        corpus.begin_epoch(epoch)
        assert [path.name for path in (tmp_path / "epochs").glob("*/*")] == [str(epoch)]


def test_a_side_that_would_become_too_long_stays_as_it_was(tmp_path, tokenizer, table):
    text = table_of(tmp_path, LINES)
    plain = encode(text, tokenizer, tmp_path, max_length=40)
    base = encode(text, tokenizer, tmp_path, max_length=40, mark_words=True)
    corpus = redrawn(base, table, tmp_path, max_length=40, dropout=0.3)
    corpus.begin_epoch(0)
    free = redrawn(base, table, tmp_path / "free", max_length=1000, dropout=0.3)
    free.begin_epoch(0)
    too_long = 0
    for side, lengths in enumerate((free.source_lengths, free.target_lengths)):
        rows = zip(*(ids_of(one, len(base))[side] for one in (corpus, free, plain)), lengths, strict=True)
        for row, drawn, unchanged, length in rows:
            assert row == (unchanged if length > 40 else drawn)
            too_long += length > 40
    assert 0 < too_long < len(base)
