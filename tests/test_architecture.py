import ast
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import vanilla_transformer


PACKAGE = Path(vanilla_transformer.__file__).parent
NAME = PACKAGE.name
MODULES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
HUB_FILES = sorted(name for name in MODULES if name.endswith("_vanilla_transformer.py"))


def import_graph():
    """The script that prints the rooms, as a module."""
    path = PACKAGE.parent / "scripts" / "import_graph.py"
    spec = spec_from_file_location(path.stem, path)
    module = module_from_spec(spec)
    # Dataclasses look for their module there.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


IMPORT_GRAPH = import_graph()
ROOMS = [*IMPORT_GRAPH.rooms(PACKAGE)]
# The rooms of training, lowest first: each may import those before it.
TRAINING = ("options", "records", "cpu", "step", "preparation", "watching")
# A folder with more entries is asking to be two. A verb is one file, and the package's own folder has the Hub files.
MOST_ENTRIES = 12
MORE_ENTRIES = {"": 21, "cli": 16}


def imports_of(path: Path, module: str) -> set[tuple[int, str]]:
    """What a file imports, anywhere in it: the number of leading dots, and the absolute name."""
    package = [NAME, *module.split("/")[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {(0, alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            # `from package import name` may import a module.
            found |= {(node.level, f"{base}.{alias.name}") for alias in node.names}
    return found


def rooms_of(path: Path, module: str) -> set[str]:
    """Which of our rooms a file imports from: the first name below the package."""
    names = {name for _, name in imports_of(path, module) if name.split(".")[0] == NAME}
    return {name.split(".")[1] if "." in name else "" for name in names}


def modules_below(*rooms: str) -> list[str]:
    return [name for name in MODULES if name.removesuffix(".py").split("/")[0] in rooms]


def assert_imports_none(modules: list[str], forbidden: set[str]) -> None:
    for module in modules:
        assert not rooms_of(MODULES[module], module) & forbidden, module


def test_the_analysis_sees_imports_wherever_they_stand(tmp_path):
    path = tmp_path / "engine.py"
    path.write_text(
        "import torch, vanilla_transformer.cli\n"
        "from ..data.batching import TokenBatches\n"
        "from .. import evaluation\n"
        "from . import journal\n"
        "def f():\n    from vanilla_transformer.translation.search.search import search\n"
    )
    assert rooms_of(path, "training/engine.py") == {"cli", "data", "evaluation", "training", "translation"}
    path.write_text("from . import errors\nfrom .presets import PAPER\n")
    assert rooms_of(path, "engine.py") == {"errors", "presets"}


def test_hub_files_import_nothing_of_ours_but_each_other_relatively():
    assert {f"{part}_vanilla_transformer.py" for part in ("configuration", "modeling", "tokenization")} <= {*HUB_FILES}
    for module in HUB_FILES:
        for level, name in imports_of(MODULES[module], module):
            if name.split(".")[0] == NAME:
                assert level == 1, (module, name)
                assert f"{name.split('.')[1]}.py" in HUB_FILES, (module, name)


def test_hub_files_need_nothing_that_transformers_does_not_bring():
    known = {"torch", "transformers", "tokenizers", "huggingface_hub", "numpy", "safetensors", NAME}
    for module in HUB_FILES:
        names = {name.split(".")[0] for _, name in imports_of(MODULES[module], module)}
        assert names <= known | sys.stdlib_module_names, module


def test_the_configuration_does_not_know_the_model():
    for module in HUB_FILES:
        if module.startswith(("configuration_", "tokenization_")):
            assert not rooms_of(MODULES[module], module), module


def test_loading_knows_what_is_loaded_alone():
    hub_files = {name.removesuffix(".py") for name in HUB_FILES}
    assert rooms_of(MODULES["loading.py"], "loading.py") <= {*hub_files, "errors"}


def test_data_takes_what_it_needs_as_arguments():
    modules = modules_below("data")
    assert len(modules) > 1
    assert_imports_none(
        modules,
        {
            "cli",
            "conversion",
            "evaluation",
            "modeling_vanilla_transformer",
            "publishing",
            "tokenization_vanilla_transformer",
            "training",
            "translation",
            "visualization",
        },
    )


def test_training_is_given_evaluation_and_publishing():
    modules = modules_below("training")
    assert len(modules) > 1
    assert_imports_none(modules, {"cli", "evaluation", "publishing", "translation", "visualization"})


def test_rooms_do_not_know_those_that_use_them():
    assert_imports_none(
        modules_below("translation", "conversion", "visualization"), {"cli", "evaluation", "publishing", "training"}
    )
    assert_imports_none(modules_below("evaluation"), {"cli", "publishing", "training"})
    assert rooms_of(MODULES["errors.py"], "errors.py") == set()
    assert rooms_of(MODULES["presets.py"], "presets.py") == set()


def test_only_the_command_line_and_what_starts_it_import_the_command_line():
    for module in MODULES:
        if module != "__main__.py" and not module.startswith(("cli/", "cli.py")):
            assert "cli" not in rooms_of(MODULES[module], module), module


def test_publishing_reads_records_and_knows_nothing_of_the_loop():
    modules = modules_below("publishing")
    assert len(modules) > 1
    assert_imports_none(
        modules, {"cli", "conversion", "data", "evaluation", "quickstart", "translation", "visualization"}
    )
    for module in modules:
        imported = {name for _, name in imports_of(MODULES[module], module)}
        from_training = {name for name in imported if name.startswith(f"{NAME}.training")}
        # A run's options, its record, and what keeps a checkpoint from being deleted while it is read.
        read = tuple(f"{NAME}.training.{name}" for name in ("options", "records.journal", "records.leases"))
        assert all(name.startswith(read) for name in from_training), module
    for module in modules_below("training", "translation", "data"):
        assert "publishing" not in rooms_of(MODULES[module], module), module


def test_scripts_only_call_the_command_line():
    scripts = PACKAGE.parent / "scripts"
    for name in ("train.py", "evaluate.py"):
        path = scripts / name
        if path.is_file():
            ours = {imported for _, imported in imports_of(path, name) if imported.split(".")[0] == NAME}
            assert ours and all(imported.startswith(f"{NAME}.cli") for imported in ours), name


@pytest.mark.parametrize("name", ["utils", "helpers", "misc", "common"])
def test_every_file_is_named_after_what_it_holds(name):
    assert not [module for module in MODULES if Path(module).stem == name or name in Path(module).parts]


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.path or NAME)
def test_no_room_has_a_circle(room):
    assert sum(map(len, room.floors())) == len(room.arrows)


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.path or NAME)
def test_every_room_can_be_overlooked(room):
    assert len(room.arrows) <= MORE_ENTRIES.get(room.path, MOST_ENTRIES)


def test_a_circle_is_seen(tmp_path):
    package = tmp_path / "package"
    (package / "inner").mkdir(parents=True)
    (package / "inner" / "a.py").write_text("from . import b\n")
    (package / "inner" / "b.py").write_text("def f():\n    from package.inner.a import f\n")
    (package / "c.py").write_text("from package.inner import a\n")
    outer, inner = IMPORT_GRAPH.rooms(package)
    assert outer.floors() == [["inner"], ["c"]]
    with pytest.raises(ValueError, match="inner: imports go round among a, b"):
        inner.floors()


def test_rooms_of_training_import_those_below():
    training = next(room for room in ROOMS if room.path == "training")
    for number, name in enumerate(TRAINING):
        assert training.arrows[name] <= {*TRAINING[:number]}, name


def test_the_engine_for_cpus_decides_nothing():
    modules = modules_below("native")
    assert len(modules) > 1
    for module in modules:
        allowed = {"configuration_vanilla_transformer", "modeling_vanilla_transformer", "errors", "files", "native"}
        assert rooms_of(MODULES[module], module) <= allowed, module
