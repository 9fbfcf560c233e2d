"""The plain decoder against passes over whole translations and against `generate`."""

import random
from copy import deepcopy

import pytest
import torch

from vanilla_transformer.translation.decoders.through_modules import PlainDecoder
from vanilla_transformer.translation.options import SearchOptions
from vanilla_transformer.translation.search.search import SpecialTokens, search


SPECIAL = SpecialTokens(1, (2,))

VARIANTS = {
    "paper": {},
    "several layers": {"encoder_layers": 2, "decoder_layers": 3, "attention_bias": True, "final_logits_bias": True},
    "no decoder layer": {"decoder_layers": 0},
    "pre-norm, learned positions": {"norm_position": "pre", "position_embedding_type": "learned"},
    "other widths": {"d_k": 8, "d_v": 24, "decoder_attention_heads": 4, "activation_function": "gelu"},
    "two vocabularies": {
        "decoder_vocab_size": 300, "share_encoder_decoder_embeddings": False, "tie_word_embeddings": False,
    },
}  # fmt: skip


def scramble(model):
    """Give every parameter and buffer values that matter, so that none can be left out unseen."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for values in [*model.parameters(), *model.buffers()]:
            values.add_(torch.randn(values.shape, generator=generator, dtype=values.dtype) * 0.2)
    return model


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
@torch.inference_mode()
def test_steps_equal_one_pass_over_the_translation(make_model, settings, implementation):
    model = scramble(make_model(**settings).double())
    model.set_attn_implementation(implementation)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 261, (5, 9), generator=generator)
    mask = torch.tensor([[int(position < length) for position in range(9)] for length in (9, 4, 7, 1, 9)])
    decoder = PlainDecoder(model)
    assert decoder.vocab_size == model.config.decoder_vocab_size
    state = decoder.start(ids, mask)
    sentences, rows = list(range(5)), [[] for _ in range(5)]
    chance = random.Random(2)
    # Widened after the first step, then reordered, with sentences leaving; `None` is a step without a selection.
    for selection in ((3, [0, 1, 2, 3, 4]), (3, [0, 1, 3, 4]), None, (3, [1, 2]), (3, [0, 1]), (2, [1])):
        tokens = torch.randint(1, 261, (len(rows),), generator=generator)
        rows = [[*row, int(token)] for row, token in zip(rows, tokens, strict=True)]
        logits = decoder.step(state, tokens)
        owners = [sentence for sentence in sentences for _ in range(len(rows) // len(sentences))]
        expected = model(input_ids=ids[owners], attention_mask=mask[owners], decoder_input_ids=torch.tensor(rows))
        torch.testing.assert_close(logits, expected.logits[:, -1], rtol=0, atol=1e-12)
        if selection is None:
            continue
        (width, kept), old = selection, len(rows) // len(sentences)
        chosen = [sentence * old + chance.randrange(old) for sentence in kept for _ in range(width)]
        everyone = len(kept) == len(sentences)
        decoder.select(state, None if everyone else torch.tensor(kept), torch.tensor(chosen))
        rows, sentences = [rows[row] for row in chosen], [sentences[sentence] for sentence in kept]


@torch.inference_mode()
def test_searches_can_alternate_on_one_decoder(learned, tokenizer, sentences):
    decoder = PlainDecoder(learned)
    batches = [tokenizer(sentences[start : start + 4], padding=True, return_tensors="pt") for start in (0, 20)]
    start = torch.ones(4, dtype=torch.int64)
    apart = []
    for batch in batches:
        state = decoder.start(batch["input_ids"], batch["attention_mask"])
        first = decoder.step(state, start).clone()
        apart.append((first, decoder.step(state, first.argmax(dim=-1)).clone()))
    states = [decoder.start(batch["input_ids"], batch["attention_mask"]) for batch in batches]
    firsts = [decoder.step(state, start).clone() for state in states]
    seconds = [decoder.step(state, first.argmax(dim=-1)) for state, first in zip(states, firsts, strict=True)]
    for first, second, expected in zip(firsts, seconds, apart, strict=True):
        assert torch.equal(first, expected[0])
        assert torch.equal(second, expected[1])


@torch.inference_mode()
def log_prob_of(model, source: list[int], tokens: tuple[int, ...], banned: tuple[int, ...] = ()) -> float:
    """The log-probability of a translation by one pass in float64."""
    logits = (
        deepcopy(model)
        .double()(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([[1, *tokens[:-1]]]))
        .logits[0]
    )
    logits[:, list(banned)] = -torch.inf
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(tokens)[:, None]).sum().item()


@pytest.mark.parametrize("num_beams", [1, 4])
def test_scores_can_be_computed_again_by_a_forward_pass(learned, tokenizer, sentences, num_beams):
    batch = tokenizer(sentences[:10], padding=True, return_tensors="pt")
    options = SearchOptions(num_beams=num_beams, num_hypotheses=num_beams, banned_tokens=(0, 75))
    found = search(PlainDecoder(learned), batch["input_ids"], batch["attention_mask"], SPECIAL, options)
    for sentence, hypotheses in zip(sentences, found, strict=False):
        assert len(hypotheses) == num_beams
        for hypothesis in hypotheses:
            expected = log_prob_of(learned, tokenizer(sentence)["input_ids"], hypothesis.tokens, (0, 75))
            assert hypothesis.log_prob == pytest.approx(expected, abs=1e-4)
            assert hypothesis.score == pytest.approx(expected / ((5 + len(hypothesis.tokens)) / 6) ** 0.6, abs=1e-4)


def assert_same_but_for_ties(model, sources, found, expected, length_of_score):
    """Equal translations, or two whose scores cannot be told apart in float32; most must be equal."""
    different = 0
    for source, tokens, others in zip(sources, found, expected, strict=True):
        if tokens != others:
            different += 1
            scores = [log_prob_of(model, source, rival) / length_of_score(len(rival)) for rival in (tokens, others)]
            assert abs(scores[0] - scores[1]) < 1e-5, (tokens, others)
    assert different <= len(sources) // 10


@pytest.mark.parametrize(("num_beams", "length_penalty"), [(1, 0.6), (2, 0.0), (4, 1.0), (4, 0.6), (5, -0.5)])
def test_translations_equal_those_of_generate(learned, tokenizer, sentences, num_beams, length_penalty):
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    options = SearchOptions(num_beams=num_beams, length_penalty=length_penalty, rules="transformers", max_length=30)
    found = search(PlainDecoder(learned), batch["input_ids"], batch["attention_mask"], SPECIAL, options)
    rules = {"length_penalty": length_penalty, "early_stopping": "never"} if num_beams > 1 else {}
    unset = {} if num_beams > 1 else {"length_penalty": None, "early_stopping": None}
    generated = learned.generate(**batch, num_beams=num_beams, max_new_tokens=30, max_length=None, **rules, **unset)
    expected = [tuple(row[: row.index(2) + 1] if 2 in row else row) for row in generated[:, 1:].tolist()]
    expected = [tuple(token for token in row if token != 0) for row in expected]
    sources = [tokenizer(sentence)["input_ids"] for sentence in sentences]
    tokens = [hypotheses[0].tokens for hypotheses in found]
    assert_same_but_for_ties(learned, sources, tokens, expected, lambda length: length**length_penalty)
    assert sum(row[-1] == 2 for row in tokens) > len(tokens) // 2
    assert len({*tokens}) > len(tokens) // 2


@pytest.mark.parametrize("num_beams", [1, 4])
def test_batches_order_and_padding_do_not_change_translations(learned, tokenizer, sentences, num_beams):
    options = SearchOptions(num_beams=num_beams)
    sources = [tokenizer(sentence)["input_ids"] for sentence in [*sentences, *(text[::-1] for text in sentences)]]
    decoder = PlainDecoder(learned)

    def translate(order, size, padding=0):
        tokens = {}
        for start in range(0, len(order), size):
            rows = [sources[index] for index in order[start : start + size]]
            batch = tokenizer.pad({"input_ids": rows}, padding="max_length", return_tensors="pt",
                                  max_length=max(map(len, rows)) + padding)  # fmt: skip
            found = search(decoder, batch["input_ids"], batch["attention_mask"], SPECIAL, options)
            tokens.update(
                zip(order[start : start + size], (hypotheses[0].tokens for hypotheses in found), strict=True)
            )
        return [tokens[index] for index in range(len(sources))]

    alone = translate(range(len(sources)), 1)
    shuffled = random.Random(4).sample(range(len(sources)), len(sources))
    for order, size, padding in ((range(len(sources)), 8, 0), (shuffled, 64, 0), (shuffled, 8, 5)):
        assert_same_but_for_ties(
            learned, sources, translate(order, size, padding), alone, lambda length: ((5 + length) / 6) ** 0.6
        )
