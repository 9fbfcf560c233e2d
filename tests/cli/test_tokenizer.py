def test_a_vocabulary_in_place_of_a_models(refused, run_folder, corpus, contents):
    before = contents(run_folder)
    refused("tokenizer", *corpus, "--vocab_size", "300", "--output_dir", run_folder)
    assert contents(run_folder) == before


def test_text_for_a_vocabulary_that_cannot_be_read(refused, tmp_path, write):
    latin = tmp_path / "latin.de"
    latin.write_bytes("Haus\nStraße\n".encode("latin-1"))
    output = ["--vocab_size", "261", "--output_dir", tmp_path / "tokenizer"]
    assert f"{latin}, line 2, byte 5: the text is not UTF-8" in refused("tokenizer", latin, *output)
    empty = write(tmp_path / "empty.de")
    assert f"{empty} is empty" in refused("tokenizer", empty, *output)
    assert "No text was given" in refused("tokenizer", *output)
    assert f"{tmp_path / 'nosuch'} does not exist" in refused("tokenizer", tmp_path / "nosuch", *output)
    assert not (tmp_path / "tokenizer" / "tokenizer.json").exists()


def test_the_mark_and_line_ends_of_windows_are_not_learned(call, tmp_path):
    lines, vocabularies = ["house", "houses", "mouse"] * 9, []
    for name, text in (("unix", "\n".join(lines)), ("windows", "\ufeff" + "\r\n".join(lines))):
        # Every file begins with the mark.
        files = [tmp_path / f"{name}-{number}" for number in range(3)]
        for path in files:
            path.write_bytes(text.encode())
        assert (
            call("tokenizer", *files, "--vocab_size", "265", "--output_dir", tmp_path / f"{name}-vocabulary")[0] == 0
        )
        vocabularies.append((tmp_path / f"{name}-vocabulary" / "tokenizer.json").read_text(encoding="utf-8"))
    assert vocabularies[0] == vocabularies[1]
