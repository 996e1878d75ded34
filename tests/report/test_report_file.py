"""`report.html` while a run trains: at its start, at evaluations and at its end; never worth a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from page_elements import Elements
from sample_runs import write_recipe

import paceline
from paceline.loggers.events import Ended, Evaluated, LoggerGroup, Note, Started
from paceline.loggers.files import StatusFile
from paceline.loggers.jsonl import JsonlLogger
from paceline.report.page import ReportFile


def data(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Elements((folder / "report.html").read_text(encoding="utf-8")).data)
    return found


def open_loggers(folder: Path) -> tuple[LoggerGroup, list[str]]:
    folder.mkdir()
    write_recipe(folder, {})
    warnings: list[str] = []
    sinks = [
        StatusFile(folder / "status.json", 8),
        JsonlLogger(folder / "metrics.jsonl"),
        ReportFile(folder, warnings.append),
    ]
    return LoggerGroup(sinks), warnings


def test_it_follows_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    logger, warnings = open_loggers(folder)
    logger.emit(Started("run", folder, "cpu", 1, 8, 4, main_metric="top1"))
    (run,) = data(folder)["runs"]
    assert (run["step"], run["series"], run["best"]) == (0, [], None)
    logger.emit(Evaluated(4, 1, "val", {"top1": 0.5}, 10))
    report = logger._sinks[-1]
    assert isinstance(report, ReportFile)
    report._next_write = 0.0  # as if a hundred times the time of a page had passed
    logger.emit(Note("on it goes"))
    assert data(folder)["runs"][0]["best"]["step"] == 4
    logger.emit(Evaluated(8, 2, "val", {"top1": 0.75}, 10))
    logger.emit(Ended("finished", 8, 2))  # at once: the page of the end has the last evaluation
    (run,) = data(folder)["runs"]
    assert (run["state"], run["best"]["value"], run["best"]["step"]) == ("finished", 0.75, 8)
    logger.close()
    assert warnings == []


def test_what_fails_is_one_warning(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    logger, warnings = open_loggers(folder)
    (folder / "report.html").mkdir()
    logger.emit(Started("run", folder, "cpu", 1, 8, 4))
    for step in (4, 8):
        logger.emit(Evaluated(step, step / 4, "val", {"top1": 0.5}, 10))
    logger.emit(Note("on it goes"))
    logger.emit(Ended("finished", 8, 2))
    logger.close()
    (warning,) = warnings
    assert str(folder / "report.html") in warning
    assert [path for path in folder.iterdir() if path.suffix == ".partial"] == []


def test_damaged_metrics_are_a_warning_too(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    logger, warnings = open_loggers(folder)
    (folder / "metrics.jsonl").write_text("damaged\n")
    logger.emit(Started("run", folder, "cpu", 1, 8, 4))
    logger.close()
    assert "metrics.jsonl:1" in warnings[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "run"
    keys = {
        "model.widths": [4], "train.epochs": None, "train.steps": 4, "train.threads": 1, "evaluate.every_steps": 2,
        "logging.every_steps": 1, "schedule.warmup": "none", "schedule.warmup_epochs": None, "expect": {"top1": 0.01},
    }  # fmt: skip
    paceline.train(paceline.build("quickstart", keys, out))
    return out


def test_a_trained_run_has_all_its_parts(trained: Path) -> None:
    records = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    (run,) = data(trained)["runs"]
    assert (run["state"], run["step"], run["task"], run["model"]) == ("finished", 4, "classification", "convnet")
    best = max((each["top1"], -each["step"]) for each in records if each["split"] == "val")
    assert (run["best"]["value"], -run["best"]["step"]) == best
    assert [(each["metric"], each["is_met"]) for each in run["expect"]] == [("top1", True)]
    names = {each["metric"] for each in run["series"]}
    assert names >= {"loss", "top1", "lr", "grad_norm", "samples_per_second", "data_wait", "memory_mb"}
    assert sum(map(sum, run["confusion"]["val"]["counts"])) == run["evaluations"][-1]["num_samples"]
    assert len(run["confusion"]["val"]["classes"]) == 10
    assert {(each["split"], each["name"]) for each in run["images"]} >= {("val", "predictions"), ("train", "samples")}
    assert [line for line in run["recipe"] if "train.steps" in line[0] or line[0].strip() == "steps: 4"]
    start, end = run["starts"]
    assert (start["device"], start["torch"][:2], end["state"]) == ("cpu", "2.", "finished")


def test_a_resumed_run_tells_of_its_restart(trained: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    shutil.copytree(trained, again, symlinks=True)
    keys = {"train.steps": 6}
    paceline.train(paceline.build(str(again / "recipe.yaml"), keys, again))
    (run,) = data(again)["runs"]
    assert [(each["step"], each.get("state")) for each in run["starts"]] == [
        (0, None), (4, "finished"), (4, None), (6, "finished"),
    ]  # fmt: skip
    steps = [each["x"] for each in run["series"] if (each["split"], each["metric"]) == ("train", "loss")]
    assert steps == [[1, 2, 3, 4, 5, 6]]
