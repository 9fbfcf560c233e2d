import signal
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
from runs import MAX_UPDATES, assert_same_run, observed_steps, records_of, stopped_after, train_anew, weights_of

from vanilla_transformer.errors import UserError
from vanilla_transformer.training import engine
from vanilla_transformer.training.engine import TrainingRun
from vanilla_transformer.training.records.checkpoints import list_checkpoints, update_of


def test_precision_makes_a_difference(uninterrupted):
    assert len({weights_of(uninterrupted(precision)) for precision in ("no", "bf16", "fp16")}) == 3


# 1: within the first epoch, between two records; 3, 9: a validation is due; 4: an epoch ends and a checkpoint is due;
# 5, 7: beside a checkpoint, within the second epoch; 10: within the third; 11: the end.
@pytest.mark.parametrize(
    ("mixed_precision", "update"),
    [*(("no", update) for update in (1, 3, 4, 5, 7, 10, 11)), ("bf16", 6), ("fp16", 9)],
)
def test_stopping_and_resuming_changes_nothing(uninterrupted, make_options, tmp_path, mixed_precision, update):
    options = make_options(tmp_path, mixed_precision=mixed_precision)
    with stopped_after(update) as before:
        result = train_anew(options)
    assert (result.interrupted_by, result.updates) == (signal.SIGINT, update)
    assert not (tmp_path / "model.safetensors").exists()
    assert update_of(list_checkpoints(tmp_path / "checkpoints")[-1]) == update
    with observed_steps() as after:
        result = train_anew(replace(options, resume=True))
    assert (result.interrupted_by, result.updates) == (None, MAX_UPDATES)
    assert before + after == list(range(1, MAX_UPDATES + 1))
    assert_same_run(tmp_path, uninterrupted(mixed_precision))


def test_a_checkpoint_that_says_no_more_than_those_of_0_1_0_is_resumed(uninterrupted, make_options, tmp_path):
    state = TrainingRun._state

    def less(run):
        said = state(run)
        window = {name: said["window"][name] for name in ("updates", "sums", "seconds")}
        return {name: said[name] for name in ("update", "stopgap", "options", "data")} | {"window": window}

    options = make_options(tmp_path)
    # In the second epoch, between two records.
    with mock.patch.object(TrainingRun, "_state", less), stopped_after(7):
        train_anew(options)
    with observed_steps() as numbers:
        train_anew(replace(options, resume=True))
    assert numbers == list(range(8, MAX_UPDATES + 1))
    assert weights_of(tmp_path) == weights_of(uninterrupted("no"))


# More updates than early stopping allows.
LONG = 60
EARLY = {"early_stopping_patience": 2, "validate_every": 3, "keep_best": 2, "max_updates": LONG}


@pytest.mark.parametrize(
    ("values", "updates"),
    [
        # 3: a validation is due that only the resumed run does; 2, 5: between two.
        ({"ema_decay": 0.9, "average_last": None}, (2, 9)),
        ({**EARLY, "early_stopping_threshold": 0.2}, (3, 5)),
        ({**EARLY, "early_stopping_threshold": 0.2, "result": "best", "average_last": None}, (6,)),
        (
            {
                **EARLY,
                "early_stopping_threshold": 0.2,
                "ema_decay": 0.9,
                "mixed_precision": "fp16",
                "average_last": None,
                "result": "best",
            },
            (3, 4, 9),
        ),
    ],
    ids=["moving average", "early stopping", "best", "all"],
)
def test_what_a_run_remembers_is_part_of_its_checkpoints(uninterrupted, make_options, tmp_path, values, updates):
    expected = uninterrupted(**{"mixed_precision": "no", **values})
    end = records_of(expected)[-1]["update"]
    if "early_stopping_patience" in values:
        assert max(updates) < end < LONG
    options = make_options(tmp_path, **values)
    numbers = []
    for update in updates:
        with stopped_after(update) as steps:
            assert train_anew(options).interrupted_by == signal.SIGINT
        numbers += steps
        options = replace(options, resume=True)
    with observed_steps() as steps:
        result = train_anew(options)
    assert result.is_complete and numbers + steps == list(range(1, result.updates + 1))
    assert_same_run(tmp_path, expected)
    # A run that was stopped early stays so, until it is given more patience.
    with observed_steps() as steps:
        train_anew(options)
    assert steps == []
    assert_same_run(tmp_path, expected)


