"""The translator with models whose weights alone do not say what they compute, against their own forward pass."""

import importlib
import logging
import warnings
from copy import deepcopy

import peft
import pytest
import torch
from accelerate import cpu_offload, disk_offload
from torch import nn
from torch.nn.utils import parametrize, prune

from vanilla_transformer import Translator, VanillaTransformerForConditionalGeneration
from vanilla_transformer.errors import UserError
from vanilla_transformer.native.incremental_decoder import NativeDecoder
from vanilla_transformer.translation.decoders.choice import make_decoder
from vanilla_transformer.translation.decoders.plain_models import unwrapped, why_not_plain
from vanilla_transformer.translation.decoders.through_modules import PlainDecoder
from vanilla_transformer.translation.decoders.torch_packed import PackedDecoder


# PEFT asks for what transformers renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

FAST = (NativeDecoder, PackedDecoder)


@pytest.fixture
def model(learned):
    return deepcopy(learned)


@pytest.fixture(scope="module")
def texts(sentences):
    return sentences[:3]


def expected(model, tokenizer, texts):
    """Greedy translations and their log-probabilities, by `generate` of one text after another."""
    found = []
    for text in texts:
        batch = tokenizer([text], return_tensors="pt")
        output = model.generate(
            **batch, num_beams=1, length_penalty=None, early_stopping=None, max_length=None, max_new_tokens=12,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        tokens = output.sequences[0, 1:]
        log_probs = torch.cat(output.logits).log_softmax(-1).gather(1, tokens[:, None])
        found.append((" ".join(tokenizer.decode(tokens, skip_special_tokens=True).split()), log_probs.sum().item()))
    return found


def translated(translator, texts):
    return [(" ".join(found[0].text.split()), found[0].log_prob) for found in translator.hypotheses(texts)]


def greedy(model, tokenizer):
    return Translator(model, tokenizer, num_beams=1, max_length=12, tokens_per_batch=1, workers=1)


def assert_translates_as(translator, model, tokenizer, texts, kind=PlainDecoder):
    mine, theirs = translated(translator, texts), expected(model, tokenizer, texts)
    assert [text for text, _ in mine] == [text for text, _ in theirs]
    assert [score for _, score in mine] == pytest.approx([score for _, score in theirs], abs=1e-3)
    assert isinstance(translator._backend._decoder.current, kind)


def lora(model, **settings):
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj", "fc1"], "init_lora_weights": False, **settings}
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(**settings)).eval()


class Doubled(nn.Linear):
    def forward(self, rows):
        return 2 * super().forward(rows)


class Scaled(nn.Module):
    def forward(self, weight):
        return weight * 1.5


def add_hook(model):
    model.model.decoder.layers[0].self_attn.register_forward_hook(lambda module, args, output: (output[0] * 3, None))


def add_pre_hook(model):
    model.model.encoder.layers[0].fc2.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def add_subclass(model):
    layer = model.model.encoder.layers[0]
    doubled = Doubled(layer.fc1.in_features, layer.fc1.out_features)
    doubled.load_state_dict(layer.fc1.state_dict())
    layer.fc1 = doubled


def add_parametrization(model):
    parametrize.register_parametrization(model.model.decoder.layers[0].fc1, "weight", Scaled())


def add_pruning(model):
    prune.l1_unstructured(model.model.decoder.layers[0].fc1, "weight", amount=0.5)


def add_forward(model):
    layer = model.model.encoder.layers[0].fc2
    layer.forward = lambda rows: nn.functional.linear(rows, layer.weight, layer.bias) * 2


def replace_method(model):
    layer = model.model.decoder.layers[0]
    layer.feed_forward = lambda states: layer.fc2(layer.fc1(states).tanh())


def change_setting(model):
    model.model.decoder.layers[0].self_attn.scaling = 2.0


def change_activation(model):
    model.model.encoder.layers[0].activation_fn = nn.Tanh()


def quantize_dynamic(model):
    with warnings.catch_warnings(action="ignore"):
        torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8, inplace=True)


