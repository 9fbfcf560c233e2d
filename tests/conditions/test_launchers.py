"""One and two processes, by each launcher, on a machine without a GPU or with one that is hidden."""

import pytest
from users import ACCELERATE, ARGUMENTS, ONE_PROCESS


# Launchers give each process its own number of threads, by which sums in float32 may round.
ROUNDING = 1e-5
TORCHRUN = ["torchrun", "--nproc_per_node"]
TWO = {
    "ours": [*ONE_PROCESS, "--num_processes", "2"],
    "accelerate": ACCELERATE,
    "torchrun": [*TORCHRUN, "2", "scripts/train.py", *ARGUMENTS],
}
ONE = {
    "accelerate": ["accelerate", "launch", "--config_file", "scripts/launch/one_gpu.yaml", *ACCELERATE[6:]],
    "torchrun": [*TORCHRUN, "1", "scripts/train.py", *ARGUMENTS],
}


@pytest.mark.parametrize("launcher", ["accelerate", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_one_process(user, trained, launcher):
    user.train(*ONE[launcher])
    assert user.record()["processes"] == 1
    assert user.losses() == pytest.approx(trained.losses(), rel=ROUNDING)


@pytest.mark.parametrize("launcher", TWO)
def test_two_processes_train_one_model(user, trained, launcher):
    err = user.train(*TWO[launcher])
    assert user.record()["processes"] == 2
    assert "2 batches of 256 over 2 processes, 1 each." in err
    assert err.count("The model in runs/en-de is update 6.") == 1
    assert user.losses() == pytest.approx(trained.losses(), rel=ROUNDING)


@pytest.mark.slow
def test_what_is_done_once_is_refused(user, trained):
    model = str(trained.file(""))
    for launcher in (["torchrun", "--nproc_per_node", "2"], ["accelerate", "launch", *ACCELERATE[2:6]]):
        command = [*launcher, "-m", "vanilla_transformer", "translate", "--model", model, "The device."]
        status, out, err = user.run(command)
        assert (status, out) == (1, "")
        assert err.count("translate: A launcher has started 2 processes, and each would do the same; start") == 1
