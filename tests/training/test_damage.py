"""Whatever happens to a checkpoint's files, a run is resumed from the newest one that is as it was written."""

import json
import random
import shutil
from pathlib import Path

import pytest
from runs import assert_same_run, train_anew
from safetensors import safe_open

from vanilla_transformer.training.records.checkpoints import fault_of, list_checkpoints, newest_sound, update_of


@pytest.fixture(scope="module")
def trained(make_options, tmp_path_factory):
    """A run with sound checkpoints of the updates 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("trained")
    train_anew(make_options(folder, max_updates=6, save_every=2))
    return folder


@pytest.fixture
def run(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / "run"))


def flip(position: float, bit: int = 0):
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[min(int(position * len(content)), len(content) - 1)] ^= 1 << bit
        path.write_bytes(content)

    return damage


def truncate(share: float):
    return lambda path: path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def exchange(replace):
    def damage(path: Path) -> None:
        path.unlink()
        replace(path)

    return damage


def fill_with_zeros(path: Path) -> None:
    # What a machine that lost its power may leave of a file whose size was written, and whose content was not.
    path.write_bytes(bytes(path.stat().st_size))


DAMAGES = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "zeros": fill_with_zeros,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "a folder": exchange(Path.mkdir),
    "a link to nothing": exchange(lambda path: path.symlink_to("nothing")),
    "a link to itself": exchange(lambda path: path.symlink_to(path)),
    "a link to a folder": exchange(lambda path: path.symlink_to(path.parent)),
    **{f"cut at {share:.0%}": truncate(share) for share in (0.01, 0.3, 0.5, 0.9, 0.999)},
    **{f"bit {bit} flipped at {place:.0%}": flip(place, bit) for place in (0, 0.1, 0.5, 1) for bit in (0, 5, 7)},
}


def files_of(checkpoint: Path) -> list[str]:
    return sorted(path.name for path in checkpoint.iterdir())


def chosen(run: Path) -> tuple[int, list[str]]:
    """The update that a run would be resumed from, and what the user is told."""
    messages = []
    return update_of(newest_sound(run / "checkpoints", messages.append)), messages


def test_all_state_is_safetensors_and_json(trained):
    for checkpoint in list_checkpoints(trained / "checkpoints"):
        for path in checkpoint.iterdir():
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt") as file:
                    assert file.keys()
            else:
                assert path.suffix == ".json"
                assert json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_any_file_is_found_and_named(run, damage):
    checkpoints = run / "checkpoints"
    newest = checkpoints / "update-00000006"
    aside = Path(shutil.copytree(newest, run / "aside"))
    assert chosen(run) == (6, [])
    assert len(files_of(newest)) >= 8
    for name in files_of(newest):
        DAMAGES[damage](newest / name)
        fault = fault_of(newest)
        # A manifest with a wrong digest accuses another file.
        assert fault is not None and (fault.startswith(name) or name == "manifest.json")
        assert chosen(run) == (4, [f"{newest} is damaged ({fault}) and passed over."])
        shutil.rmtree(newest)
        shutil.copytree(aside, newest)
    assert chosen(run) == (6, [])


def test_no_length_of_a_file_but_its_own_is_sound(run):
    checkpoint = run / "checkpoints" / "update-00000006"
    generator = random.Random(0)
    for name in files_of(checkpoint):
        content = (checkpoint / name).read_bytes()
        for length in [0, 1, len(content) - 1, *(generator.randrange(len(content)) for _ in range(15))]:
            (checkpoint / name).write_bytes(content[:length])
            assert fault_of(checkpoint) is not None, (name, length)
        (checkpoint / name).write_bytes(content)
    assert fault_of(checkpoint) is None


def test_a_manifest_must_state_what_a_run_is_resumed_from(run):
    checkpoint = run / "checkpoints" / "update-00000006"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    used = {"config.json", "model.safetensors", "optimizer.safetensors", "training_state.json"}
    assert used < manifest.keys()
    incomplete = [{}, *({name: entry for name, entry in manifest.items() if name != left_out} for left_out in used)]
    for content in incomplete:
        (checkpoint / "manifest.json").write_text(json.dumps(content))
        missing = next(name for name in sorted(used) if name not in content)
        assert fault_of(checkpoint) == f"manifest.json does not state {missing}"
        assert chosen(run)[0] == 4
    other = run / "checkpoints" / "update-00000004" / "manifest.json"
    shutil.copy(other, checkpoint)
    assert fault_of(checkpoint).endswith("was changed after it was written")


def test_what_a_user_adds_is_no_damage(run):
    checkpoint = run / "checkpoints" / "update-00000006"
    (checkpoint / "notes.txt").write_text("the best one so far")
    (checkpoint / ".DS_Store").write_bytes(b"\x00")
    (checkpoint / "evaluation").mkdir()
    # The same file elsewhere, as a disk that ran full suggests.
    (checkpoint / "optimizer.safetensors").rename(run / "optimizer.safetensors")
    (checkpoint / "optimizer.safetensors").symlink_to(run / "optimizer.safetensors")
    assert chosen(run) == (6, [])


def test_the_newest_sound_one_is_used_whatever_else_is_damaged(run):
    folder, aside = run / "checkpoints", run / "aside"
    shutil.copytree(folder, aside)
    generator = random.Random(0)
    seen = set()
    for _ in range(60):
        damaged = {}
        for checkpoint in list_checkpoints(folder):
            if generator.random() < 0.5:
                name, damage = generator.choice(files_of(checkpoint)), generator.choice(list(DAMAGES))
                DAMAGES[damage](checkpoint / name)
                damaged[update_of(checkpoint)] = name
        sound = max({2, 4, 6} - damaged.keys(), default=None)
        if sound is not None:
            update, messages = chosen(run)
            assert update == sound
            passed_over = [update for update in (6, 4, 2) if update > sound]
            for number, message in zip(passed_over, messages, strict=True):
                assert message.startswith(f"{folder / f'update-{number:08d}'} is damaged ({damaged[number]} ")
        seen.add((sound, len(damaged)))
        shutil.rmtree(folder)
        shutil.copytree(aside, folder)
    assert {sound for sound, _ in seen} == {None, 2, 4, 6}


def test_a_run_resumed_beside_damage_ends_as_if_there_were_none(run, make_options, tmp_path, capsys):
    empty, beyond = (run / "checkpoints" / f"update-{update:08d}" for update in (6, 8))
    (empty / "manifest.json").write_text("{}")
    beyond.write_text("a file where a folder was")
    options = {"max_updates": 9, "save_every": 2}
    train_anew(make_options(run, **options, resume=True))
    messages = capsys.readouterr().err
    assert f"{beyond} is damaged (manifest.json cannot be read (Not a directory)) and passed over." in messages
    assert f"{empty} is damaged (manifest.json does not state config.json) and passed over." in messages
    assert f"Resuming from {run / 'checkpoints' / 'update-00000004'}." in messages
    train_anew(make_options(tmp_path / "whole", **options))
    assert_same_run(run, tmp_path / "whole")
    assert not list(run.rglob("*partial*"))


def test_a_checkpoint_that_was_damaged_later_is_not_part_of_the_result(run, make_options, capsys):
    flip(0.9)(run / "checkpoints" / "update-00000004" / "model.safetensors")
    train_anew(make_options(run, max_updates=6, save_every=2, average_last=3, resume=True))
    messages = capsys.readouterr().err
    assert "update-00000004 is damaged (model.safetensors was changed after it was written)" in messages
    assert f"The model in {run} is the mean of the checkpoints of updates 2, 6." in messages
