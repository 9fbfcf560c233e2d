"""Render the cards in `model_cards/` again, from the facts beside them."""

from pathlib import Path

from vanilla_transformer.loading import read_json
from vanilla_transformer.publishing.card import FACTS, card_files
from vanilla_transformer.publishing.facts import read_facts


FOLDER = Path(__file__).parents[1] / "model_cards"


def main() -> None:
    for path in sorted(FOLDER.glob(f"*/{FACTS}")):
        for name, text in card_files(read_facts(read_json(path), path), path.parent.name).items():
            (path.parent / name).write_text(text, encoding="utf-8")
        print(path.parent)


if __name__ == "__main__":
    main()
