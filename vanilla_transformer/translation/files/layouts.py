"""Layouts of lines of texts and translations: plain text, tab-separated columns, or JSON; imports no torch.

One line of input makes one line of output, so that files can be compared and continued line by line.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vanilla_transformer.errors import UserError
from vanilla_transformer.translation.options import check_characters


if TYPE_CHECKING:
    from vanilla_transformer.translation.translator import Translation

LayoutName = Literal["text", "tsv", "jsonl"]


def layout_of(path: Path | None) -> LayoutName:
    """The layout by a file's suffix: `.tsv` or `.jsonl`; otherwise plain text."""
    return {".tsv": "tsv", ".jsonl": "jsonl"}.get("" if path is None else path.suffix.lower(), "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The layout of lines of input and of output.

    Args:
        source: Layout of the input.
        target: Layout of the output.
        column: In tab-separated input, the column that holds the text, from 1.
        key: In JSON objects, the key of the text.
        alternatives: Whether to write all translations with their scores; otherwise the best without its score.
    """

    source: LayoutName = "text"
    target: LayoutName = "text"
    column: int = 1
    key: str = "source"
    alternatives: bool = False

    def text_of(self, line: str, place: str) -> str:
        """The text of a line of input.

        Args:
            line: The line without its line end.
            place: Where it is, for error messages.

        Returns:
            The text. Line ends, which a text in JSON may have, become spaces.

        Raises:
            UserError: The line does not have the layout.
        """
        if self.source == "text":
            return line
        if self.source == "tsv":
            columns = line.split("\t")
            if len(columns) < self.column and line:
                raise UserError(
                    f"{place}, has {len(columns)} columns, and `column` is {self.column}; correct one of the two."
                )
            return columns[self.column - 1] if line else ""
        text = self._object(line, place).get(self.key)
        if not isinstance(text, str):
            raise UserError(f"{place}, has no text under {self.key!r}; name its key with `key`.")
        check_characters(text, place)
        return " ".join(text.splitlines())

    def line_of(self, line: str, translations: Sequence["Translation"]) -> str:
        """The line of output for a line of input.

        Args:
            line: The line of input without its line end.
            translations: The translations of its text, at least one, the best first.

        Returns:
            The line without its line end. For an empty line it is empty, unless the output is JSON.
        """
        if self.target == "jsonl":
            return self._json_line(line, translations)
        if not (line if self.source == "tsv" else line.strip()):
            return ""
        columns = [line] if self.source == self.target == "tsv" else []
        for translation in translations if self.alternatives else translations[:1]:
            # A tab would start a new column.
            is_column = self.target == "tsv" or self.alternatives
            columns.append(translation.text.replace("\t", " ") if is_column else translation.text)
            if self.alternatives:
                columns.append(f"{translation.score:.6f}")
        return "\t".join(columns)

    def _json_line(self, line: str, translations: Sequence["Translation"]) -> str:
        record = self._object(line, "") if self.source == "jsonl" else {"source": self.text_of(line, "")}
        if self.alternatives:
            record["translations"] = [
                {"text": translation.text, "score": translation.score, "log_prob": translation.log_prob}
                for translation in translations
            ]
        else:
            record["translation"] = translations[0].text
        # Lone surrogates, which JSON may hold and UTF-8 may not, stay escaped.
        return json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace").decode("utf-8")

    def _object(self, line: str, place: str) -> dict:
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{place}, is not JSON ({error.msg}); correct it.") from error
        # A number of too many digits, or brackets nested too deeply.
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place}, cannot be read as JSON ({error}); correct it.") from error
        if not isinstance(record, dict):
            raise UserError(f"{place}, is not a JSON object; correct it.")
        return record
