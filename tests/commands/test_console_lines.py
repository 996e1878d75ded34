"""What `paceline train` prints, from the banner to the closing table, and a run that is continued by its directory."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.loggers.events import Record
from paceline.loggers.jsonl import read_records
from paceline.loggers.tables import metrics_tables

SMALL = [
    "model.widths=[4]",
    "train.epochs=null",
    "train.threads=1",
    "schedule={decay: multi_step, milestone_steps: [3], warmup: none, warmup_epochs: null}",
    "data.train.transforms=[]",
    "evaluate.every_steps=2",
    "checkpoint.best=loss",
    "checkpoint.direction=min",
    "expect.top1=0",
    "logging={every_steps: 1, tensorboard: false, images: false}",
    "model.freeze=[stages]",
    "model.unfreeze=[{match: [stages.0.0.1], at_steps: 2}]",
]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], list[str]]:
    """A run of four steps, continued to the sixth by its directory: where, and the lines of each command."""
    folder = tmp_path_factory.mktemp("printed")
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for words in (["quickstart", *SMALL, "train.steps=4"], ["runs/quickstart", "train.steps=6"]):
            log = folder / "runs/quickstart/logs/rank-0.log"
            before = len(log.read_text().splitlines()) if log.exists() else 0
            assert main(["train", *words]) == 0
            lines.append([line.partition(" ")[2] for line in log.read_text().splitlines()[before:]])
    return folder / "runs/quickstart", lines[0], lines[1]


def evaluations(run: Path) -> dict[int, Record]:
    return {each["step"]: each for each in read_records(run / "metrics.jsonl") if each["split"] == "val"}


def test_a_run_directory_is_continued(printed: tuple[Path, list[str], list[str]]) -> None:
    run, _, second = printed
    assert json.loads((run / "status.json").read_text())["step"] == 6
    assert "  resumes after step 4" in second
    assert sorted(evaluations(run)) == [2, 4, 6]


def test_another_out_than_the_run_that_is_continued_is_refused(
    printed: tuple[Path, list[str], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    run, _, _ = printed
    assert main(["train", str(run), "--out", str(run.parent)]) == 2
    assert "--out" in capsys.readouterr().err


def test_the_banner_counts_what_learns(printed: tuple[Path, list[str], list[str]]) -> None:
    """A convolution of 4·9 weights and two of 4·4·9, each with a norm of 4 + 4, and a classifier of 4·10 + 10.

    The first norm begins to learn with step 2.
    """
    _, first, second = printed
    assert "  model    convnet, 398 parameters: 50 trainable, 348 frozen" in first
    assert "unfrozen at step 2: 8 parameters begin to learn: stages.0.0.1" in first
    assert "  model    convnet, 398 parameters: 58 trainable, 340 frozen" in second


def test_a_milestone_is_reported_with_both_learning_rates(printed: tuple[Path, list[str], list[str]]) -> None:
    _, first, second = printed
    assert [line for line in first + second if line.startswith("learning rate")] == [
        "learning rate 0.003 → 0.0003 after step 3"
    ]


def test_the_last_and_the_best_metrics_stand_side_by_side(printed: tuple[Path, list[str], list[str]]) -> None:
    """BatchNorm's statistics are still moving, so that the first evaluation has the least loss."""
    run, _, second = printed
    found = evaluations(run)
    best = min(found, key=lambda step: found[step]["loss"])
    place = next(number for number, line in enumerate(second) if re.match(r"  +loss +top1 ", line))
    assert second[place + 1].split()[:4] == ["val,", "last", f"{found[6]['loss']:.4f}", f"{found[6]['top1']:.4f}"]
    expected = ["val,", "best", "(step", f"{best})", f"{found[best]['loss']:.4f}", f"{found[best]['top1']:.4f}"]
    assert second[place + 2].split()[:6] == expected
    assert best == 2


def test_the_status_names_the_main_metric_and_its_direction(printed: tuple[Path, list[str], list[str]]) -> None:
    run, _, _ = printed
    status = json.loads((run / "status.json").read_text())
    assert (status["main_metric"], status["direction"]) == ("loss", "min")


def test_metrics_of_many_classes_have_a_table_of_a_line_for_each_split() -> None:
    splits = {
        split: {"ap": 0.5, **{f"ap.{number}": number / 80 for number in range(80)}} for split in ("val", "test.a")
    }
    (header, rows), (by_class, summed) = metrics_tables(splits, "ap")
    assert (header, rows) == (["", "ap"], [["val", "0.5000"], ["a", "0.5000"]])
    assert by_class == ["ap.*", "mean", "highest", "lowest"]
    assert [row[:2] for row in summed] == [["val", "0.4938 of 80"], ["a", "0.4938 of 80"]]
