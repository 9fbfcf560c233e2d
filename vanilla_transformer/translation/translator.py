"""Text in, text out: sentences sorted by length, batched by tokens, returned in the caller's order."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from tqdm import tqdm
from transformers import GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase

from vanilla_transformer.cores import check_side_by_side
from vanilla_transformer.data.batching import TokenBatches
from vanilla_transformer.errors import UserError
from vanilla_transformer.loading import check_tokenizer_fits, load_model, load_tokenizer
from vanilla_transformer.translation.decoders.plain_models import unwrapped
from vanilla_transformer.translation.search.hypotheses import Hypothesis

from .backends import make_backend, options_for
from .long_texts import split_to_fit
from .options import LongTexts, Quantization, check_at_least, check_characters, check_model_id, check_search
from .workers import map_side_by_side


# For a tokenizer without a largest length, transformers writes a far larger number than this.
_NO_LENGTH = 1 << 30
# Shorter sources count as this many tokens of a batch.
_LEAST_LENGTH = 16


@dataclass(frozen=True, slots=True)
class Translation:
    """A translated text.

    Args:
        text: The translation, one line.
        log_prob: Its log-probability; NaN if no scores were asked for.
        score: The log-probability divided by the length penalty; translations are ranked by it. If a text was split,
            log-probability and score are sums over its parts.
        finished: Whether the translation ends with `</s>`, and was not cut off at the largest length.
    """

    text: str
    log_prob: float
    score: float
    finished: bool


class Translator:
    """Translates texts with the paper's beam search.

    Models of other classes than `VanillaTransformerForConditionalGeneration` translate with their own `generate`.

    A fast decoder reads the model's weights if this gives the same results as calling the model. A model with
    adapters, hooks, quantised or replaced layers, offloaded weights or active dropout is called instead, by the same
    search; a warning in the log says why. Each call notices changes of the model since the last call: other adapters,
    other layers, edited weights. Two kinds of change are not noticed: an edit of a few rows of a matrix that bypasses
    torch, through `.data` or NumPy, and methods that are replaced in a class.

    Args:
        model: A translation model, which `torch.compile` or PEFT may have wrapped. Its device, dtype and mode
            (training or evaluation) stay as they are.
        tokenizer: Its tokenizer.
        tokens_per_batch: Largest number of source tokens of a batch, with padding and without a factor for beams.
            Sources of fewer than 16 tokens count as 16.
        window: Number of texts of an iterator that are read, sorted and batched together.
        max_source_tokens: Length of the longest text that is translated whole, in tokens with `</s>`. `None` takes the
            smaller of the tokenizer's `model_max_length` and the number of learned positions.
        long_texts: What happens to longer texts. `split` splits them, between sentences if possible; `refuse` raises
            an error; `translate` translates them whole, except that a model with learned positions refuses them.
        target_language: Language whose tag is put before each source; `None` takes the tokenizer's `tgt_lang`.
        quantization: `int8` rounds weights to 8 bits; `None` does not round them.
        workers: Number of batches that are translated at the same time, each on one core. `None` means 1 on a GPU, and
            the number of torch's threads on CPUs. If the model itself is called, it is always 1.
        **search: Fields of `SearchOptions`. What is left out or `None` comes from the model's generation
            configuration, or else is the paper's value.

    Raises:
        UserError: A value is out of range, the model does not generate text, or it needs a language.

    Example:
        >>> translator = Translator.from_pretrained("vanilla-transformer-quickstart")  # doctest: +SKIP
        >>> translator.translate("The device is not supported.")  # doctest: +SKIP
        'Das Gerät wird nicht unterstützt.'
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        tokens_per_batch: int = 4096,
        window: int = 4000,
        max_source_tokens: int | None = None,
        long_texts: LongTexts = "split",
        target_language: str | None = None,
        quantization: Quantization | None = None,
        workers: int | None = None,
        **search: Any,
    ):
        inner = unwrapped(model)
        if not isinstance(inner, GenerationMixin):
            remedy = "give the model inside it" if hasattr(inner, "module") else "load a model for translation"
            raise UserError(f"{type(inner).__name__} does not generate text; {remedy}.")
        check_search(search, tokens_per_batch=tokens_per_batch, max_source_tokens=max_source_tokens)
        check_at_least("window", window, 1)
        check_side_by_side("workers", workers)
        self.model = model
        self.tokenizer = _speaking(tokenizer, target_language)
        self.options = options_for(inner, search)
        self.tokens_per_batch = tokens_per_batch
        self.window = window
        self.long_texts = long_texts
        self.quantization = quantization
        self._backend = make_backend(model, tokenizer.pad_token_id, self.options, quantization=quantization)
        self._workers = workers
        learned = getattr(inner.config, "position_embedding_type", None) == "learned"
        self._max_positions: int | None = inner.config.max_position_embeddings if learned else None
        bounds = [max_source_tokens or tokenizer.model_max_length, self._max_positions or _NO_LENGTH]
        self.max_source_tokens: int | None = min(bounds) if min(bounds) < _NO_LENGTH else None

    @property
    def workers(self) -> int:
        """Number of batches that are translated at the same time."""
        if not self._backend.takes_threads:
            return 1
        return self._workers or (torch.get_num_threads() if self.model.device.type == "cpu" else 1)

    @classmethod
    def from_pretrained(
        cls,
        model_id: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | str = "auto",
        quantization: Quantization | None = None,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> "Translator":
        """Load a model and its tokenizer.

        Args:
            model_id: Folder that `train` or `save_pretrained` wrote, or a model's name on the Hub.
            device: Where to run; `None` takes a GPU if there is one.
            dtype: Floating-point type of the weights; `auto` is the one they were saved in.
            quantization: As for the class.
            trust_remote_code: Whether Python code from the model's repository may run. Models of this package and of
                transformers' own classes need no such code.
            **options: Other arguments of the class.

        Returns:
            The translator, its model in evaluation mode.

        Raises:
            UserError: There is no such model; it cannot be loaded; its weights or its tokenizer do not fit its
                configuration; it needs code that may not run; or an option is wrong.
        """
        check_model_id(model_id)
        source = model_id if Path(model_id).is_dir() else _on_hub(str(model_id))
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        _check_device(device)
        model = load_model(source, dtype=dtype, trust_remote_code=trust_remote_code)
        tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
        check_tokenizer_fits(model, tokenizer, source)
        return cls(model.eval().to(device), tokenizer, quantization=quantization, **options)

    @overload
    def translate(self, texts: str, **options: Any) -> str: ...
    @overload
    def translate(self, texts: Sequence[str], **options: Any) -> list[str]: ...
    @overload
    def translate(self, texts: Iterable[str], **options: Any) -> Iterator[str]: ...
    def translate(self, texts, **options):
        """Translate one text, a sequence of texts, or an iterator of any length in constant memory.

        Args:
            texts: A text; a sequence of texts; or an iterator, which is read one window at a time. An empty text stays
                empty.
            **options: As for `hypotheses`, without `with_scores`.

        Returns:
            For a text its best translation, for a sequence a list, for an iterator an iterator. Translations have the
            order of the texts; each is one line.

        Raises:
            UserError: A text is too long and `long_texts` refuses it, or a text holds a lone surrogate.
        """
        return self._by_shape(texts, lambda found: found[0].text, with_scores=False, **options)

    @overload
    def hypotheses(self, texts: str, **options: Any) -> list[Translation]: ...
    @overload
    def hypotheses(self, texts: Sequence[str], **options: Any) -> list[list[Translation]]: ...
    @overload
    def hypotheses(self, texts: Iterable[str], **options: Any) -> Iterator[list[Translation]]: ...
    def hypotheses(self, texts, *, with_scores=True, **options):
        """Translate into `num_hypotheses` translations of each text, with their scores.

        Args:
            texts: As for `translate`.
            with_scores: Whether greedy search computes scores; other searches always do.
            **options: `prefixes`, the text that the translations of each text begin with; `show_progress`, whether to
                draw a progress bar.

        Returns:
            As `translate`, but for each text the list of its translations, the best first.

        Raises:
            UserError: As `translate`, or a prefix is longer than a translation may be.
        """
        return self._by_shape(texts, lambda found: found, with_scores=with_scores, **options)

    def _by_shape(
        self,
        texts: str | Iterable[str],
        result: Callable[[list[Translation]], Any],
        *,
        with_scores: bool,
        prefixes: str | Iterable[str] | None = None,
        show_progress: bool = False,
    ):
        if isinstance(texts, str):
            prefixes = None if prefixes is None else [prefixes]
            options = {"with_scores": with_scores, "prefixes": prefixes, "show_progress": show_progress}
            return self._by_shape([texts], result, **options)[0]
        if isinstance(prefixes, str):
            raise UserError("There is one prefix and several texts; give each text one.")
        bar = partial(tqdm, desc="Translating", unit="text", disable=not show_progress)
        if isinstance(texts, Sequence):
            prefixes = None if prefixes is None else list(prefixes)
            with bar(total=len(texts)) as progress:
                found = self.translate_window(
                    list(texts), prefixes=prefixes, with_scores=with_scores, on_progress=progress.update
                )
            return [result(translations) for translations in found]
        return self._lazily(iter(texts), None if prefixes is None else iter(prefixes), result, with_scores, bar)

    def _lazily(
        self,
        texts: Iterator[str],
        prefixes: Iterator[str] | None,
        result: Callable[[list[Translation]], Any],
        with_scores: bool,
        bar: Callable[[], tqdm],
    ) -> Iterator:
        with bar() as progress:
            for start in count(0, self.window):
                block = list(islice(texts, self.window))
                if not block:
                    if prefixes is not None and next(prefixes, None) is not None:
                        raise UserError("There are more prefixes than texts; give each text one.")
                    return
                found = self.translate_window(
                    block,
                    prefixes=None if prefixes is None else list(islice(prefixes, len(block))),
                    start=start,
                    with_scores=with_scores,
                    on_progress=progress.update,
                )
                yield from map(result, found)

    def translate_window(
        self,
        texts: Sequence[str],
        *,
        prefixes: Sequence[str] | None = None,
        start: int = 0,
        with_scores: bool = True,
        on_progress: Callable[[int], Any] = lambda number: None,
    ) -> list[list[Translation]]:
        """Translate texts that are sorted and batched together.

        Args:
            texts: Texts.
            prefixes: For each text, the text that its translations begin with.
            start: Number of texts that came before these, if these are part of a longer sequence.
            with_scores: Whether greedy search computes scores.
            on_progress: Called with the number of texts that were finished since the last call.

        Returns:
            For each text its translations, the best first.

        Raises:
            UserError: As `hypotheses`.
        """
        if prefixes is not None and len(prefixes) != len(texts):
            raise UserError(f"There are {len(texts):,} texts and {len(prefixes):,} prefixes; give each text one.")
        for number, text in enumerate(texts, start=start + 1):
            check_characters(text, f"Text {number:,}")
        for number, prefix in enumerate(prefixes or (), start=start + 1):
            check_characters(prefix, f"Prefix {number:,}")
        self._backend.renew()
        parts = self._parts([text.strip() for text in texts], start)
        owners = [index for index, own in enumerate(parts) for _ in own]
        found: list[list[Hypothesis]] = [[] for _ in owners]
        on_progress(sum(not own for own in parts))
        if owners:
            sources = [part for own in parts for part in own]
            numbers = [number for own in parts for number in range(len(own))]
            beginnings = None
            if prefixes is not None:
                # A text's prefix begins the translation of its first part.
                ids = self.tokenizer(text_target=prefixes, add_special_tokens=False, verbose=False)["input_ids"]
                beginnings = [ids[owner] if number == 0 else [] for owner, number in zip(owners, numbers, strict=True)]
            places = [start + owner + (number << 48) for owner, number in zip(owners, numbers, strict=True)]

            def translate(batch: np.ndarray) -> list[list[Hypothesis]]:
                return self._backend.translate(
                    [sources[i] for i in batch],
                    prefixes=None if beginnings is None else [beginnings[i] for i in batch],
                    places=[places[i] for i in batch],
                    with_scores=with_scores,
                )

            batches = self._batches(sources)
            for batch, results in zip(
                batches, map_side_by_side(translate, batches, workers=self.workers), strict=True
            ):
                for i, hypotheses in zip(batch, results, strict=True):
                    if not hypotheses or (with_scores and not math.isfinite(hypotheses[0].log_prob)):
                        raise UserError(
                            f"The model finds no translation of text {start + owners[i] + 1:,}: its weights are not "
                            "finite, or too many tokens are banned; repair one or the other."
                        )
                    found[i] = hypotheses
                on_progress(sum(numbers[i] == 0 for i in batch))
        decoded = iter(self._decode(found))
        return [_join([next(decoded) for _ in own]) for own in parts]

    def _parts(self, texts: list[str], start: int) -> list[list[np.ndarray]]:
        """Rows of ids of each text: none for an empty text, several for one that is split, else one."""
        wanted = [index for index, text in enumerate(texts) if text]
        parts: list[list[np.ndarray]] = [[] for _ in texts]
        limit = _NO_LENGTH if self.max_source_tokens is None else self.max_source_tokens
        for index, ids in zip(wanted, self._ids([texts[index] for index in wanted]), strict=True):
            if len(ids) <= limit or (self.long_texts == "translate" and self._max_positions is None):
                parts[index] = [ids]
            elif self.long_texts == "split":
                parts[index] = self._ids(split_to_fit(texts[index], lambda part: len(self._ids([part])[0]) <= limit))
            else:
                raise UserError(
                    f"Text {start + index + 1:,} has {len(ids):,} tokens, and at most {limit:,} are translated; split "
                    "the text, or set `long_texts` to split."
                )
        return parts

    def _ids(self, texts: list[str]) -> list[np.ndarray]:
        if not texts:
            return []
        rows = self.tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
        return [np.asarray(row) for row in rows]

    def _batches(self, sources: list[np.ndarray]) -> Sequence[np.ndarray]:
        """Indices of the sources of each batch."""
        lengths = np.fromiter((len(row) for row in sources), dtype=np.int64, count=len(sources))
        # So that even a few texts occupy all workers.
        budget = min(self.tokens_per_batch, -(-int(lengths.sum()) // self.workers))
        # A row takes memory even if its source is short.
        counted = np.maximum(lengths, _LEAST_LENGTH)
        budget = max(budget, int(counted.max()))
        # Longest first: if memory does not suffice, this shows at once.
        return TokenBatches(lengths, counted, tokens_per_batch=budget, shuffle=False).batches(0)[::-1]

    def _decode(self, found: list[list[Hypothesis]]) -> list[list[Translation]]:
        tokens = [hypothesis.tokens for hypotheses in found for hypothesis in hypotheses]
        texts = iter(self.tokenizer.batch_decode(tokens, skip_special_tokens=True) if tokens else [])
        return [
            [
                # A byte-level vocabulary can produce line ends, which would shift all later lines of a file.
                Translation(
                    re.sub(r"[\r\n]+", " ", next(texts)).strip(),
                    hypothesis.log_prob,
                    hypothesis.score,
                    hypothesis.finished,
                )
                for hypothesis in hypotheses
            ]
            for hypotheses in found
        ]


def _join(parts: list[list[Translation]]) -> list[Translation]:
    """Join the translations of a text's parts: the best of each part, the second best of each part, and so on."""
    if not parts:
        return [Translation("", 0.0, 0.0, True)]
    if len(parts) == 1:
        return parts[0]
    return [
        Translation(
            " ".join(part.text for part in ranked if part.text),
            sum(part.log_prob for part in ranked),
            sum(part.score for part in ranked),
            all(part.finished for part in ranked),
        )
        for ranked in zip(*parts, strict=False)
    ]


def _check_device(device: str | torch.device) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"`device` {device} cannot be used ({reason}); choose another, such as cpu.") from error


def _speaking(tokenizer: PreTrainedTokenizerBase, language: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer, or a copy that puts a language's tag before sources."""
    known = getattr(tokenizer, "language_tags", {})
    if language is None:
        if known and tokenizer.tgt_lang is None:
            raise UserError(
                f"The model was trained for several target languages; set `target_language` to one of "
                f"{', '.join(known)}."
            )
        return tokenizer
    if language not in known:
        listed = f"has tags for {', '.join(known)}" if known else "has no language tags"
        raise UserError(f"`target_language` is {language}, but the vocabulary {listed}; correct it or leave it out.")
    tokenizer = deepcopy(tokenizer)
    tokenizer.tgt_lang = language
    return tokenizer


def _on_hub(name: str) -> str | Path:
    """Where to load a model of the Hub from: its name, or the folder of its last download if the Hub does not answer.

    Given the name, `from_pretrained` would request every file, and repeat each failing request for 23 seconds.
    """
    try:
        found = HfApi().file_exists(name, "config.json")
    except Exception as error:
        # The exceptions of a request are those of the Hub's HTTP library, which differ between releases.
        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str):
            return Path(cached).parent
        raise _cannot_load(name, error) from error
    if not found:
        raise _cannot_load(name, "no such folder, and no such model on the Hub")
    return name


def _cannot_load(model_id: str | Path, reason: Exception | str) -> UserError:
    reason = (str(reason).strip() or type(reason).__name__).splitlines()[0]
    return UserError(
        f"No translation model can be loaded from {model_id} ({reason}); give a model folder or a name on the Hub."
    )
