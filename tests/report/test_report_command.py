"""`paceline report` as a user runs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sample_runs import write_run

from paceline.cli import main


def test_one_run_and_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "first")
    write_run(tmp_path / "runs" / "second", optimizer={"lr": 0.1})
    assert main(["report", "runs/first"]) == 0
    assert "runs/first/report.html" in capsys.readouterr().out
    assert (tmp_path / "runs/first/report.html").is_file()
    assert main(["report", "runs"]) == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count('"main":') == 2
    assert main(["report", "runs/second", "--out", "pages/second.html"]) == 0
    assert (tmp_path / "pages/second.html").is_file()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nothing"], "nothing"),
        (["."], "run directory"),
        (["run", "--out", "report.pdf"], ".html"),
        (["run", "--out", "run/recipe.yaml/report.html"], "report.html"),
    ],
)
def test_mistakes_are_usage_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    write_run(tmp_path / "elsewhere" / "run")
    (tmp_path / "elsewhere" / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere" / ("empty" if words == ["."] else ""))
    assert main(["report", *words]) == 2
    assert expected in capsys.readouterr().err


def test_damaged_metrics_are_a_data_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"{}\n")
    assert main(["report", str(folder)]) == 3
    assert re.search(r"metrics\.jsonl:\d+", capsys.readouterr().err)
    assert not (folder / "report.html").exists()


def test_a_run_without_metrics_has_a_page_and_a_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", num_steps=0, ends=False)
    assert main(["report", str(folder)]) == 0
    assert f"{folder} has logged nothing yet" in capsys.readouterr().err
    assert (folder / "report.html").is_file()
