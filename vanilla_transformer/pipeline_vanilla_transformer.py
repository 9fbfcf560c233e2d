"""A pipeline that translates: transformers 5 has none of its own.

It runs on `generate`, whose options every call takes: code that is loaded with a published model has no package beside
it, and so no other search. Where the package is installed, `custom_generate=paper_beam_search` searches as the paper
does.
"""

from typing import Any

import torch
from transformers import Pipeline


# The entry in the configuration of a folder that holds this file, by which
# `pipeline("translation", model=folder, trust_remote_code=True)` finds the class.
CUSTOM_PIPELINES = {
    "translation": {
        "impl": "pipeline_vanilla_transformer.TranslationPipeline",
        "pt": ["AutoModelForSeq2SeqLM"],
        "type": "text",
    }
}
# Target tokens beyond the source's length (Vaswani et al., 2017, §6.1).
EXTRA_LENGTH = 50


class TranslationPipeline(Pipeline):
    """Translates with any model that `AutoModelForSeq2SeqLM` loads.

    A call takes a text, a list of texts, a data set or a generator, `batch_size`, `tgt_lang` for models with a tag for
    each target language, and the options of `generate`. A text gives `[{"translation_text": "..."}]`; a list gives one
    such dictionary for each text, or a list of them where `num_return_sequences` is above 1. Unless `max_new_tokens`,
    `max_length` or a `generation_config` says otherwise, translations have at most 50 tokens more than the longest
    source of the batch.

    Example:
        >>> from vanilla_transformer import TranslationPipeline
        >>> translate = TranslationPipeline(model=model, tokenizer=tokenizer)  # doctest: +SKIP
        >>> translate("The device is not supported.")  # doctest: +SKIP
        [{'translation_text': 'Das Gerät wird nicht unterstützt.'}]
    """

    _load_tokenizer = True
    _load_processor = False
    _load_image_processor = False
    _load_video_processor = False
    _load_feature_extractor = False

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        """Translate; see the class."""
        if isinstance(inputs, tuple):
            inputs = list(inputs)
        if isinstance(inputs, list) and not inputs:
            return []
        found = super().__call__(inputs, **kwargs)
        if isinstance(inputs, list) and all(len(translations) == 1 for translations in found):
            return [translations[0] for translations in found]
        return found

    def _sanitize_parameters(self, tgt_lang: str | None = None, **generate_kwargs: Any) -> tuple[dict, dict, dict]:
        return ({} if tgt_lang is None else {"tgt_lang": tgt_lang}), generate_kwargs, {}

    def preprocess(self, text: str, tgt_lang: str | None = None) -> dict[str, torch.Tensor]:
        """Turn a text into ids [1, S] and their mask."""
        if tgt_lang is None:
            return dict(self.tokenizer(text, return_tensors="pt"))
        before = self.tokenizer.tgt_lang
        self.tokenizer.tgt_lang = tgt_lang
        try:
            return dict(self.tokenizer(text, return_tensors="pt"))
        finally:
            self.tokenizer.tgt_lang = before

    def _forward(self, inputs: dict[str, torch.Tensor], **generate_kwargs: Any) -> dict[str, torch.Tensor]:
        """Translate ids [B, S] to ids [B, N, T], N being `num_return_sequences`."""
        inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        if not {"max_new_tokens", "max_length", "generation_config"} & generate_kwargs.keys():
            length = inputs["input_ids"].shape[1] + EXTRA_LENGTH
            if getattr(self.model.config, "position_embedding_type", None) == "learned":
                length = min(length, self.model.config.max_position_embeddings)
            generate_kwargs = {"max_new_tokens": length, "max_length": None, **generate_kwargs}
        if generate_kwargs.get("num_beams") == 1:
            # Options of beam search in the generation configuration do not apply to greedy search.
            generate_kwargs = {"length_penalty": None, "early_stopping": None, **generate_kwargs}
        ids = self.model.generate(**inputs, **generate_kwargs)
        # With `return_dict_in_generate`, the output holds more than ids.
        ids = ids if isinstance(ids, torch.Tensor) else ids.sequences
        return {"output_ids": ids.unflatten(0, (len(inputs["input_ids"]), -1))}

    def postprocess(self, outputs: dict[str, torch.Tensor]) -> list[dict[str, str]]:
        """Turn the ids [1, N, T] of a text's translations into texts."""
        texts = self.tokenizer.batch_decode(outputs["output_ids"][0], skip_special_tokens=True)
        return [{"translation_text": text} for text in texts]


__all__ = ["CUSTOM_PIPELINES", "TranslationPipeline"]
