import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.data.collation import collate
from vanilla_transformer.training.step import loss as loss_module
from vanilla_transformer.training.step.loss import SmoothedTranslationLoss, smoothed_cross_entropy


def random_problem(
    num_tokens: int = 37,
    width: int = 6,
    vocab_size: int = 19,
    *,
    bias: bool = False,
    dtype=torch.float64,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden_states = torch.randn(num_tokens, width, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocab_size, width, generator=generator, dtype=torch.float64).to(dtype)
    offset = torch.randn(1, vocab_size, generator=generator, dtype=torch.float64).to(dtype) if bias else None
    labels = torch.randint(vocab_size, (num_tokens,), generator=generator)
    return hidden_states.requires_grad_(), weight.requires_grad_(), offset, labels


def plain(hidden_states, weight, bias, labels, label_smoothing):
    logits = hidden_states @ weight.T
    if bias is not None:
        logits = logits + bias
    return (
        F.cross_entropy(logits, labels, label_smoothing=label_smoothing, reduction="sum"),
        F.cross_entropy(logits, labels, reduction="sum"),
    )


def assert_close(actual: torch.Tensor, expected: torch.Tensor, relative: float) -> None:
    actual, expected = actual.detach(), expected.detach()
    assert actual.shape == expected.shape
    assert float((actual - expected).norm()) <= relative * float(expected.norm())


@pytest.mark.parametrize("tokens_per_slice", [None, 1, 5, 36, 37, 1000])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_are_those_of_cross_entropy(tokens_per_slice, label_smoothing, bias):
    problem = random_problem(bias=bias)
    hidden_states, weight, *_ = problem
    expected, expected_nll = plain(*problem, label_smoothing)
    expected_gradients = torch.autograd.grad(expected * 0.3, (hidden_states, weight))
    loss, nll = smoothed_cross_entropy(*problem, label_smoothing, tokens_per_slice=tokens_per_slice)
    assert loss.dtype == nll.dtype == torch.float64
    assert_close(loss, expected, 1e-12)
    assert_close(nll, expected_nll, 1e-12)
    assert not nll.requires_grad
    for actual, wanted in zip(
        torch.autograd.grad(loss * 0.3, (hidden_states, weight)), expected_gradients, strict=True
    ):
        assert_close(actual, wanted, 1e-12)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_loss_and_gradients_are_the_closed_form(label_smoothing):
    hidden_states, weight, *_ = problem = random_problem(bias=True, seed=3)
    x, w, b, y = (tensor.detach().numpy() for tensor in problem)
    logits = x @ w.T + b
    probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    smoothed = np.full_like(logits, label_smoothing / len(w))
    smoothed[np.arange(len(y)), y] += 1.0 - label_smoothing
    loss, nll = smoothed_cross_entropy(*problem, label_smoothing, tokens_per_slice=8)
    loss.backward()
    assert loss.item() == pytest.approx(-(smoothed * np.log(probabilities)).sum(), rel=1e-12)
    assert nll.item() == pytest.approx(-np.log(probabilities[np.arange(len(y)), y]).sum(), rel=1e-12)
    assert_close(hidden_states.grad, torch.from_numpy((probabilities - smoothed) @ w), 1e-12)
    assert_close(weight.grad, torch.from_numpy((probabilities - smoothed).T @ x), 1e-12)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_gradients_are_those_of_finite_differences(label_smoothing):
    hidden_states, weight, bias, labels = random_problem(5, 3, 7, bias=True)

    def loss(hidden_states, weight):
        return smoothed_cross_entropy(hidden_states, weight, bias, labels, label_smoothing, tokens_per_slice=2)[0]

    assert torch.autograd.gradcheck(loss, (hidden_states, weight))


@pytest.mark.parametrize("needed", [(True, False), (False, True)])
def test_either_gradient_can_be_asked_for_alone(needed):
    hidden_states, weight, bias, labels = random_problem()
    wanted = torch.autograd.grad(plain(hidden_states, weight, bias, labels, 0.1)[0], (hidden_states, weight))
    parts = [
        tensor.detach().requires_grad_(need) for tensor, need in zip((hidden_states, weight), needed, strict=True)
    ]
    smoothed_cross_entropy(*parts, bias, labels, 0.1)[0].backward()
    for part, need, gradient in zip(parts, needed, wanted, strict=True):
        assert (part.grad is not None) == need
        if need:
            assert_close(part.grad, gradient, 1e-12)


def test_without_gradients_the_loss_is_the_same():
    problem = random_problem()
    with torch.no_grad():
        loss, nll = smoothed_cross_entropy(*problem, 0.1)
    assert not loss.requires_grad
    assert [loss.item(), nll.item()] == [value.item() for value in smoothed_cross_entropy(*problem, 0.1)]


def test_the_sum_over_parts_is_the_whole():
    hidden_states, weight, bias, labels = random_problem()
    whole = smoothed_cross_entropy(hidden_states, weight, bias, labels, 0.1)
    parts = [
        smoothed_cross_entropy(hidden_states[part], weight, bias, labels[part], 0.1)
        for part in (slice(0, 3), slice(3, 4), slice(4, None))
    ]
    for total, values in zip(whole, zip(*parts, strict=True), strict=True):
        assert_close(sum(values), total, 1e-12)
    gradients = [torch.autograd.grad(loss, (hidden_states, weight)) for loss in (whole[0], sum(p[0] for p in parts))]
    for whole_gradient, gradient in zip(*gradients, strict=True):
        assert_close(gradient, whole_gradient, 1e-12)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)]
)
def test_large_logits_neither_overflow_nor_vanish(bias, dtype, tolerance):
    """Most labels' probabilities are too small for their type here."""
    hidden_states, weight, offset, labels = random_problem(bias=bias, dtype=dtype)
    scaled = (hidden_states.detach() * 1e3).requires_grad_()
    loss, nll = smoothed_cross_entropy(scaled, weight, offset, labels, 0.1)
    (gradient,) = torch.autograd.grad(loss, scaled)
    offset = offset if offset is None else offset.double()
    expected = plain(scaled.double(), weight.double(), offset, labels, 0.1)
    for value, wanted in zip((loss, nll), expected, strict=True):
        assert_close(value.double(), wanted, tolerance)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_no_tokens_have_no_loss(label_smoothing):
    hidden_states, weight, bias, labels = random_problem(0, bias=True)
    loss, nll = smoothed_cross_entropy(hidden_states, weight, bias, labels, label_smoothing)
    loss.backward()
    assert loss.item() == nll.item() == 0.0
    assert hidden_states.grad.shape == (0, 6)
    assert not weight.grad.any()


