"""Tests of the fused operations: the same results as the plain network, however they are computed."""

from collections import defaultdict
from functools import cache
from statistics import mean

import pytest
import torch
from native_parts import require
from torch import nn

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.native import training_kernels as kernels
from vanilla_transformer.native import training_products as products
from vanilla_transformer.native.dropout import use_sixteen_bit_dropout
from vanilla_transformer.training.cpu import fused_layers
from vanilla_transformer.training.cpu.fused_layers import fuse_operations


KINDS = {
    "default": {},
    "attention_bias": {"attention_bias": True},
    "narrow_values": {"d_k": 6, "d_v": 10},
    "whole_vectors": {"d_k": 16, "d_v": 32},
    "pre_norm": {"norm_position": "pre"},
    "gelu": {"activation_function": "gelu"},
    "activation_dropout": {"activation_dropout": 0.2},
    "attention_dropout": {"attention_dropout": 0.2},
}


def models(*, sixteen_bits: bool = True, **changes) -> tuple[VanillaTransformerForConditionalGeneration, ...]:
    """The same network in training mode, plain and fused; both with the dropout for CPUs unless told otherwise."""
    sizes = {
        "vocab_size": 60, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 64,
    }  # fmt: skip
    config = VanillaTransformerConfig(**{**sizes, "dropout": 0.1, **changes})
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    plain = VanillaTransformerForConditionalGeneration(config)
    for name, parameter in plain.named_parameters():
        if name.endswith(".bias"):
            nn.init.normal_(parameter, std=0.3)
    fused = VanillaTransformerForConditionalGeneration(config)
    fused.load_state_dict(plain.state_dict())
    if sixteen_bits:
        use_sixteen_bit_dropout(plain)
        use_sixteen_bit_dropout(fused)
    fuse_operations(fused)
    return plain.train(), fused.train()


