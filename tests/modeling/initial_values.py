import math

from tiny_models import PAD

from vanilla_transformer import VanillaTransformerForConditionalGeneration


def rows_of_one_matrix(name):
    """Names of all weights that are rows of the matrix that `name` belongs to.

    The authors' code projects to queries, keys and values with one matrix, and from the encoder to keys and values.
    """
    for block, parts in (("self_attn.", "qkv"), ("encoder_attn.", "kv")):
        for part in parts:
            if f"{block}{part}_proj." in name:
                return [name.replace(f"{part}_proj.", f"{other}_proj.") for other in parts]
    return [name]


def assert_freshly_initialised(model: VanillaTransformerForConditionalGeneration, names) -> None:
    d_model = model.config.d_model
    state = model.state_dict()
    for name in names:
        tensor = state[name]
        if "norm.weight" in name:
            assert (tensor == 1).all(), name
        elif name.endswith("bias"):
            assert (tensor == 0).all(), name
        elif "shared" in name or "embed" in name or "lm_head" in name:
            rows = tensor
            if "lm_head" not in name and "positions" not in name:
                assert (tensor[PAD] == 0).all(), name
                rows = tensor[PAD + 1 :]
            # Ten standard errors are beyond any seed's luck.
            assert abs(rows.std().item() / d_model**-0.5 - 1) < 10 / math.sqrt(2 * rows.numel()), name
            assert abs(rows.mean().item()) < 10 * d_model**-0.5 / math.sqrt(rows.numel()), name
        else:
            fan_out = sum(state[part].shape[0] for part in rows_of_one_matrix(name))
            bound = math.sqrt(6 / (tensor.shape[1] + fan_out))
            assert tensor.abs().max() <= bound, name
            assert tensor.abs().max() > 0.9 * bound, name
            assert abs(tensor.std().item() / (bound / math.sqrt(3)) - 1) < 0.15, name