def test_patience_can_be_raised_later(make_options, tmp_path):
    options = make_options(tmp_path, **{**EARLY, "early_stopping_threshold": 100.0, "early_stopping_patience": 1})
    assert train_anew(options).updates == 6
    assert train_anew(replace(options, early_stopping_patience=3, resume=True)).updates == 12


def test_a_validation_that_was_written_down_but_not_saved_is_done_again(uninterrupted, make_options, tmp_path):
    options = make_options(tmp_path)
    with stopped_after(9):
        train_anew(options)

    def die(self):
        raise RuntimeError("killed")

    with mock.patch.object(TrainingRun, "save", die), pytest.raises(RuntimeError, match="killed"):
        train_anew(replace(options, resume=True))
    assert records_of(tmp_path)[-1] == {**records_of(tmp_path)[-1], "kind": "valid", "update": 9}
    train_anew(replace(options, resume=True))
    assert_same_run(tmp_path, uninterrupted("no"))


def test_time_that_runs_out_saves_and_stops(uninterrupted, make_options, tmp_path):
    now = [0.0]
    options = make_options(tmp_path, max_time="1h30m")
    with mock.patch.object(engine, "time", SimpleNamespace(monotonic=lambda: now[0])):

        def pass_time(done):
            now[0] = {5: 5399.0, 6: 5400.0}.get(done, now[0])

        with observed_steps(pass_time) as steps:
            result = train_anew(options)
    assert (result.out_of_time, result.interrupted_by, result.is_complete) == (True, None, False)
    assert steps == list(range(1, 7)) and not (tmp_path / "model.safetensors").exists()
    # Another run has as much time again; what is finished when the time is over is finished.
    now[0] = 0.0
    with (
        mock.patch.object(engine, "time", SimpleNamespace(monotonic=lambda: now[0])),
        observed_steps(lambda done: now.__setitem__(0, 6000.0 if done == MAX_UPDATES else 0.0)),
    ):
        assert train_anew(replace(options, resume=True)).is_complete
    assert_same_run(tmp_path, uninterrupted("no"))


def test_a_run_may_be_stopped_again_and_again(uninterrupted, make_options, tmp_path):
    options = make_options(tmp_path)
    numbers = []
    for update, number in ((2, signal.SIGTERM), (3, signal.SIGHUP), (5, signal.SIGTERM), (10, signal.SIGHUP)):
        with stopped_after(update, number, times=2) as steps:
            result = train_anew(options)
        assert (result.interrupted_by, result.out_of_time) == (number, False)
        numbers += steps
        options = replace(options, resume=True)
    with observed_steps() as steps:
        train_anew(options)
    assert numbers + steps == list(range(1, MAX_UPDATES + 1))
    assert_same_run(tmp_path, uninterrupted("no"))
    # Once more: there is nothing left to do.
    with observed_steps() as steps:
        assert train_anew(options).updates == MAX_UPDATES
    assert steps == []
    assert_same_run(tmp_path, uninterrupted("no"))


def test_a_crash_loses_only_what_came_after_the_last_checkpoint(uninterrupted, make_options, tmp_path):
    options = make_options(tmp_path)

    def crash(done):
        if done == 7:
            raise RuntimeError("crash")

    with observed_steps(crash), pytest.raises(RuntimeError, match=r"^crash$"):
        train_anew(options)
    assert records_of(tmp_path)[-1]["update"] == 6
    with observed_steps() as steps:
        train_anew(replace(options, resume=True))
    assert steps == list(range(5, MAX_UPDATES + 1))
    assert_same_run(tmp_path, uninterrupted("no"))


