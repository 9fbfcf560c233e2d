"""What trackers get is the journal, each record once, whatever happens to the run or to them."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from accelerate import tracking as accelerate_tracking
from accelerate.state import AcceleratorState, PartialState

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.cli import train as verb
from vanilla_transformer.errors import UserError
from vanilla_transformer.training import options as configuration
from vanilla_transformer.training.engine import TrainingRun, train
from vanilla_transformer.training.options import TrainingOptions
from vanilla_transformer.training.records.journal import Journal, read_journal
from vanilla_transformer.training.records.tracking import Trackers


DATA = Path(__file__).parents[2] / "data"


@pytest.fixture(autouse=True)
def one_process():
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


class Service:
    """Stands in for a tracker of Accelerate's and remembers what the network would have got."""

    def __init__(self, fails_at: str = ""):
        self.starts, self.points, self.configurations, self.finished = [], [], [], 0
        self.fails_at = fails_at

    def __call__(self, place, **settings):
        self.starts.append((place, settings))
        return self

    def start(self):
        self._fail("start")

    def store_init_configuration(self, values):
        self.configurations.append(values)

    def log(self, values, step):
        self._fail("log")
        self.points.append((step, values))

    def finish(self):
        self._fail("finish")
        self.finished += 1

    def _fail(self, where):
        if where == self.fails_at:
            raise ConnectionError("the server is\nunreachable")


@pytest.fixture
def services(monkeypatch):
    services = {"trackio": Service(), "wandb": Service()}
    for name, service in services.items():
        monkeypatch.setitem(accelerate_tracking.LOGGER_TYPE_TO_CLASS, name, service)
    return services


def write_run(folder: Path, first: int, last: int, *names: str, resume: bool) -> None:
    """What the engine does from one update to another."""
    trackers = Trackers(names, folder, {"seed": 1}, resume=resume)
    journal = Journal(folder / "metrics.jsonl", first, on_record=trackers.log)
    for update in range(first + 1, last + 1):
        journal.write("train", update, {"loss": 1.0 / update})
        if update % 2 == 0:
            journal.write("valid", update, {"loss": 2.0 / update, "bleu": float(update)})
    trackers.finish()


def points_of(folder: Path) -> list:
    return [
        (record["update"], {f"{record['kind']}/{name}": record[name] for name in record.keys() - {"kind", "update"}})
        for record in read_journal(folder / "metrics.jsonl")
    ]


def test_trackers_get_the_journal(services, tmp_path):
    write_run(tmp_path, 0, 6, "trackio", "wandb", resume=False)
    for service in services.values():
        assert len(service.points) == 9
        assert service.points == points_of(tmp_path)
        assert service.configurations == [{"seed": 1}]
        assert service.finished == 1
    assert (2, {"valid/loss": 1.0, "valid/bleu": 2.0}) in services["wandb"].points


def test_a_resumed_run_goes_on_in_its_trackers_and_repeats_nothing(services, tmp_path):
    write_run(tmp_path, 0, 9, "wandb", "trackio", resume=False)
    # Killed each time; the first time the checkpoint is of update 4, and the second resumed run does not come as far.
    write_run(tmp_path, 4, 6, "wandb", "trackio", resume=True)
    write_run(tmp_path, 4, 12, "wandb", "trackio", resume=True)
    for service in services.values():
        assert service.points == points_of(tmp_path)
        assert len(service.starts) == 3
        assert all(start == service.starts[0] for start in service.starts)
    (_, wandb), (_, trackio) = services["wandb"].starts[0], services["trackio"].starts[0]
    assert wandb["resume"] == trackio["resume"] == "allow"
    assert wandb["name"] == tmp_path.name
    assert trackio["name"].startswith(f"{tmp_path.name}-")


def test_a_tracker_that_comes_later_gets_the_whole_history(services, tmp_path):
    write_run(tmp_path, 0, 4, "wandb", resume=False)
    write_run(tmp_path, 4, 8, "wandb", "trackio", resume=True)
    assert services["wandb"].points == services["trackio"].points == points_of(tmp_path)


