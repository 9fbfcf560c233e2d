import os
from pathlib import Path

import pytest

from vanilla_transformer.errors import UserError
from vanilla_transformer.training.options import TrainingOptions
from vanilla_transformer.training.preparation.output_folder import (
    MODEL_FILES,
    check_decodable,
    check_output_dir,
    check_writable,
)


def test_an_output_folder_is_made_with_its_parents_and_left_empty(tmp_path):
    folder = tmp_path / "a" / "b"
    check_writable(folder)
    check_writable(folder)
    assert list(folder.iterdir()) == []


def test_what_stands_in_an_output_folder_is_left_alone(tmp_path):
    (tmp_path / "notes").write_text("mine")
    check_writable(tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_a_file_is_no_output_folder(tmp_path):
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(UserError, match="file is a file; give a folder for the output"):
        check_writable(path)
    with pytest.raises(UserError, match=r"inside cannot be written \(Not a directory\); choose another folder"):
        check_writable(path / "inside")
    assert path.read_text() == "mine"


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX permissions")
@pytest.mark.parametrize("mode", [0o000, 0o500])
@pytest.mark.parametrize("inside", [False, True])
def test_a_folder_without_permission_is_refused(tmp_path, mode, inside, ordinary_user):
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "output" if inside else folder
    folder.chmod(mode)
    try:
        with (
            ordinary_user(),
            pytest.raises(UserError, match=r"cannot be written \(Permission denied\); .*permissions"),
        ):
            check_writable(path)
    finally:
        folder.chmod(0o700)


RUN_FILES = [*MODEL_FILES, "run.json", "options.yaml", "metrics.jsonl", "samples.jsonl", "trackers.json"]


@pytest.mark.parametrize("name", [*RUN_FILES, "tensorboard"])
def test_what_no_run_wrote_is_not_overwritten(tmp_path, name):
    if name == "tensorboard":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text('{"mine": true}')
    with pytest.raises(UserError, match=rf"{name}, which would be overwritten|already holds a run"):
        check_output_dir(TrainingOptions(output_dir=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_what_a_run_left_that_was_never_saved_is_written_anew(tmp_path):
    for name in RUN_FILES[len(MODEL_FILES) :]:
        (tmp_path / name).write_text("{}")
    (tmp_path / "run.json").write_text('{"fingerprints": {}}')
    check_output_dir(TrainingOptions(output_dir=tmp_path))
    # No run without checkpoints has a result.
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"holds config\.json, which would be overwritten; .* move it away"):
        check_output_dir(TrainingOptions(output_dir=tmp_path))


def test_a_link_that_leads_nowhere_is_no_output_folder(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="link is a link that leads nowhere; give a folder"):
        check_writable(tmp_path / "link")


@pytest.mark.skipif(os.name != "posix", reason="needs names that are bytes")
def test_a_folder_whose_name_is_not_utf8_is_refused(tmp_path):
    with pytest.raises(UserError, match="is not UTF-8; rename the folder"):
        check_decodable(Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")))
    assert list(tmp_path.iterdir()) == []
