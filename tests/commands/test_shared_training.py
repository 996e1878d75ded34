"""Runs that two processes share: interrupted in every way, in every precision, under every strategy."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from shared_launch import environment, shared_runs
from support import forkserver
from support.waiting import is_alive, wait_until

RECIPE = {
    "name": "shared",
    "task": "classification",
    "model": {"name": "flat"},
    "data": {
        "batch_size": 16,
        "train": {
            "dataset": "few",
            "split": "train",
            "pausing": True,
            "transforms": [{"name": "random_horizontal_flip"}],
        },
        "val": {"dataset": "few", "split": "test"},
    },
    "losses": [{"name": "cross_entropy"}],
    "optimizer": {"name": "adamw", "lr": 0.01},
    "train": {"steps": 12, "micro_batch_size": 5},  # 4 micro-batches, so each process reads twice a step
    "evaluate": {"every_steps": 6, "batch_size": 60},
    "checkpoint": {"every_steps": 4, "keep_last": 9},
    "logging": {"every_steps": 3, "images": False, "tensorboard": False},
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What the processes of many short runs found, each of them the same."""
    _, (first, second) = shared_runs()
    assert first == second
    return first


def test_every_precision_trains_under_every_strategy(found: dict[str, Any]) -> None:
    runs = found["precisions"]
    assert len(runs) == 8 + 6 + 2
    expected = runs["ddp fp32"]["losses"]
    for name, run in runs.items():
        assert run["losses"] == pytest.approx(expected, abs=0.1), name
    for strategy in ("ddp", "fsdp"):
        bits = {name: runs[f"{strategy} {name}"]["bits"] for name in ("fp32", "tf32", "bf16", "fp16", "O0", "O1")}
        assert bits["fp32"] == bits["tf32"] == bits["O0"]  # there is no TF32 on a CPU
        assert bits["fp16"] == bits["O1"]
        assert len(set(bits.values())) == 3


def test_activation_checkpointing_changes_no_bit_under_any_strategy(found: dict[str, Any]) -> None:
    assert len(found["checkpointing"]) == 6
    assert [name for name, (kept, checkpointed) in found["checkpointing"].items() if kept != checkpointed] == []


def test_sharing_a_run_gives_what_one_process_gives(found: dict[str, Any]) -> None:
    distances = found["equal_to_one_process"]
    assert len(distances) == 4 * 3
    assert {name: distance for name, distance in distances.items() if not distance < 1e-5} == {}


def test_a_run_in_parts_goes_on_to_the_bit(found: dict[str, Any]) -> None:
    assert len(found["resuming"]) == 3 + 3
    for strategy, runs in found["resuming"].items():
        whole, resumed = runs["bits"]
        assert whole == resumed, strategy


def test_a_request_to_one_process_ends_an_evaluation_in_all_and_costs_nothing(found: dict[str, Any]) -> None:
    assert len(found["evaluations"]) == 3
    for strategy, run in found["evaluations"].items():
        assert run["stops"] == [[75, 3, ["evaluate", "log"]]] * 2, strategy
        assert run["bits"][0] == run["bits"][1], strategy
        assert run["index"][0] == run["index"][1], strategy
        assert [entry["step"] for entry in run["index"][0] if entry["metrics"]] == [3, 6], strategy


def test_batchnorm_trains_among_bfloat16_parameters(found: dict[str, Any]) -> None:
    runs = found["half_parameters"]
    assert list(runs) == ["plain", "fsdp", "zero", "sync_bn"]
    for name, run in runs.items():
        assert run["losses"] == pytest.approx(runs["plain"]["losses"], abs=0.3 if name == "sync_bn" else 0.05), name
    assert len({run["bits"] for run in runs.values()}) == 4


def test_an_overflow_in_one_process_skips_the_same_update_in_all(found: dict[str, Any]) -> None:
    assert len(found["overflows"]) == 3
    for strategy, run in found["overflows"].items():
        updates = run["steps"]
        assert len(updates) == 2
        skipped = [sum(update <= step for update in updates) for step in range(6)]
        assert run["skipped"] == skipped, strategy
        assert run["scale"] == [2.0**16 / 2**number for number in skipped], strategy
        assert run["resumed"] == run["scale"][2:], strategy  # what is logged at a step is so after its checkpoint
        assert run["bits"][0] == run["bits"][1], strategy


