"""Suites of the C++ engine are skipped only where processor, system and compiler do not offer what they need."""

import native_parts
import pytest
from native_parts import NEEDED, require, why_impossible

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.native.incremental_decoder import why_not_native
from vanilla_transformer.native.training_kernels import why_no_kernels
from vanilla_transformer.native.training_products import why_no_products


AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
AVX512_BF16 = AVX512 | {"avx512_bf16", "avx512_vnni"}
AMX = AVX512_BF16 | {"amx_tile", "amx_bf16", "amx_int8"}
# What GCC 12 defines with -march=native on a processor of each kind.
MACROS = {
    flag: f"__{name}__"
    for flag, name in {
        "avx512f": "AVX512F", "avx512bw": "AVX512BW", "avx512vl": "AVX512VL", "avx512dq": "AVX512DQ",
        "avx512_bf16": "AVX512BF16", "avx512_vnni": "AVX512VNNI", "amx_tile": "AMX_TILE", "amx_bf16": "AMX_BF16",
        "amx_int8": "AMX_INT8",
    }.items()
}  # fmt: skip


@pytest.fixture
def machine(monkeypatch):
    """Set the processor's flags, those that the compiler knows, and what else the machine offers."""

    def machine(flags=frozenset(), known=None, *, compiler=True, permitted=True):
        macros = {MACROS[flag] for flag in (flags if known is None else known)}
        monkeypatch.setattr(native_parts, "processor_flags", lambda: flags)
        monkeypatch.setattr(native_parts, "compiler_macros", lambda: macros if compiler else None)
        monkeypatch.setattr(native_parts, "tiles_permitted", lambda: permitted)

    return machine


def possible() -> set[str]:
    return {part for part in NEEDED if why_impossible(part) is None}


@pytest.mark.parametrize("part", NEEDED)
def test_the_engine_offers_what_this_machine_can_run(part):
    kind, _, precision = part.partition(" ")
    model = VanillaTransformerForConditionalGeneration(
        VanillaTransformerConfig(vocab_size=30, d_model=16, encoder_attention_heads=1, decoder_attention_heads=1)
    )
    reasons = {
        "kernels": why_no_kernels,
        "products": why_no_products,
        "decoder": lambda: why_not_native(model, precision),
    }
    reason, impossible = reasons[kind](), why_impossible(part)
    assert (reason is None) == (impossible is None), (reason, impossible)


def test_each_kind_of_machine_runs_the_parts_that_it_has_instructions_for(machine):
    machine()
    assert possible() == {"decoder float32"}
    machine(AVX512)
    assert possible() == {"decoder float32", "kernels"}
    machine(AVX512_BF16)
    assert possible() == {*NEEDED} - {"products"}
    machine(AMX)
    assert possible() == {*NEEDED}
    # A compiler from before AMX.
    machine(AMX, known=AVX512_BF16)
    assert possible() == {*NEEDED} - {"products"}
    # A sandbox that does not grant the tiles.
    machine(AMX, permitted=False)
    assert possible() == {"decoder float32", "kernels"}
    machine(AMX, compiler=False)
    assert possible() == set()


def test_a_part_that_can_run_and_is_refused_fails_the_test(machine):
    machine(AVX512)
    with pytest.raises(pytest.fail.Exception, match=r"can run the kernels in C\+\+, but .* refuses: it is broken\."):
        require("kernels", "it is broken")
    with pytest.raises(
        pytest.skip.Exception, match=r"cannot run here, because the processor lacks amx_bf16, amx_tile"
    ):
        require("products", "it is broken")
    require("kernels", None)
    machine(AVX512, compiler=False)
    with pytest.raises(pytest.skip.Exception, match=r"because there is no C\+\+ compiler that works"):
        require("kernels", "it is broken")
