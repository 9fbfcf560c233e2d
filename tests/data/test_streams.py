from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.data.corpora import ParallelText, Rejections
from vanilla_transformer.data.encoding import PairEncoder
from vanilla_transformer.data.records import DataSet, PairKeys
from vanilla_transformer.data.streams import StreamCorpus, StreamPlan
from vanilla_transformer.errors import UserError


SENTENCES = tuple(Path(__file__).with_name(f"sentences.{language}") for language in ("en", "de"))
PAIRS = [(source, target) for _, source, target in ParallelText(SENTENCES).pairs(Rejections("refuse"))]
TOKENIZER = VanillaTransformerTokenizer()


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hub-cache")


@pytest.fixture(params=["parquet", "saved"])
def folder(request, tmp_path):
    """Unlike pairs in several files, some of them unusable."""
    path = tmp_path / "data"
    records = [{"source": f"{n} {source}", "target": f"{target} {n}"} for n, (source, target) in enumerate(PAIRS * 2)]
    for number in (3, 17, 18):
        records[number]["target"] = ""
    data = Dataset.from_list(records)
    if request.param == "saved":
        data.save_to_disk(path, num_shards=3)
    else:
        path.mkdir()
        for shard in range(3):
            data.shard(3, shard, contiguous=True).to_parquet(path / f"train-{shard}.parquet")
    return path


def make_plan(folder: Path, window: int = 25, **values) -> StreamPlan:
    text = DataSet(str(folder), "train", PairKeys(), streaming=True)
    corpus = StreamCorpus(text, PairEncoder(TOKENIZER, max_length=120), window)
    return StreamPlan(corpus, **{"tokens_per_batch": 300, "batches_per_update": 2, "seed": 1, **values})


def read_update(plan: StreamPlan, done: int) -> list[tuple[list[list[int]], list[list[int]]]]:
    batches = plan.update(done).batches
    return [tuple([row.tolist() for row in side] for side in plan.corpus.rows(batch)) for batch in batches]


def usable_pairs(folder: Path) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    text = DataSet(str(folder), "train", PairKeys())
    pairs = (pair[1:] for pair in text.pairs(Rejections("drop")))
    encoded = [tuple(tuple(TOKENIZER(side)["input_ids"]) for side in pair) for pair in pairs]
    return [pair for pair in encoded if max(map(len, pair)) <= 120]


def test_a_stream_is_read_evenly_without_end(folder):
    plan = make_plan(folder)
    expected = usable_pairs(folder)
    counts, done = dict.fromkeys(expected, 0), 0
    while plan.passes(done) < 3:
        update = read_update(plan, done)
        assert len(update) == 2
        for sources, targets in update:
            assert len(sources) * max(map(len, sources)) <= 300 and len(targets) * max(map(len, targets)) <= 300
            for pair in zip(sources, targets, strict=True):
                counts[tuple(map(tuple, pair))] += 1
        done += 1
    # What is in the window, and what was carried into it, has been read and not yet trained on.
    assert set(counts.values()) <= {1, 2, 3, 4} and sum(counts.values()) > 2 * len(expected)
    assert max(counts.values()) - min(counts.values()) <= 2


def test_updates_are_those_of_the_lengths_in_the_window(folder):
    plan = make_plan(folder)
    for done in range(20):
        update = plan.update(done)
        lengths = plan.corpus.target_lengths
        assert update.num_target_tokens == sum(int(lengths[batch].sum()) for batch in update.batches)
        assert lengths.tolist() == [len(row) for row in plan.corpus.rows(np.arange(len(lengths)))[1]]


def test_a_resumed_plan_goes_on_exactly_from_any_update(folder, tmp_path):
    length = 40
    whole = make_plan(folder)
    expected = [read_update(whole, done) for done in range(length)]
    assert whole.corpus.passes >= 2
    running = make_plan(folder)
    for stop in range(length - 1):
        read_update(running, stop)
        checkpoint = tmp_path / str(stop)
        checkpoint.mkdir()
        running.save(checkpoint)
        resumed = make_plan(folder)
        resumed.load(deepcopy(running.state()), checkpoint)
        horizon = min(length, stop + 12)
        assert [read_update(resumed, done) for done in range(stop + 1, horizon)] == expected[stop + 1 : horizon]


def test_seed_and_window_make_another_order(folder):
    orders = [
        [read_update(plan, done) for done in range(4)]
        for plan in (make_plan(folder), make_plan(folder, seed=2), make_plan(folder, window=30), make_plan(folder))
    ]
    assert orders[0] == orders[3]
    assert orders[0] != orders[1] and orders[0] != orders[2]


def test_a_window_that_holds_no_update_is_refused(folder):
    with pytest.raises(
        UserError, match=r"`stream_window` is 2 pairs, which make \d batches; an update takes 9; raise"
    ):
        make_plan(folder, window=2, batches_per_update=9).update(0)


def test_a_stream_without_a_usable_pair_is_refused(tmp_path):
    Dataset.from_list([{"source": "a", "target": ""}] * 5).save_to_disk(tmp_path / "data")
    with pytest.raises(UserError, match="holds no usable pair: dropped 5: the target is empty"):
        make_plan(tmp_path / "data").update(0)
