"""Text in, text out: sentences sorted by length, batched by tokens, returned in the caller's order."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationMixin,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from vanilla_transformer.data.batching import TokenBatches
from vanilla_transformer.data.collation import pad
from vanilla_transformer.errors import UserError

from .arguments import check_model_id, check_search


# Target tokens beyond the source's length (§6.1).
EXTRA_LENGTH = 50


class Translator:
    """Translates sentences with `generate`.

    Args:
        model: A translation model; used as it is, on its device and in its dtype.
        tokenizer: Its tokenizer.
        num_beams: Beam size, at least 1; `None` takes the model's generation configuration.
        length_penalty: Power of the length that divides a hypothesis's score; `None` as above.
        tokens_per_batch: Largest padded number of source tokens of a batch, beams not counted.

    Raises:
        UserError: A value is out of range, or the model does not generate text.

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
        num_beams: int | None = None,
        length_penalty: float | None = None,
        tokens_per_batch: int = 4096,
    ):
        if not isinstance(model, GenerationMixin):
            raise UserError(f"{type(model).__name__} does not generate text; load a model for translation.")
        check_search(num_beams=num_beams, length_penalty=length_penalty, tokens_per_batch=tokens_per_batch)
        self.model = model
        self.tokenizer = tokenizer
        self.num_beams = num_beams
        self.length_penalty = length_penalty
        self.tokens_per_batch = tokens_per_batch
        learned = getattr(model.config, "position_embedding_type", None) == "learned"
        self._max_positions: int | None = model.config.max_position_embeddings if learned else None

    @classmethod
    def from_pretrained(
        cls,
        model_id: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | str = "auto",
        num_beams: int | None = None,
        length_penalty: float | None = None,
        tokens_per_batch: int = 4096,
    ) -> "Translator":
        """Load a model and its tokenizer.

        Args:
            model_id: Folder that `train` or `save_pretrained` wrote, or a model's name on the Hub.
            device: Where to run; `None` takes a GPU where there is one.
            dtype: Floating-point type of the weights; `auto` is the one they were saved in.
            num_beams: As for the class.
            length_penalty: As for the class.
            tokens_per_batch: As for the class.

        Returns:
            The translator, its model in evaluation mode.

        Raises:
            UserError: There is no model of that name, or it cannot be loaded.
        """
        check_search(num_beams=num_beams, length_penalty=length_penalty, tokens_per_batch=tokens_per_batch)
        check_model_id(model_id)
        local = Path(model_id).is_dir() or not _hub_answers(str(model_id))
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            model = AutoModelForSeq2SeqLM.from_pretrained(model_id, dtype=dtype, local_files_only=local)
            tokenizer = AutoTokenizer.from_pretrained(model_id, local_files_only=local)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise _cannot_load(model_id, error) from error
        return cls(
            model.eval().to(device),
            tokenizer,
            num_beams=num_beams,
            length_penalty=length_penalty,
            tokens_per_batch=tokens_per_batch,
        )

    def translate(self, texts: str | Sequence[str], *, show_progress: bool = False) -> str | list[str]:
        """Translate one text or several.

        Args:
            texts: A text, or a sequence of texts; an empty text stays empty.
            show_progress: Whether to draw a progress bar.

        Returns:
            The translation, or the translations in the order of the texts; each is one line.

        Raises:
            UserError: A text has more tokens than the model has learned positions.
        """
        if isinstance(texts, str):
            return self.translate([texts])[0]
        translations = [""] * len(texts)
        wanted = [i for i, text in enumerate(texts) if text.strip()]
        if not wanted:
            return translations
        ids = self.tokenizer([texts[i].strip() for i in wanted], return_attention_mask=False, verbose=False)
        sources = [np.asarray(row) for row in ids["input_ids"]]
        lengths = np.fromiter((len(row) for row in sources), dtype=np.int64, count=len(sources))
        if self._max_positions is not None and lengths.max() > self._max_positions:
            raise UserError(
                f"Text {wanted[int(lengths.argmax())] + 1:,} has {lengths.max():,} tokens, and the model has learned "
                f"{self._max_positions:,} positions; split the text."
            )
        # Longest first: if memory is short, it is at once.
        plan = TokenBatches(
            lengths, lengths, tokens_per_batch=max(self.tokens_per_batch, int(lengths.max())), shuffle=False
        ).batches(0)[::-1]
        with tqdm(total=len(wanted), desc="Translating", unit="sentence", disable=not show_progress) as progress:
            for batch in plan:
                for index, text in zip(batch, self._generate([sources[i] for i in batch]), strict=True):
                    translations[wanted[index]] = text
                progress.update(len(batch))
        return translations

    def translate_lines(self, lines: Iterable[str], *, window: int = 4000) -> Iterator[str]:
        """Translate any number of texts in constant memory.

        Args:
            lines: Texts.
            window: Number of texts that are sorted and batched together.

        Yields:
            The translations, in the order of the texts.
        """
        lines = iter(lines)
        while block := list(islice(lines, window)):
            yield from self.translate(block)

    @torch.inference_mode()
    def _generate(self, sources: Sequence[np.ndarray]) -> list[str]:
        input_ids, attention_mask = pad(sources, self.tokenizer.pad_token_id)
        options = {"num_beams": self.num_beams, "length_penalty": self.length_penalty}
        options = {name: value for name, value in options.items() if value is not None}
        if options.get("num_beams") == 1:
            # Options of beam search that the model's generation configuration holds do not apply to greedy search.
            options.update(length_penalty=None, early_stopping=None)
        max_new_tokens = input_ids.shape[1] + EXTRA_LENGTH
        if self._max_positions is not None:
            max_new_tokens = min(max_new_tokens, self._max_positions)
        ids = self.model.generate(
            input_ids=input_ids.to(self.model.device),
            attention_mask=attention_mask.to(self.model.device),
            max_new_tokens=max_new_tokens,
            max_length=None,
            **options,
        )
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        # A vocabulary of bytes can produce line ends, which would shift every line after them in a file.
        return [re.sub(r"[\r\n]+", " ", text).strip() for text in texts]


def _hub_answers(name: str) -> bool:
    """Whether the Hub can be asked for a model; `False` if it cannot, but the model was downloaded before.

    `from_pretrained` would ask for every file, and repeat each request that fails for 23 seconds.
    """
    try:
        found = HfApi().file_exists(name, "config.json")
    except Exception as error:
        # What a request raises is the business of the Hub's HTTP library, which changes between releases.
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return False
        raise _cannot_load(name, error) from error
    if not found:
        raise _cannot_load(name, "no such folder, and no such model on the Hub")
    return True


def _cannot_load(model_id: str | Path, reason: Exception | str) -> UserError:
    reason = (str(reason).strip() or type(reason).__name__).splitlines()[0]
    return UserError(
        f"No translation model can be loaded from {model_id} ({reason}); give a model folder or a name on the Hub."
    )
