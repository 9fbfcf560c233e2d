"""The tree of a beam search: every hypothesis that went on, every token's probability, and what was found."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vanilla_transformer.errors import UserError
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.translation.backends import special_tokens_of
from vanilla_transformer.translation.decoders.through_modules import PlainDecoder
from vanilla_transformer.translation.options import SearchOptions
from vanilla_transformer.translation.search.decoder_protocol import IncrementalDecoder, State
from vanilla_transformer.translation.search.hypotheses import Hypothesis
from vanilla_transformer.translation.search.search import search


@dataclass(frozen=True, slots=True)
class Node:
    """A token in the tree of hypotheses.

    Args:
        token: Its id; that of the root is what decoding starts from.
        parent: Number of the node before it; -1 for the root.
        depth: Number of tokens up to it; 0 for the root.
        log_prob: Log-probability of the token, given those before it.
        total: Sum of the log-probabilities up to it.
        ends: Whether a hypothesis of the result ends here.
    """

    token: int
    parent: int
    depth: int
    log_prob: float
    total: float
    ends: bool = False


@dataclass(frozen=True, slots=True)
class BeamTree:
    """What a beam search looked at.

    Args:
        nodes: All nodes; a parent comes before its children, and the root is the first.
        hypotheses: The translations that were found, the best first.
        last_nodes: For each of them the number of its last node.
    """

    nodes: tuple[Node, ...]
    hypotheses: tuple[Hypothesis, ...]
    last_nodes: tuple[int, ...]


class RecordingDecoder:
    """A decoder that notes which hypotheses of one sentence a search has it go on with.

    Args:
        decoder: What scores tokens.
        ends: Ids that end a translation.
        options: The search, which leaves what it forbids out of the softmax.
    """

    def __init__(self, decoder: IncrementalDecoder[State], ends: Sequence[int], options: SearchOptions):
        self.vocab_size = decoder.vocab_size
        self.nodes: list[Node] = []
        self._decoder = decoder
        self._ends = [*ends]
        self._options = options
        # For each row its node, and log-probabilities [R, V] of what follows; `select` reorders them.
        self._rows: list[int] = []
        self._following: np.ndarray | None = None

    def start(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> State:
        """As `IncrementalDecoder.start`, for one sentence."""
        return self._decoder.start(input_ids, attention_mask)

    def step(self, state: State, tokens: torch.Tensor) -> torch.Tensor:
        """As `IncrementalDecoder.step`."""
        ids = tokens.tolist()
        if self._following is None:
            self._rows = [self._add(ids[0], -1, 0.0)]
        else:
            self._rows = [
                self._add(token, parent, float(log_probs[token]))
                for token, parent, log_probs in zip(ids, self._rows, self._following, strict=True)
            ]
        logits = self._decoder.step(state, tokens)
        too_short = self.nodes[self._rows[0]].depth < self._options.min_length
        forbidden = [*self._options.banned_tokens, *(self._ends if too_short else ())]
        permitted = logits.to(torch.float64, copy=True)
        permitted[:, forbidden] = -torch.inf
        self._following = permitted.log_softmax(dim=-1).cpu().numpy()
        return logits

    def select(self, state: State, sentences: torch.Tensor | None, rows: torch.Tensor) -> None:
        """As `IncrementalDecoder.select`."""
        self._decoder.select(state, sentences, rows)
        self._rows = [self._rows[row] for row in rows.tolist()]
        self._following = self._following[rows.cpu().numpy()]

    def tree(self, hypotheses: Sequence[Hypothesis]) -> BeamTree:
        """The tree, with the ends of what the search found.

        Args:
            hypotheses: What the search returned.

        Returns:
            The tree; hypotheses that were impossible, which fill up beams, are left out.
        """
        nodes = list(self.nodes)
        children = {(node.parent, node.token): number for number, node in enumerate(nodes) if node.total > -np.inf}
        last_nodes = []
        for hypothesis in hypotheses:
            number, total = 0, 0.0
            for depth, token in enumerate(hypothesis.tokens, start=1):
                child = children.get((number, token))
                if child is None:
                    # Only the last token of a hypothesis was never a row: its end.
                    child = children[number, token] = len(nodes)
                    log_prob = hypothesis.log_prob - total
                    nodes.append(Node(token, number, depth, log_prob, hypothesis.log_prob))
                number, total = child, nodes[child].total
            old = nodes[number]
            nodes[number] = Node(old.token, old.parent, old.depth, old.log_prob, old.total, ends=True)
            last_nodes.append(number)
        return _without_impossible(BeamTree(tuple(nodes), tuple(hypotheses), tuple(last_nodes)))

    def _add(self, token: int, parent: int, log_prob: float) -> int:
        before = self.nodes[parent] if parent >= 0 else None
        depth, total = (before.depth + 1, before.total + log_prob) if before is not None else (0, 0.0)
        if before is not None and token in self._ends:
            # What has ended fills up a beam that has nothing else to go on with.
            total = -np.inf
        self.nodes.append(Node(token, parent, depth, log_prob, total))
        return len(self.nodes) - 1


def beam_tree(
    model: VanillaTransformerForConditionalGeneration, source_ids: Sequence[int], options: SearchOptions
) -> BeamTree:
    """Translate a sentence with the paper's beam search, and keep what it looked at.

    Args:
        model: The model, in evaluation mode.
        source_ids: Ids of the source [S], with its `</s>`.
        options: The search; `num_hypotheses` says how many translations the tree marks.

    Returns:
        The tree.

    Raises:
        UserError: There is no translation, as of a damaged model.
    """
    special_tokens = special_tokens_of(model.generation_config)
    decoder = RecordingDecoder(PlainDecoder(model), special_tokens.ends, options)
    input_ids = torch.tensor([list(source_ids)], device=model.device)
    (found,) = search(decoder, input_ids, torch.ones_like(input_ids), special_tokens, options)
    if not found or not math.isfinite(found[0].log_prob):
        raise UserError(
            "The model finds no translation: its weights are not finite, or too many tokens are banned; repair one or "
            "the other."
        )
    return decoder.tree(found)


def _without_impossible(tree: BeamTree) -> BeamTree:
    """The tree without nodes of probability zero, which a search has where there are fewer tokens than beams."""
    numbers: dict[int, int] = {-1: -1}
    nodes = []
    for number, node in enumerate(tree.nodes):
        if node.parent in numbers and node.total > -np.inf:
            numbers[number] = len(nodes)
            nodes.append(Node(node.token, numbers[node.parent], node.depth, node.log_prob, node.total, ends=node.ends))
    return BeamTree(tuple(nodes), tree.hypotheses, tuple(numbers[number] for number in tree.last_nodes))
