import os

import pytest

from vanilla_transformer.errors import UserError
from vanilla_transformer.training.output_folder import check_writable


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
