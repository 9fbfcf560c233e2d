import numpy as np
import pytest
import torch
from runs import make_run, train_anew
from safetensors.torch import load_file

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.training.records.checkpoints import list_checkpoints
from vanilla_transformer.training.step.moving_average import MovingAverage


@pytest.mark.parametrize("decay", [0.3, 0.999])
def test_the_average_is_the_recursion_over_the_weights_of_each_update(make_options, tmp_path, float64, decay):
    run = make_run(make_options(tmp_path, ema_decay=decay))
    names = [name for name, _ in run.model.named_parameters()]
    expected = {name: parameter.detach().numpy().copy() for name, parameter in run.model.named_parameters()}
    for number, update in enumerate(run.batches.updates(0), start=1):
        run.step(update, number)
        # Written as in Marian: the smallest share of the new weights, and a larger one at the start.
        share = max(1.0 - decay, 1.0 - (number + 1) / (number + 10))
        for name, parameter in run.model.named_parameters():
            expected[name] = (1.0 - share) * expected[name] + share * parameter.detach().numpy()
    for name in names:
        np.testing.assert_allclose(run.average.averages[name].numpy(), expected[name], rtol=1e-12, atol=1e-15)
        assert not np.allclose(expected[name], dict(run.model.named_parameters())[name].detach().numpy())


def test_narrow_weights_have_a_float32_average_and_come_back_bit_for_bit():
    weight = torch.nn.Parameter(torch.randn(5, 3, dtype=torch.bfloat16))
    average = MovingAverage([("weight", weight)], 0.99)
    start = weight.detach().clone()
    for number in range(1, 30):
        with torch.no_grad():
            weight += 0.01
        average.follow(number)
    assert average.averages["weight"].dtype == torch.float32
    own = weight.detach().clone()
    with pytest.raises(RuntimeError, match="inside"), average.in_place():
        torch.testing.assert_close(weight.detach(), average.averages["weight"].to(torch.bfloat16), rtol=0, atol=0)
        assert not torch.equal(weight, own) and not torch.equal(weight, start)
        raise RuntimeError("inside")
    assert torch.equal(weight, own)


def test_the_average_is_validated_and_becomes_the_result(make_options, tmp_path, float64):
    seen = []

    def evaluation(model, _):
        seen.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return {}

    options = make_options(tmp_path / "with", ema_decay=0.9, average_last=None)
    train_anew(options, evaluation)
    newest = list_checkpoints(tmp_path / "with" / "checkpoints")[-1]
    result, average, raw = (
        load_file(path)
        for path in (tmp_path / "with" / "model.safetensors", newest / "ema.safetensors", newest / "model.safetensors")
    )
    assert result.keys() == average.keys() == raw.keys()
    for name, tensor in result.items():
        assert torch.equal(tensor, average[name]) and torch.equal(tensor, seen[-1][name])
        assert not torch.equal(tensor, raw[name])
    model = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path / "with", dtype=torch.float64)
    assert torch.equal(model.model.shared.weight, average["model.shared.weight"])
    # Following the weights does not disturb them.
    train_anew(make_options(tmp_path / "without"))
    other = list_checkpoints(tmp_path / "without" / "checkpoints")[-1]
    assert (other / "model.safetensors").read_bytes() == (newest / "model.safetensors").read_bytes()
