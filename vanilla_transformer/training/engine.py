"""The training loop, on Accelerate: one process or many, exactly resumable."""

import json
import math
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm
from transformers import PreTrainedModel

from vanilla_transformer.data.batching import TokenBatches, Update
from vanilla_transformer.errors import UserError
from vanilla_transformer.loading import architecture_of, load_config, load_model
from vanilla_transformer.training.cpu.fused_layers import operations_of
from vanilla_transformer.training.cpu.memory import FreedMemory
from vanilla_transformer.training.cpu.padding_free import can_pack
from vanilla_transformer.training.preparation.initial_model import make_model
from vanilla_transformer.training.preparation.output_folder import check_output_dir
from vanilla_transformer.training.preparation.reading_order import make_plan
from vanilla_transformer.training.preparation.texts import check_texts
from vanilla_transformer.training.preparation.vocabulary_and_ids import PreparedData, prepare
from vanilla_transformer.training.records.checkpoints import (
    EMA_WEIGHTS,
    discard,
    list_checkpoints,
    load_optimizer,
    moments_of,
    newest_sound,
    rotate,
    update_of,
    write_checkpoint,
)
from vanilla_transformer.training.records.journal import Journal, Window, validation_line
from vanilla_transformer.training.records.leases import hand_out, training_in
from vanilla_transformer.training.records.tracking import Trackers
from vanilla_transformer.training.step.distribution import Division, distribute, is_sharded, whole_model
from vanilla_transformer.training.step.divergence import LossWatch, NotFinite, exploded, not_finite, stopped
from vanilla_transformer.training.step.failures import naming_disk
from vanilla_transformer.training.step.loss import SmoothedTranslationLoss
from vanilla_transformer.training.step.moving_average import MovingAverage
from vanilla_transformer.training.step.optimiser_step import OptimiserStep
from vanilla_transformer.training.step.process import (
    OUT_OF_TIME,
    accelerating,
    catch_signals,
    main_process_first,
    most_pressing,
)
from vanilla_transformer.training.step.schedule import learning_rate
from vanilla_transformer.training.watching.selection import Selection
from vanilla_transformer.training.watching.utilization import ModelFlops, matrix_rate
from vanilla_transformer.training.watching.validation import Evaluation, Validation

from .options import TrainingOptions
from .result import TrainingResult, write_result
from .run_identity import differences, identity_of
from .run_record import write_run_record


def train(
    options: TrainingOptions,
    evaluation: Evaluation | None = None,
    on_checkpoint: Callable[[Path], object] | None = None,
) -> TrainingResult:
    """Train a translation model from parallel text.

    Args:
        options: Training options.
        evaluation: Scores the model at each validation, on the main process.
        on_checkpoint: Receives the folder of every finished checkpoint, on the main process, such as to publish it.
            The run waits for it, so that long work belongs in a thread, under `leases.reading`. Its errors are
            reported and do not end the run.

    Returns:
        How the run ended.

    Raises:
        UserError: Something in the options, the text or the output folder cannot be used.
    """
    started = time.monotonic()
    options.check()
    check_texts(options)
    if options.dry_run:
        raise ValueError("`train` trains; call `dry_run` to estimate a run.")
    if options.num_processes > 1:
        raise ValueError("`train` is one process; call `launch` to start several that call it.")
    check_output_dir(options)
    cache_dir = options.cache_dir or options.output_dir / "cache"
    with accelerating(options) as accelerator, ExitStack() as stack:

        def prepare_here() -> PreparedData:
            if accelerator.is_main_process:
                stack.enter_context(training_in(options.output_dir))
            return prepare(options, cache_dir, show_progress=accelerator.is_main_process)

        data = main_process_first(accelerator, prepare_here)
        deadline = started + options.max_seconds
        return TrainingRun(options, accelerator, data, evaluation, deadline, on_checkpoint).run()


