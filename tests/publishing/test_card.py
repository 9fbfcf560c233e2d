import json
import math
import re
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise

import pytest
import yaml
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import model_index_to_eval_results
from publishing_material import read
from safetensors.torch import load_file

from vanilla_transformer import VanillaTransformerForConditionalGeneration, VanillaTransformerTokenizer
from vanilla_transformer.errors import UserError
from vanilla_transformer.publishing.bundle import make_bundle
from vanilla_transformer.publishing.card import card_files, render
from vanilla_transformer.publishing.curve import draw
from vanilla_transformer.publishing.facts import Curve, Facts, TestScore, TrainingText, merged, read_facts
from vanilla_transformer.training.records.journal import read_journal
from vanilla_transformer.training.run_record import note_result


SCORE = TestScore(
    test_set="newstest2014", dataset="wmt/wmt14", split="test", num_sentences=3003, bleu=27.314,
    bleu_signature="nrefs:1", chrf=57.5, chrf_signature="nc:6", num_beams=4, length_penalty=0.6, rules="paper",
    seconds=12.5, device="cpu", threads=2,
)  # fmt: skip
FACTS = Facts(
    name="user/en-de",
    source_language="en",
    target_languages=("de", "pt_BR"),
    license="cc-by-4.0",
    parameters=65_000_000,
    text=TrainingText(
        name="WMT 2014", dataset="wmt/wmt14", license="research", train_pairs=4_500_000, dropped_pairs=12
    ),
    curve=Curve(train=((100, 7.0), (200, 5.0)), valid=((200, 5.5),)),
    scores=(SCORE,),
    limits=("It knows news.",),
)


def test_the_metadata_is_what_the_library_reads_back():
    data = ModelCard(render(FACTS, "user/en-de")).data
    assert data.language == ["en", "de", "pt"]
    assert (data.license, data.library_name, data.pipeline_tag) == ("cc-by-4.0", "transformers", "translation")
    assert data.datasets == ["wmt/wmt14"]
    assert data.metrics == ["bleu", "chrf"]
    name, results = model_index_to_eval_results(yaml.safe_load(data.to_yaml())["model-index"])
    assert name == "en-de"
    assert [(result.metric_type, result.metric_value) for result in results] == [("bleu", 27.31), ("chrf", 57.5)]
    for result in results:
        assert (result.dataset_type, result.dataset_name, result.dataset_split) == (
            "wmt/wmt14",
            "newstest2014",
            "test",
        )
        assert result.metric_args["signature"] in ("nrefs:1", "nc:6")


def test_the_card_tells_what_is_known():
    card = render(FACTS, "user/en-de")
    for words in (
        "from en to de, pt_BR, with 65,000,000 parameters",
        "| newstest2014 | 3,003 | 27.3 | 57.5 | 4 | 0.6 | paper |",
        "BLEU `nrefs:1`, chrF `nc:6`",
        "3,003 sentences in 12.5 seconds, beam size 4, on CPU with 2 threads.",
        "Licence of the text: research",
        "Pairs trained on: 4,500,000, after 12 were dropped",
        "- It knows news.",
        "learning_curve.svg",
    ):
        assert words in card, words


def test_what_is_unknown_is_absent():
    card = render(Facts(name="user/en-de"), "user/en-de")
    data = ModelCard(card).data
    assert data.eval_results is data.language is data.license is data.metrics is data.datasets is None
    for words in (
        "None",
        "BLEU",
        "Speed",
        "Data",
        "Training",
        "Architecture",
        "parameters",
        "svg",
        "translates",
        "[]",
    ):
        assert words not in card, words
    assert "- No test set was scored." in card
    assert not re.search(r"\n{3,}", card)
    bare = replace(
        SCORE, chrf=None, chrf_signature=None, num_beams=None, length_penalty=None, rules=None, seconds=None
    )
    card = render(Facts(name="x", scores=(bare,)), "x")
    assert "| newstest2014 | 3,003 | 27.3 |  |  |  |  |" in card
    assert "None" not in card and "Speed" not in card
    assert [result.metric_type for result in ModelCard(card).data.eval_results] == ["bleu"]


def test_python_in_the_card_compiles():
    blocks = re.findall(r"```python\n(.*?)```", render(FACTS, "user/en-de", revision="v1"), flags=re.DOTALL)
    assert len(blocks) == 2
    for block in [*blocks, *re.findall(r"```python\n(.*?)```", render(FACTS, "user/en-de"), flags=re.DOTALL)]:
        compile(block, "card", "exec")
        assert '"user/en-de"' in block


