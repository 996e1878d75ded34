"""`paceline sweep` with real runs: killed and continued, stopped, failed; and what it refuses at once."""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from shared_launch import SCRIPTS, environment
from support.forkserver import Running, paceline
from support.waiting import is_alive, wait_until

from paceline.cli import main
from paceline.commands.sweep_trials import SweepFile, run_trials
from paceline.core.process import StopRequest
from paceline.launch.job_pool import JobPool

RECIPE = {
    "name": "tiny",
    "task": "classification",
    "model": {"name": "convnet", "widths": [4]},
    "data": {
        "batch_size": 20,
        "train": {"dataset": "waiting", "split": "train", "name": "train"},
        "val": {"dataset": "waiting", "split": "test", "name": "val"},
    },
    "losses": ["cross_entropy"],
    "optimizer": {"name": "sgd", "lr": 0.1},
    "train": {"steps": 4, "threads": 1},
    "evaluate": {"every_steps": 2, "batch_size": 50},
    "logging": {"every_steps": 2, "images": False, "tensorboard": False},
}
GRID = ["optimizer.lr=0.1,0.01", "train.seed=0,1"]


class Sweep:
    """`paceline sweep` in a folder; the first run that evaluates waits for the file `go` if `holds`."""

    def __init__(self, folder: Path, *words: str, holds: bool = False) -> None:
        self.folder, self.out = folder, folder / "runs" / "tiny-sweep"
        (folder / "recipe.json").write_text(json.dumps(RECIPE))
        command = ["paceline", "sweep", "recipe.json", "--use", "slow_splits", *words]
        self.process = Running(folder, command, environment(WAIT_IN="val" if holds else ""))

    def printed(self) -> str:
        return self.process.printed()[1]

    def end(self, code: int) -> dict[str, Any]:
        done = self.process.end()
        assert done.returncode == code, done.stderr
        return dict(json.loads(done.stdout)) if done.stdout.startswith("{") else {}

    def trials(self) -> list[dict[str, Any]]:
        return list(json.loads((self.out / "sweep.json").read_text())["trials"])

    def wait_for(self, *states: str) -> None:
        """Wait until a run is held in its evaluation and there are trials of these states."""
        (wanted, held) = set(states), self.folder / "val"

        def is_so() -> bool:
            return held.exists() and wanted <= {trial["state"] for trial in self.trials()}

        wait_until(lambda: is_so() or self.process.poll() is not None, f"there are trials {states}")
        assert self.process.poll() is None, self.printed()


def contents(out: Path) -> dict[str, tuple[bytes, list[dict[str, Any]]]]:
    """The last weights of each run, and its records without wall-clock metrics."""
    found = {}
    for folder in sorted(out.glob("0?")):
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        weights = (folder / "checkpoints" / "step-00000004" / "model.safetensors").read_bytes()
        found[folder.name] = weights, [{k: v for k, v in each.items() if k != "clock"} for each in records]
    return found


def test_a_killed_sweep_takes_its_runs_with_it_and_continues_to_the_same_result(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, *GRID, "--jobs", "2", holds=True)
    sweep.wait_for("finished", "running")
    statuses = [json.loads(path.read_text()) for path in sweep.out.glob("0?/status.json")]
    running = [status["pid"] for status in statuses if status["state"] == "running"]
    assert running
    sweep.process.send_signal(signal.SIGKILL)
    sweep.process.end()
    wait_until(lambda: not any(map(is_alive, running)), "no run outlives the sweep")
    kept = {trial["run"]: trial["state"] for trial in sweep.trials()}
    finished = [run for run, state in kept.items() if state == "finished"]
    logs = {run: (sweep.out / "logs" / f"{run}.log").read_bytes() for run in finished}

    answer = Sweep(tmp_path, *GRID, "--jobs", "2", "--json").end(0)
    assert [trial["state"] for trial in answer["trials"]] == ["finished"] * 4
    assert [trial["overrides"] for trial in answer["trials"]] == [
        [f"optimizer.lr={lr}", f"train.seed={seed}"] for lr in (0.1, 0.01) for seed in (0, 1)
    ]
    assert logs == {run: (sweep.out / "logs" / f"{run}.log").read_bytes() for run in finished}  # not started again
    resumed = [path for path in sweep.out.glob("logs/*.log") if "step-00000002, step 2" in path.read_text()]
    assert resumed  # the run that was held in its evaluation has lost no step

    for trial in answer["trials"]:  # each is what `train` makes of the same overrides when nothing happens to it
        words = ("train", "recipe.json", "--use", "slow_splits", *trial["overrides"], "--out", f"whole/{trial['run']}")
        assert paceline(tmp_path, *words, PYTHONPATH=str(SCRIPTS)).returncode == 0
    whole = contents(tmp_path / "whole")
    assert contents(sweep.out) == whole
    values = [each["metrics"]["top1"] for each in answer["runs"]]
    assert values == sorted(values, reverse=True)
    assert {each["run"]: each["metrics"]["top1"] for each in answer["runs"]} == {
        f"tiny-{run}": [record["top1"] for record in records if record["split"] == "val"][-1]
        for run, (_, records) in whole.items()
    }
    page = re.search(r'id="data">(.*?)</script>', (sweep.out / "report.html").read_text(), re.DOTALL)
    assert page
    report = json.loads(page[1])
    assert {run["name"]: run["evaluations"][-1]["metrics"]["top1"] for run in report["runs"]} == {
        each["run"]: pytest.approx(each["metrics"]["top1"], rel=1e-5) for each in answer["runs"]
    }
    assert {"optimizer.lr", "train.seed"} <= {each["key"] for each in report["differences"]}


