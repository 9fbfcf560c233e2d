"""Tests of the text that options name."""

from pathlib import Path

import pytest

from vanilla_transformer.errors import UserError
from vanilla_transformer.training.options import TrainingOptions
from vanilla_transformer.training.preparation.texts import check_texts


SENTENCES = tuple(Path(__file__).parents[2] / "data" / f"sentences.{language}" for language in ("en", "de"))


def options(**values) -> TrainingOptions:
    return TrainingOptions(**{"train_files": SENTENCES, **values})


def test_texts_are_checked_before_any_work(tmp_path, part):
    train, valid = check_texts(options())
    assert train.files == SENTENCES and valid is None
    files = part("valid", slice(30, None))
    assert check_texts(options(valid_files=files))[1].files == files
    with pytest.raises(UserError, match="absent does not exist"):
        check_texts(options(valid_files=(tmp_path / "absent", files[1])))
    files[1].write_text("only one line\n")
    with pytest.raises(UserError, match=r"10 lines and .* has 1;"):
        check_texts(options(valid_files=files))


def test_languages_in_opposite_order_are_refused(tmp_path, part):
    with pytest.raises(UserError, match="are in opposite order"):
        check_texts(options(valid_files=part("valid", slice(0, 10), (1, 0))))
    with pytest.raises(UserError, match="declared as de to en"):
        check_texts(options(source_language="de", target_language="en"))


@pytest.mark.parametrize(
    ("files", "values", "sentence"),
    [
        (("a.jsonl", "b.jsonl"), {}, "a.jsonl holds both sides of its pairs; give it alone"),
        (("a.jsonl.gz",), {"tsv_columns": (1, 2)}, "`tsv_columns` was given with .*, which is not tab-separated"),
        (("a.tmx",), {}, "a.tmx holds several languages; choose two with `source_language` and `target_language`"),
        (("a.tsv",), {"pair_keys": ("a", "b")}, "`pair_keys` was given with .*a.tsv; it applies to JSON lines"),
        (("a.tsv",), {"language_column": "x"}, "`language_column` is x; in a tab-separated file it is the number"),
        (("a.tmx",), {"language_column": "x"}, "a TMX file has `target_language` only"),
    ],
)
def test_options_that_a_kind_of_file_does_not_have_are_refused(tmp_path, files, values, sentence):
    for name in files:
        (tmp_path / name).write_bytes(b"x\n")
    with pytest.raises(UserError, match=sentence):
        check_texts(options(train_files=tuple(tmp_path / name for name in files), **values))
