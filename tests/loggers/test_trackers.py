"""Experiment trackers: what W&B and MLflow hold after a run, resumed or not, and what happens if they fail."""

from __future__ import annotations

import json
import math
import os
import pty
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.waiting import TIMEOUT

from paceline.cli import main
from paceline.loggers.events import Ended, Evaluated, Event, Logged, LoggerGroup, Note, Snapshot, Started, Visualized
from paceline.loggers.trackers import MlflowTracker, Tracker, TrackerLogger, WandbTracker, read_ids, write_id
from paceline.visualize.image import save_png

CONFIG = {"name": "tiny", "optimizer": {"lr": 0.1, "betas": [0.9, 0.99]}, "data": {"batch_size": 8}}


def events(folder: Path, steps: range, state: str = "finished") -> list[Event]:
    """What a run emits: a record for each step, an evaluation with an image at the last one."""
    last = steps[-1] if steps else 0
    logged = [Logged(step, step / 4, {"loss": 1 / step, "lr": 0.1}, {}, {"time": 1000.0 + step}) for step in steps]
    image = folder / f"val-samples-{last:08d}.png"
    save_png(np.zeros((5, 7, 3), dtype=np.uint8), image)
    evaluated = Evaluated(last, last / 4, "val", {"top1": last / 10, "ap@0.5": math.nan}, 20)
    opening = Started("tiny", folder, "cpu", 1, 8, 4)
    return [opening, *logged, evaluated, Visualized(last, "val", {"samples": image}), Ended(state, last, last / 4)]


def log(tracker: Tracker, folder: Path, steps: range, state: str = "finished") -> list[str]:
    """Log a run, or a part of it that continues an earlier one, and return the warnings."""
    warnings: list[str] = []
    earlier = [event.record for event in events(folder, range(1, steps[0])) if isinstance(event, Logged)]
    group = LoggerGroup([TrackerLogger("tracker", tracker, warnings.append, earlier)])
    for event in events(folder, steps, state):
        group.emit(event)
    group.close()
    return warnings


class Broken:
    """A service that fails in one of its calls, and notes which ones it got."""

    def __init__(self, fails: str) -> None:
        self.fails = fails
        self.calls: list[str] = []
        self.threads: set[int] = set()

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*_: Any) -> None:
            self.threads.add(threading.get_ident())
            self.calls.append(name)
            if name == self.fails:
                raise RuntimeError("no route\nto host")

        return call


@pytest.mark.parametrize(
    ("fails", "calls"),
    [
        ("start", ["start"]),
        ("log", ["start", "log", "log", "log", "log_images", "end"]),
        ("end", ["start", "log", "log", "log", "log_images", "end"]),
        ("", ["start", "log", "log", "log", "log_images", "end"]),
    ],
)
def test_a_failure_warns_once_and_training_continues(fails: str, calls: list[str], tmp_path: Path) -> None:
    tracker = Broken(fails)
    warnings = log(tracker, tmp_path, range(1, 3))
    assert tracker.calls == calls
    assert len(warnings) == (1 if fails else 0)
    assert all("logging.tracker" in each and "no route" in each for each in warnings)
    assert threading.get_ident() not in tracker.threads  # training never waits for a service


def test_a_failure_is_reported_while_the_run_goes_on(tmp_path: Path) -> None:
    warnings: list[str] = []
    logger = TrackerLogger("tracker", Broken("start"), warnings.append)
    logger.handle(events(tmp_path, range(1, 2))[0])
    deadline = threading.Event()
    for _ in range(3000):
        logger.tick(Snapshot(1, 8, 0.25, 0.0))
        if warnings or deadline.wait(0.01):
            break
    assert len(warnings) == 1
    logger.handle(Note("more"))
    logger.close()
    assert len(warnings) == 1


def test_a_service_that_does_not_answer_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.loggers.trackers._END_SECONDS", 0.0)
    answer = threading.Event()

    class Slow(Broken):
        def start(self, name: str) -> None:
            answer.wait()

    (warning,) = log(Slow(""), tmp_path, range(1, 2))
    assert "logging.tracker" in warning
    answer.set()


def test_a_resumed_run_passes_on_its_earlier_records_first(tmp_path: Path) -> None:
    got: list[tuple[int, float | None]] = []

    class Keeping(Broken):
        def log(self, step: int, scalars: dict[str, float]) -> None:
            got.append((step, scalars.get("train/loss")))

    assert log(Keeping(""), tmp_path, range(3, 5)) == []
    assert got == [(1, 1.0), (2, 1 / 2), (3, 1 / 3), (4, 1 / 4), (4, None)]


