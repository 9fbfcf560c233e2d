import math
from dataclasses import replace

import pytest
import torch
from scripted_decoders import (
    ScriptedDecoder,
    divisor,
    permitted,
    plain_beam_search,
    random_probabilities,
    sequences,
)

from vanilla_transformer.errors import UserError
from vanilla_transformer.translation.options import SearchOptions
from vanilla_transformer.translation.search.candidates import best_tokens
from vanilla_transformer.translation.search.search import SpecialTokens, search


START, END = 1, 2
PENALTIES = (-0.7, 0.0, 0.6, 2.0)


def translate(log_probs, vocab_size, sources, options, *, lengths=None, ends=(END,), decoder=None, **more):
    """Search with a scripted decoder; a source's length decides its cap."""
    lengths = [1] * len(sources) if lengths is None else lengths
    ids = torch.tensor([[source] * max(lengths) for source in sources])
    mask = torch.tensor([[int(position < length) for position in range(max(lengths))] for length in lengths])
    decoder = decoder or ScriptedDecoder(log_probs, vocab_size)
    return search(decoder, ids, mask, SpecialTokens(START, ends), options, **more)


def assert_same(hypotheses, expected):
    assert [hypothesis.tokens for hypothesis in hypotheses] == [tokens for tokens, *_ in expected]
    for hypothesis, (_, log_prob, score) in zip(hypotheses, expected, strict=True):
        assert hypothesis.log_prob == pytest.approx(log_prob, abs=1e-9)
        assert hypothesis.score == pytest.approx(score, abs=1e-9)


# Against all sequences, and against the algorithm as it is described


@pytest.mark.parametrize("length_penalty", PENALTIES)
@pytest.mark.parametrize("seed", range(5))
def test_a_beam_without_bounds_finds_the_best_of_all_sequences(length_penalty, seed):
    # 3 tokens that go on and at most 5 positions.
    log_probs = random_probabilities(seed, 4)
    options = SearchOptions(num_beams=300, num_hypotheses=20, length_penalty=length_penalty, extra_length=4)
    ended = [found for found in sequences(log_probs, 7, 5, (END,), options) if found[0][-1] == END]
    ranked = sorted(((*found, found[1] / divisor(len(found[0]), options)) for found in ended), key=lambda x: -x[2])
    (hypotheses,) = translate(log_probs, 4, [7], options)
    assert_same(hypotheses, ranked[:20])
    assert all(hypothesis.finished for hypothesis in hypotheses)
    # The best alone is found with an earlier stop.
    (best,) = translate(log_probs, 4, [7], replace(options, num_hypotheses=1))
    assert_same(best, ranked[:1])


@pytest.mark.parametrize("rules", ["paper", "transformers"])
@pytest.mark.parametrize("length_penalty", PENALTIES)
@pytest.mark.parametrize(("num_beams", "num_hypotheses"), [(2, 1), (3, 3), (4, 1), (4, 2)])
def test_beam_search_equals_a_plain_rendering(rules, length_penalty, num_beams, num_hypotheses):
    options = SearchOptions(
        num_beams=num_beams, num_hypotheses=num_hypotheses, length_penalty=length_penalty, rules=rules, extra_length=7
    )
    for seed in range(8):
        # Vocabularies smaller and larger than the number of candidates.
        vocab_size = 4 + 3 * (seed % 4)
        log_probs = random_probabilities(seed, vocab_size, sharpness=0.5 + seed % 3)
        (hypotheses,) = translate(log_probs, vocab_size, [seed], options)
        assert_same(hypotheses, plain_beam_search(log_probs, seed, 8, (END,), options)[:num_hypotheses])


@pytest.mark.parametrize("rules", ["paper", "transformers"])
def test_what_is_asked_of_translations_beside_their_probability(rules):
    ends = (END, 5)
    prefixes = [(), (3,), (0, 6, 4), (3, 3, 3, 3, 3, 3)]
    options = SearchOptions(
        num_beams=3, num_hypotheses=2, rules=rules, extra_length=5, min_length=3, banned_tokens=(7, 1)
    )
    for seed in range(10):
        log_probs = random_probabilities(seed, 9)
        found = translate(log_probs, 9, range(4), options, ends=ends, prefixes=prefixes)
        for source, (hypotheses, prefix) in enumerate(zip(found, prefixes, strict=True)):
            assert_same(hypotheses, plain_beam_search(log_probs, source, 6, ends, options, prefix)[:2])
            for hypothesis in hypotheses:
                assert hypothesis.tokens[: len(prefix)] == prefix
                assert not {1, 7} & {*hypothesis.tokens}
                assert not {*ends} & {*hypothesis.tokens[:3]}
                assert hypothesis.finished == (hypothesis.tokens[-1] in ends)


