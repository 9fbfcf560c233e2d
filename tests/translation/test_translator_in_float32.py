"""The translator with a model in float32, whose decoder is in C++, against transformers on text."""

import math
import random
import re

import numpy as np
import pytest
import torch
from native_parts import require

from vanilla_transformer import Translator
from vanilla_transformer.native.incremental_decoder import why_not_native


@pytest.fixture(scope="module")
def texts(sentences):
    return [*sentences, *(sentence[len(sentence) // 2 :].strip() for sentence in sentences)][:64]


@pytest.fixture(scope="module", params=[1, 4])
def generated(request, learned, tokenizer, texts):
    """The beam size, and for each text what `generate` makes of it alone, with its score."""
    search = {"num_beams": request.param, "length_penalty": 0.6, "early_stopping": "never"}
    if request.param == 1:
        search.update(length_penalty=None, early_stopping=None)
    found = {}
    for text in texts:
        batch = tokenizer([text], return_tensors="pt")
        output = learned.generate(
            **batch, max_new_tokens=batch["input_ids"].shape[1] + 50, max_length=None, **search,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        (line,) = tokenizer.batch_decode(output.sequences, skip_special_tokens=True)
        score = math.nan if request.param == 1 else output.sequences_scores.item()
        found[text] = (re.sub(r"[\r\n]+", " ", line).strip(), score)
    return request.param, found


@pytest.mark.parametrize("size", [1, 8, 64])
def test_the_decoder_in_float32_equals_generate_in_any_batch(learned, tokenizer, texts, generated, size):
    require("decoder float32", why_not_native(learned, "float32"))
    num_beams, expected = generated
    translator = Translator(
        learned, tokenizer, num_beams=num_beams, length_penalty=0.6, rules="transformers", tokens_per_batch=10**6,
        workers=1,
    )  # fmt: skip
    shuffled = random.Random(size).sample(texts, len(texts))
    for start in range(0, len(shuffled), size):
        batch = shuffled[start : start + size]
        for text, found in zip(batch, translator.hypotheses(batch), strict=True):
            line, score = expected[text]
            # Rounding may decide between two that are equally good.
            assert found[0].text == line or found[0].score == pytest.approx(score, abs=1e-5)
    assert len({line for line, _ in expected.values()}) > len(texts) // 2


@pytest.mark.parametrize("num_beams", [1, 4])
def test_scores_are_those_of_a_forward_pass(learned, tokenizer, texts, num_beams):
    translator = Translator(learned, tokenizer, num_beams=num_beams, num_hypotheses=num_beams)
    rows = [np.asarray(row) for row in tokenizer(texts)["input_ids"]]
    found = translator._backend.translate(rows, prefixes=None, places=range(len(rows)), with_scores=True)
    scores = [x.score for own in translator.hypotheses(texts) for x in own]
    assert [x.score for own in found for x in own] == pytest.approx(scores, abs=1e-4)
    for row, own in zip(rows, found, strict=True):
        for hypothesis in own:
            tokens = torch.tensor([[1, *hypothesis.tokens]])
            with torch.no_grad():
                logits = learned(torch.from_numpy(row)[None], decoder_input_ids=tokens[:, :-1]).logits
            log_prob = logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).sum().item()
            assert hypothesis.log_prob == pytest.approx(log_prob, abs=1e-4)
            assert hypothesis.score == pytest.approx(log_prob / ((5 + len(hypothesis.tokens)) / 6) ** 0.6, abs=1e-4)
