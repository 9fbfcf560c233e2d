import pytest
import torch
from safetensors.torch import load_file
from tiny_models import (
    ARCHITECTURES,
    BOS,
    PAD,
    SOURCES,
    TARGETS,
    assert_same_numbers,
    batch_of,
    build,
    padded,
    tiny_config,
)
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    AutoModelForTokenClassification,
    AutoTokenizer,
    StaticCache,
    Trainer,
    TrainingArguments,
    pipeline,
)

import vanilla_transformer
from vanilla_transformer import (
    VanillaTransformerForCausalLM,
    VanillaTransformerForMaskedLM,
    VanillaTransformerForSequenceClassification,
    VanillaTransformerTokenizer,
)


ENCODER_HEADS = {
    "VanillaTransformerEncoderModel": (AutoModelForTextEncoding, set()),
    "VanillaTransformerForMaskedLM": (AutoModelForMaskedLM, {"masked_lm_head.weight"}),
    "VanillaTransformerForQuestionAnswering": (
        AutoModelForQuestionAnswering,
        {"qa_outputs.weight", "qa_outputs.bias"},
    ),
    "VanillaTransformerForSequenceClassification": (
        AutoModelForSequenceClassification,
        {"classifier.weight", "classifier.bias"},
    ),
    "VanillaTransformerForTokenClassification": (
        AutoModelForTokenClassification,
        {"classifier.weight", "classifier.bias"},
    ),
}
LAYOUTS = ["default", "two_vocabularies", "two_vocabularies_untied", "untied", "everything", "unequal_stacks"]


def source() -> dict[str, torch.Tensor]:
    batch = batch_of(SOURCES, TARGETS)
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def encoder_of(model: nn.Module) -> nn.Module:
    return getattr(model, "model", model).encoder


def assert_same_weights(actual: nn.Module, expected: nn.Module) -> None:
    """Bit for bit, under the same names."""
    weights = expected.state_dict()
    assert actual.state_dict().keys() == weights.keys()
    for name, tensor in actual.state_dict().items():
        assert torch.equal(tensor, weights[name]), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ENCODER_HEADS)
def test_an_encoder_moves_between_translation_and_heads(name, layout, tmp_path):
    translation = build(**ARCHITECTURES[layout])
    translation.save_pretrained(tmp_path / "translation")
    auto, own = ENCODER_HEADS[name]
    head, report = auto.from_pretrained(tmp_path / "translation", output_loading_info=True)
    assert type(head) is getattr(vanilla_transformer, name)
    tied = name.endswith("MaskedLM") and head.config.tie_word_embeddings
    assert report["missing_keys"] == (set() if tied else own)
    assert not report["mismatched_keys"] and not report["error_msgs"] and not report["unexpected_keys"]
    assert not (head.config.is_encoder_decoder or head.config.is_decoder)
    assert_same_weights(encoder_of(head), translation.model.encoder)
    with torch.no_grad():
        expected = translation.model.encoder(**source()).last_hidden_state
        assert_same_numbers(encoder_of(head.eval())(**source()).last_hidden_state, expected)

    # Back: what the encoder learned in the meantime arrives, and the decoder's values are reported as missing.
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.01)
        learned = encoder_of(head)(**source()).last_hidden_state
    head.save_pretrained(tmp_path / "head")
    back, report = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "head", output_loading_info=True)
    assert back.config.is_encoder_decoder
    assert not report["mismatched_keys"] and not report["error_msgs"]
    assert report["unexpected_keys"] <= own
    assert_same_weights(back.model.encoder, encoder_of(head))
    with torch.no_grad():
        assert_same_numbers(back.eval().model.encoder(**source()).last_hidden_state, learned)
    initialised = {key for key in report["missing_keys"] if not key.startswith("model.decoder.")}
    assert initialised <= {"lm_head.weight", "final_logits_bias"}
    saved = load_file(tmp_path / "head" / "model.safetensors").keys()
    in_files = {key if key.startswith("model.") else f"model.{key}" for key in saved}
    everything = set(back.state_dict()) - set(back.all_tied_weights_keys)
    assert everything <= in_files | report["missing_keys"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_decoder_moves_between_translation_and_language_model(layout, tmp_path):
    translation = build(**ARCHITECTURES[layout])
    translation.save_pretrained(tmp_path / "translation")
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "translation", output_loading_info=True)
    assert type(model) is VanillaTransformerForCausalLM
    assert not any(report.values()), report
    assert model.config.is_decoder and not model.config.is_encoder_decoder
    state = translation.state_dict()
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[key]), key
    assert not [key for key in model.state_dict() if "encoder_attn" in key]

    model.save_pretrained(tmp_path / "model")
    back, report = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert all("encoder" in key for key in report["missing_keys"])
    assert any("encoder_attn" in key for key in report["missing_keys"])
    assert not report["unexpected_keys"] and not report["mismatched_keys"]
    for key, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[key], tensor), key


