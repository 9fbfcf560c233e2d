import json
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow
import pytest

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.data.bpe_dropout import DropoutCorpus, MergeTable
from vanilla_transformer.data.encoding import PAIRS_SCHEMA, EncodedCorpus, new_pairs_file
from vanilla_transformer.data.epochs import EpochPlan


@pytest.fixture(scope="module")
def table():
    return MergeTable(VanillaTransformerTokenizer.train_from_iterator(["ab abc abcd"] * 3, 263))


def make_corpus(folder: Path, num_pairs: int) -> EncodedCorpus:
    """Pairs of one word each."""
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps({"fingerprint": folder.name}), encoding="utf-8")
    words = pyarrow.ListArray.from_arrays(np.arange(2001, dtype=np.int32), np.full(2000, ~262, dtype=np.int32))
    with new_pairs_file(folder) as writer:
        for _ in range(num_pairs // 2000):
            writer.write_batch(pyarrow.record_batch([words, words], schema=PAIRS_SCHEMA))
    return EncodedCorpus(folder)


def peak_of_two_epochs(folder: Path, num_pairs: int, table: MergeTable) -> int:
    base = make_corpus(folder / "base", num_pairs)
    tracemalloc.start()
    try:
        corpus = DropoutCorpus(base, table, folder, dropout=0.5, seed=0, max_length=100)
        plan = EpochPlan(corpus, tokens_per_batch=4096, batches_per_update=6, seed=0)
        first, total = plan.updates_per_epoch, int(corpus.target_lengths.sum())
        # A run holds the last update of an epoch while the next begins.
        held = plan.update(first - 1)
        plan.update(first)
        assert len(corpus) == num_pairs and int(corpus.target_lengths.sum()) != total
        assert len(held.batches) > 0
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_change_of_epoch_takes_at_most_32_bytes_a_pair_where_lengths_change_too(tmp_path, table):
    small, large = (peak_of_two_epochs(tmp_path / str(number), number, table) for number in (100_000, 200_000))
    # Lengths take 8, two epochs' orders 4 each, and sorting 8; the old epoch's lengths would be 8 more.
    assert 24 * 100_000 < large - small < 32 * 100_000