def test_a_second_ctrl_c_stops_at_once(make_options, tmp_path):
    with stopped_after(2, times=2), pytest.raises(KeyboardInterrupt):
        train_anew(make_options(tmp_path))
    assert list_checkpoints(tmp_path / "checkpoints") == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_damaged_checkpoint_is_passed_over_with_a_message(uninterrupted, make_options, tmp_path, capsys):
    options = make_options(tmp_path)
    with stopped_after(9):
        train_anew(options)
    damaged = tmp_path / "checkpoints" / "update-00000009" / "optimizer.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    capsys.readouterr()
    with observed_steps() as steps:
        train_anew(replace(options, resume=True))
    message = capsys.readouterr().err
    assert "update-00000009 is damaged (optimizer.safetensors has" in message
    assert "Resuming from" in message and "update-00000008." in message
    assert steps == [9, 10, 11]
    assert_same_run(tmp_path, uninterrupted("no"))


def test_damaged_checkpoints_do_not_outlive_sound_ones(make_options, tmp_path):
    train_anew(make_options(tmp_path, max_updates=8))
    (tmp_path / "checkpoints" / "update-00000008" / "model.safetensors").write_bytes(b"")
    options = make_options(tmp_path, max_updates=6, resume=True, keep_last=1, average_last=1)
    train_anew(options)
    assert [update_of(path) for path in list_checkpoints(tmp_path / "checkpoints")] == [6]
    assert weights_of(tmp_path) == weights_of(tmp_path / "checkpoints" / "update-00000006")


def test_nothing_is_resumed_if_every_checkpoint_is_damaged(make_options, tmp_path):
    train_anew(make_options(tmp_path, max_updates=1))
    (tmp_path / "checkpoints" / "update-00000001" / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"Every checkpoint in .* is damaged"):
        train_anew(make_options(tmp_path, resume=True))


def test_a_finished_run_can_be_continued_as_if_it_had_been_longer(uninterrupted, make_options, tmp_path):
    options = make_options(tmp_path, log_every=1, save_every=2, max_updates=5)
    train_anew(options)
    changes = {"max_updates": MAX_UPDATES, "log_every": 2, "save_every": 4, "resume": True}
    train_anew(replace(options, **changes))
    assert weights_of(tmp_path) == weights_of(uninterrupted("no"))
    assert records_of(tmp_path)[-2:] == records_of(uninterrupted("no"))[-2:]


@pytest.fixture(scope="module")
def short_run(make_options, tmp_path_factory):
    folder = tmp_path_factory.mktemp("short_run")
    train_anew(make_options(folder, max_updates=1))
    return folder


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 2}, r"seed \(1 then, 2 now\)"),
        ({"dropout": 0.3}, r"dropout \(0\.2 then, 0\.3 now\)"),
        ({"tokens_per_batch": 120}, r"tokens_per_batch \(160 then, 120 now\)"),
        ({"mixed_precision": "bf16"}, r"mixed_precision \('no' then, 'bf16' now\)"),
        ({"seed": 2, "d_model": 32}, r"d_model \(16 then, 32 now\); seed \(1 then, 2 now\)"),
        ({"tokenizer": "merges"}, r"vocabulary \("),
        ({"train_files": ("changed.en", "changed.de")}, r"because these differ: training text \([^;]*; set them back"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_what_a_run_was_computed_with_cannot_change(short_run, make_options, material, changes, named):
    if "tokenizer" in changes:
        changes = {"tokenizer": material / changes["tokenizer"]}
    if "train_files" in changes:
        changes = {"train_files": tuple(material / name for name in changes["train_files"])}
    before = {path: path.read_bytes() for path in short_run.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=named):
        train_anew(make_options(short_run, max_updates=1, resume=True, **changes))
    assert {path: path.read_bytes() for path in short_run.rglob("*") if path.is_file()} == before


def test_a_run_is_neither_overwritten_nor_resumed_by_mistake(short_run, make_options, tmp_path):
    with pytest.raises(UserError, match="already holds a run; continue it with `resume`"):
        train_anew(make_options(short_run))
    with pytest.raises(UserError, match="holds no checkpoints; leave `resume` out"):
        train_anew(make_options(tmp_path, resume=True))