CHANGES = [
    add_hook, add_pre_hook, add_subclass, add_parametrization, add_pruning, add_forward, replace_method,
    change_setting, change_activation, quantize_dynamic,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_changes_a_model_acts(model, tokenizer, texts, change, when, caplog):
    plain = expected(model, tokenizer, texts)
    if when == "before":
        change(model)
    translator = greedy(model, tokenizer)
    if when == "after":
        assert_translates_as(translator, model, tokenizer, texts, FAST)
        change(model)
    assert_translates_as(translator, model, tokenizer, texts)
    assert expected(model, tokenizer, texts) != plain
    translated(translator, texts[:1])
    (record,) = [record for record in caplog.records if record.name.startswith("vanilla_transformer")]
    assert record.levelno == logging.WARNING
    assert why_not_plain(model) in record.getMessage()


# Not every layer has both adapters.
@pytest.mark.filterwarnings("ignore:A(lready un|ll adapters are already )merged")
def test_adapters_act_as_they_are_switched(model, tokenizer, texts, tmp_path):
    plain = deepcopy(model)
    translator, unaware = greedy(model, tokenizer), greedy(model, tokenizer)
    adapted = lora(model)
    assert_translates_as(translator, model, tokenizer, texts)
    assert_translates_as(greedy(adapted, tokenizer), model, tokenizer, texts)
    assert_translates_as(greedy(adapted.get_base_model(), tokenizer), model, tokenizer, texts)
    with adapted.disable_adapter():
        assert_translates_as(translator, plain, tokenizer, texts)
    adapted.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(deepcopy(plain), tmp_path).eval()
    assert_translates_as(greedy(loaded, tokenizer), model, tokenizer, texts)
    torch.manual_seed(2)
    adapted.add_adapter("other", peft.LoraConfig(r=2, target_modules=["out_proj"], init_lora_weights=False))
    before = expected(model, tokenizer, texts)
    adapted.set_adapter("other")
    assert_translates_as(translator, model, tokenizer, texts)
    adapted.merge_adapter()
    assert_translates_as(translator, model, tokenizer, texts)
    assert expected(model, tokenizer, texts) != before
    adapted.unmerge_adapter()
    assert adapted.merge_and_unload() is model
    # To one of them, the model has the modules and parameters that it had, edited through `.data`.
    for each in (translator, unaware):
        assert_translates_as(each, model, tokenizer, texts, FAST)


def test_adapters_in_the_wrapper_are_refused(model, tokenizer):
    config = peft.PromptTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=2)
    with pytest.raises(UserError, match=r"^The adapter default \(PROMPT_TUNING\) changes the calls of the model and"):
        Translator(peft.get_peft_model(model, config), tokenizer)


def test_other_wrappers_are_refused(model, tokenizer):
    with pytest.raises(UserError, match=r"^DataParallel does not generate text; give the model inside it\.$"):
        Translator(nn.DataParallel(model), tokenizer)


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_offloaded_weights_are_fetched(model, tokenizer, texts, offload, tmp_path):
    whole = deepcopy(model)
    if offload == "cpu":
        cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    translator = greedy(model, tokenizer)
    assert_translates_as(translator, whole, tokenizer, texts)
    assert translator.workers == 1


@pytest.mark.parametrize("whole", [True, False])
def test_compiled_models_translate(model, tokenizer, texts, whole):
    plain, calls = deepcopy(model), []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    if whole:
        assert_translates_as(greedy(torch.compile(model, backend=backend), tokenizer), plain, tokenizer, texts, FAST)
    else:
        model.model.encoder = torch.compile(model.model.encoder, backend=backend)
        assert_translates_as(greedy(model, tokenizer), plain, tokenizer, texts)
        assert calls
    torch._dynamo.reset()


