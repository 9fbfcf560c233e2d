"""Writes the guided tour: the paper's equations, the lines of the package that compute them, and pictures.

    python scripts/tour.py             writes the text and draws the pictures from the numbers in tour/values.json
    python scripts/tour.py --compute   computes the numbers first, which takes a minute on one core

The text is in tour-template.md. A mark on a line of its own stands for lines of code or for a picture:
`<!-- code NAME -->` and `<!-- picture NAME -->`; `{{NAME}}` stands for a number.
"""

import argparse
import ast
import json
import re
import textwrap
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.training.step.loss import smoothed_cross_entropy
from vanilla_transformer.training.step.schedule import learning_rate
from vanilla_transformer.translation.options import SearchOptions
from vanilla_transformer.visualization import panels as kinds
from vanilla_transformer.visualization.attention import eager_attention
from vanilla_transformer.visualization.panels import Bars, Heatmap, Lines, Panel, Picture, Series
from vanilla_transformer.visualization.positions import positions_picture
from vanilla_transformer.visualization.schedule import schedule_picture


ROOT = Path(__file__).parents[1]
TEMPLATE = Path(__file__).with_name("tour-template.md")
TOUR = ROOT / "vanilla_transformer" / "visualization" / "TOUR.md"
PICTURES = TOUR.with_name("tour")
VALUES = PICTURES / "values.json"

# Where the code of an equation is: module, and name in it; of long functions, how the lines begin that are shown.
MODELING = "vanilla_transformer.modeling_vanilla_transformer"
CODE: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "attention": (MODELING, "eager_attention_forward", ()),
    "heads": (MODELING, "VanillaTransformerAttention.project", ()),
    "join": (MODELING, "VanillaTransformerAttention.attend", ("return self.out_proj",)),
    "masks": (MODELING, "VanillaTransformerDecoder.forward", ("causal_mask = create_causal_mask(",)),
    "feed_forward": (MODELING, "VanillaTransformerLayer.feed_forward", ()),
    "sublayer": (MODELING, "VanillaTransformerLayer.sublayer", ()),
    "embedding": (MODELING, "VanillaTransformerScaledEmbedding", ()),
    "positions": (MODELING, "VanillaTransformerSinusoidalPositions", ()),
    "schedule": ("vanilla_transformer.training.step.schedule", "learning_rate", ()),
    "smoothing": (
        "vanilla_transformer.training.step.loss",
        "_SlicedCrossEntropy.forward",
        ("uniform = sum_of_normalisers", "loss = (1.0"),
    ),
    "penalty": ("vanilla_transformer.translation.options", "SearchOptions.penalty", ()),
}


# Lines of code


