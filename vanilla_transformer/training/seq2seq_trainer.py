"""Batches by number of tokens for fine-tuning with transformers' `Seq2SeqTrainer`."""

from collections.abc import Iterator

import numpy as np
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import DataLoader, Sampler
from transformers import Seq2SeqTrainer
from transformers.trainer_utils import has_length

from vanilla_transformer.data.batching import TokenBatches
from vanilla_transformer.errors import UserError


class TokenBatchSampler(Sampler[list[int]]):
    """One process's batches of every epoch: batches are dealt out in turn, and all processes get equally many.

    If the last round has fewer batches than processes, the epoch's first batches fill it up, as in Accelerate.

    Args:
        plan: The batches.
        process: Number of this process.
        num_processes: Number of processes that train in parallel.
    """

    def __init__(self, plan: TokenBatches, *, process: int = 0, num_processes: int = 1):
        self.plan = plan
        self.process = process
        self.num_processes = num_processes
        self.epoch = 0
        # Batches depend only on the sorted lengths, so their number is the same in every epoch.
        self._num_batches = len(plan.batches(0))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that is read next."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self._num_batches // self.num_processes)

    def __iter__(self) -> Iterator[list[int]]:
        batches = self.plan.batches(self.epoch)
        for turn in range(len(self)):
            yield batches[(turn * self.num_processes + self.process) % len(batches)].tolist()


class TokenBatchSeq2SeqTrainer(Seq2SeqTrainer):
    """`Seq2SeqTrainer` with training batches of about `tokens_per_batch` tokens, of similar lengths, as in §5.1.

    An update has `tokens_per_batch` x `gradient_accumulation_steps` x processes tokens on either side, padding
    included. `per_device_train_batch_size` and `train_sampling_strategy` then have no effect on training; evaluation
    is `Seq2SeqTrainer`'s. For one process and for data-parallel training.

    Args:
        *args: As `Seq2SeqTrainer` takes them.
        tokens_per_batch: Largest padded number of tokens on either side of a batch of one process.
        **kwargs: As `Seq2SeqTrainer` takes them. The rows of `train_dataset` have `input_ids` and `labels`.
    """

    def __init__(self, *args, tokens_per_batch: int, **kwargs):
        super().__init__(*args, **kwargs)
        self.tokens_per_batch = tokens_per_batch

    def get_train_dataloader(self) -> DataLoader:
        """The loader of this process's training batches. Reads the lengths of all rows first.

        Returns:
            A loader with the same number of batches in every process, in an order that depends on seed and epoch.

        Raises:
            UserError: The data has no length, or a row is longer than a batch may be.
        """
        if self.train_dataset is not None and not has_length(self.train_dataset):
            raise UserError(
                f"`train_dataset` is a {type(self.train_dataset).__name__} without a length, but batches of tokens "
                "are planned from all lengths; pass a `Dataset`, or use `Seq2SeqTrainer`."
            )
        usual = super().get_train_dataloader()
        lengths = np.array([(len(row["input_ids"]), len(row["labels"])) for row in usual.dataset])
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        plan = TokenBatches(*lengths.T, tokens_per_batch=self.tokens_per_batch, seed=seed)
        # Accelerate would distribute only batches of one size, and would not learn the epoch of a resumed run.
        sampler = TokenBatchSampler(plan, process=self.args.process_index, num_processes=self.args.world_size)
        kept = (
            "collate_fn",
            "num_workers",
            "pin_memory",
            "worker_init_fn",
            "multiprocessing_context",
            "prefetch_factor",
            "persistent_workers",
            "in_order",
        )
        options = {name: getattr(usual, name) for name in kept}
        return DataLoaderShard(usual.dataset, device=usual.device, batch_sampler=sampler, **options)
