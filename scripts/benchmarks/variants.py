"""The variants that the training benchmark compares: this engine, and other ways to train the same model."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import numpy as np
import torch
from accelerate.state import AcceleratorState
from measuring import Meter
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    DataCollatorForSeq2Seq,
    MarianConfig,
    MarianMTModel,
    PrinterCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.data.batching import TokenBatches
from vanilla_transformer.data.collation import collate
from vanilla_transformer.training.engine import TrainingRun
from vanilla_transformer.training.options import TrainingOptions
from vanilla_transformer.training.preparation.vocabulary_and_ids import PreparedData, model_configuration
from vanilla_transformer.training.step.process import make_accelerator


LABEL_SMOOTHING = 0.1
# Of the Trainer, which has no budget of tokens.
SENTENCES_PER_BATCH = 64


@dataclass(frozen=True, slots=True)
class Task:
    """What all variants train: the same text, vocabulary, dimensions and budget of tokens.

    Args:
        options: Options of this engine, which name the dimensions.
        data: Vocabulary and encoded text.
        device: Where to train.
    """

    options: TrainingOptions
    data: PreparedData
    device: torch.device

    @property
    def config(self) -> VanillaTransformerConfig:
        """The dimensions."""
        return model_configuration(self.options, self.data.tokenizer)


@contextmanager
def own_accelerate():
    """Let a variant set up Accelerate as it likes, which keeps a process's first set-up, partly in the environment."""
    environment = dict(os.environ)
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.clear()
        os.environ.update(environment)


class Variant:
    """One way to train. It is built and used within `own_accelerate`.

    Args:
        task: What to train.
        precision: `fp32`, or `bf16` for autocast to bfloat16.

    Attributes:
        model: The model, newly initialised.
    """

    model: nn.Module

    def __init__(self, task: Task, precision: str):
        self.task = task
        self.precision = precision

    def train(self, meter: Meter, seed: int) -> None:
        """Do updates until the meter has enough.

        Args:
            meter: Is told of every update.
            seed: Decides which part of the text is trained on.
        """
        raise NotImplementedError


class Engine(Variant):
    """This package's `TrainingRun`, with its own defaults for attention, loss and optimiser."""

    def __init__(self, task: Task, precision: str):
        super().__init__(task, precision)
        options = replace(task.options, mixed_precision="no" if precision == "fp32" else precision)
        options.check()
        self.run = TrainingRun(options, make_accelerator(options), task.data, None)
        self.model = self.run.model

    def train(self, meter: Meter, seed: int) -> None:
        meter.padded = not self.run.packs
        corpus = self.task.data.train
        number = count(1)
        for epoch in count(seed):
            for update in self.run.batches.updates(epoch):
                self.run.step(update, next(number))
                lengths = ((corpus.source_lengths[batch], corpus.target_lengths[batch]) for batch in update.batches)
                if meter.update_done(*lengths):
                    return