def test_a_run_that_starts_again_is_another_run(services, tmp_path):
    write_run(tmp_path, 0, 3, "wandb", resume=False)
    write_run(tmp_path, 0, 2, "wandb", resume=False)
    (_, first), (_, second) = services["wandb"].starts
    assert first["id"] != second["id"]
    assert [step for step, _ in services["wandb"].points] == [1, 2, 2, 3, 1, 2, 2]


@pytest.mark.parametrize("where", ["start", "log", "finish"])
def test_a_tracker_that_fails_is_reported_once_and_does_not_disturb(services, tmp_path, capsys, where):
    services["wandb"].fails_at = where
    write_run(tmp_path, 0, 6, "wandb", "trackio", resume=False)
    assert services["trackio"].points == points_of(tmp_path)
    assert services["trackio"].finished == 1
    message = "Tracker wandb failed (ConnectionError: the server is unreachable); the run goes on without it.\n"
    assert capsys.readouterr().err == message


def test_accelerate_passes_on_what_makes_runs_resumable(monkeypatch, tmp_path):
    for name in ("wandb", "trackio"):
        run = mock.Mock()
        module = SimpleNamespace(init=mock.Mock(return_value=run), config=mock.Mock())
        monkeypatch.setitem(sys.modules, name, module)
        (tmp_path / name).mkdir()
        write_run(tmp_path / name, 0, 1, name, resume=False)
        settings = module.init.call_args.kwargs
        assert settings["project"] == "vanilla-transformer"
        assert settings["resume"] == "allow"
        run.log.assert_called_once_with({"train/loss": 1.0}, step=1)
        run.finish.assert_called_once()


# Options


@pytest.mark.parametrize("names", [("tensorbord",), ("wandb", "none"), ("mlflow",)])
def test_an_unknown_tracker_is_refused(monkeypatch, names):
    monkeypatch.setattr(configuration, "find_spec", lambda name: object())
    with pytest.raises(
        UserError, match=r"`trackers` names (tensorbord|none|mlflow); it must be none, or of tensorboard"
    ):
        TrainingOptions(train_files=(Path("a"), Path("b")), trackers=names).check()


def test_a_tracker_that_is_not_installed_is_refused_with_the_package_to_install(monkeypatch):
    monkeypatch.setattr(configuration, "find_spec", lambda name: None)
    for name in configuration.TRACKERS:
        with pytest.raises(UserError, match=rf"which is not installed; run `pip install {name}`, or leave it out"):
            TrainingOptions(train_files=(Path("a"), Path("b")), trackers=(name,)).check()


def test_tensorboard_is_used_where_it_is_installed(monkeypatch):
    monkeypatch.setattr(configuration, "find_spec", lambda name: object())
    assert TrainingOptions().chosen_trackers == ("tensorboard",)
    assert TrainingOptions(trackers=("none",)).chosen_trackers == ()
    assert TrainingOptions(trackers=("wandb", "tensorboard")).chosen_trackers == ("wandb", "tensorboard")
    monkeypatch.setattr(configuration, "find_spec", lambda name: None)
    options = TrainingOptions(train_files=(Path("a"), Path("b")))
    options.check()
    assert options.chosen_trackers == ()


# Runs


@pytest.fixture
def options(tmp_path):
    for language in ("en", "de"):
        lines = (DATA / f"sentences.{language}").read_text(encoding="utf-8").splitlines(keepends=True)
        (tmp_path / f"train.{language}").write_text("".join(lines[:30]), encoding="utf-8")
        (tmp_path / f"valid.{language}").write_text("".join(lines[30:]), encoding="utf-8")
    VanillaTransformerTokenizer().save_pretrained(tmp_path / "tokenizer")
    return TrainingOptions(
        train_files=(tmp_path / "train.en", tmp_path / "train.de"),
        valid_files=(tmp_path / "valid.en", tmp_path / "valid.de"),
        output_dir=tmp_path / "run", cache_dir=tmp_path / "cache", tokenizer=tmp_path / "tokenizer", device="cpu",
        max_length=100, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, tokens_per_batch=160,
        tokens_per_update=160, max_updates=8, log_every=1, validate_every=2, save_every=3, keep_last=5,
        average_last=1, valid_bleu_sentences=4,
    )  # fmt: skip


