"""The resume contract, on real runs: killed at any instant and restarted, the result is bit-identical."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from support.forkserver import Running
from support.waiting import wait_until
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import paceline.recipe.schema  # noqa: F401 - the names that ship, before the registry is copied
from paceline import cli
from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.data.datasets.idx import MemoryImages, fashion_small

SCRIPTS = Path(__file__).resolve().parent / "scripts"
STEPS, STEPS_PER_EPOCH = 30, 7
OVERRIDES = [
    "train.epochs=null",
    f"train.steps={STEPS}",
    "train.micro_batch_size=40",
    "train.threads=1",
    "data.batch_size=96",
    "data.train={dataset: pausing, split: train}",
    "data.val={dataset: few, split: test}",
    "model={name: convnet, widths: [4, 8], dropout: 0.2}",
    "schedule.warmup_epochs=0.5",
    "evaluate.every_epochs=0.5",
    "checkpoint.every_steps=5",
    "logging.every_steps=4",
]


@dataclass
class Outcome:
    """How one start of the command ended, and what the run directory said then."""

    code: int
    error: str
    status: dict[str, Any]
    steps: list[int]
    """The steps of the checkpoints."""


class Command:
    """`paceline train` in a folder, started as often as it takes."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder
        self.run = folder / "runs" / "quickstart"
        self.arguments = ["paceline", "train", "quickstart", "--use", "pausing", *overrides]

    def start(self, pause_at: int = 0) -> Running:
        for name in ("paused", "go"):
            (self.folder / name).unlink(missing_ok=True)
        path = os.pathsep.join([str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = {**os.environ, "PAUSE_AT": str(pause_at), "PYTHONPATH": path}
        return Running(self.folder, self.arguments, variables, session=True)

    def wait_for(self, is_there: Callable[[], bool], process: Running) -> None:
        wait_until(lambda: is_there() or process.poll() is not None, "what the run is to do")
        assert is_there(), process.printed()

    def until_paused(self, pause_at: int) -> Running:
        process = self.start(pause_at)
        self.wait_for((self.folder / "paused").exists, process)
        return process

    def end(self, process: Running) -> Outcome:
        (self.folder / "go").touch()
        done = process.end()
        steps = sorted(int(path.name[5:]) for path in (self.run / "checkpoints").glob("step-*"))
        return Outcome(done.returncode, done.stderr, json.loads((self.run / "status.json").read_text()), steps)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """A run that is never interrupted."""
    command = Command(tmp_path_factory.mktemp("whole"), *OVERRIDES)
    outcome = command.end(command.start())
    assert outcome.code == 0, outcome.error
    return command


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Command, dict[str, Outcome]]:
    """The same run, ended twice on its way and started again with the same command."""
    command = Command(tmp_path_factory.mktemp("broken"), *OVERRIDES)
    outcomes = {}

    # Killed within step 13, behind its first micro-batch and in the middle of an epoch.
    process = command.until_paused(reads(0, 13))
    process.send_signal(signal.SIGKILL)
    outcomes["killed"] = command.end(process)

    # Goes on from step 11, which was evaluated; asked to stop within step 17, which is still done.
    process = command.until_paused(reads(11, 17))
    process.send_signal(signal.SIGTERM)
    outcomes["terminated"] = command.end(process)

    outcomes["finished"] = command.end(command.start())
    return command, outcomes


def reads(done: int, step_batch: int) -> int:
    """The number, counted from 1, of the second read for `update` in a process that starts behind `done` steps.

    Of 600 samples there are six steps of three micro-batches and then one of 24 samples, a single micro-batch.
    """
    return 2 + sum(1 if step % STEPS_PER_EPOCH == 0 else 3 for step in range(done + 1, step_batch))


def checkpoint(command: Command, name: str, step: int = STEPS) -> bytes:
    return (command.run / "checkpoints" / f"step-{step:08d}" / name).read_bytes()


def records(command: Command) -> list[dict[str, Any]]:
    lines = (command.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "clock"} for line in lines]