GROWING = "the model's parameters are not those that it had when the run began"
FOUND_BY_PROCESSES = {
    "growing train.strategy=ddp": (1, GROWING),
    "growing train.strategy=fsdp": (1, GROWING),
    "growing train.strategy=zero": (1, GROWING),
    "growing train.reproducible=world": (1, GROWING),
    "single": (2, "train.strategy: single needs one process, got 2; use ddp, or --procs 1"),
    "dp": (2, "train.strategy: dp needs one process, got 2; use ddp, or --procs 1"),
    "normless": (2, "train.sync_bn: the model has no BatchNorm layers"),
    "small last step": (2, "train.sync_bn: the last step of an epoch has 1 sample"),
    "one micro-batch": (2, "2 processes are too many: a step of 16 samples is divided into 1 micro-batch"),
    "one sample": (2, "2 processes are too many: a step of 1 sample"),
}


def test_is_refused_by_every_process_with_the_same_words() -> None:
    _, (first, second) = shared_runs()
    assert first["mistakes"] == second["mistakes"]
    assert set(first["mistakes"]) == set(FOUND_BY_PROCESSES)
    for name, (code, expected) in FOUND_BY_PROCESSES.items():
        found_code, found = first["mistakes"][name]
        assert found_code == code, name
        assert expected in found, name
        assert "\n" not in found, name


def evaluate(procs: int, out: Path, *words: str | Path) -> list[forkserver.Done]:
    command = ["eval", out / "recipe.json", *words, "--use", "shared_parts"]
    done = forkserver.paceline_ranks(procs, out, *command, PYTHONPATH=environment()["PYTHONPATH"])
    assert [each.returncode for each in done] == [0] * procs, done[0].stderr
    return done


def test_a_checkpoint_of_parts_is_measured_alike_on_one_process_and_on_two(found: dict[str, Any]) -> None:
    out, _ = shared_runs()
    expected = found["resuming"]["fsdp"]["evaluated"]
    assert expected["averaged_loss"] != expected["loss"]
    checkpoint = out / "fsdp" / "checkpoints" / "step-00000006"
    words = ["train.averaging={name: ema, decay: 0.8}", "--json"]
    for procs, more in ((1, []), (1, ["train.strategy=fsdp"]), (2, ["train.strategy=fsdp"])):
        done = evaluate(procs, out, "--checkpoint", checkpoint, *words, *more)
        assert json.loads(done[0].stdout)["metrics"] == expected, more


def test_a_split_that_no_number_of_processes_divides_is_measured_alike_on_one_two_and_three() -> None:
    out, _ = shared_runs()
    checkpoint = out / "fsdp" / "checkpoints" / "step-00000006"
    words = ["data.val.count=1003", "evaluate.batch_size=64", "train.averaging={name: ema, decay: 0.8}", "--json"]
    answers = []
    for procs in (1, 2, 3):
        done = evaluate(procs, out, "--checkpoint", checkpoint, *words)
        assert [each.stderr for each in done] == [""] * procs
        answers.append(json.loads(done[0].stdout))
    assert answers[0]["num_samples"] == 1003
    assert set(answers[0]["metrics"]) >= {"loss", "averaged_loss", "top1"}
    assert answers[1:] == answers[:1] * 2


