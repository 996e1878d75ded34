"""`paceline results` as a user runs it, over run directories on the disk."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import openpyxl
import pytest

from paceline.cli import main
from paceline.loggers.events import Ended, Evaluated, LoggerGroup, Started
from paceline.loggers.files import StatusFile
from paceline.loggers.jsonl import JsonlLogger


def make_run(
    folder: Path,
    *metrics: dict[str, float],
    task: str = "classification",
    best: tuple[str, Literal["max", "min"]] = ("top1", "max"),
    **settings: object,
) -> Path:
    """A run directory as training leaves it: evaluated every four steps, and on test at the end."""
    folder.mkdir(parents=True)
    recipe: dict[str, Any] = {"name": folder.name, "task": {"name": task}, "model": {"name": "convnet", "widths": [4]}}
    recipe |= settings | {"train": {"epochs": len(metrics)} | dict(settings.get("train", {}))}  # type: ignore[call-overload]
    (folder / "recipe.yaml").write_text(
        "".join(f"{key}: {json.dumps(value)}  # here\n" for key, value in recipe.items())
    )
    logger = LoggerGroup([StatusFile(folder / "status.json", 8), JsonlLogger(folder / "metrics.jsonl")])
    metric, direction = best
    logger.emit(Started(folder.name, folder, "cpu", 1, 8, 4, main_metric=metric, direction=direction))
    for number, each in enumerate(metrics, 1):
        logger.emit(Evaluated(4 * number, number, "val", each, 20))
    if metrics:
        logger.emit(Evaluated(4 * len(metrics), len(metrics), "test", metrics[-1], 10))
        logger.emit(Ended("finished", 4 * len(metrics), len(metrics)))
    logger.close()
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three folds of which the first was best after its first epoch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    two, ten, one = ({"seed": number, "epochs": 3} for number in (2, 10, 1))
    make_run(tmp_path / "runs/fold-2", {"top1": 0.6}, {"top1": 0.8, "averaged_top1": 0.9}, train=two)
    make_run(tmp_path / "runs/fold-10", {"top1": 0.4}, {"top1": 0.9}, train=ten)
    first = make_run(tmp_path / "runs/fold-1", {"top1": 0.95}, {"top1": 1.0}, {"top1": 0.7}, train=one)
    (first / "best").symlink_to(Path("checkpoints", "step-00000008"))
    make_run(tmp_path / "runs/fold-1~1", {"top1": 0.1})
    return tmp_path


def answer(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["results", *words]) == code
    return capsys.readouterr().out if code == 0 else capsys.readouterr().err


def test_runs_stand_side_by_side_with_their_mean(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = answer(capsys, "--split", "val").splitlines()
    assert lines[0] == "classification, val"
    assert lines[1].split() == ["run", "seed", "epoch", "top1"]
    assert [line.split() for line in lines[2:5]] == [
        ["fold-10", "10", "2", "0.9000"],
        ["fold-2", "2", "2", "0.8000"],
        ["fold-1", "1", "3", "0.7000"],
    ]
    assert lines[5].split() == ["mean", "±", "sd", "of", "3", "0.8000", "±", "0.1000"]
    assert lines[6] == "only some have averaged_top1"


def test_only_finished_runs_count_and_dead_ones_are_not_called_running(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = folder / "runs/fold-2/status.json"
    status.write_text(json.dumps(json.loads(status.read_text()) | {"state": "running"}))
    found = json.loads(answer(capsys, "--json", "--split", "val"))
    assert [(each["run"], each["state"]) for each in found["runs"]] == [
        ("fold-10", "finished"), ("fold-2", "killed"), ("fold-1", "finished"),
    ]  # fmt: skip
    assert [each["num_runs"] for each in found["summaries"]] == [2]
    assert found["summaries"][0]["mean"] == {"top1": pytest.approx(0.8)}
    assert [(each["directory"], each["reason"]) for each in found["left_out"]] == [("runs/fold-2", "is killed")]


def test_json_holds_every_metric_and_the_summaries(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(answer(capsys, "--json"))
    assert [(each["directory"], each["split"], each["step"]) for each in found["runs"][:4]] == [
        ("runs/fold-10", "val", 8), ("runs/fold-2", "val", 8), ("runs/fold-1", "val", 12), ("runs/fold-10", "test", 8),
    ]  # fmt: skip
    assert found["runs"][1]["metrics"] == {"top1": 0.8, "averaged_top1": 0.9}
    assert [(each["split"], each["num_runs"]) for each in found["summaries"]] == [("val", 3), ("test", 3)]
    assert found["summaries"][0]["mean"] == {"top1": pytest.approx(0.8)}
    assert found["summaries"][0]["standard_deviation"] == {"top1": pytest.approx(0.1)}


def test_best_takes_the_metrics_of_the_best_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (only,) = json.loads(answer(capsys, "--best", "--json"))["runs"]
    assert (only["run"], only["split"], only["step"], only["metrics"]) == ("fold-1", "val", 8, {"top1": 1.0})


def test_the_best_of_the_main_metric_stands_beside_the_last(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "runs/fold-2/best").symlink_to(Path("checkpoints", "step-00000004"))
    lines = answer(capsys, "runs/fold-1", "runs/fold-2", "--split", "val").splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["run", "seed", "epoch", "top1", "best", "top1"],
        ["fold-2", "2", "2", "0.8000", "0.6000"],
        ["fold-1", "1", "3", "0.7000", "1.0000"],
    ]
    assert lines[4].split()[-6:] == ["0.7500", "±", "0.0707", "0.8000", "±", "0.2828"]
    found = json.loads(answer(capsys, "runs/fold-1", "--split", "val", "--json"))["runs"][0]
    assert (found["metrics"], found["best"]) == ({"top1": 0.7}, {"step": 8, "epoch": 2, "metrics": {"top1": 1.0}})
    assert "best top1" not in answer(capsys, "runs/fold-1", "--best")


def test_named_runs_of_one_recipe_are_distinguished(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(folder / "other/fold-1", {"top1": 0.5})
    lines = answer(capsys, "runs/fold-1", "runs/fold-1/", "other", "runs/fold-1~1", "--split", "test").splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["runs/fold-1", "other/fold-1", "runs/fold-1~1"]
    (folder / "runs/fold-1~1/recipe.yaml").write_text("name: fold-1~1\ntask: classification\nmodel: convnet\n")
    assert "fold-1~1" in answer(capsys, "runs/fold-1~1")


def data(root: str, **more: object) -> dict[str, object]:
    """The data section of a recipe that reads one folder."""
    part = {"dataset": "image_folder", "root": root, **more}
    return {"batch_size": 4, "train": part, "val": part}


def test_keys_in_which_runs_differ_are_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, lr, seed, top1 in (("a", 0.1, 0, 0.5), ("b", 0.1, 1, 0.7), ("c", 0.01, 0, 0.9)):
        settings: dict[str, Any] = {
            "optimizer": {"name": "sgd", "lr": lr, "momentum": 0.9},
            "train": {"seed": seed, "threads": seed + 1},
            "losses": [{"name": "cross_entropy", "label_smoothing": lr}],
            "logging": {"every_steps": seed + 5},
        }
        make_run(tmp_path / "runs" / name, {"loss": 1.0, "top1": top1}, data=data("flowers"), **settings)
    lines = answer(capsys, str(tmp_path / "runs"), "--split", "val").splitlines()
    assert lines[0] == "classification, val: image_folder flowers"
    assert lines[1].split() == ["run", "lr", "seed", "label_smoothing", "epoch", "top1", "loss"]
    assert [line.split()[:6] for line in lines[2:5]] == [
        ["c", "0.01", "0", "0.01", "1", "0.9000"],
        ["b", "0.1", "1", "0.1", "1", "0.7000"],
        ["a", "0.1", "0", "0.1", "1", "0.5000"],
    ]
    assert lines[5].split()[:10] == ["mean", "±", "sd", "of", "2", "0.1", "0.1", "0.6000", "±", "0.1414"]
    found = json.loads(answer(capsys, str(tmp_path / "runs"), "--split", "val", "--json"))
    assert found["runs"][0]["differs"] == {"optimizer.lr": 0.01, "train.seed": 0,
                                           "losses.cross_entropy.label_smoothing": 0.01}  # fmt: skip
    (summary,) = found["summaries"]
    assert (summary["num_runs"], summary["differs"]["optimizer.lr"]) == (2, 0.1)
    assert summary["mean"]["top1"] == pytest.approx(0.6)


def test_runs_of_other_recipes_or_data_are_not_averaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Folds of one folder are; another learning rate or another folder is another thing."""
    for number in range(3):
        make_run(tmp_path / f"runs/fold-{number}", {"top1": 0.5 + number / 10}, data=data("a", fold=number))
    make_run(tmp_path / "runs/other-recipe", {"top1": 0.1}, data=data("a", fold=0), optimizer={"lr": 3})
    make_run(tmp_path / "runs/other-data", {"top1": 0.2}, data=data("b", fold=0))
    found = json.loads(answer(capsys, str(tmp_path / "runs"), "--split", "val", "--json"))
    (summary,) = found["summaries"]
    assert (summary["data"], summary["num_runs"]) == ("image_folder a", 3)
    assert summary["mean"]["top1"] == pytest.approx(0.6)
    assert summary["standard_deviation"]["top1"] == pytest.approx(0.1)


