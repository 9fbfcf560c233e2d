"""Fine-tuning with token batches in float64, in this process or, as a script, in each of several."""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, Seq2SeqTrainingArguments

from vanilla_transformer import TokenBatchSeq2SeqTrainer


SENTENCES = tuple(Path(__file__).parents[1] / "data" / f"sentences.{language}" for language in ("en", "de"))
TOKENS_PER_BATCH = 256


def trainer_for(folder: Path, output: Path, train=None, *, tokens_per_batch=TOKENS_PER_BATCH, **changes):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float64)
    sources, targets = (path.read_text(encoding="utf-8").splitlines() for path in SENTENCES)
    data = Dataset.from_dict(dict(tokenizer(sources, text_target=targets)))
    values = {
        "num_train_epochs": 2,
        "learning_rate": 1e-3,
        "label_smoothing_factor": 0.1,
        "per_device_eval_batch_size": 4,
        "save_steps": 1,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return TokenBatchSeq2SeqTrainer(
        model,
        Seq2SeqTrainingArguments(output, **{**values, **changes}),
        train_dataset=data if train is None else train,
        eval_dataset=data,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
        tokens_per_batch=tokens_per_batch,
    )


if __name__ == "__main__":
    folder, output = map(Path, sys.argv[1:3])
    trainer = trainer_for(folder, output)
    trainer.train()
    trainer.save_model()
    # Another run continues from the middle of the first.
    resumed = trainer_for(folder, output / "resumed", save_strategy="no")
    resumed.train(resume_from_checkpoint=str(output / f"checkpoint-{sys.argv[3]}"))
    resumed.save_model()
