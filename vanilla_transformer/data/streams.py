"""Text that is read as a stream, without being stored, and batched inside a window of pairs."""

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


# Number of records to read and tokenise at once.
_BLOCK = 1000
_FILE = "stream_window.safetensors"


class StreamCorpus:
    """A window of token ids that moves along a stream; at its end, the stream starts again.

    Args:
        text: A data set that is streamed.
        encoder: Turns pairs into ids.
        window: Number of pairs in the window.
        invalid_pairs: `drop` or `refuse`.

    Attributes:
        fingerprint: Digest of the stream's name, the vocabulary and the encoding options.
        source_lengths: Number of tokens of each source in the window, int32 [window].
        target_lengths: The same for targets.
        report: As in `EncodedCorpus`; the counts of a stream are unknown.
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
        # Number of completed passes; records read and usable pairs in this pass; state of the stream.
        self._position: dict[str, Any] = {"passes": 0, "records": 0, "usable": 0, "stream": None}
        self._blocks: Iterator[tuple[list[np.ndarray], list[np.ndarray]]] | None = None

    def __len__(self) -> int:
        return self._window

    @property
    def passes(self) -> int:
        """Number of times the stream has ended."""
        return self._position["passes"]

    def rows(self, indices: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Read pairs of the window; as `EncodedCorpus.rows`."""
        return tuple([side[index] for index in indices] for side in self._sides)

    def move(self, carried: Sequence[int]) -> None:
        """Fill the window with new pairs.

        Args:
            carried: Numbers of the pairs that stay; they come first in the new window.

        Raises:
            UserError: The stream holds no usable pair, or it cannot be read.
        """
        sides = tuple([side[index] for index in carried] for side in self._sides)
        if self._blocks is None:
            self._blocks = self._read()
        # Whole blocks only: the state of the stream is recorded between blocks.
        while len(sides[0]) < self._window:
            for side, rows in zip(sides, next(self._blocks), strict=True):
                side.extend(rows)
        self._take(sides)

    def save(self, folder: Path) -> None:
        """Write the window, and the position of the stream after it, into a checkpoint's folder."""
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
        """The ids of the pairs after the position, a block at a time; never ends."""
        position = self._position
        while True:
            # Opened again, since a reused data set would keep the state of the previous pass.
            records = self._text.open()
            if position["stream"] is not None:
                records.load_state_dict(json.loads(position["stream"]))
            rows = iter(records)
            while block := list(islice(rows, min(_BLOCK, self._window))):
                pairs = list(self._text.pairs_of(block, self._rejections, position["records"] + 1))
                encoded = self._encoder(self._text, pairs, self._rejections) if pairs else ([], [])
                position["records"] += len(block)
                position["usable"] += len(encoded[0])
                # Stored as text, because `datasets` changes the state in place.
                position["stream"] = json.dumps(records.state_dict())
                yield tuple([np.array(row, dtype=np.int32) for row in side] for side in encoded)
            if position["usable"] == 0:
                raise UserError(f"{self._text} holds no usable pair: {self._rejections.summary() or 'it is empty'}.")
            position.update(passes=position["passes"] + 1, records=0, usable=0, stream=None)


class StreamPlan:
    """The updates of a stream, window after window. They depend only on stream, window size, budget and seed.

    Pairs at the end of a window that do not fill an update are carried into the next window.

    Args:
        corpus: The stream's window.
        tokens_per_batch: Largest number of tokens on either side of a batch, as `batching` counts them.
        batches_per_update: Number of batches in one optimiser step.
        seed: Seed of the shuffling.
        batching: Name of a planner in `BATCHINGS`, which decides which pairs form a batch.
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
        self._make_planner = BATCHINGS[batching]
        self._budget = {"tokens_per_batch": tokens_per_batch, "batches_per_update": batches_per_update, "seed": seed}
        self._window = 0
        self._done_before = 0
        self._planner: TokenBatches | None = None
        self._window_batches: Batches | None = None
        self._updates: Sequence[Update] = ()

    @property
    def batches(self) -> TokenBatches:
        """The planner of the batches, with the lengths of the current window."""
        self.begin()
        return self._planner

    @property
    def fill_rate(self) -> float:
        """Share of the tokens of the current window that are not padding."""
        self.begin()
        return self._planner.fill_rate(self._window_batches)

    def update(self, done: int) -> Update:
        """The next update.

        Args:
            done: Number of updates done, at least those before the current window.

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
        """Number of completed passes over the stream."""
        return float(self.corpus.passes)

    def state(self) -> dict[str, int]:
        """The position of the current window, in JSON values."""
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
        """Fill the first window and plan its updates if that is not done yet."""
        if self._planner is None:
            self.corpus.move(())
            self._begin()

    def _begin(self) -> None:
        self._planner = self._make_planner(self.corpus.source_lengths, self.corpus.target_lengths, **self._budget)
        self._window_batches = self._planner.batches(self._window)
        per_update = self._budget["batches_per_update"]
        whole = len(self._window_batches) // per_update
        if whole == 0:
            raise UserError(
                f"`stream_window` is {len(self.corpus):,} pairs, which make {len(self._window_batches)} batches; an "
                f"update takes {per_update}; raise `stream_window`, or lower `tokens_per_update`."
            )
        self._updates = Updates(self._window_batches, per_update, self.corpus.target_lengths)[:whole]
