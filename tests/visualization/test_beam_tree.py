import math
from dataclasses import replace

import pytest
import torch

from vanilla_transformer.errors import UserError
from vanilla_transformer.translation.options import SearchOptions
from vanilla_transformer.translation.translator import Translator
from vanilla_transformer.visualization.beam_tree import beam_tree


def path_to(tree, number):
    path = []
    while number >= 0:
        path.append(number)
        number = tree.nodes[number].parent
    return path[::-1]


SEARCHES = {
    "paper": {"num_beams": 4, "num_hypotheses": 4},
    "as transformers": {"num_beams": 3, "num_hypotheses": 3, "rules": "transformers"},
    "banned": {"num_beams": 4, "num_hypotheses": 2, "banned_tokens": (3, 17, 40), "min_length": 3},
    "greedy": {"num_beams": 1},
}


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
def test_the_tree_is_that_of_the_search(model, tokenizer, ids, search):
    options = SearchOptions(**search, extra_length=3)
    tree = beam_tree(model, ids[0], options)
    translator = Translator(model, tokenizer, **{**search, "extra_length": 3}, workers=1)
    expected = translator.hypotheses(tokenizer.decode(ids[0], skip_special_tokens=True))
    assert len(tree.hypotheses) == options.num_hypotheses
    for hypothesis, last, translation in zip(tree.hypotheses, tree.last_nodes, expected, strict=True):
        assert hypothesis.log_prob == pytest.approx(translation.log_prob, rel=1e-4)
        path = path_to(tree, last)
        assert tuple(tree.nodes[number].token for number in path[1:]) == hypothesis.tokens
        assert math.fsum(tree.nodes[number].log_prob for number in path) == pytest.approx(hypothesis.log_prob)
        assert tree.nodes[last].total == pytest.approx(hypothesis.log_prob)
        assert tree.nodes[last].ends


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
def test_every_node_has_the_models_probability(model, ids, search):
    options = SearchOptions(**search, extra_length=3)
    tree = beam_tree(model, ids[0], options)
    alive = {}
    for number, node in enumerate(tree.nodes):
        assert node.parent < number
        if number == 0:
            continue
        assert node.depth == tree.nodes[node.parent].depth + 1
        if not node.ends:
            alive[node.depth] = alive.get(node.depth, 0) + 1
        prefix = [tree.nodes[before].token for before in path_to(tree, number)[:-1]]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids[0]]), decoder_input_ids=torch.tensor([prefix])).logits[0, -1]
        forbidden = [*options.banned_tokens, *([2] if len(prefix) - 1 < options.min_length else [])]
        logits[forbidden] = -torch.inf
        assert node.log_prob == pytest.approx(float(logits.log_softmax(dim=-1)[node.token]), abs=1e-6)
    assert max(alive.values()) <= options.num_beams


def test_rows_that_only_fill_up_the_beam_are_left_out(make_model, ids):
    # Four entries and three beams: at every step the beam has fewer continuations than places.
    model = make_model(vocab_size=4, share_encoder_decoder_embeddings=True).double()
    options = SearchOptions(num_beams=3, num_hypotheses=3, banned_tokens=(0, 1), extra_length=0)
    tree = beam_tree(model, [3, 3, 2], options)
    assert all(math.isfinite(node.total) for node in tree.nodes)
    assert all(tree.nodes[node.parent].token != 2 for node in tree.nodes[1:])


def test_a_damaged_model_finds_nothing(model, ids):
    model.lm_head.weight.data.fill_(float("nan"))
    for beams in (1, 4):
        with pytest.raises(UserError, match="finds no translation"):
            beam_tree(model, ids[0], SearchOptions(num_beams=beams, extra_length=0))


def test_the_same_options_find_the_same(model, ids):
    options = SearchOptions(num_beams=4, num_hypotheses=4, extra_length=3)
    fewer = beam_tree(model, ids[0], replace(options, num_hypotheses=1))
    assert fewer.hypotheses[0] == beam_tree(model, ids[0], options).hypotheses[0]
