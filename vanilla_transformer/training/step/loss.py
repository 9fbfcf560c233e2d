"""Label-smoothed cross-entropy, summed over target tokens, without holding all logits at once."""

from typing import Literal

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.native.training_products import RightFactor, can_multiply, multiply, product_over_rows
from vanilla_transformer.training.cpu.padding_free import last_hidden_states


# Bounds the memory of logits: 32 MiB in bfloat16, 64 MiB in float32.
LOGITS_PER_SLICE = 2**24
# Elements in bfloat16 of a cache line of 64 bytes.
_LINE = 32


class SmoothedTranslationLoss(nn.Module):
    """A translation model together with its training loss, as one module for DistributedDataParallel to wrap.

    The smoothed target distribution is q'(k) = (1 - epsilon) delta(k, label) + epsilon / V (§5.4; Szegedy et al.,
    2016, §7), with the mass spread over the whole vocabulary of V entries. tensor2tensor and fairseq give the label
    1 - epsilon and each of the V - 1 others epsilon / (V - 1), which is the same with epsilon V / (V - 1).

    Padding (label -100) does not count. The vocabulary's padding entry is one of the V, as in tensor2tensor, fairseq
    and Marian; JoeyNMT and OpenNMT-py give it no mass and divide by V - 2.

    Args:
        model: The model.
        label_smoothing: Epsilon, in [0, 1); the paper has 0.1.
        smoothed_entries: "vocabulary" spreads epsilon over all entries, "others" over all but the label.
    """

    def __init__(
        self,
        model: VanillaTransformerForConditionalGeneration,
        label_smoothing: float,
        smoothed_entries: Literal["vocabulary", "others"] = "vocabulary",
    ):
        super().__init__()
        self.model = model
        num_entries = model.lm_head.weight.shape[0]
        share = num_entries / (num_entries - 1) if smoothed_entries == "others" else 1.0
        self.label_smoothing = label_smoothing * share

    def forward(self, *parts: dict[str, torch.Tensor], **whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum the loss of a batch.

        Args:
            *parts: The tensors that `collate` or `pack` made of each part of the batch. A part is padded to its own
                longest sentence, or packed.
            **whole: Instead, the tensors of a batch of one part, such as `input_ids` [B, S], `attention_mask` [B, S],
                `decoder_input_ids` [B, T] and `labels` [B, T], with -100 on padding.

        Returns:
            The smoothed loss, summed over target tokens, and without gradient the sum of their negative
            log-likelihoods in nats.
        """
        parts = parts or (whole,)
        labels = [part["labels"] for part in parts]
        hidden_states = [
            self._hidden_states(**{name: tensor for name, tensor in part.items() if name != "labels"})[here != -100]
            for part, here in zip(parts, labels, strict=True)
        ]
        return smoothed_cross_entropy(
            hidden_states[0] if len(parts) == 1 else torch.cat(hidden_states),
            self.model.lm_head.weight,
            self.model.final_logits_bias,
            torch.cat([here[here != -100] for here in labels]),
            self.label_smoothing,
        )

    def _hidden_states(self, **inputs: torch.Tensor) -> torch.Tensor:
        """The decoder's hidden states [B, T, D]; of a packed part [1, T, D]."""
        if "source_starts" in inputs:
            return last_hidden_states(self.model.model, **inputs)
        # Padding is on the right, so all sentences have the same positions.
        positions = torch.arange(inputs["input_ids"].shape[1], device=inputs["input_ids"].device)[None]
        return self.model.model(**inputs, position_ids=positions, use_cache=False).last_hidden_state


def smoothed_cross_entropy(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    label_smoothing: float,
    *,
    tokens_per_slice: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Project to the vocabulary and sum the smoothed cross-entropy, one slice of the tokens at a time.

    The forward pass also computes the gradients, slice by slice, so that no pass holds more than one slice of logits.
    Products are computed in autocast's type if it is on; sums and gradients in float32 or wider.

    Args:
        hidden_states: Decoder output of N target tokens [N, D].
        weight: Output projection [W, D].
        bias: Added to the logits [1, W]; gets no gradient. Or `None`.
        labels: Target ids [N], without padding.
        label_smoothing: Epsilon, spread over all W entries.
        tokens_per_slice: Number of tokens whose logits exist at a time. `None` takes as many as have 2 ** 24 logits,
            500 for a vocabulary of 32,000. Small slices are slow: adding a slice's contribution to the gradient of the
            projection costs as much as a pass over the logits of D tokens.

    Returns:
        The summed smoothed loss, and without gradient the summed negative log-likelihood; scalars in float32 or wider.
    """
    device_type = hidden_states.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    else:
        dtype = torch.promote_types(hidden_states.dtype, weight.dtype)
    if tokens_per_slice is None:
        tokens_per_slice = max(1, LOGITS_PER_SLICE // weight.shape[0])
    return _SlicedCrossEntropy.apply(hidden_states, weight, bias, labels, label_smoothing, tokens_per_slice, dtype)


class _SlicedCrossEntropy(torch.autograd.Function):
    """Loss and gradients with as few passes over the logits as possible.

    The gradient of the logits is softmax(logits) - (1 - epsilon) onehot - epsilon / W. Only the first term is computed
    for all logits, in their place. The other two terms and the mean logit follow from the sums of weights and hidden
    states. A token's normaliser (log-sum-exp) is its label's logit minus the logarithm of its label's probability.
    """

    @staticmethod
    def forward(
        ctx,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        label_smoothing: float,
        tokens_per_slice: int,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        needs_gradient = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        num_tokens = len(labels)
        factors = hidden_states.to(dtype)
        kind = _Tiles if can_multiply(dtype, [weight]) else _Torch
        products = kind(weight, dtype, wide if needs_gradient else None)
        mean_weight = weight.mean(dim=0, dtype=wide)
        # One buffer for all slices: new memory from the system costs more time than a pass over the logits.
        buffer = products.new_logits(min(tokens_per_slice, num_tokens))
        nll = hidden_states.new_zeros((), dtype=wide)
        sum_of_normalisers = hidden_states.new_zeros((), dtype=wide)
        if needs_gradient:
            grad_hidden = torch.empty_like(hidden_states, dtype=wide)
        with torch.autocast(hidden_states.device.type, enabled=False):
            for start in range(0, num_tokens, tokens_per_slice):
                tokens = slice(start, start + tokens_per_slice)
                hidden, label = factors[tokens], labels[tokens, None]
                logits = products.logits(hidden, bias, buffer[: len(hidden)])
                label_logits = logits.gather(-1, label).to(wide)
                probabilities = torch.softmax(logits, dim=-1, out=logits)
                of_labels = probabilities.gather(-1, label).to(wide)
                normalisers = label_logits - of_labels.log()
                # The logarithm of a probability below the smallest normal value is inexact or -inf: sum the logits
                # of these tokens again.
                vanished = of_labels[:, 0] < torch.finfo(dtype).tiny
                if vanished.any():
                    again = products.logits(hidden[vanished], bias, products.new_logits(int(vanished.sum()))).to(wide)
                    normalisers[vanished] = again.logsumexp(dim=-1, keepdim=True)
                nll += (normalisers - label_logits).sum()
                sum_of_normalisers += normalisers.sum()
                if needs_gradient:
                    wanted = (1.0 - label_smoothing) * weight[labels[tokens]] + label_smoothing * mean_weight
                    grad_hidden[tokens] = products.means(probabilities) - wanted
                    products.add_to_gradient(hidden, probabilities)
            sum_of_hidden = hidden_states.sum(dim=0, dtype=wide)
            # The cross-entropy with the uniform distribution: the normalisers minus the mean logits.
            uniform = sum_of_normalisers - sum_of_hidden @ mean_weight
            if bias is not None:
                uniform -= num_tokens * bias.to(wide).mean()
            loss = (1.0 - label_smoothing) * nll + label_smoothing * uniform
        if needs_gradient:
            ctx.save_for_backward(hidden_states, labels, sum_of_hidden, grad_hidden, products.gradient())
        ctx.label_smoothing, ctx.weight_dtype = label_smoothing, weight.dtype
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss: torch.Tensor, _):
        hidden_states, labels, sum_of_hidden, grad_hidden, grad_weight = ctx.saved_tensors
        grad_hidden = (grad_hidden * grad_loss).to(hidden_states.dtype)
        grad_weight = grad_weight.contiguous()
        grad_weight.index_add_(0, labels, hidden_states.to(grad_weight.dtype), alpha=ctx.label_smoothing - 1.0)
        grad_weight -= ctx.label_smoothing / len(grad_weight) * sum_of_hidden
        grad_weight = grad_weight.mul_(grad_loss).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


class _Torch:
    """The products of logits and of their gradients, in torch.

    Args:
        weight: Output projection [W, D].
        dtype: Type of the products.
        grad_dtype: Type of the projection's gradient; `None` computes none.
    """

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype, grad_dtype: torch.dtype | None):
        self._projection = weight.to(dtype)
        if grad_dtype is not None:
            # Transposed [D, W], because a product of two row-major matrices is faster.
            self._gradient = weight.new_zeros(weight.shape[::-1], dtype=grad_dtype)

    def new_logits(self, num_tokens: int) -> torch.Tensor:
        """Room for logits [N, W]."""
        return self._projection.new_empty(num_tokens, len(self._projection))

    def logits(self, hidden: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        """Logits [N, W] of hidden states [N, D], written to `out` and returned; columns of padding become -inf."""
        torch.mm(hidden, self._projection.T, out=out)
        return out if bias is None else out.add_(bias)

    def means(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Means of the projection's rows [N, D], weighted by probabilities [N, W]."""
        return probabilities @ self._projection

    def add_to_gradient(self, hidden: torch.Tensor, probabilities: torch.Tensor) -> None:
        """Add the contribution of tokens, hidden states [N, D] and probabilities [N, W], to the gradient."""
        if hidden.dtype == self._gradient.dtype:
            self._gradient.addmm_(hidden.T, probabilities)
        else:
            self._gradient += hidden.T.contiguous() @ probabilities

    def gradient(self) -> torch.Tensor:
        """The projection's gradient [W, D]: the sum of all contributions."""
        return self._gradient.T


class _Tiles:
    """The products of `_Torch` in C++, where the projection is laid out once for all slices."""

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype, grad_dtype: torch.dtype | None):
        self._to_logits = RightFactor.stack([weight], transposed=True)
        if grad_dtype is not None:
            self._to_means = RightFactor.stack([weight], transposed=False)
            self._gradient = torch.zeros(weight.shape, dtype=torch.float32)
            self._grad_dtype = grad_dtype

    def new_logits(self, num_tokens: int) -> torch.Tensor:
        """Room for logits [N, >= W], with columns of padding so that each row starts a cache line."""
        width = -(-self._to_logits.columns // _LINE) * _LINE
        return torch.empty(num_tokens, width, dtype=torch.bfloat16)

    def logits(self, hidden: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        """Logits [N, W] of hidden states [N, D], written to `out` and returned; columns of padding become -inf."""
        out[:, self._to_logits.columns :] = -torch.inf
        return multiply(hidden, self._to_logits, bias=None if bias is None else bias.flatten(), out=out)

    def means(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Means of the projection's rows [N, D], weighted by probabilities [N, W]."""
        return multiply(probabilities[:, : self._to_means.depth], self._to_means)

    def add_to_gradient(self, hidden: torch.Tensor, probabilities: torch.Tensor) -> None:
        """Add the contribution of tokens, hidden states [N, D] and probabilities [N, W], to the gradient."""
        product_over_rows(probabilities[:, : len(self._gradient)], hidden, add_to=self._gradient)

    def gradient(self) -> torch.Tensor:
        """The projection's gradient [W, D]: the sum of all contributions."""
        return self._gradient.to(self._grad_dtype)
