from vanilla_transformer.training.records.checkpoints import list_checkpoints


def test_averaging_more_checkpoints_than_there_are(refused, run_folder, tmp_path):
    assert "holds 2 checkpoints that can be averaged, and --last is 3" in refused(
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


def test_an_average_in_place_of_another_model(call, refused, run_folder, tmp_path, contents):
    output = ["--last", "2", "--output_dir", tmp_path / "mean"]
    assert call("average", run_folder, *output)[0] == 0
    before = contents(tmp_path)
    assert f"{tmp_path / 'mean'} holds config.json" in refused("average", run_folder, *output)
    refused("average", run_folder, "--last", "2", "--output_dir", run_folder)
    assert contents(tmp_path) == before
