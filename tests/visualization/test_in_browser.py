"""The pages in a headless Chromium, by mouse and keyboard: what a person sees, and not what the file says."""

import numpy as np
import pytest
from browser import CHROMIUM, Browser
from runs_on_disk import write_run

from vanilla_transformer.translation.options import SearchOptions
from vanilla_transformer.visualization.attention import alignment, attention_of, encoder_attention_of
from vanilla_transformer.visualization.attention_page import attention_page
from vanilla_transformer.visualization.beam_tree import beam_tree
from vanilla_transformer.visualization.panels import picture_page
from vanilla_transformer.visualization.runs import read_run, run_picture


pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def found(make_model, tokenizer, ids):
    """Attention and beam search of a small model."""
    model = make_model().double()
    tree = beam_tree(model, ids[0], SearchOptions(num_beams=3, num_hypotheses=3, extra_length=0))
    return attention_of(model, tokenizer, *ids), tree


@pytest.fixture(scope="module")
def page(found, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "attention.html"
    text = attention_page(found[0], tokenizer, model_name="m", tree=found[1], target_is_given=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def shown(browser, page):
    browser.open(page)
    yield browser
    assert browser.errors == []
    assert browser.requests == [page.resolve().as_uri()]


def texts(browser, selector):
    return browser.evaluate(f"[...document.querySelectorAll({selector!r})].map((node) => node.textContent)")


def test_tokens_are_shown_as_they_are(shown, found):
    attention = found[0]
    assert texts(shown, ".pair ol:first-child .name") == list(attention.target.labels)
    assert texts(shown, ".pair ol:last-child .name") == list(attention.source.labels)
    assert "</script><!-- ß" in shown.evaluate("document.getElementById('target').textContent")
    assert shown.evaluate("document.querySelectorAll('#source b').length") == 0


@pytest.mark.parametrize(("part", "layers", "heads"), [("encoder", 2, 2), ("decoder", 3, 3), ("cross", 3, 3)])
def test_every_head_of_every_attention_can_be_chosen(shown, found, part, layers, heads):
    shown.point(f'input[value="{part}"]', click=True)
    assert shown.evaluate("document.querySelectorAll('.tile').length") == layers * (heads + 1)
    shown.point(f'.tile[data-layer="{layers - 1}"][data-head="1"]', click=True)
    (title,) = texts(shown, "section:nth-of-type(2) h2")
    assert title == f"Layer {layers}, head 2"
    assert shown.evaluate("[document.getElementById('layer').value, document.getElementById('head').value]") == [
        str(layers - 1),
        "1",
    ]
    weights, rows, columns = found[0].parts[part]
    # What is drawn: opacity is the square root of the weight.
    alpha = shown.evaluate(
        "(() => { const canvas = document.getElementById('matrix'); return [...canvas.getContext('2d')"
        ".getImageData(0, 0, canvas.width, canvas.height).data].filter((_, i) => i % 4 === 3); })()"
    )
    drawn = (np.array(alpha).reshape(len(rows), len(columns)) / 255.0) ** 2
    np.testing.assert_allclose(drawn, weights[layers - 1, 1], atol=0.01)


def test_pointing_at_a_token_shows_where_it_looks(shown, found):
    attention = found[0]
    shown.point('.tile[data-layer="2"][data-head="0"]', click=True)
    shown.point(".pair ol:first-child li:nth-child(3)")
    weights = attention.cross[2, 0, 2]
    best = int(weights.argmax())
    readout = shown.evaluate("document.getElementById('readout').textContent")
    assert f"Position 3, “{attention.target.labels[2]}”" in readout
    assert f"looks at “{attention.source.labels[best]}” " in readout
    shares = texts(shown, ".pair ol:last-child .share")
    assert [bool(share) for share in shares] == [weight >= 0.005 for weight in weights]
    shown.point(f".pair ol:last-child li:nth-child({best + 1})")
    readout = shown.evaluate("document.getElementById('readout').textContent")
    assert "is looked at by" in readout


def test_a_click_holds_a_token_and_escape_lets_go(shown):
    shown.point(".pair ol:first-child li:nth-child(2)", click=True)
    shown.point("h1")
    assert texts(shown, '.pair [aria-selected="true"] .name') == texts(
        shown, ".pair ol:first-child li:nth-child(2) .name"
    )
    shown.point(".pair ol:first-child li:nth-child(5)")
    assert "Position 2," in shown.evaluate("document.getElementById('readout').textContent")
    shown.evaluate("document.querySelector('.pair li').focus()")
    shown.press("Escape")
    assert texts(shown, '.pair [aria-selected="true"]') == []


def test_the_keyboard_reaches_everything_and_a_screen_reader_is_told(shown, found):
    attention = found[0]
    for _ in range(40):
        shown.press("Tab")
        if shown.evaluate("document.activeElement.closest('[role=listbox]') !== null"):
            break
    assert shown.evaluate("document.activeElement.getAttribute('role')") == "option"
    shown.press("ArrowDown")
    told = shown.evaluate("document.getElementById('voice').textContent")
    assert told.startswith(f"Position 2, “{attention.target.labels[1]}”")
    shown.press("ArrowRight")
    assert "is looked at by" in shown.evaluate("document.getElementById('voice').textContent")
    shown.evaluate("document.querySelector('.tile[tabindex=\"0\"]').focus()")
    shown.press("ArrowLeft")
    shown.press("Enter")
    (title,) = texts(shown, "section:nth-of-type(2) h2")
    assert title == "Layer 2, head 3"
    assert shown.evaluate("document.querySelectorAll('.tile[tabindex=\"0\"]').length") == 1


def test_tokens_are_merged_to_words(shown, found):
    attention = found[0]
    shown.point("#words", click=True)
    assert texts(shown, ".pair ol:first-child .name") == list(attention.target.word_labels)
    shown.point(".pair ol:first-child li:nth-child(1)")
    # The last layer but one, and the mean of its heads, are what is shown first.
    weights = alignment(attention)[0]
    shares = [float(share.rstrip(" %") or 0.0) for share in texts(shown, ".pair ol:last-child .share")]
    np.testing.assert_allclose(shares, np.where(weights >= 0.005, 100 * weights, 0.0), atol=1.0)


def test_heads_have_colours_of_their_own(shown):
    def heads_drawn() -> list[int]:
        return shown.evaluate("""(() => {
            const canvas = document.querySelector(".pair canvas");
            const points = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            const seen = new Set();
            for (let i = 0; i < points.length; i += 4) seen.add(points.slice(i, i + 3).join());
            const style = getComputedStyle(document.documentElement);
            const parts = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16)).join();
            return [0, 1, 2].filter((head) => seen.has(parts(style.getPropertyValue("--c" + head).trim())));
        })()""")

    # As if every weight were 1, so that lines are opaque.
    shown.evaluate("LEVELS.fill(1.0)")
    shown.point('.tile[data-layer="1"][data-head="0"]', click=True)
    assert heads_drawn() == []
    shown.point("#colours", click=True)
    assert texts(shown, "#heads-legend li") == ["head 1", "head 2", "head 3"]
    assert texts(shown, "section:nth-of-type(2) h2") == ["Layer 2, mean of the heads"]
    shown.point(".pair ol:first-child li:nth-child(2)", click=True)
    assert heads_drawn() == [0, 1, 2]
    shown.point("#colours", click=True)
    assert texts(shown, "#heads-legend li") == []
    assert heads_drawn() == []


def test_alignment_is_drawn_from_the_least_weight_on(shown, found):
    weights = alignment(found[0])
    for step in (1, 4):
        shown.evaluate(
            f"(() => {{ const least = document.getElementById('least'); least.value = {5 * step};"
            "least.dispatchEvent(new Event('input')); })()"
        )
        drawn = shown.evaluate("document.querySelectorAll('#alignment .link').length")
        # Within what a byte keeps of a weight.
        low, high = (weights >= 0.05 * step + 0.003).sum(), (weights >= 0.05 * step - 0.003).sum()
        assert low <= drawn <= high


def test_the_tree_is_walked_with_the_arrow_keys(shown, found):
    tree = found[1]
    assert shown.evaluate("document.querySelectorAll('#tree .node').length") == len(tree.nodes)
    assert texts(shown, "#hypotheses tbody td:nth-child(3)") == [
        f"{hypothesis.score:.3f}" for hypothesis in tree.hypotheses
    ]
    shown.evaluate("document.querySelector('#tree .node').focus()")
    shown.press("ArrowRight")
    first = max((node for node in tree.nodes if node.depth == 1), key=lambda node: node.total)
    branch = shown.evaluate("document.getElementById('branch').textContent")
    assert f"log-probability up to here {first.total:.2f}" in branch
    shown.press("ArrowLeft")
    assert "the start" in shown.evaluate("document.getElementById('branch').textContent")
    best = shown.evaluate("document.querySelectorAll('#tree .node.best').length")
    assert best == len(tree.hypotheses[0].tokens) + 1


def test_tables_stand_beside_pictures(shown, found):
    shown.point("#strongest summary", click=True)
    shown.wait("document.querySelector('#strongest table') !== null")
    rows = shown.evaluate("document.querySelector('#strongest table').rows.length")
    assert rows == len(found[0].target) + 1


def test_an_encoder_alone_has_a_page(browser, make_model, tokenizer, ids, tmp_path):
    path = tmp_path / "encoder.html"
    text = attention_page(encoder_attention_of(make_model(), tokenizer, ids[0]), tokenizer, model_name="m")
    path.write_text(text, encoding="utf-8")
    browser.open(path)
    assert len(texts(browser, "section")) == 2
    assert browser.evaluate("document.querySelectorAll('.tile').length") == 2 * 3
    browser.point(".pair ol:first-child li:nth-child(2)")
    assert "looks at" in browser.evaluate("document.getElementById('readout').textContent")
    assert browser.errors == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("phone", [False, True])
def test_it_fits_a_phone_and_follows_the_theme(browser, page, dark, phone):
    browser.open(page, width=360 if phone else 1200, dark=dark, phone=phone)
    assert browser.evaluate("document.documentElement.scrollWidth") <= (362 if phone else 1200)
    ink, paper = browser.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.documentElement).backgroundColor]"
        ".map((colour) => colour.match(/\\d+/g).map(Number).reduce((a, b) => a + b))"
    )
    assert (ink > paper) == dark
    assert abs(ink - paper) > 450
    unnamed = "[...document.querySelectorAll('select, input, button')].filter((node) => !node.labels?.length)"
    assert browser.evaluate(f"{unnamed}.length") == 0
    assert browser.errors == []


