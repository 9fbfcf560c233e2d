"""Validation: scores the model on text that it is not trained on."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vanilla_transformer.data.batching import TokenBatches
from vanilla_transformer.data.encoding import EncodedCorpus
from vanilla_transformer.training.options import TrainingOptions
from vanilla_transformer.training.preparation.vocabulary_and_ids import PreparedData
from vanilla_transformer.training.step.distribution import plain_model, reshard, whole_model, with_idle_passes
from vanilla_transformer.training.step.failures import naming_batch
from vanilla_transformer.training.step.moving_average import MovingAverage


# Receives the model in evaluation mode and the tokenizer; returns named scores for the journal and, if it likes, under
# `samples` a sequence of dictionaries, such as of source, reference and hypothesis, for samples.jsonl.
Evaluation = Callable[[PreTrainedModel, PreTrainedTokenizerBase], dict[str, Any]]


class Validation:
    """Scores the weights of a run, or their moving average.

    Args:
        options: Training options.
        accelerator: Devices and processes.
        data: Vocabulary and validation text.
        model: The model.
        loss: Model and loss, as `distribute` made them.
        inputs: Makes a batch's tensors on the device from a corpus and pair numbers [B].
        average: The moving average of the weights, if one is kept.
        evaluation: Scores the model on the main process, or `None`.
    """

    def __init__(
        self,
        options: TrainingOptions,
        accelerator: Accelerator,
        data: PreparedData,
        *,
        model: PreTrainedModel,
        loss: nn.Module,
        inputs: Callable[[EncodedCorpus, np.ndarray], dict[str, torch.Tensor]],
        average: MovingAverage | None,
        evaluation: Evaluation | None,
    ):
        self.options = options
        self.accelerator = accelerator
        self.data = data
        self.model = model
        self.loss = loss
        self.inputs = inputs
        self.average = average
        self.evaluation = evaluation

    def is_due(self, update: int, num_updates: int) -> bool:
        """Whether a validation follows an update, in a run of `num_updates`."""
        return self.data.valid is not None and (update % self.options.validate_every == 0 or update == num_updates)

    @torch.no_grad()
    def __call__(self, update: int) -> dict[str, Any]:
        """Score the validation text: loss without smoothing in nats a token, perplexity, and the evaluation's scores.

        Args:
            update: Number of optimiser steps done.

        Returns:
            Named scores, the same on every process.

        Raises:
            UserError: A batch does not fit into the memory.
        """
        with nullcontext() if self.average is None else self.average.in_place():
            nll = self._negative_log_likelihood(update)
            record = {"loss": nll, "perplexity": math.exp(min(nll, 700.0))}
            if self.evaluation is not None:
                model = whole_model(self.model, self.accelerator)
                if self.accelerator.is_main_process:
                    # The fast decoders take only a model with plain layers, without those of training.
                    record.update(self.evaluation(plain_model(model).eval(), self.data.tokenizer))
        # Only the main process has the evaluation's scores.
        return broadcast_object_list([record])[0]

    def _negative_log_likelihood(self, update: int) -> float:
        """The mean over all target tokens, in nats."""
        accelerator, corpus = self.accelerator, self.data.valid
        self.loss.eval()
        batches = TokenBatches(
            corpus.source_lengths, corpus.target_lengths, tokens_per_batch=self.options.tokens_per_batch, shuffle=False
        ).batches(0)
        sums = torch.zeros(2, dtype=torch.float64)
        share = list(enumerate(batches))[accelerator.process_index :: accelerator.num_processes]
        where = f"the validation of update {update:,}"
        for _, batch, weight in with_idle_passes(share, batches, accelerator.num_processes):
            with accelerator.autocast(), naming_batch(where, batch, corpus, self.options.tokens_per_batch):
                _, nll = self.loss(**self.inputs(corpus, batch))
            counted = torch.tensor([nll.item(), float(corpus.target_lengths[batch].sum())], dtype=torch.float64)
            sums += weight * counted
        reshard(self.loss)
        if accelerator.num_processes > 1:
            sums = accelerator.reduce(sums.to(accelerator.device), reduction="sum").cpu()
        nll, tokens = sums.tolist()
        return nll / tokens
