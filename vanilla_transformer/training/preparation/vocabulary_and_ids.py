"""From training options to vocabulary, encoded text and model configuration."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedTokenizerBase

from vanilla_transformer import loading
from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.data.bpe_dropout import DropoutCorpus, MergeTable
from vanilla_transformer.data.cached_folders import write_whole
from vanilla_transformer.data.corpora import PairSource, Rejections
from vanilla_transformer.data.encoding import (
    EncodedCorpus,
    PairEncoder,
    encode,
    fingerprint_of_text,
    iterate_texts,
    nothing_usable,
)
from vanilla_transformer.data.streams import StreamCorpus
from vanilla_transformer.errors import UserError
from vanilla_transformer.tokenization_vanilla_transformer import SMALLEST_VOCABULARY, VanillaTransformerTokenizer
from vanilla_transformer.training.cpu.memory import return_freed_memory
from vanilla_transformer.training.options import TrainingOptions

from .model_size import check_size
from .output_folder import check_decodable, check_writable
from .texts import open_texts
from .warm_start import check_vocabulary, starting_configuration, starting_folder


@dataclass(frozen=True, slots=True)
class PreparedData:
    """The vocabulary and the encoded text of a training run; `valid` is `None` without validation text."""

    tokenizer: PreTrainedTokenizerBase
    train: EncodedCorpus | DropoutCorpus | StreamCorpus
    valid: EncodedCorpus | None


def prepare(options: TrainingOptions, cache_dir: Path, *, show_progress: bool = False) -> PreparedData:
    """Train or load the vocabulary and encode the text, or reuse the results of an earlier call in `cache_dir`.

    Args:
        options: Training options; `check_texts` has accepted their text.
        cache_dir: Folder for the vocabulary and the encoded text.
        show_progress: Whether to draw progress bars.

    Returns:
        Vocabulary and encoded text.

    Raises:
        UserError: The text, the size of the vocabulary, the hyper-parameters or the folder cannot be used.
    """
    check_decodable(cache_dir)
    check_writable(cache_dir, "the encoded text")
    train_text, valid_text = open_texts(options)
    start = starting_folder(options)
    if start is None:
        # Checked before the vocabulary is trained, which takes minutes; a given tokenizer may have the smallest size.
        size = SMALLEST_VOCABULARY if options.tokenizer is not None else max(options.vocab_size, SMALLEST_VOCABULARY)
        check_size(_configuration(options, size))
    if options.tokenizer is not None or start is not None:
        tokenizer = load_tokenizer(options.tokenizer or start)
        if options.language_tags and not getattr(tokenizer, "language_tags", None):
            raise UserError(
                f"The tokenizer in {options.tokenizer or start} has no language tags; train the vocabulary with "
                "`language_tags`, or leave them out."
            )
    else:
        tokenizer = train_vocabulary(train_text, options, cache_dir)
    if start is not None:
        check_vocabulary(starting_configuration(options, start), tokenizer, start)
    encoding = {
        "max_length": options.max_length,
        "language_tags": options.language_tags,
        "target_language": options.target_language,
    }
    handling = {"invalid_pairs": options.invalid_pairs, "show_progress": show_progress}
    if options.streaming:
        train = StreamCorpus(
            train_text, PairEncoder(tokenizer, **encoding), options.stream_window, options.invalid_pairs
        )
    elif options.bpe_dropout > 0.0:
        table = MergeTable(tokenizer)
        base = encode(train_text, tokenizer, cache_dir, **encoding, **handling, mark_words=True)
        train = DropoutCorpus(
            base, table, cache_dir, dropout=options.bpe_dropout, seed=options.seed, max_length=options.max_length
        )
    else:
        train = encode(train_text, tokenizer, cache_dir, **encoding, **handling)
    valid = None
    if valid_text is not None:
        valid = encode(valid_text, tokenizer, cache_dir, **encoding, **handling)
    if options.language_tags and options.target_language is not None:
        # Sources to translate later get the same tag as the training text.
        tokenizer.tgt_lang = options.target_language
    # Longer texts were never seen in training.
    tokenizer.model_max_length = options.max_length
    return PreparedData(tokenizer, train, valid)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a local folder.

    Args:
        folder: Folder with `tokenizer.json`.

    Returns:
        The tokenizer.

    Raises:
        UserError: The folder holds no tokenizer, or the tokenizer lacks a token that translation needs.
    """
    if not (folder / "tokenizer.json").is_file():
        raise UserError(
            f"{folder} holds no tokenizer.json; give a folder that `vanilla-transformer tokenizer` or `train` wrote."
        )
    tokenizer = loading.load_tokenizer(folder)
    if getattr(tokenizer, "tgt_lang", None) is not None:
        # `PairEncoder` adds the tag of each pair.
        tokenizer.tgt_lang = None
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(tokenizer, name) is None:
            raise UserError(f"The tokenizer in {folder} has no {name}; use one that defines it.")
    if tokenizer("")["input_ids"][-1:] != [tokenizer.eos_token_id]:
        raise UserError(f"The tokenizer in {folder} does not append its end-of-sentence token; use one that does.")
    return tokenizer


