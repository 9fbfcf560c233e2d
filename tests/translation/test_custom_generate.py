"""The paper's beam search inside `generate`."""

import pytest
import torch
from transformers import (
    GenerationConfig,
    MarianConfig,
    MarianMTModel,
    MaxTimeCriteria,
    StoppingCriteriaList,
)

from vanilla_transformer import Translator, paper_beam_search
from vanilla_transformer.errors import UserError
from vanilla_transformer.translation.decoders.through_modules import PlainDecoder
from vanilla_transformer.translation.options import SearchOptions
from vanilla_transformer.translation.search.search import SpecialTokens, search


# What a generation configuration says of beam search does not apply to other searches.
GREEDY = {"length_penalty": None, "early_stopping": None}


@pytest.fixture
def batch(tokenizer, sentences):
    return tokenizer([*sentences[:7], "A."], padding=True, return_tensors="pt")


def expected_rows(model, batch, **options):
    found = search(
        PlainDecoder(model),
        batch["input_ids"],
        batch["attention_mask"],
        SpecialTokens(1, (2,)),
        SearchOptions(**options),
    )
    return [(1, *hypothesis.tokens) for hypotheses in found for hypothesis in hypotheses]


def rows_of(ids):
    rows = []
    for row in ids.tolist():
        while row[-1] == 0:
            row.pop()
        assert 2 not in row[:-1]
        rows.append(tuple(row))
    return rows


@pytest.mark.parametrize("from_configuration", [False, True])
@pytest.mark.parametrize("num_beams", [1, 3, 4])
def test_the_search_is_the_papers_wherever_the_beam_size_comes_from(model, batch, num_beams, from_configuration):
    expected = expected_rows(model, batch, num_beams=num_beams)
    beams = {"num_beams": num_beams}
    if from_configuration:
        beams = {
            "generation_config": GenerationConfig(
                num_beams=num_beams, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1
            )
        }
    if num_beams == 1:
        model.generation_config.length_penalty = model.generation_config.early_stopping = None
    ids = model.generate(**batch, **beams, custom_generate=paper_beam_search)
    assert ids.shape[0] == len(batch["input_ids"])
    assert rows_of(ids) == expected
    if num_beams > 1:
        # `generate` has another penalty, and its own length of 20.
        plain = model.generate(**batch, num_beams=num_beams, length_penalty=1.0, max_length=None, max_new_tokens=20)
        assert plain.shape != ids.shape


@pytest.fixture(autouse=True)
def configuration_stays(model):
    before = model.generation_config.to_dict()
    yield
    model.generation_config = GenerationConfig(**before)


def test_every_sentence_has_its_own_cap(model, batch):
    # Without an end, only caps end a translation.
    lengths = batch["attention_mask"].sum(dim=1)
    ids = model.generate(**batch, num_beams=2, suppress_tokens=[2, 0], custom_generate=paper_beam_search)
    assert ((ids != 0).sum(dim=1) == 1 + lengths + 50).all()
    options = {"num_beams": 2, "suppress_tokens": [2, 0], "custom_generate": paper_beam_search}
    ids = model.generate(**batch, **options, extra_length=3)
    assert ((ids != 0).sum(dim=1) == 1 + lengths + 3).all()
    ids = model.generate(**batch, **options, max_length=None, max_new_tokens=6)
    assert ids.shape[1] == 7
    # What `generate` would do without any options is left as it is.
    unmasked = model.generate(batch["input_ids"][:1], **options)
    assert unmasked.shape[1] == 1 + batch["input_ids"].shape[1] + 50


@pytest.mark.parametrize(
    ("given", "alpha"),
    [({}, 0.6), ({"length_penalty": 1.7}, 1.7), ({"length_penalty": 1.7, "alpha": 1.0}, 1.0), ({"alpha": 0.0}, 0.0)],
)
def test_the_length_penalty(make_model, batch, given, alpha):
    # Without training, the penalty decides how long translations become.
    model = make_model().double()
    model.generation_config.length_penalty = None
    options = {"num_beams": 3, "custom_generate": paper_beam_search, "return_dict_in_generate": True}
    output = model.generate(**batch, **options, **given)
    found = search(
        PlainDecoder(model), batch["input_ids"], batch["attention_mask"], SpecialTokens(1, (2,)),
        SearchOptions(num_beams=3, length_penalty=alpha),
    )  # fmt: skip
    scores = [hypotheses[0].score for hypotheses in found]
    torch.testing.assert_close(output.sequences_scores.double(), torch.tensor(scores).double(), rtol=1e-5, atol=1e-5)


