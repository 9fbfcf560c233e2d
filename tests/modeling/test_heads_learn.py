"""Each head learns its task with the plain `Trainer`, on the sentences that the package ships."""

import math
import random
import re
from collections import Counter, defaultdict

import pytest
import torch
from datasets import Dataset
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForCausalLM,
    VanillaTransformerForMaskedLM,
    VanillaTransformerForQuestionAnswering,
    VanillaTransformerForSequenceClassification,
    VanillaTransformerForTokenClassification,
    VanillaTransformerTokenizer,
)
from vanilla_transformer.quickstart.first_run import sample_files


def texts(split: str, side: int) -> list[str]:
    return sample_files(split)[side].read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def tokenizer():
    return VanillaTransformerTokenizer.train_from_iterator(texts("train", 0) + texts("train", 1), 600)


def small_config(tokenizer, **changes) -> VanillaTransformerConfig:
    sizes = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    return VanillaTransformerConfig(
        vocab_size=len(tokenizer), norm_position="pre", dropout=0.0, **sizes, **heads, **changes
    )


def predictions_after_training(model, examples, held_out, collator, folder, **arguments):
    """Train with `Trainer` on at least 2,000 examples, and return its predictions and labels for the others."""
    assert len(examples) >= 2000
    arguments = TrainingArguments(
        folder,
        **{
            "max_steps": 150,
            "per_device_train_batch_size": 32,
            "per_device_eval_batch_size": 64,
            "learning_rate": 3e-3,
            "warmup_steps": 20,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "logging_strategy": "no",
            "use_cpu": True,
            "dataloader_pin_memory": False,
            "train_sampling_strategy": "group_by_length",
            **arguments,
        },
    )
    trainer = Trainer(model, arguments, train_dataset=examples, eval_dataset=held_out, data_collator=collator)
    trainer.train()
    return trainer.predict(held_out)


def languages(tokenizer, split: str, pairs: int | None = None) -> Dataset:
    both = texts(split, 0)[:pairs] + texts(split, 1)[:pairs]
    encoded = tokenizer(both)
    labels = [0] * (len(both) // 2) + [1] * (len(both) // 2)
    return Dataset.from_dict({**encoded, "labels": labels})


def test_a_text_classifier_learns_which_language_it_is(tokenizer, tmp_path):
    model = VanillaTransformerForSequenceClassification(small_config(tokenizer, num_labels=2))
    output = predictions_after_training(
        model,
        languages(tokenizer, "train", 2000),
        languages(tokenizer, "valid"),
        DataCollatorWithPadding(tokenizer),
        tmp_path,
        max_steps=80,
    )
    right = (output.predictions.argmax(-1) == output.label_ids).mean()
    # The majority class has half of the texts.
    assert right > 0.5 + 0.45


OTHER, CAPITALISED, NUMBER = range(3)


def kinds_of_words(tokenizer, split: str, number: int | None = None) -> Dataset:
    """German sentences; all tokens of a capitalised word or of a number are labelled as such."""
    sentences = texts(split, 1)[:number]
    encoded = tokenizer(sentences, return_offsets_mapping=True)
    labels = []
    for sentence, offsets in zip(sentences, encoded.pop("offset_mapping"), strict=True):
        kinds = [OTHER] * len(sentence)
        for word in re.finditer(r"\w+", sentence):
            kind = CAPITALISED if word[0][0].isupper() else NUMBER if word[0].isdigit() else OTHER
            kinds[word.start() : word.end()] = [kind] * len(word[0])
        # A token's last character: its first one may be the space before the word.
        labels.append([kinds[end - 1] if end > start else -100 for start, end in offsets])
    return Dataset.from_dict({**encoded, "labels": labels})


def test_a_token_classifier_learns_capitalised_words_and_numbers(tokenizer, tmp_path):
    train, valid = kinds_of_words(tokenizer, "train", 2500), kinds_of_words(tokenizer, "valid")
    counts = defaultdict(Counter)
    for ids, labels in zip(train["input_ids"], train["labels"], strict=True):
        for token, label in zip(ids, labels, strict=True):
            counts[token][label] += 1
    guessed = total = 0
    for ids, labels in zip(valid["input_ids"], valid["labels"], strict=True):
        for token, label in zip(ids, labels, strict=True):
            guessed += (
                label != -100 and counts[token].most_common(1) != [] and (counts[token].most_common(1)[0][0] == label)
            )
            total += label != -100

    model = VanillaTransformerForTokenClassification(small_config(tokenizer, num_labels=3))
    output = predictions_after_training(
        model, train, valid, DataCollatorForTokenClassification(tokenizer), tmp_path, max_steps=300
    )
    real = output.label_ids != -100
    right = (output.predictions.argmax(-1) == output.label_ids)[real].mean()
    # Pieces of words stand in capitalised ones and others alike: the token alone leaves errors.
    assert right > guessed / total + 0.05


def test_a_masked_language_model_learns_hidden_tokens(tokenizer, tmp_path):
    train, valid = (
        Dataset.from_dict(dict(tokenizer(texts(split, 0), return_special_tokens_mask=True)))
        for split in ("train", "valid")
    )
    frequencies = Counter(token for ids in train["input_ids"] for token in ids if token > 4)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15, seed=0)
    model = VanillaTransformerForMaskedLM(small_config(tokenizer))
    output = predictions_after_training(
        model,
        train,
        valid,
        collator,
        tmp_path,
        max_steps=300,
    )
    real = output.label_ids != -100
    right = (output.predictions.argmax(-1) == output.label_ids)[real].mean()
    guessed = (output.label_ids == frequencies.most_common(1)[0][0])[real].mean()
    assert right > guessed + 0.08


