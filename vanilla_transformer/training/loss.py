"""Label-smoothed cross-entropy, summed over target tokens, that never holds all logits at once."""

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration


class SmoothedTranslationLoss(nn.Module):
    """A translation model together with its training loss, as one module for DistributedDataParallel to wrap.

    The smoothed target distribution is q'(k) = (1 - epsilon) delta(k, label) + epsilon / V (§5.4; Szegedy et al.,
    2016, §7), with the mass spread over the whole vocabulary of V entries. Padding (label -100) is excluded.

    Args:
        model: The model.
        label_smoothing: Epsilon, in [0, 1); the paper has 0.1.
    """

    def __init__(self, model: VanillaTransformerForConditionalGeneration, label_smoothing: float):
        super().__init__()
        self.model = model
        self.label_smoothing = label_smoothing

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        decoder_input_ids: torch.Tensor,
        labels: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum the loss of a batch.

        Args:
            input_ids: Source ids [B, S].
            attention_mask: [B, S], 1 for tokens and 0 for padding.
            decoder_input_ids: Target ids [B, T], shifted right.
            labels: Target ids [B, T]; -100 on padding.

        Returns:
            The smoothed loss, summed over target tokens, and without gradient the sum of their negative
            log-likelihoods in nats.
        """
        hidden_states = self.model.model(
            input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=decoder_input_ids, use_cache=False
        ).last_hidden_state
        real = labels != -100
        return smoothed_cross_entropy(
            hidden_states[real],
            self.model.lm_head.weight,
            self.model.final_logits_bias,
            labels[real],
            self.label_smoothing,
        )


def smoothed_cross_entropy(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    label_smoothing: float,
    *,
    tokens_per_slice: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Project to the vocabulary and sum the smoothed cross-entropy, a slice of the tokens at a time.

    The gradient is computed with the loss, slice by slice, so that neither pass holds more than one slice of logits.

    Args:
        hidden_states: Decoder output of N target tokens [N, D].
        weight: Output projection [W, D].
        bias: Added to the logits [1, W], without gradient; or `None`.
        labels: Target ids [N], none of them padding.
        label_smoothing: Epsilon, in [0, 1).
        tokens_per_slice: For how many tokens logits exist at a time. `None` means max(128, D): adding a slice's share
            to the gradient of the projection costs as much as a product of D tokens, and logits that leave the caches
            cost more.

    Returns:
        The summed smoothed loss, and without gradient the summed negative log-likelihood; scalars in float32 or wider.
    """
    device_type = hidden_states.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        hidden_states, weight = hidden_states.to(dtype), weight.to(dtype)
    if tokens_per_slice is None:
        tokens_per_slice = max(128, hidden_states.shape[-1])
    return _SlicedCrossEntropy.apply(hidden_states, weight, bias, labels, label_smoothing, tokens_per_slice)


class _SlicedCrossEntropy(torch.autograd.Function):
    """Loss and gradients with as few passes over the logits as can be.

    With e = exp(logits - max) and z = sum(e), the gradient of the logits is
    e / z - (1 - epsilon) onehot - epsilon / V. Only e has the size of the logits: 1 / z scales rows of D numbers, and
    the other two terms, as well as the mean logit, are products with the sums of weights and hidden states.
    """

    @staticmethod
    def forward(ctx, hidden_states, weight, bias, labels, label_smoothing, tokens_per_slice):
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        needs_gradient = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden_states) if needs_gradient else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_gradient else None
        nll = hidden_states.new_zeros((), dtype=wide)
        sum_of_normalisers = hidden_states.new_zeros((), dtype=wide)
        mean_weight = weight.mean(dim=0, dtype=wide)
        with torch.autocast(hidden_states.device.type, enabled=False):
            for start in range(0, len(labels), tokens_per_slice):
                hidden = hidden_states[start : start + tokens_per_slice]
                label = labels[start : start + tokens_per_slice]
                logits = hidden @ weight.T
                if bias is not None:
                    logits += bias
                largest = logits.amax(dim=-1, keepdim=True).to(wide)
                label_logits = logits.gather(-1, label[:, None]).to(wide)
                # A difference with `largest` is wide: the logits need no conversion of their own.
                exponentials = logits.sub_(largest) if logits.dtype == wide else logits - largest
                total = exponentials.exp_().sum(dim=-1, keepdim=True)
                normalisers = largest + total.log()
                nll += (normalisers - label_logits).sum()
                sum_of_normalisers += normalisers.sum()
                if needs_gradient:
                    exponentials = exponentials.to(hidden.dtype)
                    of_label = (1.0 - label_smoothing) * weight[label].to(wide)
                    grad = (exponentials @ weight).to(wide) / total - of_label - label_smoothing * mean_weight
                    grad_hidden[start : start + tokens_per_slice] = grad
                    scaled = (hidden / total).to(hidden.dtype)
                    if scaled.dtype == wide:
                        grad_weight.addmm_(exponentials.T, scaled)
                    else:
                        grad_weight += exponentials.T @ scaled
            sum_of_hidden = hidden_states.sum(dim=0, dtype=wide)
            # The cross-entropy with the uniform distribution: the normalisers less the mean logits.
            uniform = sum_of_normalisers - sum_of_hidden @ mean_weight
            if bias is not None:
                uniform -= len(labels) * bias.to(wide).mean()
            loss = (1.0 - label_smoothing) * nll + label_smoothing * uniform
        if needs_gradient:
            grad_weight.index_add_(0, labels, hidden_states.to(wide), alpha=label_smoothing - 1.0)
            grad_weight -= label_smoothing / weight.shape[0] * sum_of_hidden
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, _):
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad_loss, grad_weight * grad_loss, None, None, None, None
