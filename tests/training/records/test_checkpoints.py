import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from vanilla_transformer.errors import UserError
from vanilla_transformer.training.records import checkpoints
from vanilla_transformer.training.records.checkpoints import (
    checkpoint_name,
    fault_of,
    list_checkpoints,
    load_optimizer,
    moments_of,
    newest_sound,
    rotate,
    update_of,
    write_checkpoint,
)


FILES = {
    "config.json": b'{"a": 1}',
    "model.safetensors": bytes(range(256)) * 20,
    "optimizer.safetensors": bytes(range(256)),
    "training_state.json": b"{}",
}


def write_files(folder: Path) -> None:
    for name, content in FILES.items():
        (folder / name).write_bytes(content)


def write_old(folder: Path) -> None:
    write_files(folder)
    (folder / "old").write_text("old")


def write_new(folder: Path) -> None:
    write_files(folder)
    (folder / "new").write_text("new")


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES = {"flipped bit": flip_bit, "truncated": truncate, "empty": empty, "missing": Path.unlink}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Writing


def test_a_written_checkpoint_is_whole_and_sound(tmp_path):
    folder = tmp_path / "checkpoints"
    checkpoint = write_checkpoint(folder, 1000, write_files)
    assert checkpoint == folder / "update-00001000" == folder / checkpoint_name(1000)
    assert update_of(checkpoint) == 1000
    assert {name: (checkpoint / name).read_bytes() for name in FILES} == FILES
    assert names_in(checkpoint) == sorted([*FILES, "manifest.json"])
    assert names_in(folder) == ["update-00001000"]
    assert fault_of(checkpoint) is None


def test_checkpoints_are_listed_by_update_and_nothing_else_is(tmp_path):
    for update in (200, 1000, 30, 123_456_789):
        write_checkpoint(tmp_path, update, write_files)
    for name in ("partial-update-00000001", "update-", "update-1.old", "other"):
        (tmp_path / name).mkdir()
    assert [update_of(checkpoint) for checkpoint in list_checkpoints(tmp_path)] == [30, 200, 1000, 123_456_789]
    assert list_checkpoints(tmp_path / "absent") == []


def test_a_checkpoint_of_the_same_update_is_replaced(tmp_path):
    write_checkpoint(tmp_path, 5, write_old)
    checkpoint = write_checkpoint(tmp_path, 5, write_new)
    assert names_in(tmp_path) == [checkpoint.name]
    assert names_in(checkpoint) == sorted([*FILES, "manifest.json", "new"])
    assert fault_of(checkpoint) is None


@pytest.mark.parametrize("calls_before_death", [0, 1])
def test_a_death_while_a_checkpoint_is_replaced_leaves_one_of_the_two(tmp_path, monkeypatch, calls_before_death):
    write_checkpoint(tmp_path, 5, write_old)
    rename, renamed = Path.rename, []

    def rename_until_death(path, target):
        if len(renamed) > calls_before_death:
            # Nothing runs in a process that was killed, not even what would clean up.
            return path
        renamed.append(target)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_until_death)
    monkeypatch.setattr(checkpoints.shutil, "rmtree", lambda path, **_: None)
    write_checkpoint(tmp_path, 5, write_new)
    monkeypatch.undo()
    assert (tmp_path / "replaced-update-00000005").exists()
    survivor = newest_sound(tmp_path, pytest.fail)
    assert update_of(survivor) == 5 and fault_of(survivor) is None
    assert (survivor / ("new" if calls_before_death else "old")).exists()
    rotate(tmp_path, 1)
    assert names_in(tmp_path) == ["update-00000005"]


def test_a_checkpoint_that_cannot_take_its_place_leaves_the_old_one(tmp_path, monkeypatch):
    checkpoint = write_checkpoint(tmp_path, 5, write_old)
    rename = Path.rename

    def refuse(path, target):
        if path.name.startswith("partial-"):
            raise OSError("refused")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="refused"):
        write_checkpoint(tmp_path, 5, write_new)
    assert names_in(tmp_path) == [checkpoint.name] and (checkpoint / "old").exists()


@pytest.mark.parametrize("update", [3, 4])
def test_a_file_or_a_link_in_a_folders_place_gives_way(tmp_path, update):
    folder = tmp_path / "checkpoints"
    for name in (f"partial-{checkpoint_name(3)}", checkpoint_name(3)):
        folder.mkdir(exist_ok=True)
        (folder / name).write_text("a file")
        checkpoint = write_checkpoint(folder, update, write_files)
        rotate(folder, 1)
        assert names_in(folder) == [checkpoint.name]
        checkpoint.rename(tmp_path / "elsewhere")
        (folder / name).symlink_to(tmp_path / "elsewhere")
        checkpoint = write_checkpoint(folder, update + 1, write_files)
        rotate(folder, 1)
        assert names_in(folder) == [checkpoint.name]
        # What a link led to is the user's.
        assert fault_of(tmp_path / "elsewhere") is None
        for path in (folder, tmp_path / "elsewhere"):
            shutil.rmtree(path)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), RuntimeError("other")])
