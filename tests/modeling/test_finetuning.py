"""Saved checkpoints in the hands of transformers' own trainer, PEFT, torchao and Accelerate."""

import numpy as np
import pytest
import torch
from accelerate import infer_auto_device_map
from accelerate.utils import FullyShardedDataParallelPlugin
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import (
    SOURCES,
    TARGETS,
    assert_same_numbers,
    batch_of,
    batch_with_labels,
    build,
    tiny_config,
)
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TorchAoConfig,
)

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForCausalLM,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerForMaskedLM,
    VanillaTransformerTokenizer,
)
from vanilla_transformer.evaluation import TranslationMetric
from vanilla_transformer.quickstart.first_run import sample_files


def pairs(split: str, *, short: bool) -> list[tuple[str, str]]:
    """Pairs of the shipped sample whose English side has up to eight words, or more."""
    sides = [path.read_text(encoding="utf-8").splitlines() for path in sample_files(split)]
    return [pair for pair in zip(*sides, strict=True) if (len(pair[0].split()) <= 8) == short]


def encoded(tokenizer, some_pairs) -> Dataset:
    sources, targets = zip(*some_pairs, strict=True)
    return Dataset.from_dict(dict(tokenizer(list(sources), text_target=list(targets))))


def arguments(folder, **changes) -> Seq2SeqTrainingArguments:
    values = {
        "per_device_train_batch_size": 32,
        "per_device_eval_batch_size": 64,
        "label_smoothing_factor": 0.1,
        "predict_with_generate": True,
        "generation_max_length": 80,
        "generation_num_beams": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "train_sampling_strategy": "group_by_length",
    }
    return Seq2SeqTrainingArguments(folder, **{**values, **changes})


def new_checkpoint(folder, **sizes) -> None:
    sources, targets = zip(*pairs("train", short=True), *pairs("train", short=False), strict=True)
    tokenizer = VanillaTransformerTokenizer.train_from_iterator(sources + targets, 1000)
    config = VanillaTransformerConfig(vocab_size=len(tokenizer), norm_position="pre", **sizes)
    torch.manual_seed(0)
    model = VanillaTransformerForConditionalGeneration(config)
    model.generation_config = GenerationConfig.from_model_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def trainer_for(folder, output, train, valid=None, **changes) -> Seq2SeqTrainer:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    metric = TranslationMetric()

    def compute_metrics(prediction):
        ids = (np.where(part < 0, tokenizer.pad_token_id, part) for part in prediction)
        translations, references = (tokenizer.batch_decode(part, skip_special_tokens=True) for part in ids)
        return {"bleu": metric.compute(predictions=translations, references=references)["bleu"]}

    return Seq2SeqTrainer(
        model,
        arguments(output, **changes),
        train_dataset=encoded(tokenizer, train),
        eval_dataset=encoded(tokenizer, valid) if valid else None,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
    )


SMALL = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    new_checkpoint(folder, **SMALL, dropout=0.0)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_bleu_on_new_pairs_rises(tmp_path):
    """A model that learned short sentences is tuned on long ones; more of the short ones would not do."""
    sizes = {"d_model": 96, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 192, "decoder_ffn_dim": 192}
    new_checkpoint(tmp_path / "new", **sizes, encoder_attention_heads=4, decoder_attention_heads=4)
    schedule = {"learning_rate": 3e-3, "warmup_steps": 30}
    first = trainer_for(tmp_path / "new", tmp_path / "a", pairs("train", short=True), max_steps=350, **schedule)
    first.train()
    first.save_model(tmp_path / "short")
    options = {"max_steps": 150, "gradient_accumulation_steps": 2, **schedule}
    new = pairs("valid", short=False)
    more = trainer_for(tmp_path / "short", tmp_path / "b", pairs("train", short=True), new, **options)
    tuned = trainer_for(tmp_path / "short", tmp_path / "c", pairs("train", short=False), new, **options)
    before = tuned.evaluate()["eval_bleu"]
    more.train()
    tuned.train()
    control, after = (trainer.evaluate()["eval_bleu"] for trainer in (more, tuned))
    # Measured with three seeds: 0.8 to 1.5 before, 1.6 to 3.3 after as many updates on short ones, 5.3 to 6.0.
    assert after > before + 2.0, (before, after)
    assert after > control + 1.0, (control, after)
    tuned.save_model(tmp_path / "long")
    assert not any(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "long", output_loading_info=True)[1].values())


def test_the_trainers_losses_do_not_depend_on_accumulation(small, tmp_path):
    weights = []
    for size, steps in ((16, 1), (4, 4)):
        trainer = trainer_for(
            small,
            tmp_path / f"{size}",
            pairs("train", short=True)[:64],
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            label_smoothing_factor=0.0,
            train_sampling_strategy="sequential",
            max_steps=3,
        )
        trainer.train()
        weights.append(trainer.model.state_dict())
    # Adam turns rounding of the smallest gradients into differences of a share of the rate of 5e-5.
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-5)