def test_python_in_the_card_names_a_language_where_the_model_needs_one(model):
    tokenizer = VanillaTransformerTokenizer.train_from_iterator(["a b"], 263, languages=["de", "pt_BR"])
    tokenizer.save_pretrained(model)
    translation = VanillaTransformerForConditionalGeneration.from_pretrained(model)
    translation.resize_token_embeddings(len(tokenizer))
    translation.generation_config.max_new_tokens = 4
    translation.save_pretrained(model)
    bundle = make_bundle(model, str(model))
    assert bundle.facts.target_languages == bundle.facts.language_tags == ("de", "pt_BR")
    transformers_alone, pipeline, package = re.findall(r"```python\n(.*?)```", bundle.card, flags=re.DOTALL)
    assert 'translate("...", tgt_lang="de")' in pipeline
    names = {}
    exec(transformers_alone, names)
    assert names["batch"]["input_ids"][0, 0] == tokenizer.language_tags["de"]
    exec(package, {})
    tokenizer.tgt_lang = "de"
    tokenizer.save_pretrained(model)
    assert "tgt_lang" not in make_bundle(model, str(model)).card


def test_words_that_mean_something_to_yaml_and_templates_stay_words():
    text = "a: b # {{ facts }} {% raw %} 'é' \"…\""
    card = render(replace(FACTS, summary=text, license=text), "user/en-de")
    assert ModelCard(card).data.license == text
    assert f"\n{text}\n" in card


def test_names_of_test_sets_may_be_of_any_letters():
    names = ("новости", "日本語 2024", "a | b\nc", "???")
    card = render(replace(FACTS, scores=tuple(replace(SCORE, test_set=name, dataset=None) for name in names)), "x")
    results = ModelCard(card).data.eval_results
    assert [result.dataset_type for result in results[::2]] == ["новости", "日本語-2024", "a-b-c", "test"]
    assert [result.dataset_name for result in results[::2]] == [*names]
    table = card[card.index("| test set") :].split("\n\n")[0].splitlines()
    assert len(table) == 2 + len(names)
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in table} == {8}


def test_facts_survive_their_file():
    assert read_facts(json.loads(FACTS.as_json()), "facts.json") == FACTS
    assert "null" not in FACTS.as_json()


def test_what_is_told_wins_item_by_item():
    found = {"name": "x", "text": {"name": "found", "train_pairs": 3}, "limits": ["one"]}
    told = {"text": {"name": "told"}, "limits": ["two"], "license": "mit"}
    assert merged(found, told) == {
        "name": "x", "text": {"name": "told", "train_pairs": 3}, "limits": ["two"], "license": "mit",
    }  # fmt: skip
    assert found["text"]["name"] == "found"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"name": "x", "paramters": 1}, "did you mean parameters"),
        ({"parameters": 1}, "lacks name"),
        ({"name": "x", "parameters": True}, "parameters is True"),
        ({"name": "x", "parameters": 1.5}, "parameters is 1.5"),
        ({"name": "x", "text": []}, "text holds"),
        ({"name": "x", "limits": "one"}, "limits is 'one'"),
        ({"name": "x", "limits": [1]}, "limits is 1"),
        ({"name": "x", "curve": {"train": [[1, 2, 3]]}}, "train is"),
        ({"name": "x", "curve": {"train": [[1, math.nan]]}}, "train is nan"),
        ({"name": "x", "training": {"options": {"seed": [1]}}}, "options, seed is"),
        ([], "must be an object"),
    ],
)
def test_wrong_facts_are_refused(values, words):
    with pytest.raises(UserError, match=r"facts\.json") as caught:
        read_facts(values, "facts.json")
    assert words in str(caught.value)


# Against the run


def test_facts_are_those_of_the_run(run_folder):
    facts = make_bundle(run_folder, "user/en-de").facts
    tensors = load_file(run_folder / "model.safetensors")
    assert (
        facts.parameters
        == sum(tensor.numel() for tensor in tensors.values())
        == read(run_folder / "run.json")["parameters"]
    )
    assert (facts.source_language, facts.target_languages) == ("en", ("de",))
    assert facts.architecture["d_model"] == 16
    assert facts.text == TrainingText(train_pairs=40, valid_pairs=40, dropped_pairs=0)
    records = read_journal(run_folder / "metrics.jsonl")
    train = [record for record in records if record["kind"] == "train"]
    assert facts.training.updates == 8 and facts.training.averaged == 2
    assert facts.training.seconds == pytest.approx(sum(record["seconds"] for record in train), abs=0.06)
    assert facts.training.options["warmup_steps"] == 10
    assert [point[0] for point in facts.curve.train] == [record["update"] for record in train]
    assert facts.curve.valid[-1] == (8, round(records[-1]["loss"], 4))
    assert facts.scores == ()