def test_small_gradients_survive_float16():
    """The gradient in float32 is that of float64 though the factor that scales it would be lost in float16."""
    problem = random_problem(64, 32, 101, dtype=torch.float32)
    hidden_states, weight, bias, labels = problem
    wanted = torch.autograd.grad(plain(hidden_states.double(), weight.double(), bias, labels, 0.1)[0], problem[:2])
    with torch.autocast("cpu", dtype=torch.float16):
        loss, _ = smoothed_cross_entropy(*problem, 0.1)
    factor = 1e-9
    for gradient, expected in zip(torch.autograd.grad(loss * factor, problem[:2]), wanted, strict=True):
        assert gradient.dtype == torch.float32
        assert_close(gradient.double(), factor * expected.double(), 2.0**-9)


# bfloat16 keeps 8 bits, so that a rounding is off by at most this share.
BFLOAT16_ROUNDING = 2.0**-8


def test_under_autocast_the_loss_stays_within_the_rounding_of_bfloat16():
    problem = random_problem(64, 32, 101, dtype=torch.float32)
    hidden_states, weight, *_ = problem
    expected = smoothed_cross_entropy(*problem, 0.1)
    expected_gradients = torch.autograd.grad(expected[0], (hidden_states, weight))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = smoothed_cross_entropy(*problem, 0.1)
    gradients = torch.autograd.grad(actual[0], (hidden_states, weight))
    # Sums are float32 though products are not, and gradients have their tensors' type.
    assert all(value.dtype == torch.float32 for value in (*actual, *gradients))
    for value, wanted in zip(actual, expected, strict=True):
        assert_close(value, wanted, BFLOAT16_ROUNDING)
        assert value.item() != wanted.item()
    # Both factors, the logits and the product are rounded.
    for value, wanted in zip(gradients, expected_gradients, strict=True):
        assert_close(value, wanted, 4 * BFLOAT16_ROUNDING)


def test_bfloat16_tensors_give_a_loss_in_float32():
    problem = random_problem(64, 32, 101, dtype=torch.bfloat16)
    hidden_states, weight, *_ = problem
    loss, nll = smoothed_cross_entropy(*problem, 0.1)
    loss.backward()
    assert loss.dtype == nll.dtype == torch.float32
    assert hidden_states.grad.dtype == weight.grad.dtype == torch.bfloat16
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden_states, weight)]
    expected, _ = plain(*wide, None, problem[3], 0.1)
    gradients = torch.autograd.grad(expected, wide)
    assert_close(loss.double(), expected, BFLOAT16_ROUNDING)
    for tensor, wanted in zip((hidden_states, weight), gradients, strict=True):
        assert_close(tensor.grad.double(), wanted, 4 * BFLOAT16_ROUNDING)


# Memory