def test_masks_written_in_a_text_are_filled_where_special_tokens_in_texts_count(tmp_path):
    VanillaTransformerTokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, split_special_tokens=False)
    torch.manual_seed(0)
    model = VanillaTransformerForMaskedLM(tiny_config(vocab_size=len(tokenizer))).eval()
    (ids,) = tokenizer(["one  two"]).input_ids
    position = len(tokenizer("one ", add_special_tokens=False).input_ids)
    ids.insert(position, tokenizer.mask_token_id)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0, position].softmax(-1).topk(3)
    fill = pipeline("fill-mask", model=model, tokenizer=tokenizer, top_k=3)
    found = fill("one <mask> two")
    assert [answer["token"] for answer in found] == expected.indices.tolist()
    assert [answer["score"] for answer in found] == pytest.approx(expected.values.tolist())


def test_masks_written_in_a_text_are_filled(tmp_path):
    tokenizer = VanillaTransformerTokenizer()
    torch.manual_seed(0)
    VanillaTransformerForMaskedLM(tiny_config(vocab_size=len(tokenizer))).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    fill = pipeline("fill-mask", model=str(tmp_path), device="cpu", top_k=3)
    asked = pipeline(
        "fill-mask",
        model=str(tmp_path),
        tokenizer=AutoTokenizer.from_pretrained(tmp_path, split_special_tokens=False),
        device="cpu",
        top_k=3,
    )
    assert fill("one <mask> two") == asked("one <mask> two")


STACKS_OF_HEADS = dict.fromkeys(ENCODER_HEADS, "encoder") | {"VanillaTransformerForCausalLM": "decoder"}


@pytest.mark.parametrize("name", STACKS_OF_HEADS)
def test_the_auto_class_loads_the_stack_that_was_saved(name, tmp_path):
    tokenizer = VanillaTransformerTokenizer()
    torch.manual_seed(0)
    head = getattr(vanilla_transformer, name)(tiny_config(vocab_size=len(tokenizer))).eval()
    head.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, report = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(model, vanilla_transformer.VanillaTransformerPreTrainedModel)
    assert not report["missing_keys"] and not report["mismatched_keys"] and not report["error_msgs"]
    stack = STACKS_OF_HEADS[name]
    assert [part for part in ("encoder", "decoder") if hasattr(model, part)] == [stack]
    assert_same_weights(getattr(model, stack), getattr(getattr(head, "model", head), stack))
    batch = tokenizer(["one text", "another"], padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = model(**batch).last_hidden_state
    extract = pipeline("feature-extraction", model=str(tmp_path), device="cpu")
    assert torch.tensor(extract("one text")) == pytest.approx(expected[:1, : len("one text") + 1], abs=1e-5)
    # A new model of that configuration is of the same class.
    new = AutoModel.from_config(AutoConfig.from_pretrained(tmp_path))
    assert type(new) is type(model) and new.state_dict().keys() == model.state_dict().keys()


def test_a_translation_model_extracts_features_of_the_text_as_both_source_and_target(tmp_path):
    tokenizer = VanillaTransformerTokenizer()
    build(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path)
    batch = tokenizer(["one text", "another"], padding=True, return_tensors="pt")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    shifted = torch.cat([torch.full((2, 1), BOS), ids[:, :-1]], dim=1)
    with torch.no_grad():
        found = model(**batch).last_hidden_state
        torch.testing.assert_close(found[mask.bool()], model(**batch, decoder_input_ids=shifted)[0][mask.bool()])
    extract = pipeline("feature-extraction", model=str(tmp_path), device="cpu")
    features = torch.tensor(extract("one text"), dtype=found.dtype)
    torch.testing.assert_close(features[0], found[0][mask[0].bool()])


def test_a_target_in_another_vocabulary_is_not_made_of_the_source():
    model = build(**ARCHITECTURES["two_vocabularies"])
    with pytest.raises(ValueError, match="got no decoder inputs; pass `decoder_input_ids`"):
        model(**source())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [VanillaTransformerForCausalLM, VanillaTransformerForMaskedLM])
