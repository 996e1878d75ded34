"""`logging.results` in real runs: one row a run and split, brought up to date by training and by measuring."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import openpyxl
import pytest
from support import forkserver

SMALL = [
    "model.widths=[4]",
    "train.epochs=null",
    "train.steps=2",
    "evaluate.every_steps=1",
    "checkpoint.every_steps=1",
    "schedule.warmup=none",
    "schedule.warmup_epochs=null",
    "expect.top1=0",
]


def paceline(folder: Path, *arguments: str) -> forkserver.Done:
    return forkserver.paceline(folder, *arguments, OMP_NUM_THREADS="1")


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "all.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_training_going_on_and_measuring_update_one_row(tmp_path: Path) -> None:
    (tmp_path / "all.csv").write_text("notes,directory,split\nby hand,elsewhere,val\n")
    done = paceline(tmp_path, "train", "quickstart", *SMALL, "logging.results=all.csv")
    assert done.returncode == 0, done.stderr
    by_hand, ours = rows(tmp_path)
    assert by_hand["notes"] == "by hand"
    records = [json.loads(line) for line in (tmp_path / "runs/quickstart/metrics.jsonl").read_text().splitlines()]
    last = [record for record in records if record["split"] == "val"][-1]
    assert (ours["run"], ours["directory"], ours["split"]) == ("quickstart", "runs/quickstart", "val")
    assert (ours["task"], ours["model"], ours["state"], ours["step"]) == ("classification", "convnet", "finished", "2")
    assert float(ours["top1"]) == last["top1"]

    longer = ["train", "quickstart", *SMALL, "logging.results=all.csv", "train.steps=3", "--procs", "2"]
    done = paceline(tmp_path, *longer)
    assert done.returncode == 0, done.stderr
    assert [(row["directory"], row["step"]) for row in rows(tmp_path)] == [("elsewhere", ""), ("runs/quickstart", "3")]

    first = "runs/quickstart/checkpoints/step-00000002"
    done = paceline(tmp_path, "eval", "runs/quickstart", "--checkpoint", first, "--json")
    assert done.returncode == 0, done.stderr
    ours = rows(tmp_path)[1]
    assert (ours["step"], float(ours["top1"])) == ("2", json.loads(done.stdout)["metrics"]["top1"])
    assert float(ours["top1"]) == last["top1"]

    done = paceline(tmp_path, "eval", "runs/quickstart", "train.precision=bf16", "evaluate.save_predictions=false")
    assert done.returncode == 0, done.stderr
    found = [(row["directory"], row["settings"]) for row in rows(tmp_path)]
    assert found[1:] == [("runs/quickstart", ""), ("runs/quickstart", "train.precision=bf16")]


def test_a_table_in_use_ends_neither_training_nor_measuring(tmp_path: Path) -> None:
    (tmp_path / "all.xlsx").write_bytes(b"precious")
    done = paceline(tmp_path, "train", "quickstart", *SMALL, "logging.results=all.xlsx")
    assert done.returncode == 0, done.stderr
    assert "warning: all.xlsx: is not a complete XLSX file" in done.stderr
    assert json.loads((tmp_path / "runs/quickstart/status.json").read_text())["state"] == "finished"
    measured = paceline(tmp_path, "eval", "runs/quickstart")
    assert measured.returncode == 0
    assert "top1" in measured.stdout
    assert "warning: all.xlsx" in measured.stderr
    assert (tmp_path / "all.xlsx").read_bytes() == b"precious"
    (tmp_path / "all.xlsx").unlink()
    later = paceline(tmp_path, "results", "--out", "all.xlsx")
    assert later.returncode == 0, later.stderr
    sheet = openpyxl.load_workbook(tmp_path / "all.xlsx").active
    assert [cell.value for cell in sheet["B"]] == ["directory", "runs/quickstart"]


@pytest.mark.parametrize("name", ["all.pdf", "3", ".csv"])
def test_another_kind_of_file_is_refused_before_training(tmp_path: Path, name: str) -> None:
    refused = paceline(tmp_path, "train", "quickstart", f"logging.results={name}")
    assert refused.returncode == 2
    assert "logging.results: expected" in refused.stderr
    assert list(tmp_path.iterdir()) == []