def test_eighty_tokens_with_ninety_six_heads_are_drawn_at_once(browser, make_model, tokenizer, tmp_path):
    sizes = {"encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 16, "decoder_attention_heads": 16}
    model = make_model(d_model=64, **sizes)
    text = tokenizer("abcdefgh " * 10)["input_ids"][:79]
    path = tmp_path / "large.html"
    path.write_text(attention_page(attention_of(model, tokenizer, [*text, 2], [*text, 2]), tokenizer, model_name="m"))
    assert path.stat().st_size < 3_000_000
    browser.open(path)
    seconds = browser.evaluate(
        "(() => { const start = performance.now(); choosePart('encoder'); chooseHead(3, 5); look('row', 7);"
        "return (performance.now() - start) / 1000; })()"
    )
    # A fifteenth of that where nothing else runs.
    assert seconds < 2.0
    assert browser.errors == []


def test_curves_of_a_run_are_drawn_and_read_out(browser, tmp_path):
    picture = run_picture([read_run(write_run(tmp_path / "run", is_over=False))])
    path = tmp_path / "run.html"
    path.write_text(picture_page(picture, refresh=1.0), encoding="utf-8")
    browser.open(path)
    assert len(texts(browser, "svg.chart")) == len(picture.panels)
    browser.evaluate("document.querySelector('svg.chart').focus()")
    browser.press("ArrowRight")
    assert browser.evaluate("document.getElementById('voice').textContent").startswith("update 1: ")
    browser.point("details summary", click=True)
    browser.wait("document.querySelectorAll('details table tbody tr').length === 50")
    # The page reads itself again while the run goes on, and no longer once it is told not to.
    path.write_text(picture_page(picture, refresh=1.0).replace("<h1>", "<h1>Later: "), encoding="utf-8")
    browser.wait("document.querySelector('h1')?.textContent.startsWith('Later')")
    assert browser.errors == []