class LargestTensor(TorchDispatchMode):
    """Records the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.num_elements = max(self.num_elements, leaf.numel())
        return result


@pytest.mark.parametrize("tokens_per_slice", [None, 16])
def test_no_more_than_a_slice_of_the_logits_exists_at_a_time(tokens_per_slice, monkeypatch):
    num_tokens, width, vocab_size = 3000, 8, 500
    monkeypatch.setattr(loss_module, "LOGITS_PER_SLICE", 100 * vocab_size)
    problem = random_problem(num_tokens, width, vocab_size, dtype=torch.float32)
    with LargestTensor() as largest:
        loss, _ = smoothed_cross_entropy(*problem, 0.1, tokens_per_slice=tokens_per_slice)
        loss.backward()
    assert largest.num_elements <= max((tokens_per_slice or 100) * vocab_size, num_tokens * width)
    assert largest.num_elements < num_tokens * vocab_size / 20
    # The measurement sees logits where they exist.
    with LargestTensor() as largest:
        plain(*problem, 0.1)[0].backward()
    assert largest.num_elements == num_tokens * vocab_size


class PeakMemory(TorchDispatchMode):
    """Adds up the bytes of the tensors that operations return, as long as they live, and keeps the largest sum.

    With fake tensors nothing is computed; whatever decides about values is answered with "no".
    """

    def __init__(self):
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.num_bytes = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is torch.ops.aten._local_scalar_dense.default:
            return False
        result = operation(*args, **(kwargs or {}))
        self.storages = {key: entry for key, entry in self.storages.items() if not entry[0].expired()}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.num_bytes = max(self.num_bytes, sum(size for _, size in self.storages.values()))
        return result


@pytest.mark.parametrize("bfloat16", [False, True])
def test_memory_is_at_most_a_quarter_of_that_of_full_logits(bfloat16):
    num_tokens, width, vocab_size = 8192, 512, 32_000
    with FakeTensorMode():
        hidden_states = torch.empty(num_tokens, width).requires_grad_()
        weight = torch.empty(vocab_size, width).requires_grad_()
        labels = torch.zeros(num_tokens, dtype=torch.int64)
        with PeakMemory() as ours, torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
            smoothed_cross_entropy(hidden_states, weight, None, labels, 0.1)[0].backward()
        hidden_states.grad = weight.grad = None
        with PeakMemory() as whole:
            F.cross_entropy(F.linear(hidden_states, weight), labels, label_smoothing=0.1, reduction="sum").backward()
    assert whole.num_bytes >= 2 * 4 * num_tokens * vocab_size
    # Both count the weights' gradient.
    assert 4 * vocab_size * width <= ours.num_bytes <= whole.num_bytes / 4


# The loss of a model


def tiny_model(dtype=torch.float64, **options) -> VanillaTransformerForConditionalGeneration:
    torch.manual_seed(0)
    config = VanillaTransformerConfig(
        **{
            "vocab_size": 31,
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "dropout": 0.0,
        }
        | options
    )
    model = VanillaTransformerForConditionalGeneration(config).to(dtype)
    if model.final_logits_bias is not None:
        model.final_logits_bias.normal_()
    return model


def random_batch(lengths: list[tuple[int, int]], seed: int = 1) -> dict[str, torch.Tensor]:
    generator = np.random.default_rng(seed)
    sides = [
        [np.append(generator.integers(5, 31, pair[side] - 1), 2).astype(np.int32) for pair in lengths]
        for side in (0, 1)
    ]
    return collate(*sides, pad_token_id=0, decoder_start_token_id=1)


LENGTHS = [(4, 7), (9, 2), (1, 1), (6, 6)]
VARIANTS = [
    {},
    {"final_logits_bias": True},
    {"tie_word_embeddings": False},
    {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 43},
]


@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: ", ".join(options) or "default")
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_a_models_loss_and_gradients_are_those_of_its_logits(options, label_smoothing):
    model, batch = tiny_model(**options), random_batch(LENGTHS)
    logits = model(**{name: tensor for name, tensor in batch.items() if name != "labels"}, use_cache=False).logits
    flat, labels = logits.flatten(0, 1), batch["labels"].flatten()
    expected = F.cross_entropy(flat, labels, ignore_index=-100, label_smoothing=label_smoothing, reduction="sum")
    expected_nll = F.cross_entropy(flat, labels, ignore_index=-100, reduction="sum")
    expected.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    loss, nll = SmoothedTranslationLoss(model, label_smoothing)(**batch)
    loss.backward()
    assert_close(loss, expected, 1e-12)
    assert_close(nll, expected_nll, 1e-12)
    largest = max(float(gradient.norm()) for gradient in gradients.values())
    for name, parameter in model.named_parameters():
        assert float((parameter.grad - gradients[name]).norm()) <= 1e-12 * largest, name
    assert ("lm_head.weight" in gradients) == (options.get("tie_word_embeddings") is False)


@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: ", ".join(options) or "default")
def test_smoothing_over_the_other_entries_is_the_cross_entropy_with_their_distribution(options):
    epsilon = 0.3
    model, batch = tiny_model(**options), random_batch(LENGTHS)
    logits = model(**{name: tensor for name, tensor in batch.items() if name != "labels"}, use_cache=False).logits
    expected = 0.0
    for row, labels in zip(logits, batch["labels"], strict=True):
        for scores, label in zip(row, labels, strict=True):
            if label == -100:
                continue
            target = torch.full_like(scores, epsilon / (len(scores) - 1))
            target[label] = 1.0 - epsilon
            assert target.sum().item() == pytest.approx(1.0, abs=1e-12)
            expected = expected - (target * scores.log_softmax(dim=-1)).sum()
    expected.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    loss, nll = SmoothedTranslationLoss(model, epsilon, "others")(**batch)
    loss.backward()
    assert_close(loss, expected, 1e-12)
    over_all, same_nll = SmoothedTranslationLoss(model, epsilon)(**batch)
    assert abs((over_all - loss).item()) > 1e-3
    assert_close(nll, same_nll, 1e-12)
    largest = max(float(gradient.norm()) for gradient in gradients.values())
    for name, parameter in model.named_parameters():
        assert float((parameter.grad - gradients[name]).norm()) <= 1e-12 * largest, name


def test_without_smoothing_a_tokens_mean_is_the_models_own_loss():
    model, batch = tiny_model(), random_batch(LENGTHS)
    loss, nll = SmoothedTranslationLoss(model, 0.0)(**batch)
    num_tokens = sum(target for _, target in LENGTHS)
    assert_close(nll, loss, 1e-12)
    assert_close(nll / num_tokens, model(**batch).loss, 1e-12)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_padding_takes_no_part_in_the_loss(label_smoothing):
    model = tiny_model()
    together = random_batch(LENGTHS)
    alone = [
        {
            name: tensor[row : row + 1, : LENGTHS[row][0 if name in ("input_ids", "attention_mask") else 1]]
            for name, tensor in together.items()
        }
        for row in range(len(LENGTHS))
    ]
    assert all((batch["labels"] != -100).all() and batch["attention_mask"].all() for batch in alone)
    module = SmoothedTranslationLoss(model, label_smoothing)
    totals, gradients = [], []
    for batches in ([together], alone):
        model.zero_grad()
        values = [module(**batch) for batch in batches]
        sum(loss for loss, _ in values).backward()
        totals.append([sum(pair[index].detach() for pair in values) for index in (0, 1)])
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    for padded, unpadded in zip(*totals, strict=True):
        assert_close(padded, unpadded, 1e-12)
    largest = max(float(gradient.norm()) for gradient in gradients[1].values())
    for name, gradient in gradients[1].items():
        assert float((gradients[0][name] - gradient).norm()) <= 1e-12 * largest, name


def test_what_stands_on_padding_does_not_matter():
    module = SmoothedTranslationLoss(tiny_model(), 0.1)
    batch = random_batch(LENGTHS)
    expected = module(**batch)
    changed = {name: tensor.clone() for name, tensor in batch.items()}
    changed["input_ids"][batch["attention_mask"] == 0] = 17
    changed["decoder_input_ids"][batch["labels"] == -100] = 23
    assert not torch.equal(changed["input_ids"], batch["input_ids"])
    assert not torch.equal(changed["decoder_input_ids"], batch["decoder_input_ids"])
    for actual, wanted in zip(module(**changed), expected, strict=True):
        assert_close(actual, wanted, 1e-12)


def test_no_logits_of_padding_are_computed():
    model = tiny_model(torch.float32, vocab_size=2000)
    # One long target among short ones: most positions are padding.
    batch = random_batch([(2, 200)] + [(2, 2)] * 30)
    num_tokens = int((batch["labels"] != -100).sum())
    with LargestTensor() as largest:
        SmoothedTranslationLoss(model, 0.1)(**batch)[0].backward()
    assert largest.num_elements <= num_tokens * 2000 < batch["labels"].numel() * 2000 / 10


@pytest.mark.parametrize("wide", [False, True])
def test_the_projection_may_lie_in_memory_column_by_column(wide):
    torch.manual_seed(0)
    hidden_states = torch.randn(40, 64, dtype=torch.float64 if wide else torch.float32)
    weight, labels = torch.randn(70, 64), torch.randint(70, (40,))
    gradients = []
    for layout in (weight, weight.T.contiguous().T):
        projection = layout.clone(memory_format=torch.preserve_format).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = smoothed_cross_entropy(hidden_states, projection, None, labels, 0.1)
        loss.backward()
        gradients.append(projection.grad)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)
    exact = weight.double().requires_grad_()
    smoothed_cross_entropy(hidden_states.double(), exact, None, labels, 0.1)[0].backward()
    assert (gradients[0] - exact.grad).norm() < 0.02 * exact.grad.norm()
