from vanilla_transformer.training.checkpoints import list_checkpoints


def test_averaging_more_checkpoints_than_there_are(refused, run_folder, tmp_path):
    assert "holds 2 checkpoints, and --last is 3" in refused(
        "average", run_folder, "--last", "3", "--output_dir", tmp_path / "mean"
    )
    assert not (tmp_path / "mean").exists()
    assert "No checkpoint was given" in refused("average")
    assert "--last is 0" in refused("average", run_folder, "--last", "0")


def test_an_average_in_place_of_a_checkpoint(refused, run_folder, contents):
    before = contents(run_folder)
    first, last = list_checkpoints(run_folder / "checkpoints")
    refused("average", first, last, "--output_dir", last)
    assert contents(run_folder) == before
