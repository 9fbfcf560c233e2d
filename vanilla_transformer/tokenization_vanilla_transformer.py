"""The vocabulary that source and target share: byte-level byte-pair encoding (§5.1 uses a shared BPE vocabulary)."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers.tokenization_utils_base import BatchEncoding
from transformers.tokenization_utils_tokenizers import TokenizersBackend


SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>", "<mask>")
SMALLEST_VOCABULARY = len(SPECIAL_TOKENS) + 256
# More than the largest vocabularies in use have. Room is made for all entries at once, and without it the process
# would be aborted.
LARGEST_VOCABULARY = 1 << 20


class VanillaTransformerTokenizer(TokenizersBackend):
    """Byte-level BPE without a normaliser: every string without lone surrogates comes back from its ids unchanged.

    Ids 0 to 4 are `<pad>`, `<s>`, `</s>`, `<unk>` and `<mask>`, the next 256 are the bytes. A text ends with `</s>`.

    What steers the model stays text when a text holds its name: `<pad>`, `<s>`, `</s>`, `<unk>` and languages' tags.
    `<mask>` and every token that is added later, special or not, are found in texts. `skip_special_tokens` leaves out
    special tokens but not `<mask>`, which stands for a word.

    A vocabulary may have tags such as `<2de>`, one for each target language, behind its other entries. While
    `tgt_lang` names a language, sources begin with its tag (Johnson et al., 2017).

    Args:
        vocab: Mapping of tokens to ids; `None` means the special tokens and the 256 bytes.
        merges: Pairs of tokens in the order in which they were learned.
        pad_token: Padding.
        bos_token: What the decoder starts from.
        eos_token: The end of a source or target.
        unk_token: Never produced by this vocabulary, which knows all bytes.
        mask_token: Stands for a hidden token in masked language modelling.
        add_eos_token: Whether `</s>` is appended to every text. `None` means yes, or what was saved with a vocabulary.
        split_special_tokens: Whether names inside a text stay text as said above; `False` finds all special tokens.
        tgt_lang: Code of the language whose tag sources begin with; `None` for no tag.
        **kwargs: Options that every `TokenizersBackend` has.

    Example:
        >>> from vanilla_transformer import VanillaTransformerTokenizer
        >>> tokenizer = VanillaTransformerTokenizer()
        >>> batch = tokenizer(["a"], text_target=["b"])
        >>> batch["input_ids"], batch["labels"]
        ([[69, 2]], [[70, 2]])
        >>> tokenizer.decode(batch["labels"][0], skip_special_tokens=True)
        'b'
    """

    model = BPE
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012
    padding_side = "right"

    def __init__(
        self,
        vocab: dict[str, int] | None = None,
        merges: Sequence[tuple[str, str]] | None = None,
        pad_token: str = "<pad>",
        bos_token: str = "<s>",
        eos_token: str = "</s>",
        unk_token: str = "<unk>",
        mask_token: str = "<mask>",
        add_eos_token: bool | None = None,
        split_special_tokens: bool = True,
        tgt_lang: str | None = None,
        **kwargs,
    ):
        if vocab is None:
            alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
            vocab = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
        self._tokenizer = Tokenizer(BPE(vocab=vocab, merges=list(merges or [])))
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = decoders.ByteLevel()
        # Decoding must give back what was encoded, spaces before punctuation included.
        kwargs.setdefault("clean_up_tokenization_spaces", False)
        # A saved vocabulary comes with a post-processor, which alone tells whether `</s>` is appended.
        is_reloaded = kwargs.get("post_processor") is not None
        if add_eos_token is not None or not is_reloaded:
            kwargs["add_eos_token"] = True if add_eos_token is None else add_eos_token
        self._tgt_lang: str | None = None
        super().__init__(
            tgt_lang=tgt_lang,
            pad_token=pad_token,
            bos_token=bos_token,
            eos_token=eos_token,
            unk_token=unk_token,
            mask_token=mask_token,
            split_special_tokens=split_special_tokens,
            **kwargs,
        )
        if "add_eos_token" not in kwargs:
            # The language's tag may stand before it.
            self._add_eos_token = self._tokenizer.encode("").ids[-1:] == [self.eos_token_id]
            # What a vocabulary that is learned anew by this one takes over.
            self.init_kwargs["add_eos_token"] = self._add_eos_token
        if tgt_lang is not None:
            self.tgt_lang = tgt_lang

    @property
    def language_tags(self) -> dict[str, int]:
        """Ids of the tags, by the languages that they name."""
        return {token[2:-1]: index for token, index in self.get_added_vocab().items() if token.startswith("<2")}

    @property
    def tgt_lang(self) -> str | None:
        """Code of the language whose tag sources begin with, or `None`.

        Raises:
            ValueError: On setting a language for which the vocabulary has no tag.
        """
        return self._tgt_lang

    @tgt_lang.setter
    def tgt_lang(self, language: str | None) -> None:
        if language is not None and language not in self.language_tags:
            known = ", ".join(self.language_tags) or "none"
            raise ValueError(f"`tgt_lang` is {language!r}, but the vocabulary has tags for {known}; use one of these.")
        self._tgt_lang = language
        self.update_post_processor()
        self._switch_to_input_mode()

    def _switch_to_input_mode(self) -> None:
        """Begin texts with the tag; transformers calls this before it encodes sources."""
        if self._tgt_lang is not None:
            tag, eos = f"<2{self._tgt_lang}>", self.eos_token
            ends = [eos] if self.add_eos_token else []
            starts = [tag, self.bos_token] if self.add_bos_token else [tag]
            self._tokenizer.post_processor = processors.TemplateProcessing(
                single=[*starts, "$A", *ends],
                pair=[*starts, "$A", *ends, "$B", *ends],
                special_tokens=[(token, self.convert_tokens_to_ids(token)) for token in (*starts, *ends)],
            )

    def _switch_to_target_mode(self) -> None:
        """Leave out the tag; transformers calls this before it encodes targets."""
        if self._tgt_lang is not None:
            self.update_post_processor()

    def _encode_plus(
        self, text: Any, text_pair: Any = None, *args: Any, split_special_tokens: bool | None = None, **kwargs: Any
    ) -> BatchEncoding:
        """Turn texts into ids; all ways of encoding lead here."""
        if split_special_tokens is None:
            split_special_tokens = self.split_special_tokens
        encoder = super()
        # Splitting is all or nothing for the backend, which leaves the rest to one where fewer tokens are special.
        if split_special_tokens and _holds([text, text_pair], found := self._found_in_texts()):
            other = copy.copy(self)
            other._tokenizer = self._backend_that_finds(found)
            encoder = super(VanillaTransformerTokenizer, other)
        return encoder._encode_plus(text, text_pair, *args, split_special_tokens=split_special_tokens, **kwargs)

    def _found_in_texts(self) -> set[str]:
        """The special tokens that are found in texts."""
        special = {token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special}
        tags = {f"<2{language}>" for language in self.language_tags}
        return special - {self.pad_token, self.bos_token, self.eos_token, self.unk_token} - tags

    def _backend_that_finds(self, tokens: set[str]) -> Tokenizer:
        """The backend, sharing its vocabulary, with these special tokens found as tokens that are not special are."""
        own = self._tokenizer
        other = Tokenizer(own.model)
        for part in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
            if getattr(own, part) is not None:
                setattr(other, part, getattr(own, part))
        added = [token for _, token in sorted(own.get_added_tokens_decoder().items())]
        for token in added:
            token.special = token.special and token.content not in tokens
        other.add_tokens(added)
        return other

    def _decode(self, token_ids: Any, skip_special_tokens: bool = False, **kwargs: Any) -> str:
        """Turn ids of one text into the text."""
        if isinstance(token_ids, int):
            token_ids = [token_ids]
        if skip_special_tokens and self.mask_token_id in token_ids:
            added = self._tokenizer.get_added_tokens_decoder().items()
            left_out = {index for index, token in added if token.special} - {self.mask_token_id}
            token_ids, skip_special_tokens = [index for index in token_ids if index not in left_out], False
        return super()._decode(token_ids, skip_special_tokens=skip_special_tokens, **kwargs)

    @classmethod
    def train_from_iterator(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        *,
        min_frequency: int = 2,
        show_progress: bool = False,
        languages: Sequence[str] = (),
    ) -> "VanillaTransformerTokenizer":
        """Learn a vocabulary from texts of both languages; memory grows with the number of distinct words only.

        Args:
            texts: Texts, one at a time; read once.
            vocab_size: Number of entries, special tokens and 256 bytes included; at least 261, at most 1,048,576.
            min_frequency: How often a pair must occur to be merged; at least 1, below 2^31.
            show_progress: Whether `tokenizers` draws its progress bars.
            languages: Codes of target languages that get a tag each, counted in `vocab_size`.

        Returns:
            A tokenizer of exactly `vocab_size` entries.

        Raises:
            ValueError: `vocab_size` is too small, or larger than these texts allow, or a value is out of range.
        """
        if vocab_size < SMALLEST_VOCABULARY + len(languages):
            raise ValueError(
                f"`vocab_size` is {vocab_size}; it must be at least {SMALLEST_VOCABULARY + len(languages)}, which is "
                f"{len(SPECIAL_TOKENS) + len(languages)} special tokens and 256 bytes."
            )
        if vocab_size > LARGEST_VOCABULARY:
            raise ValueError(f"`vocab_size` is {vocab_size}; it must be at most {LARGEST_VOCABULARY}.")
        if not 1 <= min_frequency < 1 << 31:
            raise ValueError(f"`min_frequency` is {min_frequency}; it must be at least 1 and below 2^31.")
        tokenizer = cls().train_new_from_iterator(
            texts, vocab_size - len(languages), min_frequency=min_frequency, show_progress=show_progress
        )
        tags = [AddedToken(f"<2{language}>", special=True, normalized=False) for language in languages]
        if tags:
            tokenizer.add_special_tokens({"extra_special_tokens": tags})
        if len(tokenizer) < vocab_size:
            raise ValueError(
                f"`vocab_size` is {vocab_size}, but the corpus allows only {len(tokenizer)} entries with "
                f"`min_frequency` {min_frequency}; use at most {len(tokenizer)}, or more text."
            )
        return tokenizer


def _holds(texts: Any, tokens: set[str]) -> bool:
    """Whether a text, or one in lists of any depth, holds one of the tokens."""
    if isinstance(texts, str):
        return any(token in texts for token in tokens)
    return isinstance(texts, list | tuple) and any(_holds(text, tokens) for text in texts)


__all__ = ["VanillaTransformerTokenizer"]