def model_configuration(options: TrainingOptions, tokenizer: PreTrainedTokenizerBase) -> VanillaTransformerConfig:
    """Build the configuration that the options describe.

    Args:
        options: Training options.
        tokenizer: Gives the vocabulary's size and the special tokens.

    Returns:
        The configuration.

    Raises:
        UserError: The hyper-parameters do not fit together, or the model does not fit into memory.
    """
    config = _configuration(
        options,
        len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.bos_token_id,
    )
    check_positions(config, options)
    check_size(config)
    return config


def _configuration(options: TrainingOptions, vocab_size: int, **special_tokens: int) -> VanillaTransformerConfig:
    try:
        return VanillaTransformerConfig(vocab_size=vocab_size, **{**special_tokens, **options.model_settings()})
    except StrictDataclassError as error:
        raise UserError(str(error.__cause__ or error)) from error


def check_positions(config: VanillaTransformerConfig, options: TrainingOptions) -> None:
    """Refuse fewer learned positions than `max_length`.

    Args:
        config: Configuration of the model.
        options: Training options.

    Raises:
        UserError: As said.
    """
    if config.position_embedding_type == "learned" and config.max_position_embeddings < options.max_length:
        raise UserError(
            f"`max_position_embeddings` is {config.max_position_embeddings}, but sentences may have `max_length` "
            f"{options.max_length} tokens; raise the first or lower the second."
        )


def train_vocabulary(text: PairSource, options: TrainingOptions, cache_dir: Path) -> VanillaTransformerTokenizer:
    """Train the vocabulary that the options describe, or load the one that an earlier call trained.

    Args:
        text: Training text.
        options: Training options.
        cache_dir: Folder for the vocabulary.

    Returns:
        The tokenizer.

    Raises:
        UserError: The size of the vocabulary cannot be used, or a pair is refused.
    """
    choices = [options.vocab_size, options.min_frequency, options.vocabulary_pairs]
    languages = _target_languages(text, options) if options.language_tags else []
    if languages:
        choices.append(languages)
    folder = cache_dir / f"vocabulary-{fingerprint_of_text(text, choices)}"

    def write(partial: Path) -> None:
        _learn_vocabulary(text, options, languages).save_pretrained(partial)
        return_freed_memory()

    write_whole(folder, write)
    return VanillaTransformerTokenizer.from_pretrained(folder)


def _learn_vocabulary(text: PairSource, options: TrainingOptions, languages: list[str]) -> VanillaTransformerTokenizer:
    rejections, num_texts = Rejections(options.invalid_pairs), 0

    def texts() -> Iterator[str]:
        nonlocal num_texts
        for each in iterate_texts(text, rejections, num_pairs=options.vocabulary_pairs):
            num_texts += 1
            yield each

    try:
        return VanillaTransformerTokenizer.train_from_iterator(
            texts(), options.vocab_size, min_frequency=options.min_frequency, languages=languages
        )
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        # Dropped pairs may be the reason.
        if num_texts == 0 and rejections.counts:
            raise nothing_usable(text, rejections.counts.total(), rejections) from error
        told = f"Of the training text, {rejections.summary()}. Of the rest: " if rejections.counts else ""
        raise UserError(f"{told}{error}") from error


def _target_languages(text: PairSource, options: TrainingOptions) -> list[str]:
    """The target languages of the text, sorted."""
    if options.language_column is None:
        return [options.target_language]
    pairs = text.tagged_pairs(Rejections(options.invalid_pairs))
    if options.streaming:
        pairs = islice(pairs, options.vocabulary_pairs)
    return sorted({pair.language or options.target_language for pair in pairs} - {None, ""})
