"""One optimiser step: the gradient of a whole update, summed over its batches and processes, and Adam's step."""

import hashlib
import math
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PretrainedConfig

from vanilla_transformer.data.batching import Update
from vanilla_transformer.data.collation import collate, pack
from vanilla_transformer.data.encoding import EncodedCorpus
from vanilla_transformer.training.options import TrainingOptions
from vanilla_transformer.training.records.tensors import whole

from .distribution import with_idle_passes, without_reduction
from .divergence import NotFinite
from .failures import naming_batch


class OptimiserStep:
    """Makes optimiser steps.

    Args:
        options: Training options.
        accelerator: Devices and processes.
        loss: Model and loss, as `distribute` made them.
        optimizer: Adam, likewise.
        config: Configuration of the model.
        corpus: Training text.
        parts: Divides a batch, pair numbers [B], into parts, each padded to its own longest sentence. `None` packs
            batches, without padding.

    Attributes:
        gradient_norm: Euclidean norm of the last step's gradient, before clipping.
        computed_tokens: Number of source and target tokens that this process computed in the last step, padding
            included.
        skipped: Number of steps that did not change the weights, because gradients overflowed in float16.
    """

    def __init__(
        self,
        options: TrainingOptions,
        accelerator: Accelerator,
        loss: nn.Module,
        optimizer: AcceleratedOptimizer,
        config: PretrainedConfig,
        corpus: EncodedCorpus,
        parts: Callable[[np.ndarray], list[np.ndarray]] | None,
    ):
        self.options = options
        self.accelerator = accelerator
        self.loss = loss
        self.optimizer = optimizer
        self.config = config
        self.corpus = corpus
        self.parts = parts
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.gradient_norm = 0.0
        self.computed_tokens = 0
        self.skipped = 0

    def __call__(self, update: Update, number: int, learning_rate: float) -> torch.Tensor:
        """Take one step.

        Args:
            update: The batches of the step.
            number: Number of the step, from 1 on.
            learning_rate: Adam's learning rate.

        Returns:
            Smoothed loss and negative log-likelihood, summed over this process's target tokens; float64 [2].

        Raises:
            NotFinite: The gradient is infinite or NaN, and a smaller loss scale would not help. The weights have not
                changed.
        """
        losses = self._backward(update, number)
        self.accelerator.unscale_gradients()
        norm = get_total_norm([parameter.grad for parameter in self.parameters])
        # The step's only wait for the device: the gradient's norm decides whether the weights may change.
        *sums, self.gradient_norm = torch.cat([*losses, whole(norm)[None]]).to("cpu", torch.float64).tolist()
        sums = torch.tensor(sums, dtype=torch.float64).view(-1, 2)
        if not math.isfinite(self.gradient_norm):
            # The norm is that of the sum over processes, so all of them take this branch.
            bad, scaler = self._bad_batch(update, sums), self.accelerator.scaler
            if scaler is None or bad is not None or scaler.get_scale() < 1.0:
                self.optimizer.zero_grad()
                raise NotFinite(bad)
            self.skipped += 1
        elif self.options.max_grad_norm > 0.0:
            clip_grads_with_norm_(self.parameters, self.options.max_grad_norm, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        # The first step allocates Adam's moments.
        where = f"the optimiser's part of update {number:,}"
        with naming_batch(where, update.batches[-1], self.corpus, self.options.tokens_per_batch):
            # After an overflow in float16 this leaves the weights alone, and halves the loss scale.
            self.optimizer.step()
        self.optimizer.zero_grad()
        return sums.sum(dim=0)

    def order_buckets(self, update: Update) -> None:
        """Have DistributedDataParallel lay out its buckets as in a run that has already taken a step.

        It orders gradients by the first backward pass, and this order affects the rounding of sums over more than two
        processes.

        Args:
            update: Any update.
        """
        loss, _ = self.loss(*self._inputs(update.batches[0]))
        self.accelerator.backward(loss * 0.0)
        self.optimizer.zero_grad()

    def inputs(self, corpus: EncodedCorpus, batch: np.ndarray) -> dict[str, torch.Tensor]:
        """The tensors of pairs [B], padded to the longest, on the device."""
        tensors = collate(
            *corpus.rows(batch),
            pad_token_id=self.config.pad_token_id,
            decoder_start_token_id=self.config.decoder_start_token_id,
        )
        return {name: tensor.to(self.accelerator.device) for name, tensor in tensors.items()}

    def _inputs(self, batch: np.ndarray) -> list[dict[str, torch.Tensor]]:
        """The tensors of each part of a batch of the training text; packed batches have one part."""
        if self.parts is None:
            return [pack(*self.corpus.rows(batch), decoder_start_token_id=self.config.decoder_start_token_id)]
        return [self.inputs(self.corpus, part) for part in self.parts(batch)]

    def _backward(self, update: Update, number: int) -> list[torch.Tensor]:
        """Accumulate the gradient; return smoothed loss and negative log-likelihood [2] of each own batch."""
        accelerator, options = self.accelerator, self.options
        self.loss.train()
        share = update.share_of(accelerator.process_index, accelerator.num_processes)
        passes = with_idle_passes(share, update.batches, accelerator.num_processes)
        losses, self.computed_tokens = [], 0
        for position, (index, batch, weight) in enumerate(passes):
            last = position == len(passes) - 1
            with (
                nullcontext() if last else without_reduction(self.loss),
                naming_batch(f"update {number:,}", batch, self.corpus, options.tokens_per_batch),
            ):
                # Dropout depends only on the step and the batch, not on the process or on where a run was resumed.
                torch.manual_seed(_dropout_seed(options.seed, number, index))
                inputs = self._inputs(batch)
                with accelerator.autocast():
                    loss, nll = self.loss(*inputs)
                # Reduction averages gradients over processes; the factor makes it a sum.
                accelerator.backward(loss * (weight * accelerator.num_processes / update.num_target_tokens))
            if weight > 0.0:
                losses.append(torch.stack([loss.detach(), nll]))
                self.computed_tokens += sum(
                    part[side].numel() for part in inputs for side in ("input_ids", "decoder_input_ids")
                )
        return losses

    def _bad_batch(self, update: Update, sums: torch.Tensor) -> np.ndarray | None:
        """The update's first batch on any process whose loss is not finite; `None` if all losses are finite."""
        accelerator = self.accelerator
        share = update.share_of(accelerator.process_index, accelerator.num_processes)
        bad = [index for (index, _), pair in zip(share, sums, strict=False) if not bool(pair.isfinite().all())]
        first = torch.tensor([bad[0] if bad else len(update.batches)], device=accelerator.device)
        first = int(accelerator.gather(first).min())
        return update.batches[first] if first < len(update.batches) else None


def _dropout_seed(seed: int, update: int, batch: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed} {update} {batch}".encode(), digest_size=8).digest()) >> 1