EDITS = {
    "in place": lambda parameter: parameter.mul_(1.3),
    "of one row": lambda parameter: parameter[7].fill_(0.3),
    "through data": lambda parameter: parameter.data.mul_(1.3),
    "through NumPy": lambda parameter: parameter.detach().numpy().__imul__(1.3),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_edited_weights_are_read_again(model, tokenizer, texts, edit):
    translator = greedy(model, tokenizer)
    assert_translates_as(translator, model, tokenizer, texts, FAST)
    with torch.no_grad():
        edit(model.model.shared.weight)
        edit(model.model.decoder.layers[0].fc1.weight)
    assert_translates_as(translator, model, tokenizer, texts, FAST)
    # Other tensors in the place of the weights.
    model.load_state_dict({name: value * 1.1 for name, value in model.state_dict().items()}, assign=True)
    model.tie_weights()
    assert_translates_as(translator, model, tokenizer, texts, FAST)
    model.double()
    assert_translates_as(translator, model, tokenizer, texts, FAST)


def test_what_does_not_matter_keeps_the_decoder(model, tokenizer, texts):
    translator = greedy(model, tokenizer)
    decoder = translator._backend._decoder.current
    translated(translator, texts)
    assert translator._backend._decoder.current is decoder
    # Leaves hooks that record.
    model(**tokenizer(texts[:1], text_target=texts[:1], return_tensors="pt"), output_attentions=True)
    model.set_attn_implementation("eager")
    # Its dropout is 0.
    model.train()
    assert why_not_plain(model) is None
    assert isinstance(make_decoder(model), FAST)


def test_what_keeps_the_fast_decoders_away_is_named(make_model):
    model = make_model(dropout=0.1)
    assert why_not_plain(model) is None
    assert "training mode" in why_not_plain(model.train())
    model = make_model()
    model.resize_token_embeddings(300, mean_resizing=False)
    assert why_not_plain(model) is None
    model = make_model(decoder_layers=2)
    model.model.decoder.layers = model.model.decoder.layers[:1]
    assert "layers.1 is missing" in why_not_plain(model) or "decoder" in why_not_plain(model)
    model = make_model()
    model.lm_head.double()
    assert "several dtypes" in why_not_plain(model)
    assert "not in memory" in why_not_plain(make_model().to("meta"))


def test_dropout_acts_in_training_mode_and_checkpointing_is_refused(make_model, tokenizer):
    model = make_model(dropout=0.5).train()
    translator = greedy(model, tokenizer)
    torch.manual_seed(0)
    assert translated(translator, ["a b"]) != translated(translator, ["a b"])
    model.gradient_checkpointing = True
    for layer in model.model.decoder.layers:
        layer.gradient_checkpointing = True
    with pytest.raises(UserError, match="training mode with gradient checkpointing"):
        translated(translator, ["a b"])
    model.eval()
    assert translated(translator, ["a b"]) == translated(translator, ["a b"])


def test_rounding_is_refused_where_weights_cannot_be_read(model, tokenizer):
    add_hook(model)
    with pytest.raises(UserError, match=r"^`quantization` int8 is not possible here, because .* has a hook; leave"):
        Translator(model, tokenizer, quantization="int8")


def quantized_by(library, model, folder):
    if library == "torchao":
        quantization = importlib.import_module("torchao.quantization")
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
        return model
    if library == "optimum.quanto":
        quanto = importlib.import_module("optimum.quanto")
        quanto.quantize(model, weights=quanto.qint8)
        quanto.freeze(model)
        return model
    from transformers import BitsAndBytesConfig

    bits = 8 if library.endswith("8") else 4
    model.save_pretrained(folder)
    return VanillaTransformerForConditionalGeneration.from_pretrained(
        folder, quantization_config=BitsAndBytesConfig(**{f"load_in_{bits}bit": True}), device_map="cpu"
    ).eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", ["bitsandbytes 8", "bitsandbytes 4", "torchao", "optimum.quanto"])
def test_layers_of_quantisation_libraries_act(make_model, tokenizer, texts, library, tmp_path):
    pytest.importorskip(library.split()[0], exc_type=ImportError)
    # Blocks of 4 bits have 64 numbers.
    model = make_model(d_model=64, encoder_ffn_dim=64, decoder_ffn_dim=64)
    quantized = quantized_by(library, model, tmp_path)
    assert_translates_as(greedy(quantized, tokenizer), quantized, tokenizer, texts)


def test_only_known_wrappers_are_taken_off(model):
    assert unwrapped(model) is model
    assert unwrapped(torch.compile(lora(model), backend="eager")) is model
