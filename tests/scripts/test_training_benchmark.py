import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from vanilla_transformer.native.training_kernels import why_no_kernels
from vanilla_transformer.training.options import TrainingOptions
from vanilla_transformer.training.preparation.vocabulary_and_ids import prepare
from vanilla_transformer.training.step.loss import SmoothedTranslationLoss
from vanilla_transformer.training.watching.utilization import ModelFlops


BENCHMARKS = Path(__file__).parents[2] / "scripts" / "benchmarks"
TEXT = tuple(Path(__file__).parents[1] / "data" / f"sentences.{side}" for side in ("en", "de"))

VARIANT_KINDS = ("engine", "trainer", "marian", "torch")

sys.path.insert(0, str(BENCHMARKS))
try:
    import measuring
    import report
    import training
    import variants
finally:
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(autouse=True)
def own_accelerate():
    with variants.own_accelerate():
        yield


@pytest.fixture(scope="module")
def make_task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmark")

    def make(**settings) -> variants.Task:
        options = TrainingOptions(
            output_dir=folder / "run", train_files=TEXT, vocab_size=300, preset="tiny", encoder_layers=2,
            decoder_layers=2, d_model=16, encoder_ffn_dim=24, decoder_ffn_dim=24, tokens_per_batch=512,
            tokens_per_update=512, device="cpu", **settings,
        )  # fmt: skip
        return variants.Task(options, prepare(options, folder), torch.device("cpu"))

    return make


def copy_into_torch(weights: dict[str, torch.Tensor], model: variants.TorchTranslator) -> None:
    """Give `torch.nn.Transformer` Marian's weights."""

    def put(theirs: torch.nn.Module, ours: str) -> None:
        theirs.weight.copy_(weights[f"{ours}.weight"])
        theirs.bias.copy_(weights[f"{ours}.bias"])

    def put_attention(theirs: torch.nn.MultiheadAttention, ours: str) -> None:
        for name in ("weight", "bias"):
            joined = torch.cat([weights[f"{ours}.{kind}_proj.{name}"] for kind in "qkv"])
            getattr(theirs, f"in_proj_{name}").copy_(joined)
        put(theirs.out_proj, f"{ours}.out_proj")

    model.embeddings.weight.copy_(weights["model.shared.weight"])
    for side in ("encoder", "decoder"):
        for number, layer in enumerate(getattr(model.transformer, side).layers):
            prefix = f"model.{side}.layers.{number}"
            norms = ["self_attn_layer_norm", *["encoder_attn_layer_norm"] * (side == "decoder"), "final_layer_norm"]
            for i, norm in enumerate(norms, start=1):
                put(getattr(layer, f"norm{i}"), f"{prefix}.{norm}")
            put(layer.linear1, f"{prefix}.fc1")
            put(layer.linear2, f"{prefix}.fc2")
            put_attention(layer.self_attn, f"{prefix}.self_attn")
            if side == "decoder":
                put_attention(layer.multihead_attn, f"{prefix}.encoder_attn")


