from dataclasses import replace

import pytest
from runs import observed_steps, stopped_after, train_anew, weights_of

from vanilla_transformer.errors import UserError
from vanilla_transformer.training.records.checkpoints import checkpoint_name, list_checkpoints, update_of
from vanilla_transformer.training.run_record import read_run_record


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
    with pytest.raises(
        UserError, match=r"that a `result` of best may take is damaged; resume the run with another `result`"
    ):
        train_anew(replace(options, resume=True))
    assert weights_of(options.output_dir) == before
    # The run that failed has no result; the model is that of the first.
    assert read_run_record(options.output_dir)["result"] == {"updates": [6]}
    train_anew(replace(options, resume=True, result="last"))
    assert weights_of(options.output_dir) == weights_of(options.output_dir / "checkpoints" / checkpoint_name(11))


# The verb `average` and the result of a run are the same mean


def flip(checkpoint):
    path = checkpoint / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def plain(options):
    train_anew(options)
    return [8, 11]


def interrupted(options):
    with stopped_after(5):
        train_anew(options)
    train_anew(replace(options, resume=True))
    return [8, 11]


def ended_at_a_stop(options):
    with stopped_after(7):
        train_anew(options)
    train_anew(replace(options, resume=True, max_updates=7))
    return [4, 7]


def best(options):
    options = replace(options, best_metric="bleu", keep_best=2)
    with observed_steps() as steps:
        train_anew(options, lambda *_: {"bleu": SCORES[steps[-1]]})
    assert [update_of(path) for path in list_checkpoints(options.output_dir / "checkpoints")] == [4, 6, 8, 9, 11]
    return [8, 11]


def damaged(options):
    train_anew(options)
    flip(options.output_dir / "checkpoints" / checkpoint_name(8))
    train_anew(replace(options, resume=True))
    return [4, 11]


# A moving average is taken of one checkpoint.
@pytest.mark.parametrize(("ema_decay", "last"), [(0.0, 2), (0.9, 1)])
@pytest.mark.parametrize("course", [plain, interrupted, ended_at_a_stop, best, damaged])
def test_the_verb_writes_the_mean_that_training_writes(make_options, tmp_path, call, course, ema_decay, last):
    run, mean = tmp_path / "run", tmp_path / "mean"
    updates = course(make_options(run, average_last=last, ema_decay=ema_decay))[-last:]
    assert read_run_record(run)["result"] == {"updates": updates}
    status, out, err = call("average", run, "--last", last, "--output_dir", mean)
    assert status == 0, err
    assert all(checkpoint_name(update) in out for update in updates)
    assert weights_of(mean) == weights_of(run)
    assert ("update-00000008 is damaged" in err) == (course is damaged and last == 2)
    # Named one by one, the same.
    named = [run / "checkpoints" / checkpoint_name(update) for update in updates]
    assert call("average", *named, "--output_dir", tmp_path / "named")[0] == 0
    assert weights_of(tmp_path / "named") == weights_of(run)


def test_a_damaged_checkpoint_that_was_named_is_refused(make_options, tmp_path, call):
    run = tmp_path / "run"
    train_anew(make_options(run))
    first, second = list_checkpoints(run / "checkpoints")[-2:]
    flip(first)
    status, out, err = call("average", first, second, "--output_dir", tmp_path / "mean")
    assert (status, out) == (1, "")
    assert f"{first} is damaged (model.safetensors was changed after it was written); leave it out" in err
    assert not (tmp_path / "mean").exists()
