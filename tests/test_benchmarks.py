"""The page of benchmarks: made of stored results, with an overview; one that fails does not cost the others."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.__main__ import NAMES, run_all
from benchmarks.page import DOCS, page, read, save
from benchmarks.report import Goal, Section, at_least, at_most

STEP = Section(
    "A step: it",
    "How.",
    ["contestant", "network", "ratio"],
    [["by hand", "net", "1.00"], ["ours", "net", "1.25"]],
    [at_most("ours, of by hand", 1.25, 1.2), Goal("no number", "none", True)],
)
FILES = Section("Files", "How.", ["what", "value"], [["x", "1"]], [at_least("faster", 3.0, 2.0, "{:.1f} ×")])


def test_the_page_is_that_of_the_stored_results() -> None:
    results = read(DOCS / "benchmarks.json")
    assert page(results) == (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    assert set(results.by_name) <= set(NAMES)


def test_results_replace_older_ones_and_every_goal_is_in_the_overview(tmp_path: Path) -> None:
    for name, section in (("images", FILES), ("step", replace(STEP, goals=[])), ("step", STEP)):
        save(name, section, 90, NAMES, tmp_path)
    text = (tmp_path / "benchmarks.md").read_text(encoding="utf-8")
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == ["Overview", "A step: it", "Files"]
    overview = [[cell.strip() for cell in line.split("|")[1:6]] for line in text.splitlines() if "](#" in line]
    assert overview == [
        ["ours, of by hand", "1.25 ×", "≤ 1.20 ×", "NOT reached", "[A step: it](#a-step-it)"],
        ["no number", "none", "", "reached", "[A step: it](#a-step-it)"],
        ["faster", "3.0 ×", "≥ 2.0 ×", "reached", "[Files](#files)"],
    ]
    assert "in 1.5 minutes" in text
    plot = Image.open(io.BytesIO((tmp_path / "images" / "benchmarks.png").read_bytes()))
    assert len(plot.convert("RGB").getcolors(2**24) or ()) > 10


def test_a_benchmark_that_fails_does_not_cost_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_all(["missing", "absent"], is_quick=True) == 1
    printed = capfd.readouterr()
    assert "no benchmark is called missing" in printed.err
    assert "no benchmark is called absent" in printed.err
    assert "[2 of 2] absent" in printed.out