@torch.no_grad()
def test_all_variants_have_the_same_loss_under_the_same_weights(make_task, tmp_path):
    task = make_task(dropout=0.0, provenance="marian")
    engine = variants.Engine(task, "fp32")
    marian = variants.MarianLoop(task, "fp32")
    plain = variants.TorchLoop(task, "fp32")
    trainer = variants.Trainer(task, "fp32")
    for variant in (engine, marian, plain, trainer):
        variant.model.double().train()
    torch.manual_seed(1)
    for name, parameter in marian.model.named_parameters():
        if parameter.requires_grad:
            parameter.normal_(mean=1.0 if "norm.weight" in name else 0.0, std=0.3)
    weights = marian.model.state_dict()
    engine.model.load_state_dict({name: weights[name] for name in engine.model.state_dict()})
    trainer.model.load_state_dict(weights)
    copy_into_torch(weights, plain.model)
    # Marian puts sines before cosines, and rounds them to float32.
    length = len(plain.model.positions)
    plain.model.positions.copy_(weights["model.encoder.embed_positions.weight"][:length])

    pairs = np.arange(12)
    inputs = plain.inputs(pairs)
    assert inputs["padding"].any()
    of_marian = marian.loss(marian.inputs(pairs)).item()
    assert plain.loss(inputs).item() == pytest.approx(of_marian, rel=1e-12)
    seq2seq = trainer.make_trainer(str(tmp_path), None, 1)
    batch = seq2seq.data_collator([task.data.train.dataset[int(pair)] for pair in pairs])
    assert seq2seq.compute_loss(trainer.model, batch).item() == pytest.approx(of_marian, rel=1e-7)
    loss, _ = SmoothedTranslationLoss(engine.model, variants.LABEL_SMOOTHING)(**marian.inputs(pairs))
    num_tokens = int(task.data.train.target_lengths[pairs].sum())
    assert loss.item() / num_tokens == pytest.approx(of_marian, rel=1e-6)


@pytest.mark.parametrize("name", sorted(variants.VARIANTS))
def test_an_epoch_is_the_same_text_for_every_variant(make_task, name):
    task = make_task()
    corpus = task.data.train
    num_real = int(corpus.source_lengths.sum() + corpus.target_lengths.sum())
    batches = variants.MarianLoop(task, "fp32").batches
    num_updates = 1 if name.startswith("trainer") else len(batches.batches(0))
    assert len(corpus) <= variants.SENTENCES_PER_BATCH and len(batches.batches(0)) > 1

    variant = variants.VARIANTS[name](task)
    before = [parameter.clone() for parameter in variant.model.parameters() if parameter.requires_grad]
    meter = measuring.Meter(task.device, warmup=num_updates, seconds=0.0, updates=num_updates)
    variant.train(meter, seed=0)
    counts = meter.counts(task.config)
    assert (counts["updates"], counts["pairs"], counts["real_tokens"]) == (num_updates, len(corpus), num_real)
    # What the journal counts of the same text.
    needed = ModelFlops(task.config).of(corpus.source_lengths, corpus.target_lengths)
    assert counts["operations"] == pytest.approx(needed)
    assert counts["real_tokens"] < counts["padded_tokens"]
    assert counts["cpu_seconds"] > 0.0
    after = [parameter for parameter in variant.model.parameters() if parameter.requires_grad]
    assert all((old != new).any() for old, new in zip(before, after, strict=True))


def test_rounds_have_different_text_and_loops_the_same(make_task):
    task = make_task()

    def lengths(name: str, seed: int) -> list[list[int]]:
        meter = measuring.Meter(task.device, warmup=1, seconds=0.0, updates=1)
        variants.VARIANTS[name](task).train(meter, seed)
        return [side.tolist() for batch in meter.batches for side in batch]

    assert lengths("trainer-fp32", 1) == lengths("trainer-fp32", 1) != lengths("trainer-fp32", 2)
    assert lengths("engine-fp32", 1) == lengths("marian-fp32", 1) == lengths("torch-fp32", 1)
    assert lengths("engine-fp32", 1) != lengths("engine-fp32", 2)


def test_models_differ_in_biases_alone(make_task):
    task = make_task()
    counts = [measuring.count_parameters(variants.VARIANTS[f"{name}-fp32"](task).model) for name in VARIANT_KINDS]
    for kind in ("matrices", "scales"):
        assert len({count[kind] for count in counts}) == 1
    assert counts[0]["biases"] < counts[1]["biases"]


