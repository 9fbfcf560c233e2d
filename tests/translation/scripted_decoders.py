"""Decoders whose probabilities are known, and a plain rendering of the searches, to check the fast ones against."""

import math
from dataclasses import dataclass
from functools import cache

import torch

from vanilla_transformer.translation.options import SearchOptions


def random_probabilities(seed: int, vocab_size: int, *, sharpness: float = 1.0):
    """A language model: log-probabilities of the next token, drawn anew for every source and every beginning."""

    @cache
    def log_probs(source: int, beginning: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((seed, source, beginning)) % 2**31)
        logits = torch.randn(vocab_size, generator=generator, dtype=torch.float64) * sharpness
        return logits.log_softmax(dim=-1)

    return log_probs


@dataclass
class ScriptedState:
    sources: list[int]
    rows: list[tuple[int, ...]]


class ScriptedDecoder:
    """An incremental decoder of a language model over a tiny vocabulary.

    A source is known by its first id. The decoder checks what a search promises, and counts the rows that it scored.
    """

    def __init__(self, log_probs, vocab_size: int):
        self.vocab_size = vocab_size
        self.log_probs = log_probs
        self.scored: list[int] = []

    def start(self, input_ids, attention_mask):
        assert input_ids.shape == attention_mask.shape
        return ScriptedState(input_ids[:, 0].tolist(), [() for _ in input_ids])

    def step(self, state, tokens):
        assert tokens.shape == (len(state.rows),) and tokens.dtype == torch.int64
        state.rows = [(*row, int(token)) for row, token in zip(state.rows, tokens, strict=True)]
        self.scored.append(len(state.rows))
        width = len(state.rows) // len(state.sources)
        # Logits, not probabilities: a search must not rely on their sum.
        return torch.stack(
            [self.log_probs(state.sources[index // width], row[1:]) + 3.0 for index, row in enumerate(state.rows)]
        )

    def select(self, state, sentences, rows):
        width = len(state.rows) // len(state.sources)
        kept = list(range(len(state.sources))) if sentences is None else sentences.tolist()
        assert kept == sorted(set(kept))
        assert len(rows) % len(kept) == 0
        new_width = len(rows) // len(kept)
        assert [row // width for row in rows.tolist()] == [sentence for sentence in kept for _ in range(new_width)]
        state.rows = [state.rows[row] for row in rows.tolist()]
        state.sources = [state.sources[sentence] for sentence in kept]


def permitted(log_probs: torch.Tensor, position: int, ends: tuple[int, ...], options: SearchOptions) -> torch.Tensor:
    """Log-probabilities among the tokens that are permitted at a position."""
    allowed = torch.ones(len(log_probs), dtype=torch.bool)
    allowed[list(options.banned_tokens)] = False
    if position < options.min_length:
        allowed[list(ends)] = False
    return log_probs.masked_fill(~allowed, -math.inf).log_softmax(dim=-1)


def sequences(log_probs, source: int, cap: int, ends: tuple[int, ...], options: SearchOptions, prefix=()):
    """Every translation of a source with its log-probability: those that end, and those cut off at the cap."""
    found = []

    def extend(tokens: tuple[int, ...], total: float) -> None:
        if tokens and (tokens[-1] in ends or len(tokens) == cap):
            found.append((tokens, total))
            return
        following = permitted(log_probs(source, tokens), len(tokens), ends, options)
        for token in range(len(following)):
            forced = len(tokens) < len(prefix) and token != prefix[len(tokens)]
            if not forced and following[token] > -math.inf:
                extend((*tokens, token), total + following[token].item())

    extend((), 0.0)
    return found


def plain_beam_search(log_probs, source: int, cap: int, ends: tuple[int, ...], options: SearchOptions, prefix=()):
    """Beam search of one sentence, as its description says; all finished hypotheses, the best first, then the alive.

    It never stops before the cap, so that what a stop rule leaves out is seen.
    """
    alive = [((), 0.0)]
    finished = []
    for position in range(cap):
        candidates = []
        for tokens, total in alive:
            following = permitted(log_probs(source, tokens), position, ends, options)
            for token in range(len(following)):
                forced = position < len(prefix) and token != prefix[position]
                if not forced and following[token] > -math.inf:
                    candidates.append(((*tokens, token), total + following[token].item()))
        candidates.sort(key=lambda candidate: -candidate[1])
        candidates = candidates[: 2 * options.num_beams]
        for rank, (tokens, total) in enumerate(candidates):
            is_cut_off = position + 1 == cap and options.rules == "transformers"
            may_end = options.rules == "paper" or rank < options.num_beams
            if may_end and (tokens[-1] in ends or is_cut_off):
                finished.append((tokens, total, total / divisor(len(tokens), options)))
        alive = [candidate for candidate in candidates if candidate[0][-1] not in ends][: options.num_beams]
        if not alive:
            break
    finished.sort(key=lambda hypothesis: -hypothesis[2])
    return finished + [(tokens, total, total / divisor(len(tokens), options)) for tokens, total in alive]


def divisor(length: int, options: SearchOptions) -> float:
    """Equation 14 of Wu et al. (2016), or transformers' power of the length."""
    if options.rules == "paper":
        return ((5 + length) ** options.length_penalty) / ((5 + 1) ** options.length_penalty)
    return length**options.length_penalty
