import re
import shlex
from pathlib import Path

import pytest
import yaml
from accelerate import Accelerator
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.state import AcceleratorState

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.cli.options import parse
from vanilla_transformer.errors import UserError
from vanilla_transformer.training.options import TrainingOptions
from vanilla_transformer.training.step.distribution import Division, distribute, is_sharded, whole_model
from vanilla_transformer.training.step.loss import SmoothedTranslationLoss


LAUNCH = Path(__file__).parents[3] / "scripts" / "launch"
LAUNCH_FILES = sorted(LAUNCH.glob("*.yaml"))


@pytest.fixture
def accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def loss():
    config = VanillaTransformerConfig(
        vocab_size=20, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8,
    )  # fmt: skip
    return SmoothedTranslationLoss(VanillaTransformerForConditionalGeneration(config), 0.1)


@pytest.mark.parametrize("fsdp", ["true", "false"])
def test_one_process_shares_nothing(accelerator, loss, monkeypatch, fsdp):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", fsdp)
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert distribute(loss, accelerator) is loss
    assert not is_sharded(loss.model)
    assert whole_model(loss.model, accelerator) is loss.model


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("FSDP_VERSION", "1", "asks for FSDP version 1; set fsdp_version: 2"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true", "use `gradient_checkpointing`"),
        ("FSDP_OFFLOAD_PARAMS", "true", "sets fsdp_offload_params"),
    ],
)
def test_what_fsdp_cannot_do_here_is_refused(accelerator, loss, monkeypatch, name, value, message):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        distribute(loss, accelerator)


@pytest.mark.parametrize(
    ("num_processes", "fewest", "most", "text"),
    [
        (1, 6, 6, "24,576 tokens an update = 6 batches of 4,096 on 1 process"),
        (2, 3, 3, "24,576 tokens an update = 6 batches of 4,096 over 2 processes, 3 each"),
        (4, 1, 2, "24,576 tokens an update = 6 batches of 4,096 over 4 processes, 1 or 2 each"),
        (
            8, 0, 1,
            "24,576 tokens an update = 6 batches of 4,096 over 8 processes, 0 or 1 each; "
            "a `tokens_per_batch` of 3,072 or less would give every process work",
        ),
    ],
)  # fmt: skip
def test_the_division_of_an_update(num_processes, fewest, most, text):
    division = Division.of(TrainingOptions(tokens_per_batch=4096, tokens_per_update=24_576), num_processes)
    assert (division.fewest, division.most) == (fewest, most)
    assert division.fewest * num_processes <= division.batches_per_update <= division.most * num_processes
    assert str(division) == text


def test_there_is_a_launch_file_for_every_kind_of_machine():
    assert {path.stem for path in LAUNCH_FILES} == {"one_gpu", "many_gpus", "several_machines", "fsdp"}


@pytest.mark.parametrize("path", LAUNCH_FILES, ids=lambda path: path.stem)
def test_a_launch_file_says_its_command(path):
    config = load_config_from_file(str(path))
    text = path.read_text(encoding="utf-8")
    assert yaml.safe_load(text).keys() <= vars(config).keys()
    # Precision given to the launcher would be overruled in silence.
    assert str(config.mixed_precision) == "no"
    comment = re.sub(r"^#", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    (command,) = re.findall(r"^ +(accelerate launch .*)$", comment, flags=re.MULTILINE)
    launcher, arguments = command.split(" scripts/train.py ")
    assert f"--config_file {path.relative_to(LAUNCH.parents[1])}" in launcher
    options = parse(TrainingOptions, shlex.split(arguments), prog="train", summary="")
    options.check()
    assert options.mixed_precision == "bf16"
    # Every process has work.
    number = int(re.search(r"--num_processes (\d+)", launcher).group(1)) if "--num_processes" in launcher else 1
    assert Division.of(options, number).fewest >= 1