def test_only_runs_of_one_length_are_averaged_and_each_seed_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seed, epochs, top1 in (("a", 0, 2, 0.1), ("b", 1, 2, 0.5), ("c", 2, 2, 0.7), ("d", 3, 9, 0.9)):
        make_run(tmp_path / "runs" / name, {"top1": top1}, train={"seed": seed, "epochs": epochs})
    again = make_run(tmp_path / "runs/again", {"top1": 0.3}, train={"seed": 0, "epochs": 2})
    os.utime(again / "status.json", (2e9, 2e9))
    words = (str(tmp_path / "runs"), "--split", "val")
    found = json.loads(answer(capsys, *words, "--json"))
    (summary,) = found["summaries"]
    assert (summary["num_runs"], summary["mean"]) == (3, {"top1": pytest.approx(0.5)})
    assert summary["standard_deviation"] == {"top1": pytest.approx(0.2)}
    assert {Path(each["directory"]).name: each["reason"] for each in found["left_out"]} == {
        "a": f"repeats {again}, which has the same seed and is newer",
        "d": "trains 9 epochs, not 2 epochs",
    }
    lines = answer(capsys, *words).splitlines()
    assert lines[1].split() == ["run", "epochs", "seed", "epoch", "top1"]
    assert len([line for line in lines if line.startswith("not in a mean: ")]) == 2
    found = json.loads(answer(capsys, str(tmp_path / "runs/a"), str(again), "--split", "val", "--json"))
    assert found["summaries"] == []
    assert len(found["left_out"]) == 1


