import pytest

from vanilla_transformer.training.engine import train
from vanilla_transformer.translation.decoders.through_modules import PlainDecoder
from vanilla_transformer.translation.translator import Translator


@pytest.mark.parametrize(
    "values",
    [{}, {"mixed_precision": "bf16", "dropout": 0.1}, {"ema_decay": 0.9, "average_last": 1}],
    ids=["float32", "bf16", "average"],
)
def test_the_model_of_a_validation_gets_a_fast_decoder(make_options, tmp_path, values):
    found = []

    def evaluation(model, tokenizer):
        found.append(Translator(model, tokenizer)._backend._decoder.current)
        return {}

    train(make_options(output_dir=tmp_path / "run", max_updates=2, validate_every=1, **values), evaluation)
    assert len(found) == 2
    assert not any(isinstance(decoder, PlainDecoder) for decoder in found)