@pytest.mark.parametrize("update", [2, 1])
def test_a_write_that_fails_leaves_what_was_there(tmp_path, error, update):
    earlier = write_checkpoint(tmp_path, 1, write_files)
    before = {path.name: path.read_bytes() for path in earlier.iterdir()}

    def fail(folder):
        (folder / "config.json").write_text("half")
        raise error

    with pytest.raises(type(error)) as caught:
        write_checkpoint(tmp_path, update, fail)
    assert caught.value is error
    assert names_in(tmp_path) == [earlier.name]
    assert {path.name: path.read_bytes() for path in earlier.iterdir()} == before
    assert newest_sound(tmp_path, pytest.fail) == earlier


def test_while_it_is_written_a_checkpoint_is_not_listed(tmp_path):
    listed = []

    def write(folder):
        write_files(folder)
        listed.extend(list_checkpoints(tmp_path))

    checkpoint = write_checkpoint(tmp_path, 1, write)
    assert listed == [] and list_checkpoints(tmp_path) == [checkpoint]


def test_what_an_interrupted_write_left_does_not_reach_the_next_checkpoint(tmp_path):
    leftover = tmp_path / f"partial-{checkpoint_name(3)}"
    leftover.mkdir()
    (leftover / "model.safetensors").write_text("half")
    assert list_checkpoints(tmp_path) == []
    assert newest_sound(tmp_path, pytest.fail) is None
    (leftover / "other.safetensors").write_text("half")
    checkpoint = write_checkpoint(tmp_path, 3, write_files)
    assert names_in(checkpoint) == sorted([*FILES, "manifest.json"])
    assert fault_of(checkpoint) is None


# Verifying


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_damage_is_named_and_an_older_checkpoint_used(tmp_path, name, damage):
    sound, damaged = (write_checkpoint(tmp_path, update, write_files) for update in (1, 2))
    DAMAGES[damage](damaged / name)
    fault = fault_of(damaged)
    assert fault.startswith(name)
    messages = []
    assert newest_sound(tmp_path, messages.append) == sound
    assert messages == [f"{damaged} is damaged ({fault}) and passed over."]


@pytest.mark.parametrize(
    "content",
    [
        None,
        *(b"", b"{", b"{}", b"[1]", b'"text"', b'{"config.json": 1}', b"\xff\xfe", b"null"),
        *(json.dumps(dict.fromkeys(FILES, entry)).encode() for entry in (1, {}, None, "text", [])),
    ],
)
def test_a_manifest_that_says_nothing_is_damage(tmp_path, content):
    sound, damaged = (write_checkpoint(tmp_path, update, write_files) for update in (1, 2))
    (damaged / "manifest.json").unlink()
    if content is not None:
        (damaged / "manifest.json").write_bytes(content)
    assert re.match(r"manifest\.json (cannot be read|does not state)", fault_of(damaged))
    messages = []
    assert newest_sound(tmp_path, messages.append) == sound
    assert len(messages) == 1 and str(damaged) in messages[0]


def test_a_manifest_without_files_is_damage(tmp_path):
    checkpoint = write_checkpoint(tmp_path, 1, write_files)
    (checkpoint / "manifest.json").write_text("{}")
    assert fault_of(checkpoint) == "manifest.json does not state config.json"


def test_every_flipped_bit_of_a_manifests_digits_is_damage(tmp_path):
    checkpoint = write_checkpoint(tmp_path, 1, write_files)
    manifest = checkpoint / "manifest.json"
    content = manifest.read_bytes()
    for position, byte in enumerate(content):
        if chr(byte).isalnum():
            manifest.write_bytes(content[:position] + bytes([byte ^ 1]) + content[position + 1 :])
            assert fault_of(checkpoint) is not None, position
    manifest.write_bytes(content)
    assert fault_of(checkpoint) is None


def test_the_manifest_states_size_and_digest_of_every_other_file(tmp_path):
    checkpoint = write_checkpoint(tmp_path, 1, write_files)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert manifest.keys() == FILES.keys()
    assert {name: entry["size"] for name, entry in manifest.items()} == {n: len(c) for n, c in FILES.items()}
    assert len({entry["sha256"] for entry in manifest.values()}) == len(FILES)


