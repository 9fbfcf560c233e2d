"""The gradient of an update is the same however it is cut into batches and spread over processes.

All is in float64 and with label smoothing, and every parameter's gradient is compared by itself. Without dropout the
standard is independent of the engine: each pair's loss by itself, added up, divided by the number of target tokens.
"""

import socket
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gradients_of_updates import Case, compute, compute_as_process
from safetensors.torch import load_file
from torch import multiprocessing
from torch.nn import functional as F

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.training.preparation.vocabulary_and_ids import model_configuration, prepare


ENGINE = "vanilla_transformer.training.engine"
SMOOTHING = 0.1
PAIRS = (3, 17, 4, 25, 0, 11, 29, 8, 14, 22, 6)
CUTS = {
    # One process works, the others have nothing.
    "one": (PAIRS,),
    "two": (PAIRS[:5], PAIRS[5:]),
    # Two processes have unequal numbers of batches, and of four one has none.
    "three": (PAIRS[:1], PAIRS[1:9], PAIRS[9:]),
    "five": (PAIRS[:2], PAIRS[2:3], PAIRS[3:7], PAIRS[7:10], PAIRS[10:]),
    "each": tuple((pair,) for pair in PAIRS),
}
DROPOUT = {"dropout": 0.3, "attention_dropout": 0.2, "activation_dropout": 0.1}
RECOMPUTED = {"gradient_checkpointing": True}


@pytest.fixture(scope="module")
def options(make_options, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    options = make_options(folder, dropout=0.0, label_smoothing=SMOOTHING)
    # Encoded once, before several processes ask for it.
    prepare(options, options.cache_dir)
    return options


@pytest.fixture(scope="module")
def plain(options):
    """Cases without dropout."""
    recomputed = [Case(f"{cut}-recomputed", CUTS[cut], replace(options, **RECOMPUTED)) for cut in ("one", "five")]
    return [*(Case(cut, batches, options) for cut, batches in CUTS.items()), *recomputed]


@pytest.fixture(scope="module")
def dropping(options):
    """Cases with dropout. Masks belong to the batches: compared with one process that has the same batches."""
    options = replace(options, **DROPOUT)
    cases = [
        *(Case(f"dropping-{cut}", CUTS[cut], options) for cut in ("one", "three", "five")),
        Case("dropping-later", CUTS["five"], options, number=8),
        Case("dropping-seed", CUTS["three"], replace(options, seed=7)),
        Case("dropping-clipped", CUTS["each"], replace(options, max_grad_norm=0.05)),
    ]
    return cases + [
        replace(case, name=f"{case.name}-recomputed", options=replace(case.options, **RECOMPUTED))
        for case in (cases[0], cases[2])
    ]


@pytest.fixture(scope="module")
def results(plain, dropping, tmp_path_factory):
    """The folder of the gradients that so many processes computed; each number of them is started once."""
    folders = {}

    def of(processes: int) -> Path:
        if processes not in folders:
            folder = folders[processes] = tmp_path_factory.mktemp(f"processes{processes}")
            cases = [*plain, *dropping]
            if processes == 1:
                with default_dtype(torch.float64):
                    compute(folder, cases, 0, 1)
            else:
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", 0))
                    port = probe.getsockname()[1]
                # Processes are forked from one that has imported everything.
                multiprocessing.get_context("forkserver").set_forkserver_preload(["gradients_of_updates", ENGINE])
                multiprocessing.start_processes(
                    compute_as_process,
                    (processes, port, folder, cases),
                    nprocs=processes,
                    start_method="forkserver",
                )
        return folders[processes]

    return of


@pytest.fixture(scope="module")
def expected(options):
    """Each pair's gradient by itself, summed and divided by the number of target tokens; and the two summed losses."""
    data = prepare(options, options.cache_dir)
    torch.manual_seed(options.seed)
    with default_dtype(torch.float64):
        model = VanillaTransformerForConditionalGeneration(model_configuration(options, data.tokenizer))
    losses, tokens = torch.zeros(2, dtype=torch.float64), 0
    for index in PAIRS:
        source, target = (torch.from_numpy(rows[0].copy()).long()[None] for rows in data.train.rows(np.array([index])))
        start = torch.full((1, 1), data.tokenizer.bos_token_id)
        logits = model(input_ids=source, decoder_input_ids=torch.cat([start, target[:, :-1]], dim=1)).logits[0]
        loss = F.cross_entropy(logits, target[0], label_smoothing=SMOOTHING, reduction="sum")
        loss.backward()
        losses += torch.stack([loss.detach(), F.cross_entropy(logits, target[0], reduction="sum").detach()])
        tokens += target.numel()
    return {name: parameter.grad / tokens for name, parameter in model.named_parameters()} | {"sums": losses}


def gradients(folder: Path, case: Case, processes: int) -> list[dict[str, torch.Tensor]]:
    """A case's gradients on every process, with the losses summed over them."""
    found = [load_file(folder / f"{case.name}.{rank}.safetensors") for rank in range(processes)]
    losses = sum(tensors["sums"] for tensors in found)
    return [tensors | {"sums": losses} for tensors in found]


def distance(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest distance of two tensors of one name, relative to the norm of the expected one."""
    assert actual.keys() == expected.keys()
    assert all(tensor.dtype == torch.float64 and tensor.norm() > 0.0 for tensor in expected.values())
    return max(float((actual[name] - tensor).norm() / tensor.norm()) for name, tensor in expected.items())


@contextmanager
def default_dtype(dtype: torch.dtype):
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_the_gradient_is_the_sum_of_the_pairs_over_the_number_of_tokens(results, expected, plain, processes):
    for case in plain:
        for found in gradients(results(processes), case, processes):
            assert distance(found, expected) < 1e-12, case.name


@pytest.mark.parametrize("processes", [2, 4])
def test_masks_belong_to_update_and_batch_not_to_the_process(results, dropping, processes):
    for case in dropping:
        (alone,) = gradients(results(1), case, 1)
        for found in gradients(results(processes), case, processes):
            assert distance(found, alone) < 1e-12, case.name


def test_recomputed_layers_draw_the_same_masks(results, dropping):
    cases = {case.name: gradients(results(1), case, 1)[0] for case in dropping}
    names = [name for name in cases if f"{name}-recomputed" in cases]
    assert len(names) == 2
    for name in names:
        assert distance(cases[f"{name}-recomputed"], cases[name]) < 1e-12, name


def test_what_the_comparisons_could_miss_makes_a_difference(results, expected, plain, dropping, tmp_path, float64):
    cases = {case.name: gradients(results(1), case, 1)[0] for case in [*plain, *dropping]}
    # Dropout is on, and masks change with the update and the seed.
    assert distance(cases["dropping-one"], expected) > 0.1
    assert distance(cases["dropping-later"], cases["dropping-five"]) > 0.1
    assert distance(cases["dropping-seed"], cases["dropping-three"]) > 0.1
    # Label smoothing is on.
    compute(tmp_path, [replace(plain[0], options=replace(plain[0].options, label_smoothing=0.0))], 0, 1)
    assert distance(load_file(tmp_path / f"{plain[0].name}.0.safetensors"), expected) > 0.01
    # Batches differ so much in their number of tokens that the mean of their means is something else.
    lengths = prepare(plain[0].options, plain[0].options.cache_dir).train.target_lengths
    tokens = [int(lengths[np.array(batch)].sum()) for batch in CUTS["three"]]
    assert max(tokens) > 3 * min(tokens)