def test_operations_are_those_of_a_peers_products(make_task):
    task = make_task()
    loop = variants.MarianLoop(task, "fp32", attention="eager")
    meter = measuring.Meter(task.device, warmup=1, seconds=0.0, updates=1)
    source, target = np.full(3, 7), np.full(3, 5)
    loop.sources = [np.arange(7)] * 3
    loop.targets = [np.arange(5)] * 3
    with FlopCounterMode(display=False) as counter:
        loop.loss(loop.inputs(np.arange(3))).backward()
    meter.batches.append((source, target))
    assert meter.counts(task.config)["operations"] == counter.get_total_flops()


def test_the_utilisation_is_the_operations_over_the_best_rate_of_matrix_products():
    measured = {
        "variant": "engine-bf16", "precision": "bf16", "parameters": {"matrices": 1}, "real_tokens": 10,
        "padded_tokens": 10, "operations": 600.0, "wall_seconds": 3.0, "cpu_seconds": 2.0,
    }  # fmt: skip
    measurements = [
        measured | {"round": number, "matrix_rate": {"wall": rate, "cpu": 2 * rate}}
        for number, rate in enumerate((400.0, 500.0))
    ]
    row = report.summarise(measurements, {"engine-bf16": None})["engine-bf16"]
    assert row["model_flops_utilization_per_wall_second"] == pytest.approx(600.0 / 3.0 / 500.0)
    assert row["model_flops_utilization_per_cpu_second"] == pytest.approx(600.0 / 2.0 / 1000.0)


def test_command_line(tmp_path):
    output = tmp_path / "record.json"
    names = ["engine-bf16", "trainer-fp32"]
    result = subprocess.run(
        [
            sys.executable, BENCHMARKS / "training.py", "--sizes", "tiny", "--vocabularies", "300", "--threads", "1",
            "--rounds", "2", "--seconds", "0", "--updates", "1", "--warmup", "1", "--tokens_per_batch", "512",
            "--variants", *names, "--train_files", *TEXT, "--no-memory", "--output", output,
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    [record] = json.loads(output.read_text())["settings"]
    assert [entry["round"] for entry in record["measurements"]] == [0, 0, 1, 1]
    speed = {
        (entry["variant"], entry["round"]): entry["real_tokens"] / entry["cpu_seconds"]
        for entry in record["measurements"]
    }
    ratio = sorted(speed["engine-bf16", number] / speed["trainer-fp32", number] for number in (0, 1))
    assert record["ratios"]["engine-bf16 / trainer-fp32"]["cpu"]["range"] == pytest.approx(ratio)
    assert all(name in result.stdout for name in names)
    fill_rates = [record["summary"][name]["fill_rate"] for name in names]
    assert min(fill_rates) > 0.0 and fill_rates[1] < 1.0
    assert (fill_rates[0] == 1.0) == (why_no_kernels() is None)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_seen_to_come_and_its_peak_to_stay():
    cpu = torch.device("cpu")
    before = measuring.current_memory(cpu)
    block = np.ones(2**27, dtype=np.uint8)
    assert before + 2**26 < measuring.current_memory(cpu) <= measuring.peak_memory(cpu)
    del block
    assert measuring.peak_memory(cpu) >= before + 2**26


def test_the_readme_shows_a_command_that_parses():
    readme = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    [command] = re.findall(r"^python scripts/benchmarks/training\.py (.*)$", readme, flags=re.MULTILINE)
    assert training.parse(shlex.split(command)).sizes == ["tiny", "base"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "tiny"], "unrecognized arguments: --size tiny"),
        (["--variants", "fairseq"], "invalid choice: 'fairseq'"),
        (["--threads", "999"], "--threads is 999, but this process may use"),
        (["--warmup", "0"], "0 is not a whole number of at least 1"),
        (["--output", "missing/record.json"], "missing is not a folder"),
        (["--train_files", "missing.en", "missing.de"], "missing.en"),
    ],
)
def test_mistakes_are_one_sentence(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    try:
        code = training.main(arguments)
    except SystemExit as exit:
        code = exit.code
    error = capsys.readouterr().err
    assert code == 2
    assert message in error and error.count("\n") == 1
