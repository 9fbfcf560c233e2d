from dataclasses import replace

import pytest
from runs import observed_steps, train_anew, weights_of

from vanilla_transformer.errors import UserError
from vanilla_transformer.training.checkpoints import checkpoint_name
from vanilla_transformer.training.run_folder import read_run_record


# BLEU after so many updates.
SCORES = {3: 5.0, 6: 9.0, 9: 7.0, 11: 1.0}


@pytest.fixture
def best_run(make_options, tmp_path):
    """Train, and keep two best checkpoints; returns the options, and the second of them."""

    def best_run(keep_best: int):
        options = make_options(
            tmp_path, best_metric="bleu", result="best", keep_best=keep_best, average_last=None, keep_last=1
        )
        with observed_steps() as steps:
            train_anew(options, lambda *_: {"bleu": SCORES[steps[-1]]})
        best, second = (options.output_dir / "checkpoints" / checkpoint_name(update) for update in (6, 9))
        assert weights_of(tmp_path) == weights_of(best)
        weights = best / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
        assert read_run_record(tmp_path)["result"] == {"updates": [6]}
        return options, second

    return best_run


def test_a_damaged_best_checkpoint_gives_way_to_the_next_with_a_message(best_run, capfd):
    options, second = best_run(keep_best=2)
    capfd.readouterr()
    train_anew(replace(options, resume=True))
    error = capfd.readouterr().err
    assert "update-00000006 is damaged (model.safetensors was changed after it was written)" in error
    assert "is update 9, which has the best bleu of those that are not damaged." in error
    assert weights_of(options.output_dir) == weights_of(second)
    assert read_run_record(options.output_dir)["result"] == {"updates": [9]}


def test_without_a_sound_best_checkpoint_the_model_stays_as_it_was(best_run):
    options, _ = best_run(keep_best=1)
    before = weights_of(options.output_dir)
    with pytest.raises(UserError, match=r"that --result best may take is damaged; use --resume with another --result"):
        train_anew(replace(options, resume=True))
    assert weights_of(options.output_dir) == before
    # The run that failed has no result; the model is that of the first.
    assert read_run_record(options.output_dir)["result"] == {"updates": [6]}
    train_anew(replace(options, resume=True, result="last"))
    assert weights_of(options.output_dir) == weights_of(options.output_dir / "checkpoints" / checkpoint_name(11))
