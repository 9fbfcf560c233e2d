"""Tests of the C++ functions: what torch computes in double precision, nearer than torch's own half precision is."""

from types import SimpleNamespace

import pytest
import torch
from native_parts import require
from torch import nn

from vanilla_transformer.native import training_kernels as kernels
from vanilla_transformer.native.dropout import draw_kept
from vanilla_transformer.training.cpu import fused_layers


# Sentences, queries, keys, heads, and widths of a key and of a value.
SHAPES = {
    "a tile": (3, 16, 16, 2, 64, 64),
    "short": (3, 7, 7, 2, 16, 32),
    "long": (2, 75, 75, 3, 32, 80),
    "one query": (5, 1, 1, 1, 16, 16),
}
MEMORY_SHAPES = {"wider memory": (4, 9, 21, 3, 32, 16), "one query of many keys": (3, 1, 33, 1, 48, 80)}


@pytest.fixture(autouse=True)
def available():
    require("kernels", kernels.why_no_kernels())


@pytest.fixture
def num_threads():
    """Sets the number of threads for a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def attention_operands(name: str) -> SimpleNamespace:
    """Random projections, gradient and mask, in bfloat16; the first sentence has half of its keys."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    batch_size, num_queries, num_keys, num_heads, d_k, d_v = {**SHAPES, **MEMORY_SHAPES}[name]
    has_memory = name in MEMORY_SHAPES
    mask = torch.zeros(batch_size, 1, num_queries, num_keys)
    mask[0, :, :, (num_keys + 1) // 2 :] = torch.finfo(torch.bfloat16).min
    return SimpleNamespace(
        joined=draw(batch_size, num_queries, num_heads * (d_k if has_memory else 2 * d_k + d_v)),
        memory=draw(batch_size, num_keys, num_heads * (d_k + d_v)) if has_memory else None,
        mask=mask.bfloat16(),
        grad=draw(batch_size, num_queries, num_heads * d_v),
        num_heads=num_heads,
        d_k=d_k,
    )


def attend(operation, operands: SimpleNamespace, mask: torch.Tensor | None, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output and gradients."""
    inputs = [
        None if tensor is None else tensor.to(dtype, copy=True).requires_grad_()
        for tensor in (operands.joined, operands.memory)
    ]
    mask = None if mask is None else mask.to(dtype)
    output = operation.apply(*inputs, mask, operands.num_heads, operands.d_k, operands.d_k**-0.5)
    output.backward(operands.grad.to(dtype))
    return [output.detach(), *(tensor.grad for tensor in inputs if tensor is not None)]


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found - exact).norm() / exact.norm().clamp_min(1e-9)).item()


@pytest.mark.parametrize("masking", ["none", "sentences", "positions", "shared"])
@pytest.mark.parametrize("name", [*SHAPES, *MEMORY_SHAPES])
def test_attention(name, masking):
    operands = attention_operands(name)
    mask = operands.mask
    if masking == "positions":
        mask = mask + torch.full_like(mask, torch.finfo(torch.bfloat16).min).triu(1)
    mask = {"none": None, "sentences": mask[:, :, :1], "positions": mask, "shared": mask[:1]}[masking]
    assert kernels.can_attend(operands.joined.dtype, operands.joined.shape[1], operands.d_k, 16)
    exact = attend(fused_layers._Attention, operands, mask, torch.float64)
    narrow = attend(fused_layers._Attention, operands, mask, torch.bfloat16)
    found = attend(kernels.ShortAttention, operands, mask, torch.bfloat16)
    for mine, theirs, expected in zip(found, narrow, exact, strict=True):
        assert mine.dtype == torch.bfloat16 and mine.shape == expected.shape
        assert distance(mine, expected) < 0.004
        assert distance(mine, expected) <= distance(theirs, expected) + 1e-4


def form_of_nan(bits: int) -> torch.Tensor:
    return torch.tensor([bits], dtype=torch.uint16).view(torch.bfloat16)


# Positive and negative, with every bit, and with one that rounding takes away.
NANS = pytest.mark.parametrize("nan", [form_of_nan(bits) for bits in (0x7FC0, 0xFFC0, 0x7FFF, 0xFFFF, 0x7F81)])


def spoil(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Overwrite a number somewhere in the middle."""
    tensor.view(-1)[tensor.numel() // 2] = value.to(tensor.dtype)


def assert_nan_alike(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert any(theirs.isnan().any() for theirs in expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine.isnan(), theirs.isnan())


@NANS
@pytest.mark.parametrize("operand", ["joined", "memory", "grad", "mask"])
def test_attention_passes_on_what_is_no_number(operand, nan):
    operands = attention_operands("wider memory")
    spoil(getattr(operands, operand), nan)
    mask = operands.mask if operand == "mask" else None
    assert_nan_alike(
        attend(kernels.ShortAttention, operands, mask, torch.bfloat16),
        attend(fused_layers._Attention, operands, mask, torch.float32),
    )


def test_a_sentence_without_keys_gets_zeros():
    starts = torch.tensor([0, 2, 5]), torch.tensor([0, 0, 3])
    joined, memory = torch.randn(1, 5, 16).bfloat16(), torch.randn(1, 3, 48).bfloat16()
    output = kernels.ShortAttention.apply(joined, memory, kernels.Sentences(*starts), 1, 16, 0.25)
    assert not output[0, :2].any() and output[0, 2:].isfinite().all()


def normalise(operation, rows: int, width: int, num_dropped: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output and gradients, with a mask that depends on the seed alone."""
    torch.manual_seed(1)
    output, residual, grad = (torch.randn(rows, width).bfloat16().to(dtype, copy=True) for _ in range(3))
    weight, bias = torch.randn(2, width)
    inputs = [tensor.requires_grad_() for tensor in (output.clone(), residual, weight, bias)]
    normed = operation(*inputs, 1e-5, num_dropped)
    normed.backward(grad)
    return [normed.detach(), *(tensor.grad for tensor in inputs)]


def in_double_precision(output, residual, weight, bias, eps, num_dropped):
    kept = draw_kept(num_dropped, out=torch.empty(output.shape)) if num_dropped else 1.0
    total = residual + output * kept * (2**16 / (2**16 - num_dropped))
    return nn.functional.layer_norm(total, total.shape[-1:], weight.double(), bias.double(), eps)


@pytest.mark.parametrize("num_dropped", [0, 6554, 50000])
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (5, 48), (300, 512)])
def test_add_and_norm(rows, width, num_dropped):
    exact = normalise(in_double_precision, rows, width, num_dropped, torch.float64)
    found = normalise(kernels.AddAndNorm.apply, rows, width, num_dropped, torch.bfloat16)
    for mine, expected in zip(found, exact, strict=True):
        # Rounding the sum to bfloat16 is not among what is exact.
        assert distance(mine, expected) < 0.01
    # The same masks: the same zeros.
    assert torch.equal(found[1] == 0, exact[1] == 0)


def test_gradient_of_relu():
    torch.manual_seed(0)
    activations, grad = torch.randn(300, 48).relu().bfloat16(), torch.randn(300, 48).bfloat16()
    expected = grad * (activations > 0)
    sums = kernels.relu_backward_(grad, activations)
    assert torch.equal(grad, expected)
    torch.testing.assert_close(sums, expected.float().sum(0), rtol=1e-5, atol=1e-4)


@NANS
@pytest.mark.parametrize("num_dropped", [0, 50000])
@pytest.mark.parametrize("operand", range(5))
def test_add_and_norm_passes_on_what_is_no_number(operand, num_dropped, nan):
    def results(operation, dtype: torch.dtype) -> list[torch.Tensor]:
        torch.manual_seed(1)
        output, residual, grad = torch.randn(3, 5, 48).bfloat16().unbind()
        operands = [output, residual, *torch.randn(2, 48).unbind(), grad]
        spoil(operands[operand], nan)
        *inputs, grad = [each if each.dtype == torch.float32 else each.to(dtype, copy=True) for each in operands]
        inputs = [each.clone().requires_grad_() for each in inputs]
        normed = operation(*inputs, 1e-5, num_dropped)
        normed.backward(grad)
        return [normed.detach(), *(each.grad for each in inputs)]

    assert_nan_alike(results(kernels.AddAndNorm.apply, torch.bfloat16), results(in_double_precision, torch.float64))


@NANS
@pytest.mark.parametrize("operand", [0, 1])
def test_the_gradient_of_relu_passes_on_what_is_no_number(operand, nan):
    operands = torch.randn(5, 48).relu().bfloat16(), torch.randn(5, 48).bfloat16()
    spoil(operands[operand], nan)
    activations, grad = operands
    expected = torch.ops.aten.threshold_backward(grad, activations, 0)
    sums = kernels.relu_backward_(grad, activations)
    torch.testing.assert_close(grad, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(sums.isnan(), expected.sum(0).isnan())


def test_results_do_not_depend_on_the_number_of_threads(num_threads):
    operands = attention_operands("short")
    activations, grad = torch.randn(1000, 48).relu().bfloat16(), torch.randn(1000, 48).bfloat16()
    results = []
    for count in (1, 2, 3, 7):
        num_threads(count)
        passed = grad.clone()
        results.append(
            [
                *attend(kernels.ShortAttention, operands, operands.mask, torch.bfloat16),
                *normalise(kernels.AddAndNorm.apply, 1000, 48, 6554, torch.bfloat16),
                kernels.relu_backward_(passed, activations),
                passed,
            ]
        )
    for others in results[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(others, results[0], strict=True))


def test_what_the_functions_do_not_know_is_left_to_torch():
    assert kernels.can_attend(torch.bfloat16, 7, 16, 32)
    assert not kernels.can_attend(torch.float16, 7, 16, 32)
    assert not kernels.can_attend(torch.bfloat16, 7, 8, 32) and not kernels.can_attend(torch.bfloat16, 7, 16, 8)
    assert not kernels.can_attend(torch.bfloat16, kernels.LONGEST + 1, 16, 32)
    numbers, weight = torch.zeros(4, 32, dtype=torch.bfloat16), torch.ones(32)
    assert kernels.can_add_and_norm(numbers, numbers, weight)
    assert not kernels.can_add_and_norm(numbers, numbers.float(), weight)
    assert not kernels.can_add_and_norm(numbers[:, :24], numbers[:, :24], weight[:24])


def test_what_cpp_would_trust_in_is_refused():
    operands = attention_operands("wider memory")
    joined, memory, mask = operands.joined, operands.memory, operands.mask
    starts = torch.tensor([0, 9])
    for arguments in (
        (joined.float(), memory, None),
        (joined, memory[:3], None),
        (joined, memory, mask.float()),
        (joined, memory, mask[..., :1]),
        (joined[:1], memory[:1], kernels.Sentences(starts, starts)),
        (joined[:1], memory[:1], kernels.Sentences(starts.int(), torch.tensor([0, 21]))),
    ):
        with pytest.raises(ValueError, match=r"^(There is no attention in C\+\+ for|Sentences start at)"):
            kernels.ShortAttention.apply(*arguments, 3, 32, 0.25)
    numbers, weight = torch.zeros(4, 32, dtype=torch.bfloat16), torch.ones(32)
    assert not kernels.can_add_and_norm(numbers, numbers[:1], weight)
    assert not kernels.can_add_and_norm(numbers, numbers, weight[:1])
    for grad in (numbers[:2], torch.zeros(32, 4, dtype=torch.bfloat16).T):
        with pytest.raises(ValueError, match="cannot pass through ReLU"):
            kernels.relu_backward_(grad, numbers)


def test_without_a_compiler_torch_computes(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    operands = attention_operands("short")
    for function in (kernels.why_no_kernels, kernels._library):
        function.cache_clear()
    try:
        assert kernels.why_no_kernels() == "there is no C++ compiler (g++ or clang++)"
        assert not kernels.can_attend(torch.bfloat16, 7, 16, 32)
        assert not kernels.can_relu(operands.joined)
    finally:
        for function in (kernels.why_no_kernels, kernels._library):
            function.cache_clear()
