import ast
import re
import shlex
import tomllib
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import vanilla_transformer
from vanilla_transformer.cli import VERBS
from vanilla_transformer.cli.options import parse


ROOT = Path(__file__).parents[1]
# README and the pages that it leads to; the cards are rendered, and tested beside what renders them.
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "model_cards" / "README.md",
    *sorted((ROOT / "scripts").rglob("README.md")),
    *sorted((ROOT / "vanilla_transformer").rglob("README.md")),
)
README = (ROOT / "README.md").read_text(encoding="utf-8")
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PAGES}
BLOCKS = [
    block
    for text in TEXTS.values()
    for block in re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
]
HEADING = re.compile(r"^#+ (.*)$", flags=re.MULTILINE)
LAUNCHED = {"scripts/train.py": "train", "scripts/evaluate.py": "evaluate"}


def commands_of(text: str) -> list[list[str]]:
    """The words of every simple command of a shell block."""
    commands: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("&|;"):
                if words:
                    commands.append(words)
                words = []
            else:
                words.append(word)
    return commands


def calls_of(words: list[str]) -> list[str] | None:
    """Verb and arguments of a call of ours, by the console script or a launched script; else `None`."""
    for position, word in enumerate(words):
        if Path(word).name == "vanilla-transformer":
            return words[position + 1 :]
        if word in LAUNCHED:
            return [LAUNCHED[word], *words[position + 1 :]]
    return None


SHELL = [words for language, text in BLOCKS if language == "sh" for words in commands_of(text)]
# Commands in running text and tables, too.
INLINE = [
    shlex.split(words)
    for text in TEXTS.values()
    for words in re.findall(r"`([^`\n]*\bvanilla-transformer [^`\n]*)`", text)
]
CALLS = [call for words in [*SHELL, *INLINE] if (call := calls_of(words))]
PYTHON = [text for language, text in BLOCKS if language == "python"]


def requirement_names() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    listed = [*project["dependencies"], *extras["test"], *extras["dev"]]
    names = {re.match(r"[\w.-]+", requirement)[0] for requirement in listed}
    return {normal(name) for name in names} - {normal(project["name"])}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_commands_are_found():
    verbs = {call[0] for call in CALLS}
    assert {"quickstart", "train", "translate", "evaluate", "score"} <= verbs
    assert sum(any("pip" in word for word in words) for words in SHELL) >= 2


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_every_command_parses(call):
    verb, *arguments = call
    if verb in ("--help", "VERB"):
        assert arguments in ([], ["--help"])
        return
    assert verb in VERBS
    if arguments == ["--help"]:
        return
    module = import_module(f"vanilla_transformer.cli.{verb}")
    options = parse(module.OPTIONS, arguments, prog=verb, summary="")
    assert isinstance(options, module.OPTIONS[arguments[0]] if isinstance(module.OPTIONS, dict) else module.OPTIONS)


def test_both_commands_of_the_set_up_use_the_constraints_and_what_they_install():
    installs = [words for words in SHELL if "install" in words and words[0].endswith("pip")]
    assert len(installs) >= 2
    for words in installs:
        assert words[words.index("-c") + 1] == "constraints.txt"
    assert [words[-1] for words in installs[:2]] == [".", ".[test]"]
    assert [".venv/bin/python", "-m", "pytest", "-n", "2"] in SHELL


def test_launched_scripts_exist():
    for words in SHELL:
        for word in words:
            if word.startswith("scripts/"):
                assert (ROOT / word).is_file()
                # tests/scripts parses the benchmarks' commands, and test_sharding.py the launch files.
                assert word in LAUNCHED or word.startswith(("scripts/benchmarks/", "scripts/launch/"))


def test_the_python_blocks_compile_and_import_what_exists():
    assert PYTHON
    for text in PYTHON:
        tree = ast.parse(text)
        compile(tree, "README.md", "exec")
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert all(find_spec(alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                module = import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), node.module


@pytest.mark.parametrize("page", TEXTS)
def test_files_that_are_named_exist(page):
    text = TEXTS[page]
    for target in re.findall(r"\]\((?!https?://|#)([^)\s]+)\)", text):
        assert ((ROOT / page).parent / target).exists(), target
    for name in re.findall(r"`((?:vanilla_transformer|tests|scripts)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name


def test_every_page_is_reached_from_readme():
    reached, waiting = set(), ["README.md"]
    while waiting:
        page = waiting.pop()
        reached.add(page)
        for target in re.findall(r"\]\((?!https?://|#)([^)\s]+\.md)\)", TEXTS.get(page, "")):
            found = ((ROOT / page).parent / target).resolve().relative_to(ROOT).as_posix()
            if found not in reached:
                waiting.append(found)
    assert set(TEXTS) <= reached


def test_links_within_a_page_lead_to_its_headings():
    for page, text in TEXTS.items():
        headings = {re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-") for line in HEADING.findall(text)}
        assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= headings, page


def test_readme_is_read_in_two_minutes():
    # 240 words a minute; commands, the table of figures and the citation are not read word by word.
    words = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL).split()
    assert len(words) < 2 * 240 + 120


def test_the_reference_is_that_of_the_docstrings():
    path = ROOT / "scripts" / "reference.py"
    spec = spec_from_file_location(path.stem, path)
    reference = module_from_spec(spec)
    spec.loader.exec_module(reference)
    text = TEXTS["vanilla_transformer/README.md"]
    assert reference.page(text) == text, "run python scripts/reference.py"
    assert all(f"### `{name}`\n" in text for name in vanilla_transformer.__all__)


def test_the_constraints_pin_every_requirement_exactly():
    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            pin = re.fullmatch(r"([\w.-]+)==([\w.+!]+)", line.strip())
            assert pin, line
            assert normal(pin[1]) not in pins
            pins[normal(pin[1])] = pin[2]
    assert requirement_names() <= pins.keys()
    assert pins["torch"] == "2.13.0"