def excerpt(module: str, name: str, starts: tuple[str, ...] = ()) -> str:
    """The lines of a function or class without its docstring, or those statements of it that begin in a given way."""
    path = Path(find_spec(module).origin)
    source = path.read_text(encoding="utf-8")
    node = ast.parse(source)
    for part in name.split("."):
        (node,) = [child for child in node.body if getattr(child, "name", None) == part]
    lines = source.splitlines()
    if starts:
        chosen = [_statement(node, lines, start) for start in starts]
        text = "\n".join(textwrap.dedent("\n".join(lines[first:last])) for first, last in chosen)
    else:
        docstrings = {
            line
            for inner in ast.walk(node)
            if isinstance(inner, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(inner)
            for line in range(inner.body[0].lineno - 1, inner.body[0].end_lineno)
        }
        kept = [lines[at] for at in range(node.lineno - 1, node.end_lineno) if at not in docstrings]
        text = re.sub(r"\n\s*\n(\s*\n)*", "\n\n", textwrap.dedent("\n".join(kept))).strip()
        text = re.sub(r"^(class .*:)\n\n", r"\1\n", text)
    where = path.relative_to(ROOT).as_posix()
    link = f"[`{name}`](../{Path(where).relative_to('vanilla_transformer').as_posix()})"
    return f"{link}:\n\n```python\n{text}\n```"


def _statement(node: ast.AST, lines: list[str], start: str) -> tuple[int, int]:
    """First line and end of the one statement that begins so."""
    (found,) = [
        (inner.lineno - 1, inner.end_lineno)
        for inner in ast.walk(node)
        if isinstance(inner, ast.stmt) and lines[inner.lineno - 1].strip().startswith(start)
    ]
    return found


# Pictures that are computed at once


def scaling() -> tuple[list[Panel], dict[str, float]]:
    """Scores and softmax of random queries and keys, of growing width."""
    generator = np.random.default_rng(0)
    widths = [4, 8, 16, 32, 64, 128, 256, 512, 1024]
    spread, largest = [], {"unscaled": [], "scaled": []}
    for width in widths:
        queries, keys = generator.normal(size=(2, 200, 32, width))
        scores = np.einsum("nkd,nkd->nk", queries[:, :1].repeat(32, axis=1), keys)
        spread.append(float(scores.std()))
        for name, logits in (("unscaled", scores), ("scaled", scores / width**0.5)):
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            largest[name].append(float(weights.max(axis=1).mean()))
    x = [float(np.log2(width)) for width in widths]
    panels = [
        Lines(
            "Spread of q · k", "", "log2 of d_k", "standard deviation",
            (Series("measured", x, spread), Series("√d_k", x, [w**0.5 for w in widths], dashed=True, colour=1)),
        ),
        Lines(
            "Largest of 32 weights", "", "log2 of d_k", "mean of the largest weight",
            (
                Series("softmax(q · k)", x, largest["unscaled"]),
                Series("softmax(q · k / √d_k)", x, largest["scaled"], colour=1),
            ),
        ),
    ]  # fmt: skip
    return panels, {"largest_unscaled": largest["unscaled"][4], "largest_scaled": largest["scaled"][4]}


def masks() -> tuple[list[Panel], dict[str, float]]:
    """Attention weights of an untrained model over a source with three tokens of padding."""
    model = toy(layers=1)
    source, read = torch.tensor([[5, 6, 7, 8, 2, 0, 0, 0]]), torch.tensor([[1, 9, 10, 11, 12, 13]])
    with eager_attention(model), torch.inference_mode():
        outputs = model(
            input_ids=source, attention_mask=source.ne(0).long(), decoder_input_ids=read, output_attentions=True
        )  # fmt: skip
    panels = [
        Heatmap(title, "", "looked at", "looks", layers[0][0, 0].double().numpy())
        for title, layers in (
            ("Encoder: padding is barred", outputs.encoder_attentions),
            ("Decoder: so is what comes later", outputs.decoder_attentions),
            ("Decoder at the source", outputs.cross_attentions),
        )
    ]
    return panels, {}


def feed_forward() -> tuple[list[Panel], dict[str, float]]:
    """One output of a feed-forward network while one input moves."""
    layer = toy(layers=1).model.encoder.layers[0]
    x = torch.linspace(-6.0, 6.0, 121)
    inputs = torch.randn(layer.fc1.in_features, generator=torch.Generator().manual_seed(0)).repeat(121, 1)
    inputs[:, 0] = x
    with torch.inference_mode():
        outputs = layer.feed_forward(inputs)
        active = (layer.fc1(inputs) > 0.0).double().mean(dim=1)
    series = tuple(Series(f"output {i + 1}", x.tolist(), outputs[:, i].tolist(), colour=i) for i in range(3))
    return [
        Lines("Three outputs over one input", "", "input", "output", series),
        Lines("Units that are not 0", "", "input", "share", (Series("share", x.tolist(), active.tolist()),)),
    ], {}


def residual() -> tuple[list[Panel], dict[str, float]]:
    """Length of the residual stream through the layers of untrained models."""
    series = []
    for colour, norm in enumerate(("post", "pre")):
        torch.manual_seed(0)
        config = VanillaTransformerConfig(vocab_size=100, d_model=128, encoder_layers=12, norm_position=norm)
        model = VanillaTransformerForConditionalGeneration(config).eval()
        with torch.inference_mode():
            states = model.get_encoder()(torch.arange(5, 55)[None], output_hidden_states=True).hidden_states
        # Before the normalisation that pre-norm stacks end with.
        lengths = [float(state.norm(dim=-1).mean()) for state in states[:12]]
        series.append(Series(f"{norm}-norm", list(range(12)), lengths, colour=colour))
    return [Lines("Length of hidden states", "", "layers passed", "mean length", tuple(series))], {}


def embedding() -> tuple[list[Panel], dict[str, float]]:
    """Lengths of what is added before the first layer, in untrained models."""
    widths = [64, 128, 256, 512, 1024]
    lengths: dict[str, list[float]] = {"embedding": [], "embedding · √d_model": [], "position": []}
    for width in widths:
        torch.manual_seed(0)
        config = VanillaTransformerConfig(
            vocab_size=500, d_model=width, encoder_layers=0, decoder_layers=0, encoder_attention_heads=1,
            decoder_attention_heads=1,
        )  # fmt: skip
        encoder = VanillaTransformerForConditionalGeneration(config).get_encoder()
        with torch.inference_mode():
            scaled = encoder.embed_tokens(torch.arange(5, 500))
            position = encoder.embed_positions(torch.arange(100)[None], torch.float32)
        lengths["embedding"].append(float(scaled.norm(dim=-1).mean()) / width**0.5)
        lengths["embedding · √d_model"].append(float(scaled.norm(dim=-1).mean()))
        lengths["position"].append(float(position.norm(dim=-1).mean()))
    series = tuple(
        Series(name, widths, values, dashed=name == "position", colour=at)
        for at, (name, values) in enumerate(lengths.items())
    )
    panel = Lines("Lengths of vectors", "", "d_model", "mean length", series, logarithmic=True)
    numbers = {name: values[widths.index(512)] for name, values in lengths.items()}
    return [panel], {
        "length_embedding": numbers["embedding"],
        "length_scaled": numbers["embedding · √d_model"],
        "length_position": numbers["position"],
    }


def positions() -> tuple[list[Panel], dict[str, float]]:
    """Sinusoids, their products and the map that shifts them."""
    config = VanillaTransformerConfig(d_model=64)
    picture = positions_picture(config, length=64, shift=5)
    return list(picture.panels), {"shift_error": float(picture.arrays["shift_error"])}


def schedule() -> tuple[list[Panel], dict[str, float]]:
    """The paper's learning rate for two warm-ups and two widths."""
    picture = schedule_picture(learning_rate, d_model=(512, 1024), warmup_steps=(4000, 8000), points=60)
    peak = learning_rate(4000, d_model=512, warmup_steps=4000)
    return list(picture.panels), {"peak": peak}


def smoothing() -> tuple[list[Panel], dict[str, float]]:
    """Perplexity of a model that reaches the least smoothed loss, which is the smoothed distribution itself."""
    size = 1000
    epsilons = [0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3]
    perplexities, losses = [], []
    for epsilon in epsilons:
        share = epsilon / size
        # Logits whose softmax is q'; the label is entry 0.
        logits = torch.full((1, size), float(np.log(max(share, 1e-12))), dtype=torch.float64)
        logits[0, 0] = float(np.log(1.0 - epsilon + share))
        loss, nll = smoothed_cross_entropy(
            logits, torch.eye(size, dtype=torch.float64), None, torch.tensor([0]), epsilon
        )
        losses.append(float(loss))
        perplexities.append(float(nll.exp()))
    panels = [
        Lines("Least perplexity", "", "ε", "perplexity", (Series("of the smoothed optimum", epsilons, perplexities),)),
        Lines("Least smoothed loss", "", "ε", "nats per token", (Series("entropy of q'", epsilons, losses),)),
    ]  # fmt: skip
    return panels, {"floor": perplexities[2], "least_loss": losses[2]}


def table_3() -> tuple[list[Panel], dict[str, float]]:
    """Row D of the paper's Table 3, and the base model: what the authors measured."""
    labels = ("ε = 0", "ε = 0.1", "ε = 0.2")
    return [
        Bars("Perplexity (the paper's Table 3)", "", labels, (4.67, 4.92, 5.47), "perplexity on newstest2013"),
        Bars("BLEU (the paper's Table 3)", "", labels, (25.3, 25.8, 25.7), "BLEU on newstest2013"),
    ], {}


def penalty() -> tuple[list[Panel], dict[str, float]]:
    """What log-probabilities are divided by."""
    lengths = list(range(1, 61))
    series = []
    for alpha in (0.0, 0.6, 1.0):
        divisors = [float(SearchOptions(length_penalty=alpha).penalty(length)) for length in lengths]
        series.append(Series(f"alpha = {alpha:g}", lengths, divisors, colour=len(series)))
    return [Lines("Divisor", "", "length of the translation", "penalty", tuple(series))], {}


# Experiments: small models that learn to write a sequence of letters backwards


def toy(layers: int, *, d_model: int = 32, heads: int = 2, **settings) -> VanillaTransformerForConditionalGeneration:
    torch.manual_seed(0)
    config = VanillaTransformerConfig(
        vocab_size=25, d_model=d_model, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=heads,
        decoder_attention_heads=heads, encoder_ffn_dim=2 * d_model, decoder_ffn_dim=2 * d_model, dropout=0.0,
        max_position_embeddings=32, **settings,
    )  # fmt: skip
    return VanillaTransformerForConditionalGeneration(config).eval()


def letters(number: int, length: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(5, 25, (number, length), generator=generator)
    ends = torch.full((number, 1), 2)
    return torch.cat([drawn, ends], dim=1), torch.cat([drawn.flip(1), ends], dim=1)


def train(
    model: VanillaTransformerForConditionalGeneration, updates: int, rate: Callable[[int], float]
) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9)
    losses = []
    for update in range(1, updates + 1):
        optimizer.param_groups[0]["lr"] = rate(update)
        length = int(torch.randint(4, 9, (1,), generator=generator))
        source, target = letters(64, length, generator)
        loss = model(input_ids=source, labels=target).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.inference_mode()
def accuracy(model: VanillaTransformerForConditionalGeneration, length: int) -> float:
    source, target = letters(200, length, torch.Generator().manual_seed(1))
    return float((model(input_ids=source, labels=target).logits.argmax(dim=-1) == target).double().mean())


def warm_up() -> tuple[list[Panel], dict[str, float]]:
    """The same post-norm model and rates, with and without the rise at the beginning."""
    series, last = [], {}
    for colour, (name, least) in enumerate((("with warm-up", 1), ("without: the peak from the start", 80))):

        def rate(update: int, least: int = least) -> float:
            return learning_rate(max(update, least), d_model=64, warmup_steps=80, scale=0.5)

        losses = train(toy(layers=3, d_model=64, heads=4), 240, rate)
        means = np.array(losses).reshape(-1, 10).mean(axis=1).tolist()
        series.append(Series(name, list(range(10, 241, 10)), means, colour=colour))
        last[name] = means[-1]
    panel = Lines("What warm-up does", "", "update", "loss of 10 updates, nats per token", tuple(series))
    return [panel], {"with_warm_up": series[0].y[-1], "without_warm_up": series[1].y[-1]}


def backwards() -> tuple[list[Panel], dict[str, float]]:
    """Attention of a model that writes letters backwards, and how right it is beyond its training lengths."""
    lengths = list(range(4, 17))
    curves, model = [], None
    for colour, kind in enumerate(("sinusoidal", "learned")):
        trained = toy(layers=1, position_embedding_type=kind)
        train(trained, 800, lambda update: learning_rate(update, d_model=32, warmup_steps=200, scale=1.0))
        rates = [accuracy(trained, length) for length in lengths]
        curves.append(Series(f"{kind} positions", lengths, rates, colour=colour))
        model = model or trained
    source, target = letters(1, 8, torch.Generator().manual_seed(2))
    with eager_attention(model), torch.inference_mode():
        outputs = model(input_ids=source, labels=target, output_attentions=True)
    panels = [
        Heatmap(f"Head {head + 1} at the source", "", "looked at", "writes", weights.double().numpy())
        for head, weights in enumerate(outputs.cross_attentions[0][0])
    ]
    panels.append(Lines("Beyond the training length of 8", "", "length", "right tokens", tuple(curves)))
    names = {8: "right_8", 9: "right_9", 16: "right_16"}
    return panels, {
        f"{name}_{kind}": curve.y[lengths.index(length)]
        for kind, curve in zip(("sinusoidal", "learned"), curves, strict=True)
        for length, name in names.items()
    }


EXACT = {
    function.__name__: function
    for function in (
        scaling,
        masks,
        feed_forward,
        residual,
        embedding,
        positions,
        schedule,
        smoothing,
        table_3,
        penalty,
    )
}
EXPERIMENTS = {function.__name__: function for function in (warm_up, backwards)}


# Writing


def compute(name: str) -> dict:
    """Panels and numbers of a picture, rounded to four digits, as JSON holds them."""
    torch.set_num_threads(1)
    panels, numbers = {**EXACT, **EXPERIMENTS}[name]()
    return _rounded(
        {"panels": [{"kind": type(panel).__name__, **asdict(panel)} for panel in panels], "numbers": numbers}
    )


def _rounded(value):
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_rounded(part) for part in value]
    if isinstance(value, np.generic):
        value = value.item()
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _panel(told: dict) -> Panel:
    told = dict(told)
    kind = getattr(kinds, told.pop("kind"))
    if kind is Lines:
        told["series"] = tuple(Series(**series) for series in told["series"])
    elif kind is Heatmap:
        told["values"] = np.array(told["values"])
    return kind(**told)


