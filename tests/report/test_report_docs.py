"""The page on reports: its commands and its code work as they stand there."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample_runs import write_run
from support.pages import ROOT, blocks, commands

from paceline.cli import main

PAGE = ROOT / "docs" / "report.md"
WORDS = [words[1:] for block in blocks(PAGE) if block.language == "console" for words in commands(block)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("quickstart", "baseline", "low-lr"):
        write_run(tmp_path / "runs" / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_all_commands_but_those_that_run_for_long(folder: Path) -> None:
    reports = [words for words in WORDS if words[0] == "report"]
    assert len(reports) == len(WORDS) - 1 == 3
    for words in reports:
        assert main(words) == 0
    for place in ("runs/quickstart/report.html", "compared.html", "report.html"):
        assert (folder / place).is_file()


def test_the_code(folder: Path) -> None:
    (code,) = [block.text for block in blocks(PAGE) if block.language == "python"]
    exec(code, {})
    assert (folder / "compared.html").is_file()