def test_language_models_load_bitwise_and_resize_with_their_ties(kind, tied, tmp_path):
    model = kind(tiny_config(tie_word_embeddings=tied)).eval()
    model.resize_token_embeddings(35)
    model.save_pretrained(tmp_path)
    loaded, report = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    for each in (model, loaded):
        assert each.get_output_embeddings().weight.shape == (35, 24)
        assert (each.get_output_embeddings().weight is each.get_input_embeddings().weight) == tied
    assert_same_weights(loaded, model)
    with torch.no_grad():
        assert_same_numbers(loaded(**source()).logits, model(**source()).logits)


@pytest.mark.parametrize("kind", [VanillaTransformerForCausalLM, VanillaTransformerForMaskedLM])
def test_label_smoothing_of_the_trainer_has_the_loss_of_the_model_as_its_limit(kind, tmp_path):
    torch.manual_seed(2)
    model = kind(tiny_config()).double().eval()
    batch = source()
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    arguments = TrainingArguments(tmp_path, label_smoothing_factor=1e-12, use_cpu=True, report_to="none")
    with torch.no_grad():
        loss = Trainer(model, arguments).compute_loss(model, dict(batch))
        torch.testing.assert_close(loss, model(**batch).loss, rtol=1e-9, atol=0.0)


def test_a_row_without_tokens_is_classified_without_harm_to_the_others():
    torch.manual_seed(2)
    model = VanillaTransformerForSequenceClassification(tiny_config()).double().eval()
    batch = source()
    expected = model(**batch).logits
    batch["attention_mask"][0] = 0
    logits = model(**batch).logits
    torch.testing.assert_close(logits[0], model.classifier.bias)
    torch.testing.assert_close(logits[1:], expected[1:])
    labels = torch.zeros(len(logits), dtype=torch.long)
    model(**batch, labels=labels).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


def language_model(**changes) -> VanillaTransformerForCausalLM:
    torch.manual_seed(4)
    return VanillaTransformerForCausalLM(tiny_config(**changes)).double().eval()