# PEFT 0.21 asks for it by the name that transformers 5.23 has given up.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_lora_trains_merges_and_reloads(tmp_path):
    torch.manual_seed(0)
    model = VanillaTransformerForConditionalGeneration(tiny_config())
    model.save_pretrained(tmp_path / "base")
    adapted = get_peft_model(
        model, LoraConfig(task_type="SEQ_2_SEQ_LM", r=4, target_modules=["q_proj", "v_proj", "fc1"])
    )
    frozen = {name: tensor.clone() for name, tensor in adapted.state_dict().items() if "lora" not in name}
    optimizer = torch.optim.Adam([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(20):
        loss = adapted(**batch_with_labels()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3
    for name, tensor in frozen.items():
        assert torch.equal(adapted.state_dict()[name], tensor), name

    adapted.save_pretrained(tmp_path / "adapter")
    batch = batch_of(SOURCES, TARGETS)
    with torch.no_grad():
        expected = adapted.eval()(**batch).logits
        reloaded = PeftModel.from_pretrained(
            AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
        )
        assert_same_numbers(reloaded.eval()(**batch).logits, expected)
        options = {"max_new_tokens": 5, "do_sample": False, "num_beams": 2}
        source = {name: batch[name] for name in ("input_ids", "attention_mask")}
        generated = adapted.generate(**source, **options)
        merged = reloaded.merge_and_unload()
        torch.testing.assert_close(merged(**batch).logits, expected, rtol=0, atol=1e-4)
        merged.save_pretrained(tmp_path / "merged")
        whole, report = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
        assert not any(report.values()), report
        assert_same_numbers(whole(**batch).logits, merged(**batch).logits)
        assert torch.equal(whole.generate(**source, **options), generated)


def test_eight_bit_weights_load_and_stay_close(tmp_path):
    torchao = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    model = VanillaTransformerForConditionalGeneration(tiny_config(d_model=48)).eval()
    model.save_pretrained(tmp_path)
    quantized = AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path, quantization_config=TorchAoConfig(torchao.Int8WeightOnlyConfig())
    )
    assert "Int8" in type(quantized.model.encoder.layers[0].fc1.weight).__name__
    batch = batch_of(SOURCES, TARGETS)
    with torch.no_grad():
        expected, actual = model(**batch).logits, quantized(**batch).logits
        difference = (actual - expected).norm() / expected.norm()
        assert 0 < difference < 0.05
        ids = quantized.generate(batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=5)
    assert ids.shape[0] == len(SOURCES)


# What PEFT calls in transformers 5.23; what it says of adapters of tied weights; and on loading, of the stacks'
# embeddings, that their keys are missing, though they are the same module as `shared`.
@pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore:Model with `tie_word_embeddings=True`", "ignore:Found missing adapter keys"
)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "adapter",
    [
        {"target_modules": ["q_proj"], "trainable_token_indices": [7, 9, 12]},
        {"target_modules": ["q_proj"], "modules_to_save": ["shared"]},
        {"target_modules": ["shared"]},
    ],
    ids=["trainable_token_indices", "modules_to_save", "target_modules"],
)
def test_adapters_of_the_shared_embeddings_serve_both_stacks(adapter, tied, tmp_path):
    model = build(tie_word_embeddings=tied)
    batch = batch_with_labels()
    expected = model(**batch).loss.detach()
    adapted = get_peft_model(model, LoraConfig(**adapter))
    loss = adapted(**batch).loss
    torch.testing.assert_close(loss.detach(), expected)
    loss.backward()
    own = {name: parameter for name, parameter in adapted.named_parameters() if ".shared." in name}
    own = {name: parameter for name, parameter in own.items() if parameter.requires_grad}
    assert own and all(parameter.grad is not None for parameter in own.values())
    assert any(parameter.grad.any() for parameter in own.values())
    with torch.no_grad():
        for parameter in own.values():
            parameter.add_(0.1)
        trained = [stack.embed_tokens(batch["input_ids"]) for stack in (model.model.encoder, model.model.decoder)]
        assert torch.equal(*trained)
        logits = adapted(**batch).logits
        adapted.save_pretrained(tmp_path)
        reloaded = PeftModel.from_pretrained(build(tie_word_embeddings=tied), tmp_path)
        torch.testing.assert_close(reloaded(**batch).logits, logits)


FAMILY = [
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerForCausalLM,
    VanillaTransformerForMaskedLM,
]


@pytest.mark.parametrize("kind", FAMILY)
def test_device_maps_keep_layers_whole(kind, tmp_path):
    model = kind(tiny_config(encoder_layers=4, decoder_layers=4))
    largest = max(
        sum(p.numel() * 4 for p in module.parameters())
        for name, module in model.named_modules()
        if type(module).__name__ in model._no_split_modules
    )
    size = sum(p.numel() * 4 for p in model.parameters())
    placed = infer_auto_device_map(
        model, max_memory={0: size // 2, "cpu": 2 * size}, no_split_module_classes=list(model._no_split_modules)
    )
    assert set(placed.values()) == {0, "cpu"} and largest < size // 2
    assert not [name for name in placed if name.count(".") > 3], placed
    # What lies on the disk is fetched layer by layer, by hooks.
    model.eval().save_pretrained(tmp_path)
    placed = {name: "cpu" if device == 0 else "disk" for name, device in placed.items()}
    loaded = kind.from_pretrained(tmp_path, device_map=placed, offload_folder=tmp_path / "offloaded")
    assert loaded.hf_device_map == placed
    batch = batch_of(SOURCES, TARGETS)
    if not model.config.is_encoder_decoder:
        batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        assert_same_numbers(loaded(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize("kind", FAMILY)
def test_fsdp_finds_the_layers_to_wrap(kind):
    model = kind(tiny_config())
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    plugin.set_auto_wrap_policy(model)
    wrapped = plugin.auto_wrap_policy.keywords["transformer_layer_cls"]
    present = {type(module) for module in model.modules() if type(module).__name__.endswith("coderLayer")}
    assert set(wrapped) == present and present