def results(
    model: VanillaTransformerForConditionalGeneration, dtype: torch.dtype | None, seed: int = 1
) -> dict[str, torch.Tensor]:
    """Logits and gradients of a padded batch, in a given half precision or without autocast."""
    torch.manual_seed(seed)
    source, labels = torch.randint(5, 60, (16, 9)), torch.randint(5, 60, (16, 7))
    mask = torch.ones_like(source)
    mask[1, 6:], labels[2, 4:] = 0, -100
    model.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        output = model(input_ids=source, attention_mask=mask, labels=labels)
    output.loss.backward()
    return {"logits": output.logits.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@cache
def exact_results(kind: str, sixteen_bits: bool, seed: int) -> dict[str, torch.Tensor]:
    """What the plain network has in single precision; dropout's masks depend on the seed alone, fused or not."""
    return results(models(sixteen_bits=sixteen_bits, **KINDS[kind])[0], None, seed)


def errors(model: VanillaTransformerForConditionalGeneration, kind: str, sixteen_bits: bool) -> dict[str, float]:
    """Of each result in bfloat16, the root of the mean over batches of the squared error, as a share of its length.

    One batch says little: where rounding moves a number across ReLU's corner, the error of all below it jumps.
    """
    squares = defaultdict(list)
    for seed in range(1, 7):
        exact = exact_results(kind, sixteen_bits, seed)
        for name, found in results(model, torch.bfloat16, seed).items():
            # A bias of the keys moves all scores of a query alike: its gradient is zero but for rounding.
            if not name.endswith("k_proj.bias"):
                squares[name].append(((found - exact[name]).norm() / exact[name].norm()).item() ** 2)
    return {name: mean(values) ** 0.5 for name, values in squares.items()}


@cache
def errors_of_plain(kind: str, sixteen_bits: bool) -> dict[str, float]:
    return errors(models(sixteen_bits=sixteen_bits, **KINDS[kind])[0], kind, sixteen_bits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("means", ["products", "kernels", "operator", "public operations"])
@pytest.mark.parametrize("sixteen_bits", [True, False])
def test_under_autocast_results_are_as_near_to_single_precision_as_the_plain_network_is(
    kind, means, sixteen_bits, monkeypatch
):
    for module, why_not, users in (
        (products, "why_no_products", ["products"]),
        (kernels, "why_no_kernels", ["products", "kernels"]),
    ):
        if means not in users:
            monkeypatch.setattr(module, why_not, lambda: "they are not wanted")
        else:
            require(why_not.removeprefix("why_no_"), getattr(module, why_not)())
    if means == "public operations":
        monkeypatch.setattr(fused_layers, "_has_linear_pointwise", lambda _: False)
    _, fused = models(sixteen_bits=sixteen_bits, **KINDS[kind])
    found = errors(fused, kind, sixteen_bits)
    for name, of_plain in errors_of_plain(kind, sixteen_bits).items():
        assert found[name] < 1.5 * of_plain + 2e-3, name


@pytest.mark.parametrize("kind", KINDS)
def test_without_autocast_nothing_changes(kind):
    plain, fused = models(**KINDS[kind])
    expected, found = results(plain, None), results(fused, None)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_another_attention_is_left_alone():
    plain, fused = models()
    for model in (plain, fused):
        model.set_attn_implementation("sdpa")
    expected, found = results(plain, torch.bfloat16), results(fused, torch.bfloat16)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_gradients_of_inputs_and_of_outputs_that_are_kept_are_those_of_the_plain_network():
    gradients = []
    for model in models():
        torch.manual_seed(1)
        source = torch.randn(3, 6, 32, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            encoder = model.get_encoder()
            states = encoder(inputs_embeds=source, output_hidden_states=True).hidden_states
            for state in states:
                state.retain_grad()
            states[-1].square().sum().backward()
        gradients.append([source.grad, *(state.grad for state in states)])
    for expected, found in zip(*gradients, strict=True):
        assert (found - expected).norm() < 0.05 * expected.norm()


def test_fewer_products_are_computed():
    products = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "mkldnn::_linear_pointwise")
    counts = []
    for model in models():
        with torch.profiler.profile() as profile:
            results(model, torch.bfloat16)
        counts.append(sum(event.name in products for event in profile.events()))
    assert counts[1] < 0.85 * counts[0]


def test_the_log_says_what_computes(monkeypatch):
    model, _ = models()
    device = torch.device("cpu")
    assert fused_layers.operations_of(model, "no", device) == "plain operations"
    assert fused_layers.operations_of(model, "bf16", torch.device("cuda")) == "plain operations"
    assert fused_layers.operations_of(model, "fp16", device) == "fused operations"
    monkeypatch.setattr(products, "why_no_products", lambda: "they are slow")
    monkeypatch.setattr(kernels, "why_no_kernels", lambda: None)
    said = fused_layers.operations_of(model, "bf16", device)
    assert said == "fused operations in C++ and torch's matrix products, because they are slow"
    monkeypatch.setattr(products, "why_no_products", lambda: None)
    assert (
        fused_layers.operations_of(model, "bf16", device)
        == "fused operations and, where their shapes allow, matrix products in C++"
    )
    monkeypatch.setattr(kernels, "why_no_kernels", lambda: "they are wrong")
    assert fused_layers.operations_of(model, "bf16", device) == "fused operations without C++, because they are wrong"


def use_stand_ins(monkeypatch, available: set[str]) -> set[str]:
    """Let stand-ins in torch take the place of the C++ that is `available`; return the names of all that is called.

    What is taken when is a question of conditions alone, and so the same on every processor.
    """
    called = set()

    def seen(name: str, function):
        def calling(*args, **kwargs):
            called.add(name)
            return function(*args, **kwargs)

        return calling

    def observed(base: type[torch.autograd.Function], name: str) -> type[torch.autograd.Function]:
        return type(name, (base,), {"forward": staticmethod(seen(name, base.forward))})

    def relu_backward(grad, activations):
        grad.mul_(activations > 0)
        return grad.float().sum(0)

    def multiply(left, right, *, bias=None, relu=False, add_to=None):
        product = nn.functional.linear(left, right.T.to(left.dtype), None if bias is None else bias.to(left.dtype))
        return product.relu_() if relu else product if add_to is None else add_to.add_(product)

    def stack(weights, *, transposed):
        stacked = torch.cat([*weights])
        return stacked.T if transposed else stacked

    for module, name, cpp in (
        (kernels, "why_no_kernels", "kernels"),
        (products, "why_no_products", "products"),
    ):
        monkeypatch.setattr(module, name, lambda cpp=cpp: None if cpp in available else "it is not wanted")
    attention, norm = fused_layers._Attention, fused_layers._AddAndNorm
    monkeypatch.setattr(kernels, "ShortAttention", observed(attention, "ShortAttention"))
    monkeypatch.setattr(kernels, "AddAndNorm", observed(norm, "AddAndNorm"))
    monkeypatch.setattr(kernels, "relu_backward_", seen("relu_backward_", relu_backward))
    for name in ("_Attention", "_AddAndNorm", "_Projection", "_FeedForward"):
        monkeypatch.setattr(fused_layers, name, observed(getattr(fused_layers, name), name))
    monkeypatch.setattr(fused_layers.RightFactor, "stack", staticmethod(stack))
    monkeypatch.setattr(products, "multiply", seen("multiply", multiply))
    monkeypatch.setattr(
        products, "product_over_rows", seen("product_over_rows", lambda left, right: (left.T @ right).float())
    )
    return called


BOTH = {"kernels", "products"}
PRODUCTS = {"multiply", "product_over_rows"}
FUSED = {"_Projection", "_FeedForward"}
IN_KERNELS = FUSED | {"ShortAttention", "AddAndNorm", "relu_backward_"}
IN_TORCH = FUSED | {"_Attention", "_AddAndNorm"}
WHOLE = KINDS["whole_vectors"]


@pytest.mark.parametrize(
    ("changes", "dtype", "available", "expected"),
    [
        pytest.param(WHOLE, torch.bfloat16, BOTH, IN_KERNELS | PRODUCTS, id="all conditions hold"),
        pytest.param(WHOLE, torch.bfloat16, {"kernels"}, IN_KERNELS, id="no AMX"),
        pytest.param(WHOLE, torch.bfloat16, set(), IN_TORCH, id="no C++"),
        pytest.param(WHOLE, torch.float16, BOTH, IN_TORCH, id="float16"),
        pytest.param(WHOLE, None, BOTH, set(), id="float32"),
        pytest.param({**WHOLE, "attention_dropout": 0.2}, torch.bfloat16, BOTH, set(), id="attention dropout"),
        pytest.param(
            {}, torch.bfloat16, BOTH, IN_KERNELS - {"ShortAttention"} | {"_Attention"} | PRODUCTS, id="narrow heads"
        ),
        pytest.param(
            {**WHOLE, "norm_position": "pre"}, torch.bfloat16, BOTH, IN_KERNELS - {"AddAndNorm"} | PRODUCTS,
            id="pre-norm",
        ),
        pytest.param(
            {**WHOLE, "sixteen_bits": False}, torch.bfloat16, BOTH, IN_KERNELS - {"AddAndNorm"} | PRODUCTS,
            id="torch's dropout",
        ),
        pytest.param(
            {**WHOLE, "activation_function": "gelu"}, torch.bfloat16, BOTH,
            IN_KERNELS - {"_FeedForward", "relu_backward_"} | PRODUCTS, id="gelu",
        ),
        pytest.param(
            {**WHOLE, "activation_dropout": 0.2}, torch.bfloat16, BOTH,
            IN_KERNELS - {"_FeedForward", "relu_backward_"} | PRODUCTS, id="activation dropout",
        ),
        pytest.param(
            {**WHOLE, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40}, torch.bfloat16, BOTH,
            IN_KERNELS - {"relu_backward_"} | PRODUCTS, id="inner width",
        ),
        pytest.param(
            {**WHOLE, "d_model": 40}, torch.bfloat16, BOTH, IN_KERNELS - {"AddAndNorm"} | {"_AddAndNorm"} | PRODUCTS,
            id="width",
        ),
    ],
)  # fmt: skip
def test_the_table_says_which_way_is_taken(changes, dtype, available, expected, monkeypatch):
    called = use_stand_ins(monkeypatch, available)
    _, fused = models(**changes)
    results(fused, dtype)
    assert called == expected


def test_sentences_beyond_the_longest_of_the_kernels_are_left_to_torch(monkeypatch):
    called = use_stand_ins(monkeypatch, BOTH)
    _, fused = models(**WHOLE)
    # The sources have 9 tokens, the targets 7.
    monkeypatch.setattr(kernels, "LONGEST", 8)
    results(fused, torch.bfloat16)
    assert {"_Attention", "ShortAttention"} < called
    monkeypatch.setattr(kernels, "LONGEST", 6)
    called.clear()
    results(fused, torch.bfloat16)
    assert "_Attention" in called and "ShortAttention" not in called


def test_with_another_attention_no_layer_is_fused(monkeypatch):
    called = use_stand_ins(monkeypatch, BOTH)
    _, fused = models(**WHOLE)
    fused.set_attn_implementation("sdpa")
    results(fused, torch.bfloat16)
    assert not called


def test_the_parameters_and_what_is_saved_stay(tmp_path):
    plain, fused = models()
    fused.save_pretrained(tmp_path)
    again = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path).state_dict()
    assert again.keys() == plain.state_dict().keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in plain.state_dict().items())


def test_generation_under_autocast_gives_the_same_tokens():
    plain, fused = models()
    source = torch.randint(5, 60, (3, 8))
    with torch.autocast("cpu", torch.bfloat16):
        translations = [
            model.eval().generate(input_ids=source, max_new_tokens=12, num_beams=1, do_sample=False)
            for model in (plain, fused)
        ]
    assert torch.equal(*translations)


@pytest.mark.parametrize("operator", ["missing", "raising", "wrong"])
def test_an_operator_that_is_missing_or_does_something_else_is_not_used(operator, monkeypatch):
    def raising(*_):
        raise RuntimeError("not built in")

    namespace = type("Namespace", (), {})()
    if operator == "raising":
        namespace._linear_pointwise = raising
    elif operator == "wrong":
        namespace._linear_pointwise = lambda rows, weight, bias, *_: nn.functional.linear(rows, weight, bias)
    monkeypatch.setattr(torch.ops, "mkldnn", namespace)
    assert not fused_layers._has_linear_pointwise.__wrapped__(torch.bfloat16)