class TrainingRun:
    """A run: model, optimiser, batches, and the loop over them.

    Args:
        options: Checked training options.
        accelerator: Devices and processes.
        data: Vocabulary and encoded text.
        evaluation: Scores the model at each validation, on the main process.
        deadline: When the run is to be saved and stopped, in seconds of `time.monotonic`.
        on_checkpoint: Receives the folder of every finished checkpoint, on the main process.

    Raises:
        UserError: The checkpoint to resume from is damaged or belongs to another run.
    """

    def __init__(
        self,
        options: TrainingOptions,
        accelerator: Accelerator,
        data: PreparedData,
        evaluation: Evaluation | None,
        deadline: float = math.inf,
        on_checkpoint: Callable[[Path], object] | None = None,
    ):
        self.options = options
        self.accelerator = accelerator
        self.data = data
        self.deadline = deadline
        self.on_checkpoint = on_checkpoint
        self.checkpoints = options.output_dir / "checkpoints"
        self.plan = make_plan(data.train, options, accelerator)
        self._freed_memory = FreedMemory() if accelerator.device.type == "cpu" else None
        self.model = make_model(options, data.tokenizer, accelerator.device)
        self.update = 0
        # The signal that stops the run, or OUT_OF_TIME; 0 while it goes on.
        self.stop = 0
        self._received = 0
        self._window = Window()
        # On the main process of a run that has begun.
        self._journals: tuple[Journal, ...] = ()
        self._watch = LossWatch()
        self.selection = Selection(
            options.best_metric, options.keep_best, options.early_stopping_patience, options.early_stopping_threshold
        )
        checkpoint, skipped = self._resume() if options.resume else (None, 0)
        # Here, where all processes come by: the beginning of an epoch may make them wait for one another.
        self.plan.begin()
        self.num_updates = options.max_updates
        if options.max_epochs is not None:
            self.num_updates = min(self.num_updates, options.max_epochs * self.plan.updates_per_epoch)
        loss = SmoothedTranslationLoss(self.model, options.label_smoothing, options.smoothed_entries)
        self.loss = distribute(loss.to(accelerator.device), accelerator)
        self.packs = not is_sharded(self.model) and can_pack(self.model, options, accelerator.device)
        optimizer = torch.optim.Adam(
            self.model.parameters(),
            lr=0.0,
            betas=(options.adam_beta1, options.adam_beta2),
            eps=options.adam_epsilon,
            fused=accelerator.device.type in ("cpu", "cuda"),
        )
        if checkpoint is not None:
            path = checkpoint / "optimizer.safetensors"
            load_optimizer(optimizer, self.model.named_parameters(), path, self.update - skipped)
        self.optimizer = accelerator.prepare_optimizer(optimizer)
        self.average = (
            MovingAverage(self.model.named_parameters(), options.ema_decay) if options.ema_decay > 0.0 else None
        )
        if self.average is not None and checkpoint is not None:
            self.average.load(checkpoint)
        self.optimiser_step = OptimiserStep(
            options,
            accelerator,
            self.loss,
            self.optimizer,
            self.model.config,
            data.train,
            # Another epoch may have other lengths.
            None if self.packs else lambda batch: self.batches.parts(batch),
        )
        self.optimiser_step.skipped = skipped
        if self.update > 0 and isinstance(self.loss, DistributedDataParallel):
            self.optimiser_step.order_buckets(self.plan.update(self.update))
        self.validation = Validation(
            options,
            accelerator,
            data,
            model=self.model,
            loss=self.loss,
            inputs=self.optimiser_step.inputs,
            average=self.average,
            evaluation=evaluation,
        )
        self._model_flops = ModelFlops(self.model.config)

    @property
    def batches(self) -> TokenBatches:
        """The batches of the epoch, or of the window of a stream."""
        return self.plan.batches

    @property
    def fill_rate(self) -> float:
        """Share of the tokens of the epoch, or of the window of a stream, that are not padding."""
        return 1.0 if self.packs else self.plan.fill_rate

    def run(self) -> TrainingResult:
        """Train to the end, or until a signal, and write the result."""
        options, accelerator = self.options, self.accelerator
        dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
        self._matrix_rate = matrix_rate(accelerator.device, dtypes.get(options.mixed_precision, self.model.dtype))
        journal = None
        if accelerator.is_main_process:
            write_run_record(options.output_dir, options, self.data, self._facts())
            trackers = Trackers(options.chosen_trackers, options.output_dir, options.as_dict(), resume=options.resume)
            validated = self.selection.validated
            journal = Journal(options.output_dir / "metrics.jsonl", self.update, validated, trackers.log)
            self._samples = Journal(options.output_dir / "samples.jsonl", validated)
            self._journals = (journal, self._samples)
            # What lies beyond is damaged, and would be counted among the last checkpoints.
            discard(path for path in list_checkpoints(self.checkpoints) if update_of(path) > self.update)
            # A kill may have come between writing the newest one and this.
            rotate(self.checkpoints, options.keep_last, self.selection.best_updates)
        if self.update >= self.num_updates:
            accelerator.print(f"The run in {options.output_dir} has done all of its {self.num_updates:,} updates.")
        with (
            catch_signals(self._on_signal),
            tqdm(
                total=self.num_updates, initial=self.update, desc="Training", unit="update",
                disable=not accelerator.is_main_process, dynamic_ncols=True,
            ) as progress,
        ):  # fmt: skip
            self._loop(journal, progress)
        if accelerator.is_main_process:
            if not self.stop:
                best = self.selection.best_updates
                write_result(options, self.checkpoints, best, self.model.generation_config)
            trackers.finish()
        accelerator.wait_for_everyone()
        accelerator.end_training()
        out_of_time = self.stop == OUT_OF_TIME
        return TrainingResult(options.output_dir, self.update, None if out_of_time else self.stop or None, out_of_time)

    def _loop(self, journal: Journal | None, progress: tqdm) -> None:
        options = self.options
        # A run that was stopped when a validation was due has not done it yet.
        if self.selection.validated < self.update and self.validation.is_due(self.update, self.num_updates):
            self._validate(journal, progress)
            # The checkpoint that the run was resumed from knows nothing of it.
            self.save()
        self._window.restart_clock()
        while self.update < self.num_updates and not self.selection.is_exhausted:
            number = self.update + 1
            planned = self.plan.update(self.update)
            sums = self.step(planned, number)
            sums, computed_tokens, self.stop = self._exchange(sums, self._wish_to_stop(number))
            self._watch_loss(planned, number, float(sums[0]) / planned.num_target_tokens)
            pairs = np.concatenate(planned.batches)
            flops = self._model_flops.of(self.data.train.source_lengths[pairs], self.data.train.target_lengths[pairs])
            self._window.add(planned, sums, (self.batches.tokens(pairs), computed_tokens), flops)
            self.update = number
            progress.update()
            if number % options.log_every == 0 or number == self.num_updates:
                record = self._train_record(self._window)
                self._window = Window()
                progress.set_postfix_str(
                    f"loss {record['loss']:.3f}, {record['tokens_per_second']:,.0f} tokens/s, "
                    f"{record['model_flops_utilization']:.0%} MFU"
                )
                if journal is not None:
                    journal.write("train", number, record)
            is_best = (
                not self.stop
                and self.validation.is_due(self.update, self.num_updates)
                and self._validate(journal, progress)
            )
            is_last = self.stop or number == self.num_updates or self.selection.is_exhausted
            if is_best or is_last or number % options.save_every == 0:
                self.save()
                self._window.restart_clock()
            if self.stop:
                break
        if self.selection.is_exhausted and journal is not None:
            progress.write(
                f"{options.early_stopping_patience:,} validations have not improved the {options.best_metric} of "
                f"{self.selection.reference:.4f}; training stops after {self.update:,} updates.",
                file=sys.stderr,
            )

    def _watch_loss(self, update: Update, number: int, loss: float) -> None:
        if self._watch.see(loss, math.log(self.model.config.vocab_size)):
            pairs = np.concatenate(update.batches)
            reason = exploded(number, self._watch, loss, pairs, self.data.train)
            raise stopped(reason, self.checkpoints, number - self._watch.streak)

    def _wish_to_stop(self, number: int) -> int:
        """The signal that this process received; on the main process OUT_OF_TIME, when there is still work to do."""
        is_time = self.accelerator.is_main_process and time.monotonic() >= self.deadline
        return self._received or (OUT_OF_TIME if is_time and number < self.num_updates else 0)

    def _validate(self, journal: Journal | None, progress: tqdm) -> bool:
        """Validate, write it down, and return whether this update's checkpoint is one of the best."""
        record = self.validation(self.update)
        samples = record.pop("samples", ())
        if journal is not None:
            for sample in samples:
                self._samples.write("sample", self.update, sample)
            journal.write("valid", self.update, record)
            progress.write(validation_line(self.update, record), file=sys.stderr)
        self._window.restart_clock()
        return self.selection.see(self.update, record)

    def step(self, update: Update, number: int) -> torch.Tensor:
        """Do one optimiser step.

        The gradient is that of the loss summed over the whole update, divided by its number of target tokens, however
        the update is cut into batches and however these are spread over processes.

        Args:
            update: The batches of the step.
            number: Number of the step, from 1 on.

        Returns:
            Smoothed loss and negative log-likelihood, summed over this process's target tokens; float64 [2].

        Raises:
            UserError: The loss or its gradient is not finite; the weights are as they were.
        """
        try:
            sums = self.optimiser_step(update, number, self._learning_rate(number))
        except NotFinite as error:
            reason = not_finite(number, update.batches, error.batch, self.data.train)
            raise stopped(reason, self.checkpoints, number - 1) from error
        if self.average is not None:
            self.average.follow(number)
        if self._freed_memory is not None:
            self._freed_memory.update_done()
        return sums

    def save(self) -> None:
        """Write a checkpoint and delete the oldest ones."""
        state, tensors = self._state(), {}
        model = whole_model(self.model, self.accelerator)
        if self.accelerator.is_main_process or is_sharded(self.model):
            tensors["optimizer.safetensors"] = moments_of(self.optimizer.optimizer, self.model.named_parameters())
            if self.average is not None:
                tensors[EMA_WEIGHTS] = self.average.tensors()
        if self.accelerator.is_main_process:
            with naming_disk(f"The checkpoint of update {self.update:,}", self.checkpoints, self.checkpoints):
                for journal in self._journals:
                    journal.sync()
                checkpoint = write_checkpoint(
                    self.checkpoints,
                    self.update,
                    lambda folder: self._write_checkpoint_files(folder, state, model, tensors),
                )
            rotate(self.checkpoints, self.options.keep_last, self.selection.best_updates)
            if self.on_checkpoint is not None:
                hand_out(checkpoint, self.on_checkpoint)
        self.accelerator.wait_for_everyone()

    def _learning_rate(self, number: int) -> float:
        return learning_rate(
            number,
            d_model=self.model.config.d_model,
            warmup_steps=self.options.warmup_steps,
            scale=self.options.learning_rate_scale,
        )

    def _train_record(self, window: Window) -> dict[str, float | None]:
        loss, nll = window.sums.tolist()
        norm = self.optimiser_step.gradient_norm
        record = {
            "epoch": round(self.plan.passes(self.update), 4),
            "loss": loss / window.target_tokens,
            "nll": nll / window.target_tokens,
            # JSON has no infinity, which an overflow in float16 gives.
            "gradient_norm": norm if math.isfinite(norm) else None,
            "learning_rate": self._learning_rate(self.update),
            "tokens_per_second": window.tokens / window.seconds,
            "model_flops_utilization": window.flops
            / (window.seconds * self._matrix_rate * self.accelerator.num_processes),
            "fill_rate": window.tokens / window.padded_tokens,
            "seconds": window.seconds,
        }
        if self.accelerator.scaler is not None:
            record["loss_scale"] = self.accelerator.scaler.get_scale()
            record["skipped_updates"] = self.optimiser_step.skipped
        return record

    def _on_signal(self, number: int) -> None:
        # Only a second Ctrl-C is impatience: launchers repeat SIGTERM, which must not break off the saving.
        if number == signal.SIGINT and self._received == number:
            raise KeyboardInterrupt
        self._received = number

    def _exchange(self, sums: torch.Tensor, stop: int) -> tuple[torch.Tensor, int, int]:
        """Sum losses and computed tokens over the processes, and take the most pressing of their wishes to stop."""
        computed_tokens = self.optimiser_step.computed_tokens
        if self.accelerator.num_processes == 1:
            return sums, computed_tokens, stop
        # One message for all three.
        values = [*sums.tolist(), computed_tokens, stop]
        message = torch.tensor(values, dtype=torch.float64, device=self.accelerator.device)
        messages = self.accelerator.gather(message).cpu().view(-1, 4)
        stops = messages[:, 3].int().tolist()
        return messages[:, :2].sum(dim=0), int(messages[:, 2].sum()), most_pressing(stops)

    def _write_checkpoint_files(
        self, folder: Path, state: dict, model: PreTrainedModel, tensors: dict[str, dict[str, torch.Tensor]]
    ) -> None:
        model.save_pretrained(folder)
        self.data.tokenizer.save_pretrained(folder)
        for name, content in tensors.items():
            save_file(content, folder / name, metadata={"format": "pt"})
        self.plan.save(folder)
        (folder / "training_state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")

    def _state(self) -> dict:
        """Where a resumed run goes on, and what it must have in common with this one."""
        return {
            "update": self.update,
            "stopgap": self.update % self.options.save_every != 0,
            "plan": self.plan.state(),
            "window": self._window.state(),
            "watch": self._watch.state(),
            "selection": self.selection.state(),
            "skipped": self.optimiser_step.skipped,
            "scaler": None if self.accelerator.scaler is None else self.accelerator.scaler.state_dict(),
            **identity_of(self.options, self.data),
        }

    def _resume(self) -> tuple[Path, int]:
        """Load the newest sound checkpoint, but for moments and moving average; return it and the skipped steps."""
        with self.accelerator.main_process_first():
            checkpoint = newest_sound(self.checkpoints, lambda text: self.accelerator.print(text, file=sys.stderr))
        if checkpoint is None:
            raise UserError(
                f"--resume was given, but {self.options.output_dir} holds no checkpoint; leave --resume out to start."
            )
        state = json.loads((checkpoint / "training_state.json").read_text(encoding="utf-8"))
        # The options leave much to presets and defaults, which another version of the package may have changed.
        config = load_config(checkpoint)
        different = differences(
            state | {"architecture": architecture_of(config)},
            identity_of(self.options, self.data) | {"architecture": architecture_of(self.model.config)},
        )
        if different:
            raise UserError(
                f"The run in {self.options.output_dir} cannot be resumed, because these differ: "
                f"{'; '.join(different)}; set them back, or start a new run in another --output_dir."
            )
        saved = load_model(checkpoint, config=config, dtype=self.model.dtype)
        self.model.load_state_dict(saved.state_dict())
        self.update = state["update"]
        # Checkpoints of 0.1.0 say less: the plan then walks to the update from the first, and the next record covers
        # the updates that follow.
        if "plan" in state:
            self.plan.load(state["plan"], checkpoint)
            self._window.restore(state["window"])
        self._watch = LossWatch(**state.get("watch", {}))
        if "selection" in state:
            self.selection.restore(**state["selection"])
        else:
            self.selection.validated = self.update
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.accelerator.print(f"Resuming from {checkpoint}.", file=sys.stderr)
        return checkpoint, state.get("skipped", 0)

    def _facts(self) -> dict[str, Any]:
        """What the run's record tells of model, plan and devices."""
        return {
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "updates": self.num_updates,
            "updates_per_epoch": self.plan.updates_per_epoch,
            "fill_rate": self.fill_rate,
            "processes": self.accelerator.num_processes,
            "division": asdict(Division.of(self.options, self.accelerator.num_processes)),
            "wrapper": type(self.loss).__name__,
            "device": str(self.accelerator.device),
            "attention": self.model.config._attn_implementation,
            "padding": "none" if self.packs else "to the longest",
            "operations": operations_of(self.model, self.options.mixed_precision, self.accelerator.device),
            "matrix_flops_per_second": self._matrix_rate,
        }
