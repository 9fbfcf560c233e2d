"""Ctrl-C and other signals, in every phase of a run."""

import signal
import subprocess
import time

from vanilla_transformer.data import encoding
from vanilla_transformer.training.records.checkpoints import fault_of, list_checkpoints, update_of
from vanilla_transformer.training.records.journal import read_journal


def test_ctrl_c_while_text_is_encoded(call, train, tmp_path, monkeypatch):
    encode_block = encoding.PairEncoder.__call__

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        return encode_block(*arguments)

    monkeypatch.setattr(encoding.PairEncoder, "__call__", interrupted)
    status, out, err = call(*train())
    assert (status, out) == (130, "")
    assert err.endswith("vanilla-transformer train: stopped by Ctrl-C.\n")
    assert "Traceback" not in err
    # Nothing half done is left, and the same command then runs to its end.
    assert not list((tmp_path / "run").rglob("*partial*"))
    monkeypatch.undo()
    assert call(*train())[0] == 0
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_signals_in_the_middle_of_training_save_and_resuming_finishes(train, corpus, tmp_path, start):
    folder = tmp_path / "run"
    arguments = train("--max_updates", "1000000", "--save_every", "100000", "--log_every", "1", "--keep_last", "5")
    reached = [0]
    for number, flags in ((signal.SIGINT, []), (signal.SIGTERM, ["--resume"]), (signal.SIGHUP, ["--resume"])):
        process = start([*arguments, *flags], stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 120
            while process.poll() is None and time.monotonic() < deadline:
                journal = folder / "metrics.jsonl"
                if journal.exists() and any(r["update"] > reached[-1] + 2 for r in read_journal(journal)):
                    break
                time.sleep(0.05)
            process.send_signal(number)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 128 + number, err
        assert "Traceback" not in err
        newest = list_checkpoints(folder / "checkpoints")[-1]
        assert fault_of(newest) is None
        reached.append(update_of(newest))
        assert reached[-1] > reached[-2]
        assert err.endswith(f"Stopped after {reached[-1]:,} updates and saved; continue with --resume.\n")
        assert not (folder / "model.safetensors").exists()
    end = reached[-1] + 3
    process = start([*arguments, "--resume", "--max_updates", end], stdout=subprocess.DEVNULL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert (folder / "model.safetensors").is_file()
    assert update_of(list_checkpoints(folder / "checkpoints")[-1]) == end
    updates = [record["update"] for record in read_journal(folder / "metrics.jsonl") if record["kind"] == "train"]
    assert updates == list(range(1, end + 1))
