import json

import numpy as np
import pytest
from runs import make_run, train_anew
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from vanilla_transformer.training.engine import TrainingRun
from vanilla_transformer.training.records.journal import read_journal
from vanilla_transformer.training.watching.utilization import ModelFlops


def counted(run: TrainingRun, pairs: np.ndarray) -> int:
    """Floating-point operations that torch counts for a pass over each pair on its own and back."""
    with FlopCounterMode(display=False) as counter:
        for pair in pairs:
            inputs = run.optimiser_step.inputs(run.data.train, np.array([pair]))
            labels = inputs.pop("labels")
            F.cross_entropy(run.model(**inputs).logits[0], labels[0]).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("values", [{}, {"d_k": 6, "d_v": 10, "encoder_layers": 3, "encoder_ffn_dim": 40}], ids=str)
def test_the_operations_are_those_that_torch_counts_for_each_pair(make_options, tmp_path, values):
    run = make_run(make_options(tmp_path, dropout=0.0, attention="eager", **values))
    corpus, flops = run.data.train, ModelFlops(run.model.config)
    counts = {}
    for index in (0, 7, 20):
        pair = np.array([index])
        counts[index] = counted(run, pair)
        assert flops.of(corpus.source_lengths[pair], corpus.target_lengths[pair]) == counts[index]
    assert len(set(counts.values())) == 3
    # Padding is no work of the model's: a batch is worth its pairs.
    pairs = np.array(list(counts))
    assert flops.of(corpus.source_lengths[pairs], corpus.target_lengths[pairs]) == sum(counts.values())


def test_the_journal_tells_the_share_of_the_measured_rate(make_options, tmp_path):
    train_anew(make_options(tmp_path, max_updates=2))
    run = make_run(make_options(tmp_path / "plan", dropout=0.0, attention="eager"))
    batches = [batch for update in run.batches.updates(0)[:2] for batch in update.batches]
    (record,) = (record for record in read_journal(tmp_path / "metrics.jsonl") if record["kind"] == "train")
    corpus, pairs = run.data.train, np.concatenate(batches)
    lengths = corpus.source_lengths[pairs], corpus.target_lengths[pairs]
    seconds = sum(int(side.sum()) for side in lengths) / record["tokens_per_second"]
    rate = json.loads((tmp_path / "run.json").read_text())["matrix_flops_per_second"]
    assert record["model_flops_utilization"] == pytest.approx(counted(run, pairs) / seconds / rate, rel=1e-9)
