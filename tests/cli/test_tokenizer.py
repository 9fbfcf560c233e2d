def test_a_vocabulary_in_place_of_a_models(refused, run_folder, corpus, contents):
    before = contents(run_folder)
    refused("tokenizer", *corpus, "--vocab_size", "300", "--output_dir", run_folder)
    assert contents(run_folder) == before


def test_text_for_a_vocabulary_that_cannot_be_read(refused, tmp_path):
    latin = tmp_path / "latin.de"
    latin.write_bytes("Haus\nStraße\n".encode("latin-1"))
    output = ["--vocab_size", "261", "--output_dir", tmp_path / "tokenizer"]
    assert f"{latin}, line 2, byte 5: the text is not UTF-8" in refused("tokenizer", latin, *output)
    assert "No text was given" in refused("tokenizer", *output)
    assert f"{tmp_path / 'nosuch'} does not exist" in refused("tokenizer", tmp_path / "nosuch", *output)
    assert not (tmp_path / "tokenizer" / "tokenizer.json").exists()