class Project:
    """`paceline train --procs 2` in a folder, started as often as it takes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "recipe.json").write_text(json.dumps(RECIPE))

    def start(self, *options: str, pause_at: int = 0) -> forkserver.Running:
        """Begin; each process waits at its read of that number until it is let go or gets a signal."""
        self.forget()
        command = ["paceline", "train", "recipe.json", "--out", "run", "--procs", "2", "--use", "shared_parts"]
        return forkserver.Running(self.folder, [*command, *options], environment(PAUSE_AT=str(pause_at)))

    def forget(self) -> None:
        for name in ("go", "paused-0", "paused-1"):
            (self.folder / name).unlink(missing_ok=True)

    def paused(self, launcher: forkserver.Running) -> list[int]:
        """Wait until both processes wait; their ids."""
        files = [self.folder / f"paused-{rank}" for rank in (0, 1)]
        wait_until(lambda: launcher.poll() is not None or all(file.exists() for file in files), "both pause")
        assert launcher.poll() is None, launcher.printed()
        return [int(file.read_text()) for file in files]

    def go(self) -> None:
        (self.folder / "go").touch()

    def end(self, launcher: forkserver.Running, code: int) -> list[str]:
        """Wait for the end; the lines that were printed."""
        done = launcher.end()
        assert done.returncode == code, done.stderr
        return done.stderr.splitlines()

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads((self.folder / "run" / "status.json").read_text())
        return status

    def bits(self) -> list[str]:
        """Hashes of the last checkpoint."""
        folder = self.folder / "run" / "checkpoints" / "step-00000012"
        names = ("model.safetensors", "state.safetensors", "state.json")
        return [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names]

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, list[str]]:
    """A run that nothing happens to, and what it printed."""
    project = Project(tmp_path_factory.mktemp("whole"))
    return project, project.end(project.start(), 0)


def test_one_console_a_log_for_each_process_and_the_slowest_named(whole: tuple[Project, list[str]]) -> None:
    project, printed = whole
    assert [line for line in printed if line.startswith("shared:")] == printed[:1]
    assert "on cpu in 2 processes" in printed[0]
    assert sorted(set(printed)) == sorted(printed)
    assert sum("finished at step 12" in line for line in printed) == 1
    for rank in (0, 1):
        log = (project.folder / "run" / "logs" / f"rank-{rank}.log").read_text()
        assert log.count("shared: 12 steps") == log.count("finished at step 12") == 1
    clocks = [record["clock"] for record in project.records() if record["split"] == "train"]
    assert len(clocks) == 4
    for clock in clocks:
        assert clock["slowest_rank"] in (0, 1)
        assert 0 <= clock["data_wait"] <= 1


def test_killed_processes_a_request_to_stop_and_a_killed_launcher_change_nothing(
    whole: tuple[Project, list[str]], tmp_path: Path
) -> None:
    project = Project(tmp_path)

    # A process is killed in step 5: the newest checkpoint is that of step 4, and --fresh has been obeyed already.
    launcher = project.start("--fresh", pause_at=11)
    processes = project.paused(launcher)
    wait_until((tmp_path / "run" / "checkpoints" / "step-00000004").exists, "what is saved meanwhile is there")
    os.kill(processes[1], signal.SIGKILL)
    project.go()
    wait_until(lambda: not any(map(is_alive, processes)), "both processes have ended")
    project.forget()
    project.paused(launcher)
    assert [path.name for path in tmp_path.glob("run*")] == ["run"]
    assert project.status()["state"] == "running"

    # The launcher is asked to stop in step 9.
    launcher.send_signal(signal.SIGTERM)
    printed = project.end(launcher, 75)
    assert sum("process 1 was killed by SIGKILL; restarting" in line for line in printed) == 1
    assert sum(line.endswith("run/checkpoints/step-00000004, step 4") for line in printed) == 1
    assert (project.status()["state"], project.status()["step"]) == ("stopped", 10)

    # The launcher is killed in step 11: nobody trains on.
    launcher = project.start(pause_at=3)
    processes = project.paused(launcher)
    launcher.send_signal(signal.SIGKILL)
    launcher.end()
    wait_until(lambda: not any(map(is_alive, processes)), "no process outlives the launcher")

    project.end(project.start(), 0)
    assert project.status()["state"] == "finished"
    undisturbed = whole[0]
    assert project.bits() == undisturbed.bits()
    assert _without_clock(project.records()) == _without_clock(undisturbed.records())


def _without_clock(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name != "clock"} for record in records]
