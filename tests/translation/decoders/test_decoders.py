"""The fast decoders against passes of the plain model over whole translations, and against each other."""

import os
import random
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from native_parts import require

from vanilla_transformer.errors import UserError
from vanilla_transformer.native import incremental_decoder, library
from vanilla_transformer.native.incremental_decoder import NativeDecoder, why_not_native
from vanilla_transformer.translation.decoders.choice import make_decoder
from vanilla_transformer.translation.decoders.packed_weights import can_pack, pack
from vanilla_transformer.translation.decoders.through_modules import PlainDecoder
from vanilla_transformer.translation.decoders.torch_packed import PackedDecoder
from vanilla_transformer.translation.options import SearchOptions
from vanilla_transformer.translation.search.search import SpecialTokens, search


SPECIAL = SpecialTokens(1, (2,))

# Widths are multiples of 16, which the decoder in C++ needs; vocabularies are not.
VARIANTS = {
    "paper": {},
    "several layers": {"encoder_layers": 2, "decoder_layers": 3, "attention_bias": True, "final_logits_bias": True},
    "no decoder layer": {"decoder_layers": 0},
    "pre-norm, learned positions": {"norm_position": "pre", "position_embedding_type": "learned"},
    "other widths": {"d_k": 16, "d_v": 48, "decoder_attention_heads": 4, "encoder_ffn_dim": 50, "decoder_ffn_dim": 70},
    "two vocabularies": {
        "decoder_vocab_size": 300, "share_encoder_decoder_embeddings": False, "tie_word_embeddings": False,
        "scale_embedding": False, "sinusoidal_layout": "concatenated",
    },
}  # fmt: skip

PRECISE = {
    "packed": lambda model: PackedDecoder(model),
    "native": lambda model: NativeDecoder(model, precision="float32"),
}

# Decoders that round, and how far their logits may be from the model's, as a share of the logits' standard deviation.
ROUNDING = {
    "packed bfloat16": (lambda model: PackedDecoder(model, dtype=torch.bfloat16, packing="plain"), 0.03),
    "packed onednn": (lambda model: PackedDecoder(model, dtype=torch.bfloat16, packing="onednn"), 0.03),
    "packed int8": (lambda model: PackedDecoder(model, packing="int8"), 0.05),
    "native bfloat16": (lambda model: NativeDecoder(model, precision="bfloat16"), 0.02),
    "native int8": (lambda model: NativeDecoder(model, precision="int8"), 0.04),
}


def make(maker, name, model):
    """A decoder; the test is skipped where this machine can have none of the kind."""
    kind, _, precision = name.partition(" ")
    if kind == "native":
        precision = precision or "float32"
        require(f"decoder {precision}", why_not_native(model, precision))
    elif precision in ("onednn", "int8") and not can_pack(precision):
        pytest.skip(f"torch cannot pack {precision} here")
    return maker(model)


@pytest.fixture
def scrambled(make_model):
    """Make a model whose every parameter and buffer has a value that matters."""

    def scrambled(**settings):
        generator = torch.Generator().manual_seed(5)
        model = make_model(**settings)
        with torch.no_grad():
            for values in [*model.parameters(), *model.buffers()]:
                values.add_(torch.randn(values.shape, generator=generator) * 0.2)
        return model

    return scrambled