class Trainer(Variant):
    """`Seq2SeqTrainer` as `run_translation.py` sets it up: random sentences, the Trainer's own loss and optimiser.

    What is measured is `Trainer.train()` itself, from the end of one of its steps to the end of another.
    """

    def __init__(self, task: Task, precision: str):
        super().__init__(task, precision)
        self.model = marian(task.config)

    def train(self, meter: Meter, seed: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.make_trainer(folder, meter, seed).train()

    def make_trainer(self, folder: str, meter: Meter, seed: int) -> Seq2SeqTrainer:
        """The Trainer; it stops when the meter has enough.

        Args:
            folder: The Trainer's folder, where nothing is written.
            meter: Is told of every step.
            seed: Decides the order of the text.
        """
        arguments = Seq2SeqTrainingArguments(
            folder,
            per_device_train_batch_size=SENTENCES_PER_BATCH,
            label_smoothing_factor=LABEL_SMOOTHING,
            bf16=self.precision == "bf16",
            use_cpu=self.task.device.type == "cpu",
            seed=seed,
            max_steps=10**6,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        tokenizer = self.task.data.tokenizer
        collator = RecordingCollator(tokenizer, model=self.model, label_pad_token_id=-100)
        trainer = Seq2SeqTrainer(
            model=self.model,
            args=arguments,
            train_dataset=self.task.data.train.dataset,
            data_collator=collator,
            processing_class=tokenizer,
            callbacks=[MeterCallback(meter, collator.lengths)],
        )
        trainer.remove_callback(PrinterCallback)
        return trainer


class RecordingCollator(DataCollatorForSeq2Seq):
    """The Trainer's collator, which also keeps the lengths of each batch, in the order of the steps."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.lengths: list[tuple[np.ndarray, np.ndarray]] = []

    def __call__(self, features, return_tensors=None):
        self.lengths.append(
            tuple(np.array([len(feature[name]) for feature in features]) for name in ("input_ids", "labels"))
        )
        return super().__call__(features, return_tensors)


class MeterCallback(TrainerCallback):
    """Tells the meter of each of the Trainer's steps, and stops the Trainer when it has enough."""

    def __init__(self, meter: Meter, lengths: list[tuple[np.ndarray, np.ndarray]]):
        self.meter = meter
        self.lengths = lengths

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = self.meter.update_done(self.lengths[state.global_step - 1])
        return control


class Loop(Variant):
    """A hand-written loop as a careful user writes it: length buckets, fused Adam, autocast, text held in memory.

    The buckets are this package's own, one batch to an update.
    """

    def __init__(self, task: Task, precision: str):
        super().__init__(task, precision)
        self.config = task.config
        self.model = self.make_model().to(task.device)
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=task.device.type in ("cpu", "cuda")
        )
        corpus = task.data.train
        self.batches = TokenBatches(
            corpus.source_lengths, corpus.target_lengths, tokens_per_batch=task.options.tokens_per_batch,
            seed=task.options.seed,
        )  # fmt: skip
        self.sources, self.targets = corpus.rows(np.arange(len(corpus)))

    def make_model(self) -> nn.Module:
        """The model, in float32."""
        raise NotImplementedError

    def logits(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Scores of the next tokens [B, T, W]."""
        raise NotImplementedError

    def loss(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """The smoothed loss, a mean over target tokens."""
        with torch.autocast(self.task.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            return nn.functional.cross_entropy(
                self.logits(inputs).flatten(0, 1), inputs["labels"].flatten(), label_smoothing=LABEL_SMOOTHING
            )

    def inputs(self, batch: np.ndarray) -> dict[str, torch.Tensor]:
        """The tensors of a batch, on the device."""
        config, device = self.config, self.task.device
        tensors = collate(
            [self.sources[pair] for pair in batch],
            [self.targets[pair] for pair in batch],
            pad_token_id=config.pad_token_id,
            decoder_start_token_id=config.decoder_start_token_id,
        )
        if device.type == "cuda":
            tensors = {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in tensors.items()}
        return tensors

    def train(self, meter: Meter, seed: int) -> None:
        self.model.train()
        for batch in self._endless(seed):
            self.loss(self.inputs(batch)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if meter.update_done((self.batches.source_lengths[batch], self.batches.target_lengths[batch])):
                return

    def _endless(self, epoch: int) -> Iterator[np.ndarray]:
        for number in count(epoch):
            yield from self.batches.batches(number)


class MarianLoop(Loop):
    """The loop over `MarianMTModel`.

    Args:
        task: What to train.
        precision: `fp32` or `bf16`.
        attention: `sdpa`, which is what transformers chooses, or `eager`.
    """

    def __init__(self, task: Task, precision: str, attention: str = "sdpa"):
        self.attention = attention
        super().__init__(task, precision)

    def make_model(self) -> nn.Module:
        model = marian(self.config)
        model.set_attn_implementation(self.attention)
        return model

    def logits(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            decoder_input_ids=inputs["decoder_input_ids"],
            use_cache=False,
        ).logits


class TorchLoop(Loop):
    """The loop over `torch.nn.Transformer`.

    Args:
        task: What to train.
        precision: `fp32` or `bf16`.
        backend: The kernel of scaled dot-product attention; `None` leaves the choice to torch.
    """

    def __init__(self, task: Task, precision: str, backend: SDPBackend | None = None):
        self.backend = backend
        super().__init__(task, precision)

    def make_model(self) -> nn.Module:
        return TorchTranslator(self.config, max_length=self.task.options.max_length)

    def logits(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model(inputs["input_ids"], inputs["padding"], inputs["decoder_input_ids"])

    def inputs(self, batch: np.ndarray) -> dict[str, torch.Tensor]:
        tensors = super().inputs(batch)
        padding = tensors["attention_mask"] == 0
        # Known without asking the device. Without a mask attention has faster kernels.
        lengths = self.batches.source_lengths[batch]
        return {**tensors, "padding": padding if lengths.min() < lengths.max() else None}

    def train(self, meter: Meter, seed: int) -> None:
        if self.backend is None:
            return super().train(meter, seed)
        with sdpa_kernel(self.backend):
            return super().train(meter, seed)


class TorchTranslator(nn.Module):
    """`torch.nn.Transformer` between tied, scaled embeddings with sinusoids and the output projection.

    Its stacks come without torch's additional last normalisations, and its dropout without the two places, attention
    weights and inner feed-forward layer, that the paper does not have.
    """

    def __init__(self, config: VanillaTransformerConfig, *, max_length: int):
        super().__init__()
        settings = {
            "d_model": config.d_model,
            "nhead": config.encoder_attention_heads,
            "dim_feedforward": config.encoder_ffn_dim,
            "dropout": config.dropout,
            "activation": "relu",
            "layer_norm_eps": config.layer_norm_eps,
            "batch_first": True,
            "norm_first": False,
        }
        self.embeddings = nn.Embedding(config.vocab_size, config.d_model)
        nn.init.normal_(self.embeddings.weight, std=config.d_model**-0.5)
        self.transformer = nn.Transformer(
            **settings,
            custom_encoder=nn.TransformerEncoder(
                nn.TransformerEncoderLayer(**settings), config.encoder_layers, enable_nested_tensor=False
            ),
            custom_decoder=nn.TransformerDecoder(nn.TransformerDecoderLayer(**settings), config.decoder_layers),
        )
        for module in self.transformer.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
            elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                module.dropout = nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        self.scale = config.d_model**0.5
        angles = torch.arange(max_length)[:, None] / 10_000 ** (torch.arange(0, config.d_model, 2) / config.d_model)
        self.register_buffer("positions", torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1))
        self.register_buffer("future", torch.ones(max_length, max_length, dtype=torch.bool).triu(1))

    def forward(
        self, input_ids: torch.Tensor, padding: torch.Tensor | None, decoder_input_ids: torch.Tensor
    ) -> torch.Tensor:
        length = decoder_input_ids.shape[1]
        hidden_states = self.transformer(
            self.embed(input_ids),
            self.embed(decoder_input_ids),
            tgt_mask=self.future[:length, :length],
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            src_is_causal=False,
            tgt_is_causal=True,
        )
        return nn.functional.linear(hidden_states, self.embeddings.weight)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """The sum of scaled embeddings and positions [B, L, D], with dropout."""
        return self.dropout(self.embeddings(ids) * self.scale + self.positions[: ids.shape[1]])


def marian(config: VanillaTransformerConfig) -> MarianMTModel:
    """A `MarianMTModel` of the same dimensions, newly initialised."""
    names = (
        "vocab_size", "d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads",
        "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim", "activation_function", "dropout",
        "attention_dropout", "activation_dropout", "max_position_embeddings", "scale_embedding", "pad_token_id",
        "bos_token_id", "eos_token_id", "decoder_start_token_id",
    )  # fmt: skip
    same = {name: getattr(config, name) for name in names}
    return MarianMTModel(MarianConfig(**same, init_std=config.d_model**-0.5, forced_eos_token_id=None))


VARIANTS: dict[str, Callable[[Task], Variant]] = {
    f"{name}-{precision}{suffix}": partial(kind, precision=precision, **settings)
    for name, kind, suffix, settings in (
        ("engine", Engine, "", {}),
        ("trainer", Trainer, "", {}),
        ("marian", MarianLoop, "", {}),
        ("marian", MarianLoop, "-eager", {"attention": "eager"}),
        ("torch", TorchLoop, "", {}),
        ("torch", TorchLoop, "-math", {"backend": SDPBackend.MATH}),
    )
    for precision in ("bf16", "fp32")
}
