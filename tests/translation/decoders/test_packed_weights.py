import pytest
import torch

from vanilla_transformer.translation.decoders.packed_weights import can_pack, pack


@pytest.mark.parametrize("packing", ["plain", "onednn", "int8"])
@pytest.mark.parametrize("place", ["weight", "bias"])
def test_relu_keeps_nan(packing, place):
    if not can_pack(packing):
        pytest.skip(f"this torch has no {packing} products here")
    dtype = torch.bfloat16 if packing == "onednn" else torch.float32
    tensors = {"weight": torch.ones(16, 16, dtype=dtype), "bias": torch.zeros(16, dtype=dtype)}
    tensors[place][0] = torch.nan
    product = pack(tensors["weight"], tensors["bias"], packing, relu=True)
    assert product(torch.ones(4, 16, dtype=dtype))[:, 0].isnan().all()
