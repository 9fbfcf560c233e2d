"""What autocast keeps in float32 on devices other than CPUs, which this machine need not have."""

import pytest
import torch
from tiny_models import tiny_config

from vanilla_transformer import VanillaTransformerEncoderModel


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_residual_stream_stays_in_float32_off_the_cpu(device, monkeypatch):
    # No autocast is known for meta tensors, the only ones of another device that every machine has.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda *_: torch.bfloat16)
    encoder = VanillaTransformerEncoderModel(tiny_config(norm_position="pre")).to(device).eval().encoder
    hidden_states, _, _ = encoder.embed(torch.zeros(2, 5, dtype=torch.long, device=device), None, None)
    assert hidden_states.device.type == device
    assert hidden_states.dtype == (torch.bfloat16 if device == "cpu" else torch.float32)
