"""`visualize`: pages, figures and arrays of what a model, a schedule, a run or a vocabulary does."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from vanilla_transformer.errors import UserError
from vanilla_transformer.training.options import option
from vanilla_transformer.translation.options import check_at_least, check_characters, check_model_id, check_search

from .files import check_output_file, read_lines, write_lines


if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from transformers import PreTrainedTokenizerBase

    from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
    from vanilla_transformer.translation.translator import Translator
    from vanilla_transformer.visualization.attention import Attention
    from vanilla_transformer.visualization.beam_tree import BeamTree
    from vanilla_transformer.visualization.panels import Picture


_FIGURES = (".png", ".svg", ".pdf")
_SUFFIXES = (".html", ".npz", *_FIGURES)
_OUTPUT = (
    "Files to write, by their names: .html a page that needs nothing else; .png, .svg, .pdf a figure (needs the extra "
    "visualization); .npz the arrays."
)


@dataclass(kw_only=True)
class AttentionOptions:
    """Options of `visualize attention`."""

    SUMMARY: ClassVar[str] = "who looks where: all layers and heads for a text, its alignment and its beam search"

    model: str = option(..., "Model folder, or name on the Hub.")
    text: str = option(..., "Text to translate.")
    target: str | None = option(None, "Translation to look at; default: the one that the model finds.")
    output: tuple[Path, ...] = option((Path("attention.html"),), _OUTPUT)
    target_language: str | None = option(None, "Language to translate to, for models with a tag for each.")
    num_beams: int | None = option(None, "Beam size; default: the model's generation configuration.")
    length_penalty: float | None = option(None, "Power of the length penalty; default: likewise.")
    attention: Literal["encoder", "decoder", "cross"] | None = option(
        None, "Which attention a figure shows; default: cross, and encoder of models without a trained decoder."
    )
    layer: int | None = option(None, "The one layer that a figure shows, from 1; default: all.")
    head: int | None = option(None, "The one head that a figure shows, from 1; default: all.")
    device: str | None = option(None, "Where to run, such as cpu or cuda:1; default: a GPU if there is one.")


@dataclass(kw_only=True)
class PositionsOptions:
    """Options of `visualize positions`."""

    SUMMARY: ClassVar[str] = (
        "sinusoids, their dot products, the map that shifts them, and learned positions beside them"
    )

    model: str | None = option(None, "Model whose positions are shown; default: the paper's, of --d_model.")
    d_model: int = option(512, "Width, without --model.")
    layout: Literal["interleaved", "concatenated"] = option("interleaved", "Order of sines and cosines, likewise.")
    exponent: Literal["paper", "tensor2tensor"] = option("paper", "Exponent of the wavelengths, likewise.")
    length: int = option(128, "Number of positions.")
    trained_length: int | None = option(
        None, "Length of the training texts; default: as saved with the model, else not shown."
    )
    shift: int = option(5, "By how many positions the linear map shifts.")
    output: tuple[Path, ...] = option((Path("positions.html"),), _OUTPUT)


@dataclass(kw_only=True)
class ScheduleOptions:
    """Options of `visualize schedule`."""

    SUMMARY: ClassVar[str] = "the learning rate for any warm-up and width"

    d_model: tuple[int, ...] = option((512,), "Widths.")
    warmup_steps: tuple[int, ...] = option((4000,), "Updates over which the rate rises.")
    learning_rate_scale: float = option(1.0, "Factor on the rate.")
    updates: int | None = option(None, "Last update; default: five times the longest warm-up.")
    output: tuple[Path, ...] = option((Path("schedule.html"),), _OUTPUT)


@dataclass(kw_only=True)
class RunOptions:
    """Options of `visualize run`."""

    SUMMARY: ClassVar[str] = "loss, perplexity, BLEU, throughput and gradient norm of one or several runs"

    runs: tuple[Path, ...] = option((), "Folders of runs.", positional=True)
    follow: float | None = option(
        None, "Write the files again every so many seconds until the runs are over; pages read themselves again."
    )
    output: tuple[Path, ...] = option((Path("run.html"),), _OUTPUT)


@dataclass(kw_only=True)
class TokenizerOptions:
    """Options of `visualize tokenizer`."""

    SUMMARY: ClassVar[str] = "how a vocabulary cuts texts, and how two languages share it"

    model: str = option(..., "Folder of a model or a vocabulary, or a model's name on the Hub.")
    text: tuple[str, ...] = option((), "Texts to cut.")
    files: tuple[Path, Path] | None = option(
        None, "Text files of both languages, one sentence a line, whose use of the vocabulary is counted."
    )
    languages: tuple[str, str] = option(("source", "target"), "What to call them.")
    output: tuple[Path, ...] = option((Path("tokenizer.html"),), _OUTPUT)


OPTIONS = {
    "attention": AttentionOptions,
    "positions": PositionsOptions,
    "schedule": ScheduleOptions,
    "run": RunOptions,
    "tokenizer": TokenizerOptions,
}


def run(options: AttentionOptions | PositionsOptions | ScheduleOptions | RunOptions | TokenizerOptions) -> int:
    """Draw what was asked for, and print the names of the files."""
    _check_outputs(options.output)
    {
        AttentionOptions: _attention,
        PositionsOptions: _positions,
        ScheduleOptions: _schedule,
        RunOptions: _run,
        TokenizerOptions: _tokenizer,
    }[type(options)](options)
    return 0


def _attention(options: AttentionOptions) -> None:
    check_search({"num_beams": options.num_beams, "length_penalty": options.length_penalty}, tokens_per_batch=1)
    for name, text in (("--text", options.text), ("--target", options.target)):
        if text is not None:
            check_characters(text, name)
            if not text.strip():
                raise UserError(f"{name} is empty; give a text of at least one word.")
    for name in ("layer", "head"):
        check_at_least(name, getattr(options, name), 1)
    attention, tokenizer, tree = _attention_and_tree(options)
    part = options.attention or ("cross" if len(attention.target) else "encoder")
    _check_choice(options, part, attention.parts[part][0].shape)
    from vanilla_transformer.visualization.attention_page import attention_page

    page = attention_page(
        attention,
        tokenizer,
        model_name=_name(options.model),
        tree=tree,
        target_is_given=options.target is not None,
    )

    def figure() -> "Figure":
        from vanilla_transformer.visualization.figures import attention_figure

        chosen = {name: None if number is None else number - 1 for name, number in _chosen(options).items()}
        return attention_figure(attention, part, **chosen)

    _write(options.output, page=lambda: page, figure=figure, arrays=attention.arrays)


def _attention_and_tree(
    options: AttentionOptions,
) -> "tuple[Attention, PreTrainedTokenizerBase, BeamTree | None]":
    """Weights of the text with its translation, and the search for it; of an encoder alone where that was trained."""
    check_model_id(options.model)
    from .session import start

    start()
    from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
    from vanilla_transformer.loading import load_config
    from vanilla_transformer.visualization.attention import attention_of
    from vanilla_transformer.visualization.beam_tree import beam_tree

    config = load_config(options.model)
    if not isinstance(config, VanillaTransformerConfig) or config.is_decoder:
        saved = (config.architectures or [type(config).__name__])[0]
        raise UserError(f"{options.model} holds a {saved}; give a model of this package that has an encoder.")
    if not config.is_encoder_decoder:
        return *_encoder_alone(options, config), None
    translator = _translator(options)
    model, tokenizer = translator.model, translator.tokenizer
    source = tokenizer(options.text.strip(), verbose=False)["input_ids"]
    search = translator.options
    tree = beam_tree(model, source, replace(search, num_hypotheses=search.num_beams))
    target = tree.hypotheses[0].tokens
    if options.target is not None:
        target = tokenizer(text_target=options.target.strip(), verbose=False)["input_ids"]
    return attention_of(model, tokenizer, source, target), tokenizer, tree


def _encoder_alone(
    options: AttentionOptions, config: "VanillaTransformerConfig"
) -> "tuple[Attention, PreTrainedTokenizerBase]":
    """Weights of a text in a model that has an encoder and no decoder, such as a classifier."""
    from vanilla_transformer.loading import load_tokenizer
    from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerEncoderModel
    from vanilla_transformer.visualization.attention import encoder_attention_of

    if options.target is not None:
        saved = (config.architectures or ["model"])[0]
        raise UserError(f"{options.model} holds a {saved}, which has no decoder; leave --target out.")
    if options.device not in (None, "cpu"):
        raise UserError(f"--device is {options.device}, but an encoder alone is computed on cpu; leave --device out.")
    tokenizer = load_tokenizer(options.model)
    model = VanillaTransformerEncoderModel.from_pretrained(
        options.model, local_files_only=Path(options.model).is_dir(), use_safetensors=True
    ).eval()
    return encoder_attention_of(
        model, tokenizer, tokenizer(options.text.strip(), verbose=False)["input_ids"]
    ), tokenizer


def _positions(options: PositionsOptions) -> None:
    from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig

    config, learned, trained, name = None, None, options.trained_length, ""
    if options.trained_length is not None:
        check_at_least("trained_length", options.trained_length, 1)
    if options.model is None:
        check_at_least("d_model", options.d_model, 4)
        if options.d_model % 2:
            raise UserError(f"--d_model is {options.d_model}; it must be even, since a sine is paired with a cosine.")
        config = VanillaTransformerConfig(
            d_model=options.d_model, sinusoidal_layout=options.layout, sinusoidal_exponent=options.exponent,
            encoder_attention_heads=1, decoder_attention_heads=1,
        )  # fmt: skip
    else:
        translator = _translator(options)
        config, name = translator.model.config, _name(options.model)
        if not isinstance(config, VanillaTransformerConfig):
            raise UserError(f"{options.model} is a {type(config).__name__}; give a model of this package.")
        trained = trained or translator.max_source_tokens
        if getattr(config, "position_embedding_type", None) == "learned":
            learned = translator.model.get_encoder().embed_positions.weight.detach().double().cpu().numpy()
    from vanilla_transformer.visualization.positions import positions_picture

    _write_picture(
        options.output,
        positions_picture(
            config,
            length=options.length,
            shift=options.shift,
            trained_length=trained,
            learned=learned,
            model_name=name,
        ),
    )


def _schedule(options: ScheduleOptions) -> None:
    from vanilla_transformer.training.step.schedule import learning_rate
    from vanilla_transformer.visualization.schedule import schedule_picture

    picture = schedule_picture(
        learning_rate,
        d_model=options.d_model,
        warmup_steps=options.warmup_steps,
        scale=options.learning_rate_scale,
        updates=options.updates,
    )
    _write_picture(options.output, picture)


def _run(options: RunOptions) -> None:
    from vanilla_transformer.visualization.runs import read_run, run_picture

    if not options.runs:
        raise UserError("No run was given; name the folder of one run or more.")
    if options.follow is not None and not 1.0 <= options.follow <= 86400.0:
        raise UserError(f"--follow is {options.follow}; it must be a number of seconds from 1 to 86400.")
    while True:
        runs = [read_run(folder) for folder in options.runs]
        goes_on = options.follow is not None and not all(run.is_over for run in runs)
        _write_picture(options.output, run_picture(runs), refresh=options.follow if goes_on else None)
        if not goes_on:
            return
        time.sleep(options.follow)


def _tokenizer(options: TokenizerOptions) -> None:
    for number, text in enumerate(options.text, start=1):
        check_characters(text, f"--text {number}")
    if not options.text and options.files is None:
        raise UserError("No text was given; give --text, or two --files.")
    corpora = None if options.files is None else tuple(read_lines(path) for path in options.files)
    from vanilla_transformer.visualization.vocabulary import tokenizer_picture

    tokenizer = _load_tokenizer(options.model)
    picture = tokenizer_picture(
        tokenizer, options.text, corpora=corpora, languages=options.languages, model_name=_name(options.model)
    )
    _write_picture(options.output, picture)


def _translator(options: AttentionOptions | PositionsOptions) -> "Translator":
    check_model_id(options.model)
    from vanilla_transformer.translation.translator import Translator

    from .session import start

    start()
    names = ("num_beams", "length_penalty", "target_language", "device")
    return Translator.from_pretrained(
        options.model, long_texts="translate", **{name: getattr(options, name, None) for name in names}
    )


def _load_tokenizer(name: str) -> "PreTrainedTokenizerBase":
    if not Path(name).is_dir():
        check_model_id(name)
    from vanilla_transformer.loading import load_tokenizer

    from .session import start

    start()
    return load_tokenizer(name)


def _chosen(options: AttentionOptions) -> dict[str, int | None]:
    return {"layer": options.layer, "head": options.head}


def _check_choice(options: AttentionOptions, part: str, shape: tuple[int, ...]) -> None:
    """Refuse layers and heads that the model does not have."""
    if any(path.suffix.lower() in _FIGURES for path in options.output) and not shape[0]:
        raise UserError(f"--attention is {part}, of which {options.model} has no layer; choose another, or a page.")
    for name, number in zip(("layer", "head"), shape, strict=False):
        given = getattr(options, name)
        if given is not None and given > number:
            raise UserError(f"--{name} is {given}, and the {part} attention has {number}; choose one of them.")


def _name(model: str) -> str:
    """What a page calls a model: the name of its folder, and not where it lies."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def _check_outputs(paths: Sequence[Path]) -> None:
    """Refuse files that cannot be written, before there is work to lose."""
    for at, path in enumerate(paths):
        if path.suffix.lower() not in _SUFFIXES:
            raise UserError(f"{path} ends with none of {', '.join(_SUFFIXES)}; the name says what is written.")
        check_output_file(path, paths[:at])
    if any(path.suffix.lower() in _FIGURES for path in paths):
        from vanilla_transformer.visualization.figures import check_matplotlib

        check_matplotlib()


def _write_picture(paths: Sequence[Path], picture: "Picture", *, refresh: float | None = None) -> None:
    def figure() -> "Figure":
        from vanilla_transformer.visualization.figures import picture_figure

        return picture_figure(picture)

    from vanilla_transformer.visualization.panels import picture_page

    _write(paths, page=lambda: picture_page(picture, refresh=refresh), figure=figure, arrays=lambda: picture.arrays)


def _write(
    paths: Sequence[Path],
    *,
    page: Callable[[], str],
    figure: Callable[[], "Figure"],
    arrays: Callable[[], "dict[str, np.ndarray]"],
) -> None:
    """Write every file whole or not at all, and print its name."""
    for path in paths:
        suffix = path.suffix.lower()
        if suffix == ".html":
            write_lines(path, [page()])
        else:
            partial = path.with_name(f"partial-{path.name}")
            try:
                if suffix == ".npz":
                    import numpy as np

                    np.savez_compressed(partial, **arrays())
                else:
                    from vanilla_transformer.visualization.figures import save_figure

                    for remark in save_figure(figure(), partial):
                        print(remark.replace(str(partial), str(path)), file=sys.stderr)
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
        print(path)
