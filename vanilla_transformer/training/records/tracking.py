"""TensorBoard, trackio and Weights & Biases get the journal's numbers, each once however often the run is resumed."""

import json
import shutil
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from vanilla_transformer.files import replacing


# Name under which trackio and Weights & Biases collect runs.
_PROJECT = "vanilla-transformer"


class Trackers:
    """Trackers of a run, on its main process. One that fails is reported and left; the run goes on.

    What a tracker got cannot be taken back, while a run that was killed repeats what it did since its checkpoint. So
    `trackers.json` keeps the identity of the run and which records each tracker got last; these are not sent again.

    Args:
        names: Trackers, of `configuration.TRACKERS`.
        folder: Folder of the run; TensorBoard's files go to `tensorboard` in it.
        options: The run's options, as values that JSON holds.
        resume: Whether the run goes on, and its trackers with it.
    """

    def __init__(self, names: tuple[str, ...], folder: Path, options: dict[str, Any], *, resume: bool):
        self._path = folder / "trackers.json"
        if not resume:
            # What a run left that was never saved.
            self._path.unlink(missing_ok=True)
            shutil.rmtree(folder / "tensorboard", ignore_errors=True)
        self._state = {"run": uuid.uuid4().hex, "latest": {}}
        if self._path.exists():
            self._state = _read_state(self._path) or self._state
        self._trackers: dict[str, GeneralTracker] = {}
        for name in names:
            self._attempt(name, lambda name=name: self._start(name, folder, options))

    def log(self, record: dict[str, Any]) -> None:
        """Send a record of the journal to every tracker that has not had it.

        Args:
            record: Its `kind` and `update`, and named numbers.
        """
        kind, update = record["kind"], record["update"]
        values = {
            f"{kind}/{name}": value
            for name, value in record.items()
            if name not in ("kind", "update") and value is not None
        }
        for name, tracker in list(self._trackers.items()):
            latest = self._state["latest"][name]
            if update > latest.get(kind, 0):
                latest[kind] = update
                # Noted before it is sent: a point that is missing is better than one that is there twice.
                self._write_state()
                self._attempt(name, lambda tracker=tracker: tracker.log(values, step=update))

    def finish(self) -> None:
        """Send what is still under way, and close."""
        for name, tracker in list(self._trackers.items()):
            self._attempt(name, tracker.finish)

    def _start(self, name: str, folder: Path, options: dict[str, Any]) -> None:
        identity = self._state["run"]
        place, settings = {
            "tensorboard": ("tensorboard", {"logging_dir": folder}),
            "trackio": (_PROJECT, {"name": f"{folder.resolve().name}-{identity[:8]}", "resume": "allow"}),
            "wandb": (_PROJECT, {"name": folder.resolve().name, "id": identity, "resume": "allow"}),
        }[name]
        tracker = LOGGER_TYPE_TO_CLASS[name](place, **settings)
        tracker.start()
        known = name in self._state["latest"]
        self._state["latest"].setdefault(name, {})
        self._write_state()
        if name != "tensorboard":
            tracker.store_init_configuration(options)
        elif not known:
            # Its hyper-parameters would open another run in a folder of its own at every start.
            tracker.log({"options": f"```\n{yaml.safe_dump(options, sort_keys=False)}```"}, step=0)
        self._trackers[name] = tracker

    def _attempt(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._trackers.pop(name, None)
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"--trackers {name} failed ({reason}); the run goes on without it.", file=sys.stderr)

    def _write_state(self) -> None:
        with replacing(self._path) as aside:
            aside.write_text(json.dumps(self._state), encoding="utf-8")


def _read_state(path: Path) -> dict[str, Any] | None:
    """Read `trackers.json`; of a damaged one a line on standard error says that trackers begin anew."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(state["run"], str) and all(
            isinstance(update, int) for kinds in state["latest"].values() for update in kinds.values()
        ):
            return state
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    print(f"{path} is damaged; trackers get all of the run's records anew.", file=sys.stderr)
    return None
