"""What is shipped: the wheel's content, and the wheel installed where there is no checkout."""

import configparser
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import vanilla_transformer


ROOT = Path(__file__).parents[1]
SPLITS = ("train", "valid", "test")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT],
        check=True,
        capture_output=True,
    )
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A virtual environment with the wheel; its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    # Without pip of its own, which would take a while to unpack: this environment's pip installs into it.
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel],
        check=True,
        capture_output=True,
    )
    own = Path(
        subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
    )
    # A path in a .pth file comes behind the environment's own packages; the .pth files there are not read, so that
    # the checkout is not on the path.
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python.parent


def run(*command, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=cwd, env=environment).stdout


def test_the_wheel_holds_what_is_needed_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (scripts,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
        entry_points = configparser.ConfigParser()
        entry_points.read_string(archive.read(scripts).decode())
    information = scripts.rpartition("/")[0]
    needed = {"vanilla_transformer/py.typed", "vanilla_transformer/quickstart/sample/NOTICE"}
    needed |= {f"vanilla_transformer/recipes/{name}.yaml" for name in ("base", "big", "multi30k", "quickstart")}
    needed |= {f"vanilla_transformer/quickstart/sample/{split}.{side}" for split in SPLITS for side in ("en", "de")}
    package = ROOT / "vanilla_transformer"
    assets = package / "visualization" / "assets"
    needed |= {path.relative_to(ROOT).as_posix() for path in assets.iterdir()}
    needed |= {path.relative_to(ROOT).as_posix() for path in package.rglob("*.py")}
    assert needed <= names
    assert f"{information}/licenses/LICENSE" in names
    assert f"{information}/licenses/vanilla_transformer/quickstart/sample/NOTICE" in names
    assert {name.split("/")[0] for name in names} == {"vanilla_transformer", information}
    assert not [name for name in names if "test_" in name or "__pycache__" in name]
    assert entry_points["console_scripts"]["vanilla-transformer"] == "vanilla_transformer.cli:main"


def test_the_installed_wheel_works_without_the_checkout(installed, tmp_path):
    code = """
import json
import vanilla_transformer
from vanilla_transformer.cli.options import read_recipe, recipes
from vanilla_transformer.quickstart.first_run import sample_files
from vanilla_transformer.training.options import TrainingOptions
for name in recipes():
    TrainingOptions(**read_recipe(name, TrainingOptions))
sample = [path for split in ("train", "valid", "test") for path in sample_files(split)]
print(json.dumps([vanilla_transformer.__file__, recipes(), [str(path) for path in sample if path.is_file()]]))
"""
    module, recipes, sample = json.loads(run(installed / "python", "-c", code, cwd=tmp_path))
    assert not Path(module).is_relative_to(ROOT)
    assert all(Path(path).is_relative_to(installed.parent) for path in (module, *sample))
    assert recipes == ["base", "big", "multi30k", "quickstart"]
    assert len(sample) == 6


def test_the_installed_console_script_answers(installed, tmp_path):
    version = run(installed / "vanilla-transformer", "--version", cwd=tmp_path)
    assert version == f"vanilla-transformer {vanilla_transformer.__version__}\n"
    assert "--max_updates" in run(installed / "vanilla-transformer", "train", "--help", cwd=tmp_path)


def test_all_statements_of_the_version_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(\d[^\]]*)\]", changelog, flags=re.MULTILINE)
    assert newest[1] == project["version"] == vanilla_transformer.__version__