def test_a_prefix_that_ends_is_the_translation():
    (hypotheses,) = translate(random_probabilities(0, 6), 6, [0], SearchOptions(num_beams=2), prefixes=[(3, END)])
    assert [hypothesis.tokens for hypothesis in hypotheses] == [(3, END)]


@pytest.mark.parametrize("num_beams", [1, 3])
def test_log_probabilities_are_those_of_the_tokens(num_beams):
    log_probs = random_probabilities(3, 8)
    options = SearchOptions(
        num_beams=num_beams, num_hypotheses=num_beams, extra_length=9, banned_tokens=(4,), min_length=2
    )
    found = translate(log_probs, 8, range(6), options, prefixes=[(), (3,)] * 3)
    for source, hypotheses in enumerate(found):
        for hypothesis in hypotheses:
            total = sum(
                permitted(log_probs(source, hypothesis.tokens[:position]), position, (END,), options)[token].item()
                for position, token in enumerate(hypothesis.tokens)
            )
            assert hypothesis.log_prob == pytest.approx(total, abs=1e-9)
            assert hypothesis.score == pytest.approx(total / divisor(len(hypothesis.tokens), options), abs=1e-9)


# Stops and caps


def chain(*steps: dict[int, float], vocab_size: int = 5):
    """Probabilities of the next token by position alone; what is left goes to the other tokens alike."""

    def log_probs(source, beginning):
        given = steps[min(len(beginning), len(steps) - 1)]
        rest = (1.0 - sum(given.values())) / (vocab_size - len(given))
        return torch.tensor([given.get(token, rest) for token in range(vocab_size)], dtype=torch.float64).log()

    return log_probs


def test_a_search_stops_once_no_other_hypothesis_can_win():
    # After one token, the end is nearly certain.
    log_probs = chain({3: 0.98}, {END: 0.98})
    decoder = ScriptedDecoder(log_probs, 5)
    (hypotheses,) = translate(log_probs, 5, [0], SearchOptions(num_beams=4, extra_length=50), decoder=decoder)
    assert hypotheses[0].tokens == (3, END)
    best = (0.98**2, 2)
    # What is alive then has lost a factor of about 200, which the penalty of the longest translation must not undo.
    assert math.log(0.98 * 0.02 / 4) / divisor(51, SearchOptions()) < math.log(best[0]) / divisor(2, SearchOptions())
    assert len(decoder.scored) == 2
    # A list of more hypotheses takes longer.
    slower = ScriptedDecoder(log_probs, 5)
    (several,) = translate(log_probs, 5, [0], SearchOptions(num_beams=4, num_hypotheses=4), decoder=slower)
    assert several[0] == hypotheses[0]
    assert len(slower.scored) > 2


def test_a_search_goes_on_while_a_longer_hypothesis_can_win():
    # The end is the best second token, but a certain continuation wins by its length.
    log_probs = chain({3: 0.9}, {END: 0.6, 4: 0.35}, {4: 0.9999}, {4: 0.9999}, {END: 0.9999})
    (short,) = translate(log_probs, 5, [0], SearchOptions(num_beams=2, length_penalty=0.0))
    assert short[0].tokens == (3, END)
    (long,) = translate(log_probs, 5, [0], SearchOptions(num_beams=2, length_penalty=3.0))
    assert long[0].tokens[:4] == (3, 4, 4, 4)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_every_sentence_has_its_own_cap(num_beams):
    # Even the end costs more than all positions up to a cap.
    log_probs = chain({3: 1.0 - 1e-6})
    found = translate(log_probs, 5, [0, 1, 2], SearchOptions(num_beams=num_beams, extra_length=6), lengths=[3, 1, 9])
    assert [len(hypotheses[0].tokens) for hypotheses in found] == [9, 7, 15]
    bounded = SearchOptions(num_beams=num_beams, extra_length=6, max_length=8)
    found = translate(log_probs, 5, [0, 1, 2], bounded, lengths=[3, 1, 9])
    assert [len(hypotheses[0].tokens) for hypotheses in found] == [8, 7, 8]


