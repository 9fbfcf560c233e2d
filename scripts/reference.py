"""Writes the reference of the public names into vanilla_transformer/README.md, from their signatures and docstrings.

The rest of that page is written by hand and stays.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedConfig

import vanilla_transformer


PAGE = Path(__file__).resolve().parents[1] / "vanilla_transformer" / "README.md"
BEGIN, END = "<!-- reference: begin -->\n", "<!-- reference: end -->\n"
# Sections of a docstring (Google style) that become lists.
_SECTIONS = ("Args", "Returns", "Yields", "Raises", "Example")


class Shown(str):
    """A default value as it is to be shown."""

    __repr__ = str.__str__


def reference() -> str:
    """The reference, in Markdown."""
    blocks = []
    for name in sorted(vanilla_transformer.__all__, key=str.lower):
        thing = getattr(vanilla_transformer, name)
        blocks.append(f"### `{name}`\n\n{_described(name, thing)}")
        if inspect.isclass(thing):
            for method_name, method in _own_methods(thing):
                blocks.append(f"#### `{name}.{method_name}`\n\n{_described(f'{name}.{method_name}', method)}")
    return "\n".join(blocks)


def page(text: str) -> str:
    """A page with the present reference in its place."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{reference()}\n{END}{after}"


def _own_methods(cls: type) -> Iterator[tuple[str, object]]:
    """Public methods that the class defines and describes itself."""
    for name, member in vars(cls).items():
        function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        if not name.startswith("_") and inspect.isfunction(function) and inspect.getdoc(function):
            yield name, function


def _described(name: str, thing: object) -> str:
    signature = _signature(name, thing)
    return f"```\n{signature}\n```\n\n{_markdown(inspect.getdoc(thing) or '')}"


def _signature(name: str, thing: object) -> str:
    """The signature, one parameter a line if it is long; without annotations, which the text explains."""
    parameters = list(inspect.signature(thing).parameters.values())
    if parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    if isinstance(thing, type) and issubclass(thing, PreTrainedConfig):
        # The library's own fields differ between its releases.
        parameters = [parameter for parameter in parameters if parameter.name in thing.__annotations__]
    bare = [
        parameter.replace(
            annotation=inspect.Parameter.empty,
            default=Shown("...") if inspect.isfunction(parameter.default) else parameter.default,
        )
        for parameter in parameters
    ]
    # As Python prints it, with the stars and slashes between the kinds of parameters.
    text = str(inspect.Signature(bare))
    if len(name) + len(text) <= 100:
        return f"{name}{text}"
    inner = "".join(f"    {part},\n" for part in _split(text[1:-1]))
    return f"{name}(\n{inner})"


def _split(text: str) -> list[str]:
    """Parameters of a signature; commas inside brackets separate nothing."""
    parts, depth, start = [], 0, 0
    for position, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    return [*parts, text[start:].strip()]


def _markdown(docstring: str) -> str:
    """A docstring in Markdown: its sections become lists, its examples code."""
    lines, section = [], None
    for line in docstring.splitlines():
        heading = re.fullmatch(r"(\w+)s?:", line)
        if heading and heading[0][:-1] in _SECTIONS:
            section = heading[0][:-1]
            lines += [f"**{section}**", ""]
        elif section in ("Args", "Raises") and (item := re.fullmatch(r"    (\*{0,2}[\w.]+): (.*)", line)):
            lines.append(f"- `{item[1]}`: {item[2]}")
        elif section == "Example":
            lines.append(line)
        elif section is not None and line.startswith("    "):
            lines.append(f"  {line.strip()}" if section in ("Args", "Raises") else line.strip())
        else:
            section = section if not line else None
            lines.append(line)
    return "\n".join(lines).strip() + "\n"


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