@torch.inference_mode()
def walk(model, decoder, *, sentences=5, seed=1):
    """Yield the decoder's logits and those of a pass over the whole translations, step by step.

    Rows are widened, reordered, kept as they are, and lost with their sentences.
    """
    generator = torch.Generator().manual_seed(seed)
    chance = random.Random(seed)
    ids = torch.randint(3, model.config.vocab_size, (sentences, 9), generator=generator)
    lengths = [9, *(chance.randint(1, 9) for _ in range(sentences - 1))]
    mask = torch.tensor([[int(position < length) for position in range(9)] for length in lengths])
    state = decoder.start(ids, mask)
    left, rows = list(range(sentences)), [[] for _ in range(sentences)]
    for beams, keep in ((3, 1.0), (3, 0.8), (None, 1.0), (3, 0.5), (3, 1.0), (2, 0.5), (None, 1.0), (1, 1.0)) * 2:
        tokens = torch.randint(1, model.config.decoder_vocab_size, (len(rows),), generator=generator)
        rows = [[*row, int(token)] for row, token in zip(rows, tokens, strict=True)]
        logits = decoder.step(state, tokens)
        owners = [sentence for sentence in left for _ in range(len(rows) // len(left))]
        inputs = {"input_ids": ids[owners], "attention_mask": mask[owners], "decoder_input_ids": torch.tensor(rows)}
        yield logits, model(**inputs).logits[:, -1]
        if beams is None:
            continue
        width = len(rows) // len(left)
        kept = sorted(chance.sample(range(len(left)), max(1, round(keep * len(left)))))
        chosen = [number * width + chance.randrange(width) for number in kept for _ in range(beams)]
        everyone = len(kept) == len(left)
        decoder.select(state, None if everyone else torch.tensor(kept), torch.tensor(chosen))
        left, rows = [left[number] for number in kept], [rows[number] for number in chosen]


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("name", PRECISE)
def test_in_float32_steps_equal_passes_over_the_translation(scrambled, name, settings):
    model = scrambled(**settings)
    decoder = make(PRECISE[name], name, model)
    assert decoder.vocab_size == model.config.decoder_vocab_size
    for logits, expected in walk(model, decoder):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("sentences", [3, 40])
@pytest.mark.parametrize("settings", [VARIANTS["several layers"], VARIANTS["other widths"]], ids=["several", "other"])
@pytest.mark.parametrize("name", ROUNDING)
def test_rounded_decoders_stay_near_the_model(scrambled, name, settings, sentences):
    model = scrambled(**settings)
    maker, bound = ROUNDING[name]
    decoder = make(maker, name, model)
    # Few rows and many take different ways through the products.
    for logits, expected in walk(model, decoder, sentences=sentences):
        error = (logits.float() - expected).square().mean().sqrt() / expected.std()
        assert 0.0 < error < bound


def test_a_large_batch_equals_the_model(scrambled):
    model = scrambled(encoder_layers=2)
    # More tokens, and more rows, than go through the layers together.
    for logits, expected in walk(model, make(PRECISE["native"], "native", model), sentences=150):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("count", [1, 8])
def test_the_likeliest_tokens_are_those_of_the_logits(scrambled, precision, count):
    # More entries than are scored together.
    model = scrambled(vocab_size=1100)
    decoder = make(lambda model: NativeDecoder(model, precision=precision), f"native {precision}", model)
    ids, mask = torch.randint(3, 261, (20, 5)), torch.ones(20, 5, dtype=torch.long)
    states = decoder.start(ids, mask), decoder.start(ids, mask)
    for forbidden in ([], [7], [2, 600, 1099]):
        tokens = torch.randint(3, 261, (20,))
        logits = decoder.step(states[0], tokens)
        logits[:, forbidden] = -torch.inf
        expected, expected_ids = logits.log_softmax(-1).topk(count)
        found, log_probs = decoder.step_best(states[1], tokens.numpy(), count, np.array(forbidden, dtype=np.int64))
        np.testing.assert_array_equal(found, expected_ids)
        np.testing.assert_allclose(log_probs, expected, atol=1e-5)
    # Without log-probabilities, what comes with the tokens are their logits.
    states = decoder.start(ids, mask), decoder.start(ids, mask)
    expected, expected_ids = decoder.step(states[0], tokens).topk(count)
    found, logits = decoder.step_best(
        states[1], tokens.numpy(), count, np.empty(0, dtype=np.int64), with_log_probs=False
    )
    np.testing.assert_array_equal(found, expected_ids)
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_where_nothing_is_permitted_nothing_is_probable(scrambled):
    model = scrambled()
    decoder = make(PRECISE["native"], "native", model)
    state = decoder.start(torch.full((2, 3), 5), torch.ones(2, 3, dtype=torch.long))
    forbidden = np.arange(1, model.config.vocab_size)
    ids, log_probs = decoder.step_best(state, np.array([1, 1]), 2, forbidden)
    assert ids[:, 0].tolist() == [0, 0]
    np.testing.assert_allclose(log_probs[:, 0], 0.0, atol=1e-6)
    assert (log_probs[:, 1] == -np.inf).all()


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_rows_do_not_depend_on_their_neighbours(scrambled, precision):
    model = scrambled(**VARIANTS["several layers"])
    decoder = make(lambda model: NativeDecoder(model, precision=precision), f"native {precision}", model)
    ids, tokens = torch.randint(3, 261, (40, 6)), torch.randint(3, 261, (40,))
    mask = (torch.arange(6) < torch.randint(1, 7, (40, 1))).long()
    together = decoder.step(decoder.start(ids, mask), tokens)
    for number in range(0, 40, 7):
        alone = decoder.step(decoder.start(ids[number, None], mask[number, None]), tokens[number, None])
        assert torch.equal(alone[0], together[number])


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("name", PRECISE)
def test_translations_are_the_plain_decoders(learned, tokenizer, sentences, name, num_beams):
    decoder = make(PRECISE[name], name, learned)
    rows = tokenizer(sentences, padding=True, return_tensors="pt")
    options = SearchOptions(num_beams=num_beams, num_hypotheses=num_beams, min_length=3, banned_tokens=(40,))
    prefixes = [[70, 80] if number % 3 else [] for number in range(len(sentences))]
    arguments = (rows["input_ids"], rows["attention_mask"], SPECIAL, options)
    for forced in (None, prefixes):
        found = search(decoder, *arguments, prefixes=forced)
        expected = search(PlainDecoder(learned), *arguments, prefixes=forced)
        for mine, theirs in zip(found, expected, strict=True):
            assert [each.tokens for each in mine] == [each.tokens for each in theirs]
            np.testing.assert_allclose(
                [each.score for each in mine], [each.score for each in theirs], rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("name", [*PRECISE, "native int8"])
def test_searches_in_threads_do_not_disturb_each_other(learned, tokenizer, sentences, name):
    decoder = make(PRECISE.get(name) or ROUNDING[name][0], name, learned)

    def translate(number: int) -> list:
        rows = tokenizer(sentences[number : number + 4], padding=True, return_tensors="pt")
        options = SearchOptions(num_beams=1 + number % 4)
        return search(decoder, rows["input_ids"], rows["attention_mask"], SPECIAL, options)

    numbers = [*range(0, len(sentences) - 4, 2)]
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(translate, numbers)] == [translate(number) for number in numbers]


def test_ids_outside_the_vocabulary_are_refused(scrambled):
    model = scrambled(max_position_embeddings=3, position_embedding_type="learned")
    decoder = make(PRECISE["native"], "native", model)
    one = torch.ones(1, 2, dtype=torch.long)
    for wrong in (-1, 261):
        with pytest.raises(IndexError, match="source token is not among the model's 261"):
            decoder.start(torch.tensor([[5, wrong]]), one)
        state = decoder.start(torch.tensor([[5, 6]]), one)
        with pytest.raises(IndexError, match="target token is not among the model's 261"):
            decoder.step(state, torch.tensor([wrong]))
        with pytest.raises(IndexError, match="target token is not among the model's 261"):
            decoder.step_best(state, np.array([wrong]), 1, np.empty(0, dtype=np.int64))
    state = decoder.start(torch.tensor([[5, 6]]), one)
    for _ in range(3):
        decoder.step(state, torch.tensor([5]))
    with pytest.raises(IndexError, match="3 learned positions"):
        decoder.step(state, torch.tensor([5]))


@pytest.mark.skipif(
    sys.platform != "linux" or not torch.cpu._is_avx512_supported(), reason="compares instructions of x86 processors"
)
@pytest.mark.parametrize(
    "flags",
    [["-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16"], ["-march=x86-64-v3", "-Wno-psabi"]],
    ids=["vectors", "avx2"],
)
@pytest.mark.usefixtures("fresh_library")
def test_other_instructions_give_the_same(scrambled, monkeypatch, flags):
    model = scrambled(**VARIANTS["several layers"])
    require("decoder float32", why_not_native(model, "float32"))
    precisions = [each for each in ("float32", "bfloat16", "int8") if why_not_native(model, each) is None]

    def logits(precision: str) -> list[torch.Tensor]:
        return [logits for logits, _ in walk(model, NativeDecoder(model, precision=precision), sentences=20)]

    expected = {precision: logits(precision) for precision in precisions}
    incremental_decoder.load_library.cache_clear()
    monkeypatch.setattr(library, "_FLAGS", (*library._FLAGS, "-O1", *flags))
    for precision in precisions:
        if why_not_native(model, precision) is None:
            # Sums in another order can move what is rounded next.
            bound = 1e-5 if precision == "float32" else 0.01
            for mine, theirs in zip(logits(precision), expected[precision], strict=True):
                assert (mine - theirs).square().mean().sqrt() < bound * theirs.std()
        else:
            assert flags[0] == "-march=x86-64-v3" and precision != "float32"


@pytest.fixture
def fresh_library(tmp_path, monkeypatch):
    """A cache of its own, and none of the process's libraries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    incremental_decoder.load_library.cache_clear()
    yield tmp_path / "cache"
    incremental_decoder.load_library.cache_clear()


@pytest.mark.usefixtures("fresh_library")
def test_without_a_compiler_torch_decodes(scrambled, monkeypatch):
    model = scrambled()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert why_not_native(model, "int8") == "there is no C++ compiler (g++ or clang++)"
    decoder = make_decoder(model)
    assert isinstance(decoder, PackedDecoder)
    for logits, expected in walk(model, decoder):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=2e-5)
    if can_pack("int8"):
        assert isinstance(make_decoder(model, quantization="int8"), PackedDecoder)
    monkeypatch.setattr("vanilla_transformer.translation.decoders.choice.can_pack", lambda packing: False)
    with pytest.raises(UserError, match=r"int8 is not possible here, because there is no C\+\+ compiler"):
        make_decoder(model, quantization="int8")


@pytest.mark.usefixtures("fresh_library")
def test_a_compiler_that_fails_is_named(scrambled, monkeypatch, tmp_path):
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'no such flag' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert why_not_native(scrambled(), "float32") == f"{compiler} does not compile the decoder (no such flag)"
    monkeypatch.setenv("CXX", str(tmp_path / "absent"))
    assert "absent does not compile the decoder" in why_not_native(scrambled(), "float32")


def test_what_is_compiled_is_kept(scrambled, fresh_library, monkeypatch):
    model = scrambled()
    make(PRECISE["native"], "native", model)
    (compiled,) = (fresh_library / "vanilla_transformer" / "libraries").iterdir()
    assert compiled.suffix == ".so"
    incremental_decoder.load_library.cache_clear()
    monkeypatch.setattr(library, "_compile", lambda *_: pytest.fail("compiled again"))
    assert why_not_native(model, "float32") is None


def test_models_that_cpp_does_not_know_are_left_to_torch(make_model):
    assert "activation is gelu" in why_not_native(make_model(activation_function="gelu"), "float32")
    assert "multiple of 16" in why_not_native(make_model(d_k=8), "float32")
    assert "on meta" in why_not_native(make_model().to("meta"), "float32")
    for settings in ({"activation_function": "gelu"}, {"d_k": 8}):
        model = make_model(**settings)
        decoder = make_decoder(model)
        assert isinstance(decoder, PackedDecoder)
        for logits, expected in walk(model, decoder):
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=2e-5)


def test_the_dtype_of_a_model_is_what_it_is_decoded_in(scrambled, monkeypatch):
    model = scrambled().double()
    decoder = make_decoder(model)
    for logits, expected in walk(model, decoder):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
    model = scrambled().bfloat16()
    reasons = {"bfloat16": "no such instructions"}
    monkeypatch.setattr(
        "vanilla_transformer.translation.decoders.choice.why_not_native", lambda _, precision: reasons.get(precision)
    )
    monkeypatch.setattr("vanilla_transformer.translation.decoders.choice.can_pack", lambda packing: False)
    # A processor without them computes faster in float32, and as precisely as the weights are.
    reasons["float32"] = "neither"
    exact = scrambled().bfloat16().float()
    for logits, expected in walk(exact, make_decoder(model)):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 8, 33])
@pytest.mark.parametrize(("packing", "tolerance"), [("plain", 0.0), ("onednn", 0.02), ("int8", 0.05)])
def test_packed_products_are_products(packing, tolerance, rows, bias, relu):
    if not can_pack(packing):
        pytest.skip(f"torch cannot pack {packing} here")
    dtype = torch.bfloat16 if packing == "onednn" else torch.float32
    generator = torch.Generator().manual_seed(rows)
    weight, vector, x = (torch.randn(*shape, generator=generator) for shape in ((48, 40), (48,), (rows, 40)))
    weight, vector, x = weight.to(dtype), vector.to(dtype) if bias else None, x.to(dtype)
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if vector is None else vector.double())
    expected = expected.relu() if relu else expected
    product = pack(weight, vector, packing, relu=relu)(x).double()
    assert (product - expected).square().mean().sqrt() <= tolerance * expected.std() + 1e-6
    assert product.min() >= 0.0 or not relu


@pytest.mark.parametrize("relu", [False, True])
def test_a_row_of_a_rounded_product_does_not_depend_on_the_others(relu):
    if not can_pack("int8"):
        pytest.skip("torch cannot pack int8 here")
    generator = torch.Generator().manual_seed(1)
    product = pack(torch.randn(48, 40, generator=generator), torch.randn(48, generator=generator), "int8", relu=relu)
    rows = torch.randn(33, 40, generator=generator) * torch.logspace(-3, 3, 33)[:, None]
    alone = torch.cat([product(row[None]) for row in rows])
    assert torch.equal(product(rows), alone)


def test_both_decoders_round_to_8_bits_alike(scrambled):
    model = scrambled()
    incremental_decoder, packed = (make(ROUNDING[name][0], name, model) for name in ("native int8", "packed int8"))
    for (mine, _), (theirs, exact) in zip(walk(model, incremental_decoder), walk(model, packed), strict=True):
        assert (mine - theirs).square().mean() < (theirs - exact).square().mean()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process forks")
def test_the_decoder_works_in_a_new_process(scrambled):
    model = scrambled()
    precision = "int8" if why_not_native(model, "int8") is None else "float32"
    make(PRECISE["native"], "native", model)
    code = (
        "import torch\n"
        "from vanilla_transformer import VanillaTransformerConfig\n"
        "from vanilla_transformer import VanillaTransformerForConditionalGeneration as Model\n"
        "from vanilla_transformer.native.incremental_decoder import NativeDecoder\n"
        "config = VanillaTransformerConfig(vocab_size=99, d_model=16, encoder_layers=1, decoder_layers=1,"
        " encoder_attention_heads=1, decoder_attention_heads=1, encoder_ffn_dim=16, decoder_ffn_dim=16)\n"
        # Without a question to `why_not_native` before.
        f"decoder = NativeDecoder(Model(config).eval(), precision='{precision}')\n"
        "state = decoder.start(torch.tensor([[5, 6]]), torch.ones(1, 2, dtype=torch.long))\n"
        "print(decoder.step(state, torch.tensor([1])).isfinite().all().item())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


NO_MEMORY = """
import resource
import numpy as np
import torch
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.native.incremental_decoder import NativeDecoder

config = VanillaTransformerConfig(
    vocab_size=99, d_model=64, encoder_layers=1, decoder_layers=4, encoder_attention_heads=1,
    decoder_attention_heads=1, encoder_ffn_dim=16, decoder_ffn_dim=16,
)
decoder = NativeDecoder(VanillaTransformerForConditionalGeneration(config).eval(), precision="float32")
rows, ids = 20_000, torch.full((20_000, 1), 5)
mask, tokens = torch.ones_like(ids), np.ones(rows, dtype=np.int64)
state = decoder.start(ids, mask)
decoder.step_best(state, tokens, 1, np.empty(0, dtype=np.int64))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
# Keys and values of all rows take 40 MB a position.
resource.setrlimit(resource.RLIMIT_AS, (used + 2**24, resource.RLIM_INFINITY))
for call in (
    lambda: decoder.start(ids, mask),
    lambda: [decoder.step_best(state, tokens, 1, np.empty(0, dtype=np.int64)) for _ in range(9)],
):
    try:
        call()
    except MemoryError as error:
        print(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
try:
    decoder.step_best(state, tokens, 1, np.empty(0, dtype=np.int64))
except RuntimeError as error:
    print(error)
print(len(decoder.step_best(decoder.start(ids, mask), tokens, 1, np.empty(0, dtype=np.int64))[0]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and limits memory")
def test_too_little_memory_is_an_error_that_can_be_caught(scrambled):
    make(PRECISE["native"], "native", scrambled())
    done = subprocess.run([sys.executable, "-c", NO_MEMORY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *messages, failed, rows = done.stdout.splitlines()
    assert len(messages) == 2
    # What a step left half done is not gone on with.
    assert failed == "The decoder in C++ failed with status 3 in this step or an earlier one."
    assert all("no memory left to translate a batch" in message for message in messages)
    assert rows == "20000"


@pytest.mark.parametrize("count", [1 << 50, 1 << 60])
def test_too_many_rows_to_select_are_an_error_that_can_be_caught(scrambled, count):
    decoder = make(PRECISE["native"], "native", scrambled())
    state = decoder.start(torch.tensor([[5, 6]]), torch.ones(1, 2, dtype=torch.long))
    rows = torch.zeros(1, dtype=torch.long)
    assert (
        incremental_decoder.load_library().select_rows(state.handle, None, 0, rows.data_ptr(), count)
        == library.Outcome.NO_MEMORY
    )
    decoder.select(state, None, rows)
    assert len(decoder.step(state, torch.tensor([1]))) == 1


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFFFFFFF, 0x7F800001], ids=hex)
def test_one_weight_that_is_no_number_is_seen_in_the_logits(scrambled, precision, bits):
    settings = {"encoder_ffn_dim": 50, "decoder_ffn_dim": 50, "attention_bias": True, "final_logits_bias": True}
    make(lambda _: None, f"native {precision}", scrambled(**settings))
    nan = torch.tensor([bits], dtype=torch.uint32).view(torch.float32)
    ids, mask, tokens = torch.tensor([[5, 6, 7]]), torch.ones(1, 3, dtype=torch.long), torch.tensor([4])
    names = [*scrambled(**settings).state_dict()]
    generator = random.Random(0)
    for name in names:
        model = scrambled(**settings)
        weight = model.state_dict()[name].view(-1)
        weight[generator.randrange(len(weight))] = nan
        with torch.inference_mode():
            expected = model(input_ids=ids, attention_mask=mask, decoder_input_ids=tokens[None]).logits[0]
        decoder = NativeDecoder(model, precision=precision)
        found = decoder.step(decoder.start(ids, mask), tokens)
        # One that is not used does not count.
        assert (found.isnan() | ~expected.isnan()).all(), name
        best = decoder.step_best(decoder.start(ids, mask), tokens.numpy(), 3, np.empty(0, dtype=np.int64))[1]
        assert np.isnan(best).all() == bool(found.isnan().any()), name


@pytest.mark.parametrize("size", [1e-38, 1e-44])
def test_matrices_of_tiny_numbers_are_zero_in_8_bits(scrambled, size):
    model = scrambled()
    model.lm_head.weight.data.fill_(size)
    decoder = make(ROUNDING["native int8"][0], "native int8", model)
    state = decoder.start(torch.tensor([[5, 6]]), torch.ones(1, 2, dtype=torch.long))
    assert decoder.step(state, torch.tensor([1])).abs().max() <= 1e-30


def test_what_cpp_would_trust_in_is_refused(scrambled):
    model = scrambled()
    decoder = make(PRECISE["native"], "native", model)
    ids, mask = torch.tensor([[5, 6], [7, 8]]), torch.ones(2, 2, dtype=torch.long)
    with pytest.raises(ValueError, match="A source has no token"):
        decoder.start(ids, torch.tensor([[1, 1], [0, 0]]))
    state = decoder.start(ids, mask)
    for tokens in (torch.tensor([1]), torch.tensor([[1, 1]])):
        with pytest.raises(ValueError, match="give each row one"):
            decoder.step(state, tokens)
    wrong = ([], []), ([0, 1], [0]), ([0, 1], [0, 1, 0]), ([0, 1], [0, 2]), ([0, -1], [0, 1]), ([2], [0])
    for sentences, rows in wrong:
        with pytest.raises(ValueError, match="`rows` or `sentences` names one that does not exist"):
            decoder.select(state, torch.tensor(sentences, dtype=torch.long), torch.tensor(rows, dtype=torch.long))
    assert decoder.step(state, torch.tensor([1, 1], dtype=torch.int32)).isfinite().all()
    model.config.decoder_ffn_dim += 1
    with pytest.raises(ValueError, match="do not have the sizes of its configuration"):
        NativeDecoder(model, precision="float32")


DAEMON = """
import threading
import numpy as np
import torch
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.native.incremental_decoder import NativeDecoder

config = VanillaTransformerConfig(
    vocab_size=9000, d_model=256, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=1024, decoder_ffn_dim=1024,
)
decoder = NativeDecoder(VanillaTransformerForConditionalGeneration(config).eval(), precision="float32")
rows, begun = 4000, threading.Event()
state = decoder.start(torch.full((rows, 1), 5), torch.ones(rows, 1, dtype=torch.long))

def decode():
    begun.set()
    decoder.step_best(state, np.ones(rows, dtype=np.int64), 1, np.empty(0, dtype=np.int64))

threading.Thread(target=decode, daemon=True).start()
begun.wait()
"""


def test_threads_may_be_decoding_when_the_interpreter_ends(scrambled):
    make(PRECISE["native"], "native", scrambled())
    done = subprocess.run([sys.executable, "-c", DAEMON], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_another_thread_may_replace_the_table_of_positions(scrambled, monkeypatch):
    model = scrambled()
    decoder, ids = PackedDecoder(model), torch.randint(3, 261, (1, 40))
    expected = PackedDecoder(model)._encoder.embed(ids)
    embedding = torch.nn.functional.embedding

    def interrupted(*arguments):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: setattr(decoder._encoder, "_table", decoder._encoder._table[:1])).result()
        return embedding(*arguments)

    # Between the growing of the table and its use.
    monkeypatch.setattr(torch.nn.functional, "embedding", interrupted)
    assert torch.equal(decoder._encoder.embed(ids), expected)


@pytest.mark.parametrize("call", ["step", "step_best"])
def test_a_table_of_positions_lives_as_long_as_cpp_reads_it(scrambled, monkeypatch, call):
    decoder = make(PRECISE["native"], "native", scrambled())
    state = decoder.start(torch.tensor([[5, 6]]), torch.ones(1, 2, dtype=torch.long))
    library, up_to, tables, alive = decoder._library, decoder._positions[1].up_to, [], []

    class Watching:
        def __getattr__(self, name):
            if name.startswith("step"):
                alive.append(tables[-1]() is not None)
            return getattr(library, name)

    def outgrown(length):
        # As if another thread had put a longer one in its place at once.
        table = up_to(length).clone()
        tables.append(weakref.ref(table.untyped_storage()))
        return table

    monkeypatch.setattr(decoder._positions[1], "up_to", outgrown)
    monkeypatch.setattr(decoder, "_library", Watching())
    if call == "step":
        decoder.step(state, torch.tensor([1]))
    else:
        decoder.step_best(state, np.array([1]), 1, np.empty(0, dtype=np.int64))
    assert alive == [True]


@pytest.mark.parametrize("name", PRECISE)
def test_searches_in_threads_may_grow_the_tables_at_once(scrambled, name):
    model = scrambled()
    rows = [torch.randint(3, 261, (1, length)) for length in (300, 5, 90, 700, 30, 1100, 2, 400)]

    def first_logits(decoder, row):
        return decoder.step(decoder.start(row, torch.ones_like(row)), torch.tensor([1]))

    expected = [first_logits(make(PRECISE[name], name, model), row) for row in rows]
    for _ in range(5):
        decoder = make(PRECISE[name], name, model)
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda row, decoder=decoder: first_logits(decoder, row), rows))
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("name", PRECISE)
def test_the_side_of_the_padding_does_not_matter(scrambled, name, settings):
    model = scrambled(**settings)
    decoder = make(PRECISE[name], name, model)
    lengths, generator = [7, 3, 5], torch.Generator().manual_seed(1)
    ids = torch.randint(3, 261, (3, 7), generator=generator)
    right = torch.tensor([[int(position < length) for position in range(7)] for length in lengths])
    turned = [torch.cat([row[length:], row[:length]]) for row, length in zip(ids, lengths, strict=True)]
    tokens = torch.tensor([1, 1, 1])
    expected = decoder.step(decoder.start(ids, right), tokens)
    found = decoder.step(decoder.start(torch.stack(turned), right.flip(1)), tokens)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
