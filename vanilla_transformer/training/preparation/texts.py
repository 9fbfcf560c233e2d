"""Opens and checks the training and validation text that the options name."""

from pathlib import Path

from vanilla_transformer.data.corpora import (
    PairSource,
    ParallelText,
    check_language_order,
    check_language_suffixes,
)
from vanilla_transformer.data.records import DataSet, JsonLines, PairKeys
from vanilla_transformer.data.tmx import TranslationMemory
from vanilla_transformer.errors import UserError
from vanilla_transformer.training.options import TrainingOptions


def open_texts(options: TrainingOptions) -> tuple[PairSource, PairSource | None]:
    """Open training and validation text without reading it.

    Args:
        options: Training options.

    Returns:
        Training text, and validation text or `None`.

    Raises:
        UserError: Options do not apply to the kind of text.
    """
    train = _open_text(options, options.train_files, options.train_split)
    valid = None
    if options.valid_files or options.valid_split is not None:
        valid = _open_text(options, options.valid_files, options.valid_split)
    return train, valid


def check_texts(options: TrainingOptions) -> tuple[PairSource, PairSource | None]:
    """Check the text before any work starts; this reads all of it.

    Args:
        options: Training options.

    Returns:
        As `open_texts`.

    Raises:
        UserError: Text is missing or empty, parallel files differ in length, or languages are exchanged.
    """
    train, valid = open_texts(options)
    for text in (train, valid):
        if text is not None:
            check_language_suffixes(text, options.source_language, options.target_language)
            text.check_lines()
    if valid is not None and options.language_column is None:
        check_language_order(train, valid)
    return train, valid


def _open_text(options: TrainingOptions, files: tuple[Path, ...], split: str | None) -> PairSource:
    languages = (options.source_language, options.target_language)
    fields = PairKeys(options.pair_keys, None if None in languages else languages, options.language_column)
    if not files:
        return DataSet(
            options.dataset, split, fields, options.dataset_config, options.dataset_revision, options.streaming
        )
    formats = [Path(path.name.removesuffix(".gz")).suffix.lower() for path in files]
    for path, suffix in zip(files, formats, strict=True):
        if suffix in (".jsonl", ".tmx") and len(files) > 1:
            raise UserError(f"{path} holds both sides of its pairs; give it alone.")
        if suffix in (".jsonl", ".tmx") and options.tsv_columns is not None:
            raise UserError(f"`tsv_columns` was given with {path}, which is not tab-separated; leave it out.")
    if formats == [".jsonl"]:
        return JsonLines(files, fields)
    if formats == [".tmx"]:
        if options.language_column is not None:
            raise UserError(f"`language_column` was given with {files[0]}; a TMX file has `target_language` only.")
        if None in languages:
            raise UserError(
                f"{files[0]} holds several languages; choose two with `source_language` and `target_language`."
            )
        return TranslationMemory(files, languages)
    if options.pair_keys is not None:
        raise UserError(f"`pair_keys` was given with {files[0]}; it applies to JSON lines (.jsonl) and data sets.")
    column = options.language_column
    # `int` refuses numbers of thousands of digits.
    if column is not None and not (column.isdecimal() and len(column) < 10):
        raise UserError(f"`language_column` is {column}; in a tab-separated file it is the number of a column.")
    return ParallelText(files, options.tsv_columns, None if column is None else int(column))