def test_a_list_that_is_too_short_ends_with_unfinished_hypotheses():
    log_probs = chain({3: 0.9, END: 0.01, 4: 0.08})
    (hypotheses,) = translate(log_probs, 5, [0], SearchOptions(num_beams=4, num_hypotheses=4, extra_length=1))
    finished = [hypothesis.finished for hypothesis in hypotheses]
    assert finished == sorted(finished, reverse=True)
    assert {True, False} == {*finished}
    for part in (True, False):
        scores = [hypothesis.score for hypothesis in hypotheses if hypothesis.finished == part]
        assert scores == sorted(scores, reverse=True)
    # The paper's code returns an unfinished one only where it has no finished one.
    (single,) = translate(log_probs, 5, [0], SearchOptions(num_beams=4, extra_length=1))
    assert single == [hypotheses[0]]


# Batches


@pytest.mark.parametrize(
    "options",
    [
        SearchOptions(num_beams=1),
        SearchOptions(num_beams=4, num_hypotheses=3),
        SearchOptions(num_beams=3, rules="transformers", length_penalty=1.0),
        SearchOptions(num_beams=1, sample=True, num_hypotheses=3, seed=5),
    ],
    ids=["greedy", "beam", "transformers", "samples"],
)
def test_a_sentence_does_not_depend_on_its_batch(options):
    log_probs = random_probabilities(11, 7)
    lengths = [1 + (3 * source) % 5 for source in range(12)]
    options = replace(options, extra_length=4)
    alone = [
        translate(log_probs, 7, [source], options, lengths=[lengths[source]], places=[source])[0]
        for source in range(12)
    ]
    order = [5, 0, 11, 3, 8, 2, 10, 1, 7, 9, 4, 6]
    decoder = ScriptedDecoder(log_probs, 7)
    together = translate(
        log_probs, 7, order, options, lengths=[lengths[source] for source in order], places=order, decoder=decoder
    )
    assert together == [alone[source] for source in order]
    assert len({hypotheses[0].tokens for hypotheses in alone}) > 3
    # Sentences leave as their results become certain: first one row for each, then fewer and fewer.
    assert decoder.scored[0] == 12
    assert decoder.scored[1:] == sorted(decoder.scored[1:], reverse=True)
    assert decoder.scored[-1] < decoder.scored[1]


# Greedy search and samples


@pytest.mark.parametrize("with_scores", [True, False])
def test_greedy_search_takes_the_best_token_each_time(with_scores):
    for seed in range(10):
        log_probs = random_probabilities(seed, 6)
        tokens = []
        while len(tokens) < 9 and END not in tokens:
            tokens.append(int(log_probs(0, tuple(tokens)).argmax()))
        options = SearchOptions(num_beams=1, extra_length=8)
        ((hypothesis,),) = translate(log_probs, 6, [0], options, with_scores=with_scores)
        assert hypothesis.tokens == tuple(tokens)
        assert hypothesis.finished == (tokens[-1] == END)
        assert math.isnan(hypothesis.score) == (not with_scores)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, {3: 0.5, 4: 0.3, END: 0.15, 0: 0.05}),
        ({"top_k": 2}, {3: 0.625, 4: 0.375}),
        # 0.5 is less than 0.6, and 0.5 + 0.3 reaches it.
        ({"top_p": 0.6}, {3: 0.625, 4: 0.375}),
        ({"top_p": 0.01}, {3: 1.0}),
        ({"temperature": 0.5}, {3: 0.25 / 0.365, 4: 0.09 / 0.365, END: 0.0225 / 0.365, 0: 0.0025 / 0.365}),
        ({"banned_tokens": (3,)}, {4: 0.6, END: 0.3, 0: 0.1}),
        ({"min_length": 1}, {3: 0.5 / 0.85, 4: 0.3 / 0.85, 0: 0.05 / 0.85}),
    ],
)
def test_samples_are_drawn_by_their_probability(flags, expected):
    log_probs = chain({3: 0.5, 4: 0.3, END: 0.15, 0: 0.05})
    options = SearchOptions(num_beams=1, sample=True, num_hypotheses=4000, extra_length=0, seed=1, **flags)
    ((*hypotheses,),) = translate(log_probs, 5, [0], options)
    counts = dict.fromkeys(range(5), 0)
    for hypothesis in hypotheses:
        counts[hypothesis.tokens[0]] += 1
    for token, count in counts.items():
        share = expected.get(token, 0.0)
        # Four standard deviations.
        assert abs(count / 4000 - share) <= 4 * math.sqrt(share * (1 - share) / 4000), (token, count)


