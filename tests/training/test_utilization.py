import numpy as np
import pytest
import torch
from runs import make_run, train_anew
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from vanilla_transformer.training.journal import read_journal
from vanilla_transformer.training.utilization import ModelFlops, matrix_rate


@pytest.mark.parametrize("values", [{}, {"d_k": 6, "d_v": 10, "encoder_layers": 3, "encoder_ffn_dim": 40}], ids=str)
def test_the_operations_are_those_that_torch_counts_for_each_pair(make_options, tmp_path, values):
    run = make_run(make_options(tmp_path, dropout=0.0, attention="eager", **values))
    corpus, flops = run.data.train, ModelFlops(run.model)
    counts = {}
    for index in (0, 7, 20):
        pair = np.array([index])
        inputs = run.optimiser_step.inputs(corpus, pair)
        labels = inputs.pop("labels")
        with FlopCounterMode(display=False) as counter:
            F.cross_entropy(run.model(**inputs).logits[0], labels[0]).backward()
        counts[index] = counter.get_total_flops()
        assert flops.of([pair], corpus) == counts[index]
    assert len(set(counts.values())) == 3
    # Padding is no work of the model's: a batch is worth its pairs.
    assert flops.of([np.array([0, 7]), np.array([20])], corpus) == sum(counts.values())


def test_the_journal_tells_the_share_of_the_measured_rate(make_options, tmp_path):
    train_anew(make_options(tmp_path, max_updates=2))
    run = make_run(make_options(tmp_path / "plan"))
    batches = [batch for update in run.batches.updates(0)[:2] for batch in update.batches]
    (record,) = (record for record in read_journal(tmp_path / "metrics.jsonl") if record["kind"] == "train")
    lengths = run.data.train.source_lengths, run.data.train.target_lengths
    seconds = sum(int(sizes[batch].sum()) for batch in batches for sizes in lengths) / record["tokens_per_second"]
    share = (
        ModelFlops(run.model).of(batches, run.data.train) / seconds / matrix_rate(torch.device("cpu"), torch.float32)
    )
    assert record["model_flops_utilization"] == pytest.approx(share, rel=1e-9) and 0.0 < share < 1.0
