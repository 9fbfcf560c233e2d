"""A verb's options: one dataclass, filled from a recipe and from flags; flags win, and unknown names are errors."""

import argparse
import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from importlib import resources
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from vanilla_transformer.errors import UserError


Options = TypeVar("Options")

_TOO_LARGE = 1 << 31


class _Parser(argparse.ArgumentParser):
    """Reports mistakes in one sentence, without the usage text that would hide it."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[:1].upper()}{message[1:]}; see {self.prog} --help.")


def parse(
    options: type[Options] | Mapping[str, type[Options]], argv: Sequence[str], *, prog: str, summary: str
) -> Options:
    """Build a verb's options.

    Args:
        options: Dataclass whose fields have a `help` text in their metadata; `positional` in it makes an argument
            without a flag. A class attribute `TAKES_RECIPE` that is true adds `--config`. A verb that does several
            things has a dataclass for each, by the word that chooses it, whose class attribute `SUMMARY` describes it.
        argv: Arguments behind the verb.
        prog: Name of program and verb.
        summary: What the verb does.

    Returns:
        The options.

    Raises:
        UserError: An option is unknown, misspelt, lacks its value or has one of the wrong type, or a number that is
            larger than anything can be counted here.
    """
    if isinstance(options, Mapping):
        word, chosen = _choose(options, argv, prog=prog, summary=summary)
        summary = f"{chosen.SUMMARY[0].upper()}{chosen.SUMMARY[1:]}."
        return parse(chosen, argv[1:], prog=f"{prog} {word}", summary=summary)
    hints = get_type_hints(options)
    takes_recipe = getattr(options, "TAKES_RECIPE", False)
    parser = _Parser(prog=prog, description=summary, allow_abbrev=False, formatter_class=_HelpFormatter)
    if takes_recipe:
        parser.add_argument(
            "--config",
            metavar="RECIPE",
            help="YAML file of options, or a shipped recipe: " + ", ".join(recipes()) + ".",
        )
    for item in fields(options):
        _add_argument(parser, item, hints[item.name])
    known, unknown = parser.parse_known_args(list(argv))
    if unknown:
        flags = [action for group in parser._actions for action in group.option_strings]
        raise UserError(_unknown(unknown[0].split("=")[0], flags, f"an option of `{prog}`"))
    # argparse would ask for these before it names a misspelt one.
    missing = [f"--{item.name}" for item in fields(options) if _is_required(item) and not hasattr(known, item.name)]
    if missing:
        raise UserError(f"{' and '.join(missing)} must be given; see {prog} --help.")
    values = vars(known)
    recipe = values.pop("config", None)
    if recipe is not None:
        values = {**read_recipe(recipe, options), **values}
    for name, value in values.items():
        # Beyond it, libraries overflow or abort. A seed counts nothing.
        if name != "seed" and isinstance(value, int) and value >= _TOO_LARGE:
            raise UserError(f"--{name} is {value}; it must be below 2 ** 31.")
    return options(**values)


def _choose(
    kinds: Mapping[str, type[Options]], argv: Sequence[str], *, prog: str, summary: str
) -> tuple[str, type[Options]]:
    """The first argument, which says what a verb is to do, and the options of that."""
    word = argv[0] if argv else None
    if word in ("-h", "--help"):
        width = max(map(len, kinds)) + 2
        lines = [f"  {name:<{width}}{kind.SUMMARY}" for name, kind in kinds.items()]
        print(
            "\n".join(
                [f"usage: {prog} WHAT [OPTIONS]", "", summary, "", *lines, "", f"`{prog} WHAT --help` lists options."]
            )
        )
        raise SystemExit(0)
    if word not in kinds:
        what = "Nothing was named" if word is None else f"{word} is not something to {prog.split()[-1]}"
        nearest = difflib.get_close_matches(word or "", kinds, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"name one of {', '.join(kinds)}."
        raise UserError(f"{what}; {hint}")
    return word, kinds[word]


def recipes() -> list[str]:
    """Names of the shipped recipes."""
    folder = resources.files("vanilla_transformer") / "recipes"
    return sorted(path.name.removesuffix(".yaml") for path in folder.iterdir() if path.name.endswith(".yaml"))


def read_recipe(name: str, options: type) -> dict[str, Any]:
    """Read a YAML file of options.

    Args:
        name: Path of the file, or name of a shipped recipe.
        options: Dataclass that has the options.

    Returns:
        Options by name, of the types that the dataclass declares.

    Raises:
        UserError: There is no such file, it is not a YAML mapping, or a name or value in it is not an option's.
    """
    import yaml

    hints = get_type_hints(options)
    hints = {item.name: hints[item.name] for item in fields(options)}

    if name in recipes():
        text = (resources.files("vanilla_transformer") / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
    else:
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"--config {name} is neither a readable file nor a shipped recipe; the shipped ones are "
                f"{', '.join(recipes())}."
            ) from error
    try:
        values = yaml.safe_load(text)
    # The latter of dates that do not exist, of numbers of too many digits, and of too many brackets.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{name} is not valid YAML ({' '.join(str(error).split())}); correct it.") from error
    if not isinstance(values, dict):
        raise UserError(f"{name} must hold lines of the form `option: value`, and nothing else.")
    for key in values:
        if key not in hints:
            raise UserError(f"{name}: {_unknown(str(key), hints, 'an option')}")
    return {key: _from_yaml(f"{name}: {key}", value, hints[key]) for key, value in values.items()}


def _unknown(given: str, known: Iterable[str], what: str) -> str:
    nearest = difflib.get_close_matches(given.replace("-", "_") if given[:1] != "-" else given, list(known), n=1)
    if given.startswith("--"):
        nearest = difflib.get_close_matches("--" + given[2:].replace("-", "_"), list(known), n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else "; --help lists them all."
    return f"{given} is not {what}{hint}"


def _add_argument(parser: argparse.ArgumentParser, item: Field, hint: Any) -> None:
    kind, optional = _strip_none(hint)
    text = _describe(item, optional)
    # Absent flags leave no trace, so that they do not overrule a recipe.
    common: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text}
    if kind is bool:
        parser.add_argument(f"--{item.name}", action="store_true", **common)
        parser.add_argument(
            f"--no_{item.name}",
            dest=item.name,
            action="store_false",
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )
        return
    if get_origin(kind) is tuple:
        element, *rest = get_args(kind)
        common.update(type=element, nargs="+" if rest == [Ellipsis] else 1 + len(rest), action=_StoreTuple)
    elif get_origin(kind) is Literal:
        common.update(type=str, choices=get_args(kind))
    else:
        common["type"] = kind
    if item.metadata.get("positional"):
        if "nargs" in common and item.default is not MISSING:
            common["nargs"] = "*"
        parser.add_argument(item.name, metavar=item.name.upper(), **common)
        return
    metavar = {} if "choices" in common else {"metavar": getattr(common["type"], "__name__", "value").upper()}
    parser.add_argument(f"--{item.name}", **metavar, **common)


def _is_required(item: Field) -> bool:
    return item.default is MISSING and item.default_factory is MISSING


def _describe(item: Field, optional: bool) -> str:
    text = item.metadata["help"] + (" Required." if _is_required(item) else "")
    shown = (
        item.default is not MISSING and item.default not in (None, ()) and item.default is not False and not optional
    )
    return f"{text} Default: {item.default}.".replace("%", "%%") if shown else text.replace("%", "%%")


def _strip_none(hint: Any) -> tuple[Any, bool]:
    """`X | None` to `X`, and whether there was a `None`."""
    if get_origin(hint) in (Union, UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        return kinds[0], len(kinds) < len(get_args(hint))
    return hint, False


def _from_yaml(name: str, value: Any, hint: Any) -> Any:
    """Check a recipe's value against an option's type."""
    kind, optional = _strip_none(hint)
    if value is None and optional:
        return None
    if get_origin(kind) is tuple:
        element, *rest = get_args(kind)
        values = value if isinstance(value, list) else [value]
        if rest != [Ellipsis] and len(values) != 1 + len(rest):
            raise UserError(f"{name} is {value!r}; it must be a list of {1 + len(rest)} values.")
        return tuple(_from_yaml(name, part, element) for part in values)
    if get_origin(kind) is Literal:
        # YAML reads a bare `no` as false.
        value = {False: "no", True: "yes"}.get(value, value) if isinstance(value, bool) else value
        if value not in get_args(kind):
            raise UserError(f"{name} is {value!r}; it must be one of {', '.join(get_args(kind))}.")
        return value
    accepted = {
        int: isinstance(value, int) and not isinstance(value, bool),
        float: isinstance(value, (int, float)) and not isinstance(value, bool),
        bool: isinstance(value, bool),
        str: isinstance(value, str),
        Path: isinstance(value, str),
    }
    if kind is float and isinstance(value, (str, int)) and not isinstance(value, bool):
        # YAML 1.1 reads 1e-9, without a point, as text; and a whole number may be too large.
        try:
            return float(value)
        except (ValueError, OverflowError) as error:
            raise UserError(f"{name} is {value!r}; it must be a number.") from error
    if isinstance(value, str) and "\0" in value:
        raise UserError(f"{name} is {value!r}; it must not have a NUL character.")
    if not accepted[kind]:
        names = {
            int: "a whole number",
            float: "a number",
            bool: "true or false",
            str: "text in quotes",
            Path: "a path",
        }
        raise UserError(f"{name} is {value!r}; it must be {names[kind]}.")
    return kind(value)


class _StoreTuple(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, tuple(values))


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=38, width=119 if not sys.stdout.isatty() else None)