def test_a_file_that_the_disk_does_not_give_back_is_named(tmp_path, monkeypatch):
    checkpoint = write_checkpoint(tmp_path, 1, write_files)
    opened = Path.open

    def fail(path, *args, **kwargs):
        if path.name == "model.safetensors":
            raise OSError(5, "Input/output error")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", fail)
    assert fault_of(checkpoint) == "model.safetensors cannot be read (Input/output error)"


def test_damage_to_all_checkpoints_is_told_not_passed_over(tmp_path):
    for update in (1, 2, 3):
        flip_bit(write_checkpoint(tmp_path, update, write_files) / "model.safetensors")
    messages = []
    with pytest.raises(UserError, match=r"Every checkpoint in .* is damaged; start again in another `output_dir`"):
        newest_sound(tmp_path, messages.append)
    assert [checkpoint_name(update) in message for update, message in zip((3, 2, 1), messages, strict=True)] == [
        True
    ] * 3


def test_a_folder_without_checkpoints_has_no_newest(tmp_path):
    assert newest_sound(tmp_path, pytest.fail) is None
    assert newest_sound(tmp_path / "absent", pytest.fail) is None


# Rotation


@pytest.mark.parametrize("keep", [1, 2, 4, 5, 9])
def test_rotation_keeps_the_newest(tmp_path, keep):
    for update in (9, 10, 100, 1000, 99):
        write_checkpoint(tmp_path, update, write_files)
    rotate(tmp_path, keep)
    assert [update_of(path) for path in list_checkpoints(tmp_path)] == [9, 10, 99, 100, 1000][-keep:]
    assert len(names_in(tmp_path)) == min(keep, 5)
    assert all(fault_of(checkpoint) is None for checkpoint in list_checkpoints(tmp_path))


def test_rotation_removes_what_interrupted_writes_left_and_nothing_else(tmp_path):
    checkpoint = write_checkpoint(tmp_path, 1, write_files)
    (tmp_path / "partial-update-00000002").mkdir()
    (tmp_path / "partial-update-00000002" / "model.safetensors").write_text("half")
    (tmp_path / "notes").mkdir()
    rotate(tmp_path, 3)
    assert names_in(tmp_path) == ["notes", checkpoint.name]


# The optimiser


class Network(nn.Module):
    """Two layers, of which one is used by two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 5)
        self.tied = self.first

    def forward(self, inputs):
        return self.second(torch.tanh(self.tied(inputs)))


def adam(network: nn.Module, fused: bool) -> torch.optim.Adam:
    return torch.optim.Adam(network.parameters(), lr=1e-2, betas=(0.9, 0.98), eps=1e-9, fused=fused)


def steps(network: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last + 1):
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        network(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("fused", [True, False])
def test_adam_goes_on_bit_for_bit_after_saving_and_loading(tmp_path, fused):
    torch.manual_seed(0)
    whole = Network()
    initial = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    steps(whole, adam(whole, fused), 1, 9)

    first = Network()
    first.load_state_dict(initial)
    optimizer = adam(first, fused)
    steps(first, optimizer, 1, 4)
    save_file(moments_of(optimizer, first.named_parameters()), tmp_path / "optimizer.safetensors")

    second = Network()
    second.load_state_dict(first.state_dict())
    resumed = adam(second, fused)
    load_optimizer(resumed, second.named_parameters(), tmp_path / "optimizer.safetensors", 4)
    for (_, ours), (_, theirs) in zip(second.named_parameters(), first.named_parameters(), strict=True):
        assert resumed.state[ours].keys() == optimizer.state[theirs].keys()
        for key, value in optimizer.state[theirs].items():
            assert torch.equal(resumed.state[ours][key], value)
            assert resumed.state[ours][key].dtype == value.dtype
    steps(second, resumed, 5, 9)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(second.state_dict()[name], tensor), name

    # The moments matter: an optimiser that starts anew arrives elsewhere.
    forgetful = Network()
    forgetful.load_state_dict(first.state_dict())
    steps(forgetful, adam(forgetful, fused), 5, 9)
    assert not torch.equal(forgetful.first.weight, whole.first.weight)


def test_an_optimisers_file_is_part_of_a_checkpoint(tmp_path):
    network = Network()
    optimizer = adam(network, fused=False)
    steps(network, optimizer, 1, 2)

    def write(folder):
        write_files(folder)
        save_file(moments_of(optimizer, network.named_parameters()), folder / "optimizer.safetensors")

    checkpoint = write_checkpoint(tmp_path, 2, write)
    assert fault_of(checkpoint) is None
    truncate(checkpoint / "optimizer.safetensors")
    assert fault_of(checkpoint).startswith("optimizer.safetensors has ")