def test_runs_on_other_training_data_are_no_repetitions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, root in enumerate(("a", "b")):
        folders = data("v") | {"train": {"dataset": "image_folder", "root": root}}
        make_run(tmp_path / "runs" / root, {"top1": 0.5}, data=folders, train={"seed": number})
    assert json.loads(answer(capsys, str(tmp_path / "runs"), "--split", "val", "--json"))["summaries"] == []


def test_metrics_of_many_classes_are_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    classes = {f"ap.class {number}": number / 80 for number in range(80)}
    for seed in range(2):
        make_run(tmp_path / f"runs/{seed}", {"ap50": 0.5, **classes}, {"ap50": 0.5, **classes}, train={"seed": seed})
    make_run(tmp_path / "runs/without", {"ap50": 0.25}, {"ap50": 0.25}, train={"seed": 3})
    output = answer(capsys, str(tmp_path / "runs"), "--split", "val", "--out", str(tmp_path / "all.csv"))
    assert max(map(len, output.splitlines())) < 120
    header, *rows = output.split("\n\n")[1].splitlines()
    assert header.split() == ["ap.*", "mean", "highest", "lowest"]
    cells = "0.4938 of 80  class 79 0.988, class 78 0.975, class 77 0.963  class 0 0, class 1 0.0125, class 2 0.025"
    assert rows == [f"{seed}     {cells}" for seed in range(2)]
    assert "ap.class 7" not in output
    assert len(json.loads(answer(capsys, str(tmp_path / "runs"), "--json"))["runs"][0]["metrics"]) == 81
    assert float(csv_rows(tmp_path / "all.csv")[0]["ap.class 40"]) == 0.5


def test_the_direction_of_the_main_metric_is_respected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, mae in (("a", 0.2), ("b", 0.1), ("c", float("nan")), ("d", 0.3)):
        make_run(tmp_path / "runs" / name, {"max_f": mae, "mae": mae}, task="saliency", best=("mae", "min"))
    lines = answer(capsys, str(tmp_path / "runs"), "--split", "test").splitlines()
    assert lines[1].split() == ["run", "epoch", "mae", "max_f"]
    assert [line.split()[0] for line in lines[2:6]] == ["b", "a", "d", "c"]


