"""Text that is too long to be kept: read as a stream, and batched inside a window of pairs."""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from vanilla_transformer.errors import UserError

from .batching import BATCHINGS, Batches, TokenBatches, Update, Updates
from .corpora import Rejections
from .encoding import PairEncoder, fingerprint_of_text
from .records import DataSet


# Records that are read and tokenised at once.
_BLOCK = 1000
_FILE = "stream_window.safetensors"


class StreamCorpus:
    """A window of token ids that moves along a stream; the stream begins anew when it ends.

    Args:
        text: A data set that is streamed.
        encoder: Turns pairs into ids.
        window: Number of pairs in the window.
        invalid_pairs: `drop` or `refuse`.

    Attributes:
        fingerprint: Tells one stream, vocabulary and encoding from another.
        source_lengths: Number of tokens of each source in the window, int32 [window].
        target_lengths: Likewise of each target.
        report: What is known before reading.
    """

    def __init__(self, text: DataSet, encoder: PairEncoder, window: int, invalid_pairs: str = "drop"):
        self.fingerprint = fingerprint_of_text(text, encoder.options(invalid_pairs))
        self.report = {
            "fingerprint": self.fingerprint,
            "files": list(text.names),
            "pairs_read": None,
            "pairs_kept": 0,
            "summary": "",
        }
        self._text = text
        self._encoder = encoder
        self._window = window
        self._rejections = Rejections(invalid_pairs)
        self._sides: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        # How often the stream has ended, how many of its records were read since, and where it goes on.
        self._position: dict[str, Any] = {"passes": 0, "records": 0, "usable": 0, "stream": None}
        self._blocks: Iterator[tuple[list[np.ndarray], list[np.ndarray]]] | None = None

    def __len__(self) -> int:
        return self._window

    @property
    def passes(self) -> int:
        """How often the stream has ended."""
        return self._position["passes"]

    def rows(self, indices: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Read pairs of the window; as `EncodedCorpus.rows`."""
        return tuple([side[index] for index in indices] for side in self._sides)

    def move(self, carried: Sequence[int]) -> None:
        """Fill the window anew.

        Args:
            carried: Numbers of the pairs that stay, and come first.

        Raises:
            UserError: The stream holds no usable pair, or it cannot be read.
        """
        sides = tuple([side[index] for index in carried] for side in self._sides)
        if self._blocks is None:
            self._blocks = self._read()
        # Whole blocks: the position of the stream is known between them.
        while len(sides[0]) < self._window:
            for side, rows in zip(sides, next(self._blocks), strict=True):
                side.extend(rows)
        self._take(sides)

    def save(self, folder: Path) -> None:
        """Write the window, and where the stream goes on behind it, into a checkpoint's folder."""
        arrays = {}
        for name, side in zip(("source", "target"), self._sides, strict=True):
            arrays[f"{name}_ids"] = np.concatenate(side)
            arrays[f"{name}_lengths"] = np.array([len(row) for row in side], dtype=np.int32)
        save_file(arrays, folder / _FILE, metadata={"position": json.dumps(self._position)})

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        with safe_open(folder / _FILE, "numpy") as file:
            self._position = json.loads(file.metadata()["position"])
            sides = (
                np.split(file.get_tensor(f"{name}_ids"), np.cumsum(file.get_tensor(f"{name}_lengths"))[:-1])
                for name in ("source", "target")
            )
            self._take(tuple(sides))
        self._blocks = None

    def _take(self, sides: tuple[list[np.ndarray], list[np.ndarray]]) -> None:
        self._sides = sides
        self.source_lengths, self.target_lengths = (
            np.fromiter((len(row) for row in side), dtype=np.int32, count=len(side)) for side in sides
        )

    def _read(self) -> Iterator[tuple[list[np.ndarray], list[np.ndarray]]]:
        """The ids of the pairs behind the position, a block at a time, without end."""
        position = self._position
        while True:
            # Copies would share the state of the pass before.
            records = self._text.open()
            if position["stream"] is not None:
                records.load_state_dict(json.loads(position["stream"]))
            rows = iter(records)
            while block := list(islice(rows, min(_BLOCK, self._window))):
                pairs = list(self._text.pairs_of(block, self._rejections, position["records"] + 1))
                encoded = self._encoder(self._text, pairs, self._rejections) if pairs else ([], [])
                position["records"] += len(block)
                position["usable"] += len(encoded[0])
                # As text, since `datasets` goes on changing it.
                position["stream"] = json.dumps(records.state_dict())
                yield tuple([np.array(row, dtype=np.int32) for row in side] for side in encoded)
            if position["usable"] == 0:
                raise UserError(f"{self._text} holds no usable pair: {self._rejections.summary() or 'it is empty'}.")
            position.update(passes=position["passes"] + 1, records=0, usable=0, stream=None)


class StreamPlan:
    """The updates of a stream, window after window; a function of stream, window size, budget and seed alone.

    Pairs that are left when a window holds no further whole update stay for the next window.

    Args:
        corpus: The stream's window.
        tokens_per_batch: Largest number of tokens on either side of a batch, as `batching` counts them.
        batches_per_update: Number of batches in one optimiser step.
        seed: Seed of the shuffling.
        batching: Which pairs a batch has, by the name in `BATCHINGS`.
    """

    updates_per_epoch = None

    def __init__(
        self,
        corpus: StreamCorpus,
        *,
        tokens_per_batch: int,
        batches_per_update: int,
        seed: int,
        batching: str = "lengths",
    ):
        self.corpus = corpus
        self._make_batches = BATCHINGS[batching]
        self._budget = {"tokens_per_batch": tokens_per_batch, "batches_per_update": batches_per_update, "seed": seed}
        self._window = 0
        self._done_before = 0
        self._plan: TokenBatches | None = None
        self._window_batches: Batches | None = None
        self._updates: Sequence[Update] = ()

    @property
    def batches(self) -> TokenBatches:
        """The batches, by the lengths of the current window."""
        self.begin()
        return self._plan

    @property
    def fill_rate(self) -> float:
        """Share of the tokens of the current window that are not padding."""
        self.begin()
        return self._plan.fill_rate(self._window_batches)

    def update(self, done: int) -> Update:
        """The update that follows.

        Args:
            done: Number of updates done, no fewer than before the current window.

        Returns:
            The update.

        Raises:
            UserError: The stream cannot be read, or the window is too small for one update.
        """
        self.begin()
        while done >= self._done_before + len(self._updates):
            self._done_before += len(self._updates)
            rest = self._window_batches[len(self._updates) * self._budget["batches_per_update"] :]
            self.corpus.move([pair for batch in rest for pair in batch])
            self._window += 1
            self._begin()
        return self._updates[done - self._done_before]

    def passes(self, _: int) -> float:
        """How often the stream has been read to its end."""
        return float(self.corpus.passes)

    def state(self) -> dict[str, int]:
        """Where a resumed run finds the current window, as JSON holds it."""
        return {"window": self._window, "done_before": self._done_before}

    def save(self, folder: Path) -> None:
        """Write the window into a checkpoint's folder."""
        self.corpus.save(folder)

    def load(self, state: dict[str, int], folder: Path) -> None:
        """Continue where `state` says, with the window that `save` wrote."""
        self._window, self._done_before = state["window"], state["done_before"]
        self.corpus.load(folder)
        self._begin()

    def begin(self) -> None:
        """Fill the first window and plan its updates, where that is not yet done."""
        if self._plan is None:
            self.corpus.move(())
            self._begin()

    def _begin(self) -> None:
        self._plan = self._make_batches(self.corpus.source_lengths, self.corpus.target_lengths, **self._budget)
        self._window_batches = self._plan.batches(self._window)
        per_update = self._budget["batches_per_update"]
        whole = len(self._window_batches) // per_update
        if whole == 0:
            raise UserError(
                f"`stream_window` is {len(self.corpus):,} pairs, which make {len(self._window_batches)} batches; an "
                f"update takes {per_update}; raise `stream_window`, or lower `tokens_per_update`."
            )
        self._updates = Updates(self._window_batches, per_update, self.corpus.target_lengths)[:whole]