def test_facts_are_those_of_the_checkpoints_that_the_result_was_made_of(run_folder, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    assert read(folder / "run.json")["result"] == {"updates": [6, 8]}
    # As `--result best` with `--average_last 3` leaves it, or a resumed run that has not ended.
    note_result(folder, [4, 2, 6])
    bundle = make_bundle(folder, "user/en-de")
    assert (bundle.facts.training.updates, bundle.facts.training.averaged) == (6, 3)
    assert "The weights are the mean of 3 checkpoints." in bundle.card
    assert max(json.loads(line)["update"] for line in bundle.files["metrics.jsonl"].splitlines()) == 6
    assert bundle.facts.curve.train[-1][0] == 6
    note_result(folder, None)
    training = make_bundle(folder, "user/en-de").facts.training
    assert training.updates is training.averaged is training.epochs is training.seconds is None
    assert training.options == bundle.facts.training.options
    assert training.options["warmup_steps"] == 10


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_folder_of_data_is_no_data_set_of_the_hub(run_folder, tmp_path, is_folder):
    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    for name, change in (("options.yaml", {"dataset": "data/news"}), ("run.json", {"dataset_is_folder": is_folder})):
        # What YAML reads, JSON is.
        record = yaml.safe_load((folder / name).read_text()) | change
        (folder / name).write_text(json.dumps(record))
    # The folder is not to be seen from where it is published.
    assert make_bundle(folder, "user/en-de").facts.text.dataset == (None if is_folder else "data/news")


def test_a_model_without_a_run_has_the_facts_of_its_files(model_folder):
    bundle = make_bundle(model_folder, "user/en-de")
    assert bundle.facts.parameters and bundle.facts.architecture
    assert bundle.facts.training is bundle.facts.text is bundle.facts.curve is None
    assert not {"metrics.jsonl", "learning_curve.svg"} & bundle.files.keys()


def test_scores_come_from_what_evaluate_writes(model_folder, tmp_path):
    record = {"bleu": 1.5, "bleu_signature": "s", "num_sentences": 3, "model": "/home/me/run", "seconds": 2.0}
    (tmp_path / "news.json").write_text(json.dumps(record))
    bundle = make_bundle(model_folder, "user/en-de", evaluations=[tmp_path / "news.json"])
    (score,) = bundle.facts.scores
    assert (score.test_set, score.bleu, score.seconds) == ("news", 1.5, 2.0)
    assert b"/home/me" not in bundle.files["facts.json"]


def test_what_is_given_wins_over_what_is_told_and_that_over_what_is_found(model, tmp_path):
    record = {"bleu": 1.5, "bleu_signature": "s", "num_sentences": 3}
    told = {"name": "someone/else", "scores": [{**record, "test_set": "told"}]}
    for path in (model / "evaluation.json", tmp_path / "given.json"):
        path.write_text(json.dumps(record))
    for changes, expected in (
        ({}, "evaluation"),
        ({"told": told}, "told"),
        ({"told": told, "evaluations": [tmp_path / "given.json"]}, "given"),
    ):
        facts = make_bundle(model, "user/en-de", **changes).facts
        assert facts.name == "user/en-de"
        assert [score.test_set for score in facts.scores] == [expected]


def test_long_curves_keep_their_ends(run_folder, tmp_path, monkeypatch):
    from vanilla_transformer.publishing.run_facts import _points

    values = [(update, 1.0 / update) for update in range(1, 1001)]
    points = _points(values)
    assert len(points) == 100 and points[-1] == [1000, 0.001]
    assert {b[0] - a[0] for a, b in pairwise(points)} == {10}
    assert _points(values[:3]) == [[1, 1.0], [2, 0.5], [3, 0.3333]]


# The picture


def test_the_picture_shows_every_point_where_it_belongs():
    curve = Curve(train=((0, 8.0), (500, 4.0), (1000, 2.0)), valid=((500, 5.0), (1000, 3.0)))
    root = ElementTree.fromstring(draw(curve, "A < B"))
    space = "{http://www.w3.org/2000/svg}"
    assert root.find(f"{space}title").text == "A < B"
    lines = [path.get("d") for path in root.iter(f"{space}path") if path.get("fill") == "none"]
    drawn = [[tuple(map(float, point.split())) for point in line[1:].split("L")] for line in lines]
    assert [len(line) for line in drawn] == [3, 2]
    # Linear in both directions, and upside down as pictures are.
    places = dict(zip([*curve.train, *curve.valid], [*drawn[0], *drawn[1]], strict=True))
    (x0, y8), (x1, y2) = places[0, 8.0], places[1000, 2.0]
    assert x0 < x1 and y8 < y2
    for (update, value), (x, y) in places.items():
        assert x == pytest.approx(x0 + (x1 - x0) * update / 1000, abs=0.11)
        assert y == pytest.approx(y8 + (y2 - y8) * (8.0 - value) / 6.0, abs=0.11)
    width, height = float(root.get("width")), float(root.get("height"))
    assert all(0 < x < width and 0 < y < height for x, y in places.values())


@pytest.mark.parametrize("values", [[(1, 2.0), (2, 2.0)], [(5, 1e-3), (10, 2e-3)], [(1, 0.0), (10**6, 900.0)]])
def test_the_picture_of_strange_curves(values):
    root = ElementTree.fromstring(draw(Curve(valid=tuple(values)), "x"))
    assert "nan" not in ElementTree.tostring(root).decode()
    assert "train" not in card_files(Facts(name="x", curve=Curve(valid=tuple(values))), "x")["learning_curve.svg"]