def events(command: Command) -> dict[str, list[tuple[int, Any]]]:
    """What TensorBoard shows, clocks left out: scalars by tag and step, and images."""
    events = EventAccumulator(str(command.run / "tensorboard"), {"scalars": 0, "images": 0}).Reload()
    scalars = {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    images = {
        tag: [(point.step, point.encoded_image_string) for point in events.Images(tag)]
        for tag in events.Tags()["images"]
    }
    return {tag: points for tag, points in {**scalars, **images}.items() if not tag.startswith("clock/")}


Broken = tuple[Command, dict[str, Outcome]]


def test_a_kill_leaves_the_last_checkpoint(broken: Broken) -> None:
    killed = broken[1]["killed"]
    assert killed.code == -signal.SIGKILL
    assert killed.steps[-3:] == [7, 10, 11]
    assert killed.status["state"] == "running"


def test_sigterm_stops_at_a_step_with_its_state_saved(broken: Broken) -> None:
    terminated = broken[1]["terminated"]
    assert terminated.code == 75, terminated.error
    assert terminated.status["state"] == "stopped"
    assert terminated.status["step"] == terminated.steps[-1] == 17
    assert "SIGTERM" in terminated.status["reason"]
    assert "weights  from runs/quickstart/checkpoints/step-00000011" in terminated.error
    assert "Traceback" not in terminated.error


def test_the_continued_run_finishes(broken: Broken) -> None:
    finished = broken[1]["finished"]
    assert finished.code == 0, finished.error
    assert (finished.status["state"], finished.status["step"]) == ("finished", STEPS)
    assert f"weights  from runs/quickstart/checkpoints/step-{17:08d}" in finished.error


@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors", "state.json"])
def test_interruptions_change_no_bit_of_the_last_checkpoint(name: str, whole: Command, broken: Broken) -> None:
    assert checkpoint(broken[0], name) == checkpoint(whole, name)


def test_interruptions_change_no_bit_of_the_best_checkpoint(whole: Command, broken: Broken) -> None:
    best, other = ((command.run / "best").resolve() for command in (whole, broken[0]))
    assert best.name == other.name
    assert (best / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


def test_interruptions_change_no_metric(whole: Command, broken: Broken) -> None:
    found = records(broken[0])
    assert found == records(whole)
    assert [(record["split"], record["step"]) for record in found] == [
        *(("val", 4), ("train", 4), ("val", 7), ("train", 8), ("val", 11), ("train", 12), ("val", 14), ("train", 16)),
        *(("val", 18), ("train", 20), ("val", 21), ("train", 24), ("val", 25), ("val", 28), ("train", 28)),
        *(("val", 30), ("train", 30)),
    ]
    assert all(record["smoothed"]["loss"].keys() >= {"median", "global_mean"} for record in found if "lr" in record)


def test_interruptions_change_nothing_that_tensorboard_shows(whole: Command, broken: Broken) -> None:
    found = events(broken[0])
    assert found == events(whole)
    assert [step for step, _ in found["train/loss"]] == [4, 8, 12, 16, 20, 24, 28, 30]
    assert [step for step, _ in found["val/predictions"]] == [4, 7, 11, 14, 18, 21, 25, 28, 30]


def test_interruptions_change_no_image(whole: Command, broken: Broken) -> None:
    found = {path.name: path.read_bytes() for path in (broken[0].run / "images").iterdir()}
    assert found == {path.name: path.read_bytes() for path in (whole.run / "images").iterdir()}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_request_that_reaches_workers_too_still_stops_cleanly(number: signal.Signals, tmp_path: Path) -> None:
    """Terminals, schedulers and `timeout` signal all processes of the command, the loader's workers included."""
    command = Command(
        tmp_path,
        "train.epochs=null",
        "train.steps=100000",
        "model.widths=[4]",
        "train.threads=1",
        "data.train={dataset: one_by_one, split: train}",
        "data.val={dataset: few, split: test}",
        "data.num_workers=2",
        "data.loader=process",
        "logging.every_steps=1",
        "checkpoint.every_epochs=1000",
    )
    process = command.start()
    command.wait_for((command.run / "metrics.jsonl").exists, process)
    os.killpg(process.pid, number)
    outcome = command.end(process)
    assert outcome.code == 75, outcome.error
    assert outcome.status["state"] == "stopped"
    assert outcome.steps == [outcome.status["step"]]
    assert "Traceback" not in outcome.error


class Scripted(MemoryImages):
    """Images that do something the next time they are asked for."""

    deed: Callable[[], None] | None = None

    def gather(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        deed, Scripted.deed = Scripted.deed, None
        if deed is not None:
            deed()
        return super().gather(ids)


def scripted(split: Literal["train", "test"]) -> Scripted:
    base = fashion_small(split)
    return Scripted(base.images[:200], {"label": base.fields["label"][:200]}, base.classes)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to run commands in within this process; torch's settings and the registry are put back."""
    monkeypatch.chdir(tmp_path)
    datasets = register.kind("dataset")
    monkeypatch.setattr(datasets, "_entries", dict(datasets._entries))
    register.dataset("scripted")(scripted)
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    benchmark = torch.backends.cudnn.benchmark
    yield tmp_path
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = benchmark


TINY = [
    "train",
    "quickstart",
    "train.epochs=null",
    "train.steps=2",
    "train.threads=1",
    "model.widths=[2]",
    "schedule.warmup_epochs=0.01",
]


def status_of(folder: Path) -> dict[str, Any]:
    status: dict[str, Any] = json.loads((folder / "runs/quickstart/status.json").read_text())
    return status


def interrupt_twice() -> None:
    assert threading.current_thread() is threading.main_thread()  # where a signal is dealt with before the next line
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    raise AssertionError("the run goes on")


def test_a_second_sigint_ends_the_run_at_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [*TINY, "data.train={dataset: scripted, split: train}", "logging.images=false"]
    Scripted.deed = interrupt_twice
    assert cli.main(command) == 130
    assert status_of(here)["state"] == "failed"
    assert "Traceback" not in capsys.readouterr().err
    assert cli.main(command) == 0
    assert (status_of(here)["state"], status_of(here)["step"]) == ("finished", 2)


def fail_to_read() -> None:
    raise DataError("the test split cannot be read yet")


def test_what_was_missing_after_the_last_step_is_made_up_for(here: Path) -> None:
    """The last checkpoint is saved before the test split is measured: a run that ends between is not finished."""
    normalize = "transforms: [{name: normalize, mean: [0.0], std: [1.0]}]"
    command = [*TINY, f"data.test={{dataset: scripted, split: test, {normalize}}}", "evaluate.batch_size=256"]
    Scripted.deed = fail_to_read
    assert cli.main(command) == 3
    assert status_of(here)["state"] == "failed"

    def measured() -> int:
        lines = (here / "runs/quickstart/metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["split"] for line in lines].count("test")

    for _ in range(2):
        assert cli.main(command) == 0
        assert status_of(here)["state"] == "finished"
        assert measured() == 1


def test_a_run_killed_between_its_last_checkpoint_and_its_end_is_finished(here: Path) -> None:
    assert cli.main(TINY) == 0
    (here / "runs/quickstart/status.json").write_text(json.dumps({**status_of(here), "state": "running"}))
    assert cli.main(TINY) == 0
    assert status_of(here)["state"] == "finished"


def test_other_images_beside_ours_are_no_obstacle(here: Path) -> None:
    assert cli.main(TINY) == 0
    drawing = here / "runs/quickstart/images/my-own-drawing.png"
    drawing.write_bytes(b"mine")
    assert cli.main([*TINY, "train.steps=3"]) == 0
    assert drawing.read_bytes() == b"mine"


def test_a_finished_run_is_left_alone(here: Path) -> None:
    assert cli.main(TINY) == 0
    run = here / "runs/quickstart"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert cli.main(TINY) == 0
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_another_recipe_does_not_continue_a_run(here: Path) -> None:
    assert cli.main(TINY) == 0
    assert cli.main([*TINY, "optimizer.lr=0.5"]) == 4
    assert cli.main([*TINY, "train.steps=3", "logging.every_steps=1"]) == 0
