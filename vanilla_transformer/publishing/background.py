"""Publishes the newest checkpoints of a run in a background thread."""

import sys
import threading
from contextlib import ExitStack
from pathlib import Path

from vanilla_transformer.errors import UserError
from vanilla_transformer.training.records.leases import reading

from .bundle import make_bundle, told_facts
from .card import FACTS
from .facts import merged, read_facts
from .upload import Destination, Hub, UploadError


class BackgroundPush:
    """Publishes the checkpoints of a run, one at a time; if several wait, only the newest.

    A checkpoint is leased from `offer` until it is published or skipped, so that rotation does not delete it. A
    failure is reported and the next checkpoint is tried; the run goes on in any case.

    Args:
        hub: The Hub.
        destination: Repository and branch.
        run: Folder of the run. It may hold a `facts.json` with facts that the run does not record.
    """

    def __init__(self, hub: Hub, destination: Destination, run: Path):
        self._hub = hub
        self._destination = destination
        self._run = run
        self._changed = threading.Condition()
        self._waiting: tuple[Path, ExitStack] | None = None
        self._is_busy = self._is_over = self._is_prepared = False
        self.failure: str | None = None
        # A daemon, so that a finished process never waits for the network.
        self._thread = threading.Thread(target=self._work, name="push-to-hub", daemon=True)
        self._thread.start()

    def prepare(self) -> None:
        """Make the repository; missing rights are an error now, an unreachable Hub is only reported.

        Raises:
            UserError: The repository cannot be written, or `facts.json` is wrong.
        """
        read_facts(merged({"name": self._destination.repo}, told_facts(self._run)), self._run / FACTS)
        try:
            self._hub.prepare(self._destination, attempts=1)
            self._is_prepared = True
        except UploadError as error:
            print(
                f"Nothing can be published yet: {error} The run starts; its checkpoints will try again.",
                file=sys.stderr,
            )

    def offer(self, checkpoint: Path) -> None:
        """Publish a checkpoint in the background, and return at once.

        Args:
            checkpoint: Folder of a finished checkpoint.
        """
        lease = ExitStack()
        lease.enter_context(reading(checkpoint))
        with self._changed:
            passed_over, self._waiting = self._waiting, (checkpoint, lease)
            self._changed.notify_all()
        if passed_over is not None:
            passed_over[1].close()

    def finish(self, result: Path | None, timeout: float | None = None) -> None:
        """Wait for the upload in progress, and publish the result of the run.

        This ends even if the Hub does not answer, because `Hub` limits its waiting and its attempts.

        Args:
            result: Folder of the result; `None` for a run that was stopped, whose last checkpoint is published.
            timeout: Seconds to wait for checkpoints; `None` waits as long as it takes.

        Raises:
            UserError: The result, or the last checkpoint, was not published.
        """
        with self._changed:
            if result is not None and self._waiting is not None:
                # The result is newer.
                self._waiting[1].close()
                self._waiting = None
            is_done = self._changed.wait_for(lambda: self._waiting is None and not self._is_busy, timeout)
            self._is_over = True
            self._changed.notify_all()
        if not is_done:
            raise UserError(
                f"The last checkpoint was not published in {timeout:.0f} seconds; {self._destination.repo} has an "
                f"earlier one. Continue with `resume`, or use `vanilla-transformer publish`."
            )
        if result is not None:
            try:
                address = self._publish(result, "Result of the run")
            except UserError as error:
                raise UserError(
                    f"The result is in {result}, but was not published: {error} Publish it with `vanilla-transformer "
                    f"publish {result} --repo {self._destination.repo}`."
                ) from error
            print(f"Published as {address}.", file=sys.stderr)
        elif self.failure is not None:
            raise UserError(f"The last checkpoint was not published: {self.failure}")

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._is_over)
                if self._waiting is None:
                    return
                (checkpoint, lease), self._waiting = self._waiting, None
                self._is_busy = True
            try:
                with lease:
                    self._publish(checkpoint, f"Checkpoint {checkpoint.name}")
                self.failure = None
            except Exception as error:
                known = isinstance(error, UserError)
                self.failure = str(error) if known else f"{type(error).__name__}: {error}"
                print(f"Publishing failed on {checkpoint}: {self.failure} The run goes on.", file=sys.stderr)
            finally:
                with self._changed:
                    self._is_busy = False
                    self._changed.notify_all()

    def _publish(self, folder: Path, message: str) -> str:
        if not self._is_prepared:
            self._hub.prepare(self._destination)
            self._is_prepared = True
        bundle = make_bundle(
            folder,
            self._destination.repo,
            run=self._run,
            revision=self._destination.revision,
            told=told_facts(self._run),
        )
        return self._hub.upload(bundle, self._destination, message)