def test_a_stopped_sweep_continues_and_failed_runs_wait_for_a_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["optimizer.lr=0.1,1e38"]
    sweep = Sweep(tmp_path, *words, holds=True)
    sweep.wait_for("running")
    sweep.process.send_signal(signal.SIGINT)
    wait_until(lambda: "SIGINT" in sweep.printed(), "the run is asked to stop")
    (tmp_path / "go").touch()
    sweep.end(75)
    assert [trial["state"] for trial in sweep.trials()] == ["stopped", "waiting"]
    assert json.loads((sweep.out / "00" / "status.json").read_text())["state"] == "stopped"

    again = Sweep(tmp_path, *words)
    again.end(1)
    first, second = again.trials()
    assert (first["state"], second["state"], second["exit_code"]) == ("finished", "failed", 1)
    assert "step" in second["reason"]
    assert second["reason"] in again.printed()

    # Failed trials are reported without being started; only --retry has them done again.
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(SCRIPTS)
    command = ["sweep", "recipe.json", "--use", "slow_splits", *words]
    assert main([*command, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert [trial["state"] for trial in answer["trials"]] == ["finished", "failed"]
    started: list[str] = []
    monkeypatch.setattr("paceline.commands.sweep_trials.run_trials", lambda _, due, *__: started.extend(map(str, due)))
    assert main([*command, "--retry"]) == 1
    assert [each[:2] for each in started] == ["01"]


@pytest.mark.parametrize(("is_asked", "state"), [(True, "stopped"), (False, "failed")])
def test_a_run_that_a_request_ends_before_it_can_answer_has_not_failed(
    is_asked: bool, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os, time; time.sleep(99)" if is_asked else "import os; os.kill(os.getpid(), 15)"
    monkeypatch.setattr("paceline.commands.sweep_trials.worker_command", lambda _: [sys.executable, "-c", code])
    file, stop = SweepFile(tmp_path, {"recipe": "recipe.json"}, [("train.seed=0",)]), StopRequest()
    file.write()
    if is_asked:
        threading.Timer(0.3, lambda: setattr(stop, "requested", True)).start()
    run_trials(file, file.wanted, lambda _: [], JobPool(1), stop)
    (trial,) = json.loads((tmp_path / "sweep.json").read_text())["trials"]
    assert (trial["state"], trial["exit_code"]) == (state, -signal.SIGTERM)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_whole_grid_is_checked_before_anything_starts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["optimizer.lr=0.1,fast", "train.epochs=1,-2", "data.batch_size=8,0"]
    assert main(["sweep", "quickstart", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert sorted(line.split(": ")[1] for line in lines) == ["data.batch_size", "optimizer.lr", "train.epochs"]
    for wrong in (
        ["optimizer.lr=0.1..0.2"], ["optimizer.lr=0.1"], ["optimizer.lr=0.1,0.2", "--jobs", "0"],
        ["optimizer.lr=0.1,0.2", "--samples", "3"], ["train.seed=1,2", "--procs", "0"],
    ):  # fmt: skip
        assert main(["sweep", "quickstart", *wrong]) == 2
        assert capsys.readouterr().err
    assert list(folder.iterdir()) == []


def test_what_a_trial_is_trained_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[list[str]] = []

    def run(file: SweepFile, recipe: object, words: Any, options: object) -> int:
        trained.extend(map(words, file.wanted))
        return 0

    monkeypatch.setattr("paceline.commands.sweep._run", run)
    words = ["sweep", "quickstart", "train.seed=0,1,2", "train.epochs=1", "--procs", "2", "--out", "it's"]
    assert main(words) == 0
    assert len(trained) == 3
    assert trained[1] == [
        *("train", "quickstart", "train.seed=1", "train.epochs=1", "name=quickstart-01", "--out", "it's/01"),
        *("--procs", "2"),
    ]


def test_a_folder_holds_one_sweep(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.commands.sweep._run", lambda *_: 0)

    def write(*words: str, code: int = 0) -> list[dict[str, Any]]:
        assert main(["sweep", "quickstart", *words, "--out", "all"]) == code
        return list(json.loads((folder / "all" / "sweep.json").read_text())["trials"])

    assert [each["run"] for each in write("train.seed=0,1", "train.epochs=1")] == ["00", "01"]
    more = write("train.seed=1,2", "train.epochs=1")  # other values are added; known ones keep their runs
    assert [(each["run"], each["overrides"]) for each in more] == [
        ("00", ["train.seed=0"]), ("01", ["train.seed=1"]), ("02", ["train.seed=2"]),
    ]  # fmt: skip
    assert write("train.seed=1,2", "train.epochs=2", code=2) == more
    assert "train.epochs=1" in capsys.readouterr().err
    (folder / "mine").mkdir()
    (folder / "mine" / "notes.txt").touch()
    assert main(["sweep", "quickstart", "train.seed=0,1", "--out", "mine"]) == 2
    assert [path.name for path in (folder / "mine").iterdir()] == ["notes.txt"]
