"""Tests of the products in C++: what torch computes in double precision, to one rounding of the result."""

import pytest
import torch
from native_parts import require
from torch._subclasses import FakeTensorMode

from vanilla_transformer.native import training_products as products
from vanilla_transformer.native.training_products import RightFactor, can_multiply, multiply, product_over_rows


# Rows, numbers of a sum, and columns: whole tiles and none, sums and heights beyond what is laid out at a time.
SHAPES = [(1, 1, 1), (32, 32, 32), (33, 31, 47), (70, 513, 40), (5, 1100, 33), (1030, 2100, 65), (2, 40, 1500)]
ROUNDING = 2.0**-8


@pytest.fixture(autouse=True)
def available():
    require("products", products.why_no_products())


@pytest.fixture
def num_threads():
    """Sets the number of threads for a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def assert_rounded(found: torch.Tensor, exact: torch.Tensor, depth: int) -> None:
    """Each number is the exact one, rounded once, but for the rounding of sums in float32."""
    assert found.dtype == torch.bfloat16 and found.shape == exact.shape
    slack = 1e-6 * depth**0.5 * exact.abs().max().clamp_min(1.0)
    assert ((found.double() - exact).abs() <= exact.abs() * ROUNDING + slack).all()


@pytest.mark.parametrize(("rows", "depth", "columns"), SHAPES)
def test_products_with_a_matrix_and_with_its_transpose(rows, depth, columns):
    torch.manual_seed(0)
    left, weight = draw(rows, depth), torch.randn(columns, depth)
    exact = left.double() @ weight.bfloat16().double().T
    assert_rounded(multiply(left, RightFactor.stack([weight], transposed=True)), exact, depth)
    assert_rounded(multiply(left, RightFactor.stack([weight.T.contiguous()], transposed=False)), exact, depth)
    assert_rounded(multiply(left, RightFactor.of_rows(weight.T.bfloat16())), exact, depth)


@pytest.mark.parametrize(("rows", "depth", "columns"), SHAPES)
def test_bias_relu_and_what_is_added_to(rows, depth, columns):
    torch.manual_seed(0)
    left, weight, bias, total = (
        draw(rows, depth),
        torch.randn(columns, depth),
        torch.randn(columns),
        draw(rows, columns),
    )
    factor = RightFactor.stack([weight], transposed=True)
    exact = left.double() @ weight.bfloat16().double().T
    assert_rounded(multiply(left, factor, bias=bias), exact + bias, depth)
    assert_rounded(multiply(left, factor, bias=bias, relu=True), (exact + bias).relu(), depth)
    expected = exact + total.double()
    result = multiply(left, factor, add_to=total)
    assert result is total
    assert_rounded(total, expected, depth)


@pytest.mark.parametrize(("height", "rows", "width"), SHAPES)
def test_products_over_rows(height, rows, width):
    torch.manual_seed(0)
    left, right = draw(rows, height), draw(rows, width)
    exact = left.double().T @ right.double()
    total = torch.randn(height, width)
    expected = exact + total
    for found, wanted in (
        (product_over_rows(left, right), exact),
        (product_over_rows(left, right, add_to=total), expected),
    ):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5 * rows**0.5)


@pytest.mark.parametrize("transposed", [True, False])
def test_stacked_matrices_are_one(transposed):
    torch.manual_seed(0)
    weights = [torch.randn(height, 45) for height in (64, 32, 96, 7)]
    stacked = torch.cat(weights)
    left = draw(50, 45 if transposed else len(stacked))
    assert can_multiply(torch.bfloat16, weights)
    assert torch.equal(
        multiply(left, RightFactor.stack(weights, transposed=transposed)),
        multiply(left, RightFactor.stack([stacked], transposed=transposed)),
    )


def test_factors_may_lie_in_memory_as_they_like():
    torch.manual_seed(0)
    wide = draw(70, 100)
    weight = torch.randn(40, 60)
    factor = RightFactor.stack([weight], transposed=True)
    for left in (wide[:, 10:70], wide[:60].T[:, :60], wide[:1, :60].expand(9, -1), wide[:9, :1].expand(-1, 60)):
        assert torch.equal(multiply(left, factor), multiply(left.contiguous(), factor))
        left, right = left[:, :50], draw(len(left), 80)[:, 5:25]
        assert torch.equal(product_over_rows(left, right), product_over_rows(left.contiguous(), right.contiguous()))
    room = draw(70, 64)
    before = room.clone()
    multiply(wide[:, :60], factor, out=room)
    assert torch.equal(room[:, :40], multiply(wide[:, :60], factor)) and torch.equal(room[:, 40:], before[:, 40:])


def test_results_do_not_depend_on_the_number_of_threads(num_threads):
    torch.manual_seed(0)
    left, weight, other = draw(200, 1300), torch.randn(90, 1300), draw(200, 90)
    results = []
    for count in (1, 2, 3, 16):
        num_threads(count)
        factor = RightFactor.stack([weight], transposed=True)
        results.append([multiply(left, factor), product_over_rows(left, other), product_over_rows(other, left)])
    for others in results[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(others, results[0], strict=True))


def test_what_is_no_number_spoils_its_row_alone():
    left, weight = draw(40, 50), torch.randn(60, 50)
    left[3, 7], left[35, 0] = torch.nan, torch.inf
    result = multiply(left, RightFactor.stack([weight], transposed=True), relu=True)
    assert result[3].isnan().all() and result[35].isinf().any()
    assert result[[row for row in range(40) if row not in (3, 35)]].isfinite().all()


@pytest.mark.parametrize(
    ("left", "values"),
    [
        (draw(5, 0), {}),
        (draw(5, 51), {}),
        (draw(5, 50).float(), {}),
        (draw(5, 50), {"bias": torch.randn(59)}),
        (draw(5, 50), {"out": torch.empty(5, 59, dtype=torch.bfloat16)}),
        (draw(5, 50), {"out": torch.empty(4, 60, dtype=torch.bfloat16)}),
        (draw(5, 50), {"out": torch.empty(60, 5, dtype=torch.bfloat16).T}),
        (draw(5, 50), {"add_to": torch.empty(5, 60)}),
    ],
)
def test_what_cpp_would_trust_in_is_refused(left, values):
    with pytest.raises(ValueError, match=r"A product of \(5, \d+\) in .* and \(50, 60\) cannot be written to"):
        multiply(left, RightFactor.stack([torch.randn(60, 50)], transposed=True), **values)


def test_sums_over_no_rows_are_refused():
    with pytest.raises(ValueError, match=r"cannot be written"):
        product_over_rows(draw(0, 4), draw(0, 3))


def test_what_the_products_do_not_know_is_left_to_torch():
    weight = torch.randn(40, 64)
    assert can_multiply(torch.bfloat16, [weight])
    assert not can_multiply(torch.float16, [weight])
    assert not can_multiply(torch.bfloat16, [weight.double()])
    assert not can_multiply(torch.bfloat16, [weight.to("meta")])
    # The second matrix would begin within a panel.
    assert not can_multiply(torch.bfloat16, [weight, weight])
    with FakeTensorMode():
        assert not can_multiply(torch.bfloat16, [torch.randn(40, 64)])


@pytest.mark.parametrize("obstacle", ["no compiler", "no permission"])
def test_where_there_are_none_torch_multiplies(obstacle, monkeypatch, tmp_path):
    for function in (products.why_no_products, products._library):
        function.cache_clear()
    if obstacle == "no compiler":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("CXX", raising=False)
        reason = "there is no C++ compiler (g++ or clang++)"
    else:
        library = type("Library", (), {"supports_products": lambda self: 0})
        monkeypatch.setattr(products.ctypes, "CDLL", lambda path: library())
        reason = "processor, compiler or system does not offer AMX"
    try:
        assert products.why_no_products() == reason
        assert not can_multiply(torch.bfloat16, [torch.randn(32, 32)])
    finally:
        for function in (products.why_no_products, products._library):
            function.cache_clear()
