import json
import math
from dataclasses import replace

import pytest
import torch
from runs import make_run, observed_steps, records_of, train_anew

from vanilla_transformer.errors import UserError
from vanilla_transformer.training.engine import TrainingRun
from vanilla_transformer.training.records.checkpoints import list_checkpoints


def gradients_in_a_step(run: TrainingRun, number: int = 1) -> torch.Tensor:
    """What Adam receives in a step, in one vector."""
    received = []
    handle = run.optimizer.optimizer.register_step_pre_hook(
        lambda *_: received.append(torch.cat([p.grad.flatten().clone() for p in run.model.parameters()]))
    )
    run.step(run.batches.updates(0)[number - 1], number)
    handle.remove()
    return received[0]


def weights_in(run: TrainingRun) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in run.model.state_dict().items()}


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.01])
def test_half_precision_gradients_are_those_of_float32(make_options, tmp_path, max_grad_norm):
    vectors, norms = {}, {}
    for precision in ("no", "fp16"):
        options = make_options(tmp_path, mixed_precision=precision, max_grad_norm=max_grad_norm, dropout=0.0)
        run = make_run(options)
        vectors[precision] = gradients_in_a_step(run)
        norms[precision] = run.optimiser_step.gradient_norm
    assert not torch.equal(vectors["fp16"], vectors["no"])
    assert float((vectors["fp16"] - vectors["no"]).norm()) < 0.01 * float(vectors["no"].norm())
    assert norms["fp16"] == pytest.approx(norms["no"], rel=0.01) and norms["no"] > 0.05
    if max_grad_norm:
        assert float(vectors["fp16"].norm()) == pytest.approx(max_grad_norm, rel=1e-3)


def test_an_overflow_leaves_the_weights_alone_and_halves_the_loss_scale(make_options, tmp_path):
    run = make_run(make_options(tmp_path, mixed_precision="fp16", max_grad_norm=1.0))
    updates = run.batches.updates(0)
    run.step(updates[0], 1)
    before = weights_in(run)
    run.accelerator.scaler.load_state_dict({**run.accelerator.scaler.state_dict(), "scale": 2.0**40})
    run.step(updates[1], 2)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_in(run).items())
    assert run.accelerator.scaler.get_scale() == 2.0**39
    assert run.optimiser_step.skipped == 1 and not math.isfinite(run.optimiser_step.gradient_norm)
    assert {float(state["step"]) for state in run.optimizer.state.values()} == {1.0}
    run.accelerator.scaler.load_state_dict({**run.accelerator.scaler.state_dict(), "scale": 2.0**10})
    run.step(updates[2], 3)
    assert not all(torch.equal(before[name], tensor) for name, tensor in weights_in(run).items())
    assert {float(state["step"]) for state in run.optimizer.state.values()} == {2.0}


def test_overflows_that_no_loss_scale_cures_stop_the_run(make_options, tmp_path):
    run = make_run(make_options(tmp_path, mixed_precision="fp16"))
    update = run.batches.updates(0)[0]
    before = weights_in(run)
    run.model.model.shared.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(UserError, match=r"^In update 18 the gradient is infinite or not a number"):
        for number in range(1, 30):
            run.step(update, number)
    # 65,536 halved seventeen times.
    assert run.accelerator.scaler.get_scale() == 0.5
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_in(run).items())


def test_skipped_updates_are_written_down_and_survive_resuming(make_options, tmp_path):
    def overflow(options):
        """Train so that the third update overflows, and no other."""
        original, scales = TrainingRun.step, {3: 2.0**40, 4: 2.0**10}

        def step(self, update, number):
            scaler = self.accelerator.scaler
            scaler.load_state_dict({**scaler.state_dict(), "scale": scales.get(number, scaler.get_scale())})
            return original(self, update, number)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TrainingRun, "step", step)
            train_anew(options)

    options = make_options(tmp_path / "whole", mixed_precision="fp16", max_updates=6, save_every=1, keep_last=9)
    overflow(options)
    overflow(replace(options, output_dir=tmp_path / "cut", max_updates=4))
    with observed_steps() as steps:
        train_anew(replace(options, output_dir=tmp_path / "cut", resume=True))
    assert steps == [5, 6]
    assert [record["skipped_updates"] for record in records_of(tmp_path / "whole", "train")] == [0, 1, 1]
    assert [record["gradient_norm"] is None for record in records_of(tmp_path / "whole", "train")] == [False] * 3
    newest = [list_checkpoints(tmp_path / name / "checkpoints")[-1] for name in ("whole", "cut")]
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert len({(checkpoint / file).read_bytes() for checkpoint in newest}) == 1
    states = [json.loads((checkpoint / "training_state.json").read_text()) for checkpoint in newest]
    assert states[0]["scaler"] == states[1]["scaler"] and states[0]["skipped"] == states[1]["skipped"] == 1
    assert states[0]["scaler"]["_growth_tracker"] == 3
