"""What a user gets who installs the package: built as an sdist, from that a wheel, used without the clone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
# Trains by the installed command's own entry point, then looks at where everything came from.
_TRAIN = """
import sys
from importlib.metadata import entry_points
(command,) = [each for each in entry_points(group="console_scripts") if each.name == "paceline"]
code = command.load()(sys.argv[2:])
files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
ours = [file for file in files if file and file.startswith(sys.argv[1])]
print(code, len([name for name in sys.modules if name.startswith("paceline.")]) > 50, ours)
"""


def run(folder: Path, *words: str | Path) -> str:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(list(map(str, words)), cwd=folder, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sdist and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "constraints.txt"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    sdist = folder / run(source, sys.executable, "-c", _BUILD, "build_sdist", folder).splitlines()[-1]
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    wheel = folder / run(unpacked, sys.executable, "-c", _BUILD, "build_wheel", folder).splitlines()[-1]
    return {"sdist": sdist, "wheel": wheel}


@pytest.fixture(scope="module")
def installed(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an environment with the wheel, beside the libraries that it needs."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    words = ("--python", python, "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check")
    run(folder, sys.executable, "-m", "pip", *words, built["wheel"])
    (packages,) = (folder / "lib").glob("python3*/site-packages")
    # Behind its own packages. Path files in there are not read: the clone, where it is installed in place, stays away.
    (packages / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder / "bin"


def test_the_wheel_has_every_file_of_the_package_that_is_no_byproduct(built: dict[str, Path]) -> None:
    listed = subprocess.run(["git", "ls-files", "src/paceline"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode or not listed.stdout:
        pytest.skip("not a git checkout: there is no list of files to compare with")
    wanted = {name.removeprefix("src/") for name in listed.stdout.splitlines()}
    with zipfile.ZipFile(built["wheel"]) as wheel:
        names = {name for name in wheel.namelist() if not name.split("/")[0].endswith(".dist-info")}
    assert wanted - names == set()
    with tarfile.open(built["sdist"]) as sdist:
        assert {f"src/{name}" for name in wanted} <= {name.partition("/")[2] for name in sdist.getnames()}


def test_it_trains_without_the_clone(installed: Path, tmp_path: Path) -> None:
    names = run(tmp_path, installed / "paceline", "recipes")
    assert "quickstart" in names
    short = ("train.epochs=null", "train.steps=2", "schedule.warmup_epochs=0.01", "logging.images=false")
    printed = run(tmp_path, installed / "python", "-c", _TRAIN, ROOT / "src", "train", "quickstart", *short)
    assert printed.splitlines()[-1] == "0 True []"
    out = tmp_path / "runs" / "quickstart"
    assert (out / "checkpoints" / "step-00000002" / "model.safetensors").is_file()
    assert (out / "report.html").is_file()


def test_it_makes_a_project_without_the_clone(installed: Path, tmp_path: Path) -> None:
    run(tmp_path, installed / "paceline", "new", "mine")
    assert {"README.md", "recipe.yaml"} <= {path.name for path in (tmp_path / "mine").iterdir()}