def test_a_language_model_learns_next_tokens(tokenizer, tmp_path):
    train, valid = (Dataset.from_dict(dict(tokenizer(texts(split, 0)))) for split in ("train", "valid"))
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    frequencies = Counter(token for ids in train["input_ids"] for token in ids[1:])
    total = sum(frequencies.values()) + len(tokenizer)
    scored = [-math.log((frequencies[token] + 1) / total) for ids in valid["input_ids"] for token in ids[1:]]

    model = VanillaTransformerForCausalLM(small_config(tokenizer))
    output = predictions_after_training(model, train, valid, collator, tmp_path, max_steps=200)
    loss = torch.nn.functional.cross_entropy(
        torch.from_numpy(output.predictions)[:, :-1].flatten(0, 1), torch.from_numpy(output.label_ids)[:, 1:].flatten()
    )
    unigram = sum(scored) / len(scored)
    # A perplexity of at most half.
    assert loss < unigram - math.log(2)


def phrases(tokenizer, split: str, seed: int) -> Dataset:
    """Questions of one to three words out of an English sentence, answered by their place in it."""
    generator = random.Random(seed)
    questions, contexts, places = [], [], []
    for sentence in texts(split, 0):
        words = list(re.finditer(r"\S+", sentence))
        first = generator.randrange(len(words))
        last = min(first + generator.randrange(3), len(words) - 1)
        phrase = sentence[words[first].start() : words[last].end()]
        if len(words) >= 5 and sentence.count(phrase) == 1:
            questions.append(phrase)
            contexts.append(sentence)
            places.append((words[first].start(), words[last].end() - 1))
    encoded = tokenizer(questions, contexts)
    starts, ends = (
        [encoded.char_to_token(row, place[side], sequence_index=1) for row, place in enumerate(places)]
        for side in (0, 1)
    )
    return Dataset.from_dict({**encoded, "start_positions": starts, "end_positions": ends})


def test_a_question_answerer_learns_where_a_phrase_stands(tokenizer, tmp_path):
    train, valid = phrases(tokenizer, "train", 0), phrases(tokenizer, "valid", 1)
    model = VanillaTransformerForQuestionAnswering(small_config(tokenizer))
    output = predictions_after_training(
        model, train, valid, DataCollatorWithPadding(tokenizer), tmp_path, max_steps=400
    )
    right = [
        (scores.argmax(-1) == positions).mean()
        for scores, positions in zip(output.predictions, output.label_ids, strict=True)
    ]
    common = [Counter(valid[name]).most_common(1)[0][1] / len(valid) for name in ("start_positions", "end_positions")]
    assert min(right) > max(common) + 0.3