def test_the_log_probability_of_a_sample_is_the_models():
    log_probs = random_probabilities(2, 9)
    options = SearchOptions(
        num_beams=1, sample=True, num_hypotheses=5, temperature=0.7, top_k=4, top_p=0.9, extra_length=6
    )
    (hypotheses,) = translate(log_probs, 9, [0], options)
    assert len({hypothesis.tokens for hypothesis in hypotheses}) > 1
    for hypothesis in hypotheses:
        total = sum(
            log_probs(0, hypothesis.tokens[:position])[token].item()
            for position, token in enumerate(hypothesis.tokens)
        )
        assert hypothesis.log_prob == pytest.approx(total, abs=1e-9)
    scores = [hypothesis.score for hypothesis in hypotheses]
    assert scores == sorted(scores, reverse=True)


def test_the_seed_and_the_place_decide_what_is_drawn():
    log_probs = random_probabilities(2, 9)
    options = SearchOptions(num_beams=1, sample=True, num_hypotheses=3, extra_length=9)
    # The same source, so that only what is drawn differs.
    first = translate(log_probs, 9, [0, 0], options)
    assert first == translate(log_probs, 9, [0, 0], options)
    assert first[0] != first[1]
    assert first[0] != translate(log_probs, 9, [0], replace(options, seed=1))[0]
    assert first[1] == translate(log_probs, 9, [0], options, places=[1])[0]


# Mistakes


def test_a_prefix_longer_than_the_translation_may_be():
    with pytest.raises(UserError, match=r"^A forced prefix has 4 tokens, and the translation at most 3;"):
        translate(None, 9, [0], SearchOptions(extra_length=2), prefixes=[(3, 3, 3, 3)])


def test_a_prefix_with_a_banned_token():
    with pytest.raises(UserError, match=r"^A forced prefix holds the banned token 4;"):
        translate(None, 9, [0], SearchOptions(banned_tokens=(4,)), prefixes=[(3, 4)])


# Logits that are equal, or no numbers


class Logits:
    """A decoder of given logits, the same at every step."""

    def __init__(self, logits):
        self.logits, self.vocab_size = logits, logits.shape[-1]

    def start(self, input_ids, attention_mask):
        return None

    def step(self, state, tokens):
        return self.logits.expand(len(tokens), -1).clone()

    def select(self, state, sentences, rows):
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 4, 9, 60])
def test_of_equal_logits_the_lowest_id_wins(dtype, count):
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        # Few values, so that many are equal, at the last place too.
        logits = torch.randint(0, 2 + seed, (7, 60), generator=generator).to(dtype)
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        found, log_probs = best_tokens(logits, count)
        assert found.tolist() == ids[:, :count].tolist()
        expected = logits.float().log_softmax(-1).gather(1, ids[:, :count])
        torch.testing.assert_close(torch.from_numpy(log_probs), expected)
        bare, largest = best_tokens(logits, count, with_log_probs=False)
        assert bare.tolist() == found.tolist()
        assert largest.tolist() == values[:, :count].tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("with_scores", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        SearchOptions(num_beams=1),
        SearchOptions(num_beams=3),
        SearchOptions(num_beams=3, rules="transformers"),
        SearchOptions(num_beams=1, sample=True),
    ],
    ids=["greedy", "beam", "transformers", "sample"],
)
def test_logits_that_are_not_finite_are_no_translation(options, with_scores, bad):
    logits = torch.zeros(1, 9)
    assert translate(None, 9, [0], options, decoder=Logits(logits), with_scores=with_scores)[0]
    logits[0, 6] = bad
    assert translate(None, 9, [0], options, decoder=Logits(logits), with_scores=with_scores) == [[]]
    # What is forbidden does not count, unless nothing is left.
    options = replace(options, banned_tokens=(6,))
    assert translate(None, 9, [0], options, decoder=Logits(logits), with_scores=with_scores)[0]
    options = replace(options, banned_tokens=tuple(range(9)))
    assert translate(None, 9, [0], options, decoder=Logits(logits), with_scores=with_scores) == [[]]


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_hypothesis_whose_logits_are_no_numbers_spoils_its_sentence_alone(num_beams):
    log_probs = random_probabilities(3, 8)

    def spoiled(source, beginning):
        found = log_probs(source, beginning)
        return found * math.nan if source == 1 and len(beginning) == 1 else found

    options = SearchOptions(num_beams=num_beams, extra_length=6)
    expected = translate(log_probs, 8, [0, 1, 2], options)
    assert translate(spoiled, 8, [0, 1, 2], options) == [expected[0], [], expected[2]]
