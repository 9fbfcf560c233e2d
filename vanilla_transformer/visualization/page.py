"""One self-contained HTML page out of data, a style sheet and scripts: no network, no build step, no library."""

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any


def page(title: str, data: dict[str, Any], scripts: Sequence[str]) -> str:
    """Build a page.

    The page may load nothing and run nothing but the scripts named here: its content security policy has their
    digests. Data are text for the browser and never markup.

    Args:
        title: Title of the page.
        data: What the scripts show, as JSON holds it; they find it under the id `data`.
        scripts: Names of the scripts in `assets`, in the order in which they run.

    Returns:
        The text of an HTML file.
    """
    style = _asset("style.css")
    code = "\n".join(_asset(name) for name in scripts)
    policy = f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(code)}; base-uri 'none'"
    parts = {
        "title": escape(title),
        "policy": escape(policy),
        "style": style,
        "data": json_in_html(data),
        "code": code,
    }
    text = _asset("page.html")
    pieces = text.split("%%")
    # Split once, so that nothing inside of what is filled in is taken for a place to fill.
    return "".join(parts[piece] if index % 2 else piece for index, piece in enumerate(pieces))


def json_in_html(data: Any) -> str:
    """JSON that may stand in a `script` element: without characters that end it, open a comment or end a line.

    Args:
        data: What JSON holds; numbers must be finite.

    Returns:
        JSON in ASCII without <, > and &.

    Raises:
        ValueError: A number is not finite.
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    # Of what stands between the tags: they are on the lines of the text.
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