@pytest.mark.parametrize("architecture", ["default", "pre_norm", "unequal_stacks", "learned_positions"])
def test_a_language_model_is_the_decoder_whose_attention_to_the_encoder_adds_nothing(architecture):
    translation = build(**ARCHITECTURES[architecture])
    model = VanillaTransformerForCausalLM(translation.config).double().eval()
    state = translation.state_dict()
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    ids = torch.tensor([[BOS, 9, 8, 7, 6, 5]])
    for layer in translation.model.decoder.layers:
        nn.init.zeros_(layer.encoder_attn.out_proj.weight)
        if layer.encoder_attn.out_proj.bias is not None:
            nn.init.zeros_(layer.encoder_attn.out_proj.bias)
        if not layer.pre_norm:
            # It stands behind the sub-layer that a language model does not have.
            layer.encoder_attn_layer_norm = nn.Identity()
    with torch.no_grad():
        expected = translation(torch.tensor([SOURCES[0]]), decoder_input_ids=ids).logits
        torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_language_model_ignores_padding_on_the_left(attention):
    model = language_model(d_model=48, encoder_attention_heads=3)
    model.set_attn_implementation(attention)
    texts = [[BOS, 7, 12, 9, 25, 6], [BOS, 11, 5], [BOS, 29]]
    longest = max(map(len, texts))
    ids = torch.tensor([[PAD] * (longest - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts])
    with torch.no_grad():
        together = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
        for row, text in enumerate(texts):
            alone = model(torch.tensor([text])).logits[0]
            torch.testing.assert_close(together[row, -len(text) :], alone, rtol=0, atol=1e-6)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": PAD}
    for num_beams in (1, 3):
        generated = model.generate(ids, attention_mask=mask, num_beams=num_beams, **options)[:, longest:]
        for row, text in enumerate(texts):
            alone = model.generate(
                torch.tensor([text]), attention_mask=torch.ones(1, len(text)), num_beams=num_beams, **options
            )
            assert alone[0, len(text) :].tolist() == generated[row].tolist()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("layers", [(1, 3), (3, 1)])
def test_a_language_model_with_a_cache_of_its_own_depth_equals_one_without(layers, cache):
    model = language_model(encoder_layers=layers[0], decoder_layers=layers[1])
    ids = torch.tensor([[BOS, 9, 8, 7, 6, 5]])
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=False, **options)
    implementation = {"cache_implementation": "static"} if cache == "static" else {}
    cached = model.generate(ids, attention_mask=torch.ones_like(ids), **implementation, **options)
    assert torch.equal(cached, expected)
    with torch.no_grad():
        whole = model(ids).logits
        static = StaticCache(config=model.config, max_cache_len=6)
        assert len(static.layers) == layers[1]
        pieces = [model(piece, past_key_values=static, use_cache=True).logits for piece in ids.split(2, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=1e-10)


def test_the_loss_of_a_language_model_shifts_once():
    model = language_model()
    ids = padded([[BOS, *target] for target in TARGETS])
    labels = padded([[BOS, *target] for target in TARGETS], -100)
    mask = (labels != -100).long()
    with torch.no_grad():
        output = model(ids, attention_mask=mask, labels=labels)
        expected = nn.functional.cross_entropy(
            output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        )
        torch.testing.assert_close(output.loss, expected)
        shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        torch.testing.assert_close(model(ids, attention_mask=mask, shift_labels=shifted).loss, expected)
        halved = model(ids, attention_mask=mask, labels=labels, num_items_in_batch=2 * int((shifted != -100).sum()))
        torch.testing.assert_close(halved.loss, expected / 2)


def test_a_text_is_classified_by_the_mean_of_its_tokens_alone():
    model = vanilla_transformer.VanillaTransformerForSequenceClassification(tiny_config(num_labels=4)).double().eval()
    with torch.no_grad():
        logits = model(**source()).logits
        for row, ids in enumerate(SOURCES):
            states = model.model(torch.tensor([ids])).last_hidden_state[0]
            expected = states.mean(0) @ model.classifier.weight.T + model.classifier.bias
            torch.testing.assert_close(logits[row], expected, rtol=0, atol=1e-10)
            assert torch.allclose(model(torch.tensor([ids])).logits[0], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ENCODER_HEADS)
def test_heads_do_not_change_the_configuration_that_they_are_given(name):
    config = tiny_config()
    model = getattr(vanilla_transformer, name)(config)
    assert config.is_encoder_decoder and not model.config.is_encoder_decoder
    assert encoder_of(model).config is model.config


def test_parts_of_the_tensor_parallel_plan_exist():
    for model in (build(**ARCHITECTURES["default"]), language_model(), VanillaTransformerForMaskedLM(tiny_config())):
        names = {
            ".".join("*" if part.isdigit() else part for part in name.split(".")) for name, _ in model.named_modules()
        }
        assert set(model._tp_plan) <= names
        matrices = {name for name in names if name.endswith(("_proj", "fc1", "fc2"))}
        assert matrices <= set(model._tp_plan)