def test_a_penalty_that_the_model_names_is_taken_whatever_it_is(model, batch, tokenizer):
    model.generation_config.length_penalty = 1.0
    options = {"num_beams": 3, "custom_generate": paper_beam_search, "return_dict_in_generate": True}
    output = model.generate(**batch, **options)
    texts = tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True)
    translator = Translator(model, tokenizer, num_beams=3)
    assert translator.options.length_penalty == 1.0
    scores = [found[0].score for found in translator.hypotheses(texts)]
    assert output.sequences_scores.tolist() == pytest.approx(scores, abs=1e-6)


def test_several_sequences_prefixes_and_what_is_banned(model, batch):
    prefixes = torch.tensor([[1, 70 + number, 90] for number in range(8)])
    ids = model.generate(
        **batch, decoder_input_ids=prefixes, num_beams=4, num_return_sequences=3, min_new_tokens=4,
        suppress_tokens=[101], bad_words_ids=[[105]], custom_generate=paper_beam_search,
    )  # fmt: skip
    found = search(
        PlainDecoder(model), batch["input_ids"], batch["attention_mask"], SpecialTokens(1, (2,)),
        SearchOptions(num_beams=4, num_hypotheses=3, min_length=6, banned_tokens=(101, 105)),
        prefixes=prefixes[:, 1:].tolist(),
    )  # fmt: skip
    assert rows_of(ids) == [(1, *hypothesis.tokens) for hypotheses in found for hypothesis in hypotheses]
    assert torch.equal(ids[:, :3], prefixes.repeat_interleave(3, dim=0))


def test_the_smallest_length(model, batch):
    # Of two tokens that are left, the end comes as soon as it may.
    banned = tuple(token for token in range(261) if token not in (2, 100))
    ids = model.generate(
        **batch, num_beams=2, min_new_tokens=5, suppress_tokens=list(banned), custom_generate=paper_beam_search
    )
    assert rows_of(ids) == expected_rows(model, batch, num_beams=2, min_length=5, banned_tokens=banned)
    assert min(len(row) for row in rows_of(ids)) == 1 + 5 + 1


def test_the_translator_gives_the_same(model, tokenizer, sentences):
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    ids = model.generate(**batch, num_beams=4, custom_generate=paper_beam_search)
    texts = [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]
    assert texts == Translator(model, tokenizer, num_beams=4).translate(sentences)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (
            {"do_sample": True, "num_beams": 1, "length_penalty": None, "early_stopping": None},
            "do_sample, TopKLogitsWarper",
        ),
        ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor"),
        ({"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(9.0)])}, "MaxTimeCriteria"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        (
            {"decoder_input_ids": torch.ones(8, 2, dtype=torch.long), "decoder_attention_mask": torch.eye(8, 2)},
            "a decoder_attention_mask with zeros",
        ),
    ],
)
def test_what_the_search_does_not_do_is_refused(model, batch, options, name):
    with pytest.raises(
        UserError, match=f"^paper_beam_search does not support what was asked for: {name}; leave it out"
    ):
        model.generate(**batch, custom_generate=paper_beam_search, **options)


def test_words_of_several_tokens_cannot_be_banned(model, batch, tokenizer):
    with pytest.raises(UserError, match=r"^`bad_words_ids` bans words of several tokens"):
        model.generate(**batch, custom_generate=paper_beam_search, bad_words_ids=[[7], [7, 8]])
    model.generation_config.bad_words_ids = [[7, 8]]
    with pytest.raises(UserError, match=r"^`bad_words_ids` bans words of several tokens"):
        Translator(model, tokenizer)
    assert Translator(model, tokenizer, banned_tokens=()).options.banned_tokens == ()


def test_models_of_other_classes_are_refused(batch):
    sizes = {
        "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    }  # fmt: skip
    config = MarianConfig(vocab_size=261, pad_token_id=0, eos_token_id=2, decoder_start_token_id=1, **sizes)
    with pytest.raises(UserError, match=r"^paper_beam_search got a MarianMTModel;"):
        MarianMTModel(config).eval().generate(**batch, max_new_tokens=5, custom_generate=paper_beam_search)