def run_until(options: TrainingOptions, update: int | None = None) -> None:
    """Train; the run dies in the middle of the update after the given one."""
    step = TrainingRun.step

    def die(self, planned, number):
        if update is not None and number > update:
            raise KeyboardInterrupt
        return step(self, planned, number)

    AcceleratorState._reset_state(reset_partial_state=True)
    with mock.patch.object(TrainingRun, "step", die):
        train(options, verb._sample_bleu(options))


def test_tensorboard_shows_the_journal_of_a_run_that_was_killed_twice(options):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    options.trackers = ("tensorboard",)
    with pytest.raises(KeyboardInterrupt):
        run_until(options, 5)
    options.resume = True
    with pytest.raises(KeyboardInterrupt):
        run_until(options, 4)
    run_until(options)
    folder = options.output_dir / "tensorboard"
    # One run, in one folder.
    assert all(path.is_file() for path in folder.iterdir())
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    shown = {(tag, event.step): event.value for tag in events.Tags()["scalars"] for event in events.Scalars(tag)}
    assert len(shown) == sum(len(events.Scalars(tag)) for tag in events.Tags()["scalars"])
    expected = {
        (name, step): value for step, values in points_of(options.output_dir) for name, value in values.items()
    }
    # A repeated update took another time.
    shown, expected = (
        {
            key: value
            for key, value in points.items()
            if key[0] not in ("train/tokens_per_second", "train/model_flops_utilization", "train/seconds")
        }
        for points in (shown, expected)
    )
    assert {name for name, _ in shown} >= {"train/loss", "train/learning_rate", "valid/loss", "valid/bleu"}
    assert shown == pytest.approx(expected, rel=1e-6)
    assert json.loads((options.output_dir / "run.json").read_text())["trackers"] == ["tensorboard"]


def test_samples_show_each_validation_once(options):
    options.trackers = ("none",)
    with pytest.raises(KeyboardInterrupt):
        run_until(options, 5)
    options.resume = True
    run_until(options)
    assert not (options.output_dir / "tensorboard").exists()
    samples = read_journal(options.output_dir / "samples.jsonl")
    assert [sample["update"] for sample in samples] == [update for update in (2, 4, 6, 8) for _ in range(4)]
    pairs = list(zip(*((path.read_text(encoding="utf-8").splitlines()) for path in options.valid_files), strict=True))
    for sample in samples:
        assert sample.keys() == {"kind", "update", "source", "reference", "hypothesis"}
        assert (sample["source"], sample["reference"]) in pairs
    assert len({sample["source"] for sample in samples}) == 4
    # The scores stay free of text.
    assert all(isinstance(value, float) for _, values in points_of(options.output_dir) for value in values.values())


def test_the_run_record_has_the_fingerprints_of_all_data(options):
    options.max_updates, options.trackers = 1, ("none",)
    run_until(options)
    record = json.loads((options.output_dir / "run.json").read_text())["fingerprints"]
    assert record.keys() == {"training text", "validation text", "vocabulary"}
    assert len(set(record.values())) == 3
    (options.valid_files[0]).write_text(options.valid_files[0].read_text(encoding="utf-8") + "One more .\n")
    (options.valid_files[1]).write_text(options.valid_files[1].read_text(encoding="utf-8") + "Noch einer .\n")
    options.output_dir = options.output_dir.with_name("other")
    run_until(options)
    other = json.loads((options.output_dir / "run.json").read_text())["fingerprints"]
    assert {name for name in record if record[name] != other[name]} == {"validation text"}
