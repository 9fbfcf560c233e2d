import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from vanilla_transformer.loading import read_json
from vanilla_transformer.publishing.card import CARD, FACTS, card_files
from vanilla_transformer.publishing.facts import read_facts


FOLDERS = sorted(path.parent for path in (Path(__file__).parents[2] / "model_cards").glob(f"*/{FACTS}"))


def test_there_are_cards_and_no_weights():
    assert len(FOLDERS) >= 2
    assert not [path for folder in FOLDERS for path in folder.iterdir() if path.suffix not in (".json", ".md", ".svg")]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_card_is_that_of_its_facts(folder):
    facts = read_facts(read_json(folder / FACTS), FACTS)
    rendered = card_files(facts, folder.name)
    assert rendered.keys() == {path.name for path in folder.iterdir()}
    for name, text in rendered.items():
        assert (folder / name).read_text(encoding="utf-8") == text, f"run python scripts/model_cards.py ({name})"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_card_says_how_it_was_scored(folder):
    card = ModelCard.load(folder / CARD)
    assert {result.metric_type for result in card.data.eval_results} == {"bleu", "chrf"}
    assert all("version:" in result.metric_args["signature"] for result in card.data.eval_results)
    text = (folder / CARD).read_text(encoding="utf-8")
    # A path that begins at the root, and is not part of an address.
    assert not re.search(r"(?<![\w.:/])/\w+/", text)
