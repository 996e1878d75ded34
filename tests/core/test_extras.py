"""What needs an extra says so in one line; what a default installation has trains without any."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.core.errors import missing_extra

OPTIONAL = ("av", "openpyxl", "onnx", "onnxscript", "onnxruntime", "wandb", "mlflow", "nvidia.dali")


def without(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in which no optional package can be imported."""
    blocked = f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL!r}))\n"
    words = [sys.executable, "-c", blocked + code]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=folder, check=False)


@pytest.mark.parametrize(
    ("extra", "packages"),
    [
        ("dali", "nvidia.dali is"),
        ("excel", "openpyxl is"),
        ("mlflow", "mlflow is"),
        ("onnx", "onnx, onnxscript, onnxruntime are"),
        ("video", "av is"),
        ("wandb", "wandb is"),
    ],
)
def test_a_missing_extra_is_one_line_with_its_command(
    extra: str, packages: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in OPTIONAL:
        monkeypatch.setitem(sys.modules, name, None)
    assert missing_extra(extra) == f"{packages} not installed: pip install 'paceline[{extra}]'"


@pytest.mark.parametrize(
    ("package", "text", "line"),
    [
        (
            "openpyxl", "logging: {results: all.xlsx}",
            "3:20: logging.results: openpyxl is not installed: pip install 'paceline[excel]', or name a .csv file",
        ),
        (
            "av", "data: {train: {dataset: video_folder, root: .}}",
            "3:25: data.train.dataset: av is not installed: pip install 'paceline[video]', which reads videos",
        ),
    ],
)  # fmt: skip
def test_a_recipe_that_needs_an_extra_is_refused_where_it_does(
    package: str, text: str, line: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    base = "video_sample" if package == "av" else "quickstart"
    Path("recipe.yaml").write_text(f"extends: {base}\nname: t\n{text}\n")
    for command in ("check", "train"):
        assert main([command, "recipe.yaml"]) == 2
        assert capsys.readouterr().err.splitlines()[-1] == f"recipe.yaml:{line}"


def test_an_xlsx_table_without_its_package_is_refused_before_it_is_written(
    tmp_path: Path,
) -> None:
    code = "from paceline.loggers.results import update_rows; from pathlib import Path\n"
    done = without(code + "update_rows(Path('t.xlsx'), [{'a': 1}])", tmp_path)
    last = done.stderr.splitlines()[-1]
    assert last.endswith("XLSX tables: openpyxl is not installed: pip install 'paceline[excel]', or name a .csv file")
    assert list(tmp_path.iterdir()) == []


def test_the_default_installation_trains(tmp_path: Path) -> None:
    overrides = ["train.epochs=null", "train.steps=2", "schedule.warmup=none", "schedule.warmup_epochs=null"]
    words = ["train", "quickstart", *overrides, "expect.top1=0", "logging.results=all.csv"]
    done = without(f"from paceline.cli import main; sys.exit(main({words!r}))", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "all.csv").is_file()
