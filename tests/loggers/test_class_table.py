"""Metrics of single classes become a table in the run directory."""

from __future__ import annotations

import csv
from pathlib import Path

from paceline.loggers.events import Evaluated
from paceline.loggers.files import ClassTable


def test_each_class_is_a_row(tmp_path: Path) -> None:
    logger = ClassTable(tmp_path / "tables")
    logger.handle(Evaluated(3, 1.0, "val", {"loss": 0.5}, 8))
    assert not (tmp_path / "tables").exists()
    logger.handle(Evaluated(4, 1.0, "val", {"ap": 0.9, "ap.cat": 0.1}, 8))
    metrics = {
        "ap": 0.3,
        "ap.cat": 1 / 3,
        'ap.a, "b"': 0.5,
        "ap.=1+1": 0.0,
        "voc_ap50.cat": 0.75,
        "ap.St. Bernard": 1.0,
    }
    logger.handle(Evaluated(5, 2.0, "val", metrics, 8))
    with (tmp_path / "tables/val-per_class.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["class", "ap", "voc_ap50"]
    assert {row[0]: row[1:] for row in rows[1:]} == {
        "cat": [repr(1 / 3), "0.75"],
        'a, "b"': ["0.5", ""],
        "'=1+1": ["0.0", ""],  # no spreadsheet takes it for a formula
        "St. Bernard": ["1.0", ""],
    }