def test_ids_of_trackers_that_start_together_are_all_kept(tmp_path: Path) -> None:
    names = [str(number) for number in range(8)]
    threads = [threading.Thread(target=write_id, args=(tmp_path, name, f"id-{name}")) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_ids(tmp_path) == {name: f"id-{name}" for name in names}


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_an_error_of_the_recipe(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, name, None)
    section = {"wandb": "{project: p, mode: offline}", "mlflow": "{}"}[name]
    Path("recipe.yaml").write_text(f"extends: quickstart\nname: t\nlogging:\n  images: false\n  {name}: {section}\n")
    for command in ("train", "check"):
        assert main([command, "recipe.yaml"]) == 2
        assert capsys.readouterr().err.startswith(f"recipe.yaml:5:{len(name) + 5}: logging.{name}: ")
    assert main(["sweep", "recipe.yaml", "train.seed=0,1"]) == 2
    assert f"paceline[{name}]" in capsys.readouterr().err
    assert main(["show", "recipe.yaml", "--json"]) == 0  # only training needs it
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_mlflow_holds_each_step_once_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracking = pytest.importorskip("mlflow.tracking", reason="mlflow is not installed: pip install 'paceline[mlflow]'")
    pytest.importorskip("sqlalchemy", reason="the database of MLflow needs paceline[mlflow]")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    given: dict[str, Any] = {"experiment": "tests", "tracking_uri": uri, "tags": {"team": "a"}}
    monkeypatch.chdir(tmp_path)  # artifacts are beside the database
    assert log(MlflowTracker(tmp_path, CONFIG, **given), tmp_path, range(1, 5), "stopped") == []
    number = read_ids(tmp_path).get("mlflow")
    client = tracking.MlflowClient(uri)
    assert client.get_run(number).info.status == "KILLED"
    assert log(MlflowTracker(tmp_path, CONFIG, **given), tmp_path, range(3, 5), "stopped") == []
    assert log(MlflowTracker(tmp_path, CONFIG, **given), tmp_path, range(6, 8)) == []  # step 5 was lost
    assert read_ids(tmp_path).get("mlflow") == number
    run = client.get_run(number)
    assert (run.info.status, run.info.run_name, run.data.tags["team"]) == ("FINISHED", "tiny", "a")
    params = {"name": "tiny", "optimizer.lr": "0.1", "optimizer.betas": "[0.9, 0.99]", "data.batch_size": "8"}
    assert run.data.params == params
    losses = [(each.step, each.value) for each in client.get_metric_history(number, "train/loss")]
    assert losses == [(step, 1 / step) for step in range(1, 8)]
    assert [each.step for each in client.get_metric_history(number, "val/top1")] == [4, 7]
    assert math.isnan(client.get_metric_history(number, "val/ap_0.5")[-1].value)
    images = client.list_artifacts(number, "images/val")
    assert [Path(each.path).name for each in images] == ["val-samples-00000004.png", "val-samples-00000007.png"]


def log_file_records(content: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, which offline runs have behind a header of seven bytes."""
    assert content.startswith(b":W&B")
    place, parts = 7, b""
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:  # no record starts in the last bytes of a block
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def wandb_records(path: Path) -> list[dict[str, Any]]:
    """What the offline file of one part of a run holds."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for data in log_file_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("run"):
            found.append({"id": record.run.run_id, "project": record.run.project, "name": record.run.display_name})
        if record.HasField("history"):
            items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            found.append({key: json.loads(value) for key, value in items.items()})
    return found


_START = """
import sys
from pathlib import Path
from paceline.loggers.trackers import WandbTracker
assert sys.stdin.isatty() and sys.stderr.isatty()
try:
    WandbTracker(Path(), {}, "tests").start("tiny")
except Exception as error:
    Path("refused").write_text(type(error).__name__)
"""


def test_wandb_asks_for_no_key_in_a_terminal(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'paceline[wandb]'")
    ours, theirs = pty.openpty()
    variables = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    variables |= {"HOME": str(tmp_path), "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-c", _START], cwd=tmp_path, env=variables, stdin=theirs, stdout=theirs, stderr=theirs
    )
    assert process.wait(TIMEOUT) == 0
    assert (tmp_path / "refused").read_text() == "UsageError"
    os.close(ours)
    os.close(theirs)


def test_wandb_offline_files_hold_the_run_and_a_resume_keeps_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'paceline[wandb]'")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "own"))
    given: dict[str, Any] = {"project": "tests", "mode": "offline", "tags": ["a"]}
    assert log(WandbTracker(tmp_path, CONFIG, **given), tmp_path, range(1, 5), "stopped") == []
    number = read_ids(tmp_path).get("wandb")
    assert log(WandbTracker(tmp_path, CONFIG, **given), tmp_path, range(6, 8)) == []  # step 5 was lost
    first, records = [wandb_records(path) for path in sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))]
    runs = [record for record in (*first, *records) if "id" in record]
    assert {(each["id"], each["project"], each["name"]) for each in runs} == {(number, "tests", "tiny")}
    history = [record for record in records if "train/loss" in record]
    assert [(each["_step"], each["train/loss"]) for each in history] == [(step, 1 / step) for step in range(1, 8)]
    evaluated = [(each["_step"], each["val/top1"]) for each in records if "val/top1" in each]
    assert evaluated == [(7, 0.7)]
    assert [each["_step"] for each in first if "train/loss" in each] == [1, 2, 3, 4]
    assert len(list(tmp_path.glob("wandb/offline-run-*/files/media/images/val/*.png"))) == 2