def test_runs_that_have_little_in_common_show_few_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(2):
        make_run(tmp_path / f"runs/{number}", {"top1": 0.5}, train={f"key_{each}": number for each in range(9)})
    output = answer(capsys, str(tmp_path / "runs"), "--split", "val")
    assert output.splitlines()[1].split() == ["run", *(f"key_{each}" for each in range(6)), "epoch", "top1"]
    assert "train.key_6, train.key_7, train.key_8" in output


def test_tasks_are_not_mixed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(folder / "runs/deep/masks", {"mae": 0.125}, task="saliency")
    output = answer(capsys, "--split", "test")
    assert output.startswith("saliency, test\n")
    assert "\n\nclassification, test\n" in output
    assert output.count("mean ± sd") == 1


def test_a_narrow_terminal_gets_the_metrics_in_parts(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(folder / "many/one", {f"figure_{number}": number / 8 for number in range(12)})
    monkeypatch.setenv("COLUMNS", "60")
    narrow = answer(capsys, "many", "--split", "val")
    monkeypatch.delenv("COLUMNS")
    assert answer(capsys, "many", "--split", "val").count("\n") == 3
    assert max(map(len, narrow.splitlines())) <= 60
    assert narrow.count("figure_") == 12
    assert narrow.count("1.3750") == 1
    assert narrow.count("one") == 3


@pytest.mark.parametrize("name", ["all.csv", "all.xlsx"])
def test_out_brings_rows_up_to_date_and_keeps_notes(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    answer(capsys, "--out", f"tables/{name}", "--split", "val")
    path = folder / "tables" / name
    if name.endswith("csv"):
        lines = path.read_text().splitlines()
        path.write_text("\n".join([f"{lines[0]},notes", f"{lines[1]},keep me", *lines[2:]]) + "\n")
    else:
        book = openpyxl.load_workbook(path)
        book.active.cell(1, book.active.max_column + 1, "notes")
        book.active.cell(2, book.active.max_column, "keep me")
        book.save(path)
    answer(capsys, "runs/fold-1", "--best", "--out", f"tables/{name}")
    answer(capsys, "--out", f"tables/{name}", "--split", "test", "--json")
    rows = csv_rows(path) if name.endswith("csv") else xlsx_rows(path)
    assert [each["directory"] for each in rows] == [f"../runs/fold-{n}" for n in (1, 2, 10)] * 2
    assert (rows[0]["notes"], int(rows[0]["step"]), float(rows[0]["top1"])) == ("keep me", 8, 1.0)
    assert [float(each["top1"]) for each in rows[1:]] == [0.8, 0.9, 0.7, 0.8, 0.9]


def csv_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def xlsx_rows(path: Path) -> list[dict[str, str]]:
    header, *rows = openpyxl.load_workbook(path).active.iter_rows(values_only=True)
    return [dict(zip(header, row, strict=True)) for row in rows]


def test_mistakes_are_reported_in_a_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "empty").mkdir()
    (folder / "all.csv").write_text("city\nUlm\n")
    for words, code, message in (
        (["none"], 2, "none is not a folder"),
        (["empty"], 2, "empty is not a run directory"),
        (["--out", "all.pdf"], 2, "all.pdf: expected a file with the extension .csv or .xlsx"),
        (["--out", "all.csv"], 3, "all.csv: is not a results table"),
        (["runs/fold-2", "--best"], 3, "none of these runs has metrics by its best checkpoint"),
    ):
        assert message in answer(capsys, *words, code=code)
    assert (folder / "all.csv").read_text() == "city\nUlm\n"


def test_runs_that_are_damaged_or_have_nothing_are_left_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(folder / "runs/new")
    (folder / "runs/fold-2/metrics.jsonl").write_text("garbage\n{}\n")
    (folder / "runs/fold-10/recipe.yaml").write_text("- 1\n")
    assert main(["results", "--json"]) == 0
    output = capsys.readouterr()
    assert {each["run"] for each in json.loads(output.out)["runs"]} == {"fold-1"}
    assert [line.split(":")[1].strip() for line in output.err.splitlines()] == [
        "runs/fold-2/metrics.jsonl", "runs/fold-10/recipe.yaml", "runs/new",
    ]  # fmt: skip
    assert "metrics.jsonl:1: expected a JSON object" in answer(capsys, "runs/fold-2", code=3)


def test_it_starts_fast(folder: Path) -> None:
    code = (
        "import sys; from paceline.cli import main; assert main(['results', '--json', '--out', 'all.csv']) == 0\n"
        "assert not {'torch', 'openpyxl', 'numpy'} & sys.modules.keys(), 'too much'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