def text_of(values: dict[str, dict]) -> str:
    """The tour's text."""
    numbers = {name: number for picture in values.values() for name, number in picture["numbers"].items()}
    text = TEMPLATE.read_text(encoding="utf-8")
    text = re.sub(r"^<!-- code (\w+) -->$", lambda mark: excerpt(*CODE[mark[1]]), text, flags=re.MULTILINE)
    text = re.sub(
        r"^<!-- picture (\w+) \| (.+) -->$", lambda mark: f"![{mark[2]}](tour/{mark[1]}.svg)", text, flags=re.MULTILINE
    )
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: f"{numbers[mark[1]]:.3g}", text)


def draw(values: dict[str, dict]) -> None:
    """Write the pictures."""
    from vanilla_transformer.visualization.figures import picture_figure, save_figure

    for name, told in values.items():
        panels = tuple(_panel(panel) for panel in told["panels"])
        save_figure(picture_figure(Picture(name, "", panels)), PICTURES / f"{name}.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compute", action="store_true", help="compute the numbers anew")
    parser.add_argument("--only", choices=[*EXACT, *EXPERIMENTS], help="compute those of one picture alone")
    arguments = parser.parse_args()
    PICTURES.mkdir(exist_ok=True)
    values = json.loads(VALUES.read_text(encoding="utf-8")) if VALUES.exists() else {}
    if arguments.compute:
        names = [arguments.only] if arguments.only else [*EXACT, *EXPERIMENTS]
        values |= {name: compute(name) for name in names}
        VALUES.write_text(json.dumps(values, separators=(",", ":"), ensure_ascii=False) + "\n", encoding="utf-8")
    TOUR.write_text(text_of(values), encoding="utf-8")
    draw(values)


if __name__ == "__main__":
    main()
