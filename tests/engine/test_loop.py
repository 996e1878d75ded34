"""Training from where a run stands to its end: what is due when, stopping on request, and going on to the same bits."""

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import CLASSES, NormedNet, PlainNet, Small, grouped, one_thread, solver  # noqa: F401
from torch import Tensor

from paceline.checkpoint.background import Saver
from paceline.checkpoint.store import Store
from paceline.core.errors import DataError, Stopped, TrainingError
from paceline.data.batch import Sample
from paceline.data.loading.loader import TrainBatches
from paceline.data.loading.source import Source
from paceline.engine.loop import train
from paceline.engine.run import Run
from paceline.engine.saving import completing_saves, save
from paceline.models.freezing import Freezing
from paceline.observe.events import Evaluated, Event, Logged, Note, Observer, Saved, Snapshot
from paceline.optim.averaging import Ema, Swa
from paceline.optim.plan import Plan
from paceline.optim.schedules import Schedule, Schedules

pytestmark = pytest.mark.usefixtures("one_thread")


class Diary:
    """A sink that writes down what happens."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ticks: list[int] = []

    def handle(self, event: Event) -> None:
        self.events.append(event)

    def tick(self, snapshot: Snapshot) -> None:
        self.ticks.append(snapshot.step)

    def close(self) -> None: ...

    def happened(self) -> list[str]:
        names = {Evaluated: "evaluated", Logged: "logged", Saved: "saved"}
        return [f"{names[type(e)]} {e.step}" for e in self.events if isinstance(e, Evaluated | Logged | Saved)]


class AtOnce(Saver):
    """Is done with a save when training goes on, so that it is told of at its step."""

    def begin(self, *args: Any, **kwargs: Any) -> None:
        super().begin(*args, **kwargs)
        self._join()


def small(out: Path, **changes: Any) -> Small:
    """Six updates, two an epoch, of 24 and 16 samples in micro-batches of about 8."""
    common = Small(
        out, size=40, batch=24, micro_batch=8, steps=6, net=NormedNet, dtype=torch.float32, evaluation_size=30
    )
    return replace(common, **changes)


def adam(run: Run) -> Run:
    return replace(run, **solver(torch.optim.AdamW(grouped(run.model), lr=0.01), 0.01, 6))


def final(run: Run) -> dict[str, Any]:
    """All that a run ends with, tensors as bytes."""

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().numpy().tobytes()
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list) else value

    return {"model": plain(dict(run.model.state_dict())), "state": plain(run.state())}


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        ((2, 1, 2), "l1 e2 l2 s2 l3 e4 l4 s4 l5 e6 l6 s6"),
        ((4, 3, 5), "l3 e4 s5 e6 l6 s6"),
        ((100, 100, 100), "e6 l6 s6"),
        ((1.5, 2.5, 100), "e2 e3 l3 e5 l5 e6 l6 s6"),
    ],
)
def test_due_at_a_step_evaluate_then_record_then_save(
    every: tuple[float, float, float], expected: str, tmp_path: Path
) -> None:
    diary = Diary()
    run = small(tmp_path, every=every).run(observer=Observer([diary]))
    run.saver = AtOnce(run.store)
    train(run)
    words = {"e": "evaluated", "l": "logged", "s": "saved"}
    assert diary.happened() == [f"{words[item[0]]} {item[1:]}" for item in expected.split()]
    assert diary.ticks == [1, 2, 3, 4, 5, 6]


def test_records_tell_the_step_its_epoch_and_its_figures(tmp_path: Path) -> None:
    diary = Diary()
    run = small(tmp_path).run(observer=Observer([diary]))
    train(run)
    logged = [event for event in diary.events if isinstance(event, Logged)]
    assert [event.epoch for event in logged] == [0.5, 1, 1.5, 2, 2.5, 3]
    assert all(set(event.figures) == {"loss", "cross_entropy", "grad_norm", "lr"} for event in logged)
    losses = [event.figures["loss"] for event in logged]
    assert logged[-1].smoothed["loss"]["mean"] == pytest.approx(sum(losses) / 6, rel=1e-12)
    evaluated = [event for event in diary.events if isinstance(event, Evaluated)]
    assert [(event.split, event.num_samples) for event in evaluated] == [("val", 30)] * 3
    assert run.figures["val"] == evaluated[-1].figures


def test_the_test_split_is_left_for_the_end(tmp_path: Path) -> None:
    diary = Diary()
    made = small(tmp_path)
    sets = made.evaluations()
    run = made.run(observer=Observer([diary]), evaluations={**sets, "test": sets["val"]})
    train(run)
    measured = [(event.split, event.step) for event in diary.events if isinstance(event, Evaluated)]
    assert [step for split, step in measured if split == "val"] == [2, 4, 6]
    assert all(step == 6 for split, step in measured if split == "test")


class Interrupting(NormedNet):
    """Sends its own process a signal during the forward pass of its first micro-batch in training."""

    number = signal.SIGTERM
    armed = False

    def forward(self, images: Tensor) -> Tensor:
        if type(self).armed:
            type(self).armed = False
            os.kill(os.getpid(), self.number)
        return super().forward(images)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_ends_the_run_at_a_step_with_its_state_saved(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Interrupting, "number", number)
    monkeypatch.setattr(Interrupting, "armed", True)
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    run = small(tmp_path, net=Interrupting, every=(100, 100, 100)).run()
    with pytest.raises(Stopped, match=rf"stopped after step 2 on request \({number.name}\)"):
        train(run)
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == before
    saved = run.store.newest()
    assert saved is not None
    assert (saved.step, run.progress.step) == (2, 2)


def test_a_request_in_the_last_step_lets_the_run_finish(tmp_path: Path) -> None:
    run = small(tmp_path).run()
    run.progress.step = 5
    run.stop.requested = True
    train(run)
    assert run.progress.is_done


def learning(out: Path, kind: str) -> Run:
    """A run with Adam; its first layers may begin to learn with the fourth update, or its weights be averaged."""
    run = adam(small(out).run())
    if kind == "thawing":
        run.freezing = Freezing(run.model, ["layers.0", "layers.1"], [(3, ["layers.0", "layers.1"])])
    if kind == "ema":
        run.averaging = Ema(decay=0.8)
    if kind == "swa":
        run.averaging = Swa(total_steps=6, steps_per_epoch=2, start=0.3, every_steps=1)
    return run


@pytest.fixture(scope="module", params=["plain", "thawing", "ema", "swa"])
def uninterrupted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """A kind of run, and what it ends with."""
    run = learning(tmp_path_factory.mktemp("whole"), request.param)
    train(run)
    return request.param, final(run)


@pytest.mark.parametrize("stop", range(1, 6))
def test_stopped_anywhere_and_continued_a_run_ends_with_the_same_bits(
    stop: int, uninterrupted: tuple[str, Any], tmp_path: Path
) -> None:
    kind, expected = uninterrupted
    first = learning(tmp_path, kind)
    first.observer = Observer([StopAt(first, stop - 1)])
    if stop == 1:
        first.stop.requested = True
    with pytest.raises(Stopped):
        train(first)
    assert first.progress.step == stop
    second = learning(tmp_path, kind)
    torch.manual_seed(stop)  # no state of a generator is kept, and none is needed
    checkpoint = second.store.newest()
    assert checkpoint is not None
    second.restore(checkpoint)
    train(second)
    assert final(second) == expected


class StopAt(Diary):
    """Asks a run to stop when a step is done."""

    def __init__(self, run: Run, step: int) -> None:
        super().__init__()
        self.run, self.step = run, step

    def tick(self, snapshot: Snapshot) -> None:
        if snapshot.step == self.step:
            self.run.stop.requested = True


def test_a_checkpoint_brings_back_what_was_chosen_automatically(tmp_path: Path) -> None:
    first = small(tmp_path).run(threads=2)
    train(first)
    second = small(tmp_path, micro_batch=24).run(threads=1)
    checkpoint = second.store.newest()
    assert checkpoint is not None
    before = torch.get_num_threads()
    try:
        second.restore(checkpoint)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert (second.threads, second.batches.updates.micro_batch) == (2, 8)
    assert second.progress.is_done


def test_a_failing_run_keeps_its_last_good_checkpoint(tmp_path: Path) -> None:
    run = small(tmp_path, every=(100, 100, 2)).run()
    schedule = Schedule(1.0, lambda step: math.inf if step == 2 else 0.1, total_steps=6, steps_per_epoch=2)
    run.plan = Plan(run.optimizer, Schedules(schedule))
    with pytest.raises(TrainingError, match="update 4"):
        train(run)
    saved = run.store.newest()
    assert saved is not None
    assert saved.step == 2
    assert all(value.isfinite().all() for value in saved.model.values())


def test_a_checkpoint_carries_the_figures_of_its_own_weights(tmp_path: Path) -> None:
    """Those of an earlier evaluation would have `best` chosen by what other weights reached."""
    diary = Diary()
    run = small(tmp_path, every=(4, 100, 3)).run(observer=Observer([diary]), store=Store(tmp_path / "c", 9, "top1"))
    run.saver = AtOnce(run.store)
    train(run)
    assert diary.happened() == ["saved 3", "evaluated 4", "evaluated 6", "logged 6", "saved 6"]
    last = [event for event in diary.events if isinstance(event, Evaluated)][-1]
    figures = {entry["step"]: entry["figures"] for entry in run.store.index()}
    assert figures[3] == {}
    assert figures[6] == last.figures
    other = small(tmp_path, every=(2, 100, 3)).run(store=Store(tmp_path / "d", 9, "top1"))
    train(other)
    assert [entry["figures"] == {} for entry in other.store.index()] == [True, False]


class Reading:
    """Images that are read one by one, by workers."""

    classes = CLASSES
    channels = 2

    def __len__(self) -> int:
        return 40

    def read(self, index: int) -> Sample:
        return {"image": np.full((6, 6, 2), index, np.uint8), "label": index % 3}


class Widen:
    draws = 0
    is_batch = True

    def __call__(self, batch: dict[str, Any], draws: Tensor) -> dict[str, Any]:
        return {**batch, "image": batch["image"].float() / 40}


class Sleeping(PlainNet):
    """Does something in its second forward pass."""

    deed: Callable[[], None]
    calls = 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            self.deed()
        return super().forward(images)


def kill_a_worker() -> None:
    victim = multiprocessing.active_children()[0].pid
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    time.sleep(0.3)  # the step goes on for a while, and that is where torch tells of the death


def test_a_worker_that_dies_during_a_step_is_a_data_error(tmp_path: Path) -> None:
    run = small(tmp_path, net=Sleeping, steps=40).run()
    assert isinstance(run.model, Sleeping)
    run.model.deed = kill_a_worker
    source = Source(Reading(), [Widen()], seed=0)
    batches = TrainBatches(source, run.batches.updates, run.batches.order, run.mesh, run.progress, workers=1)
    run = replace(run, source=source, batches=batches)
    with pytest.raises(DataError, match="a loader worker died"):
        train(run)


class Greedy(PlainNet):
    """Wants more memory than there is."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + torch.empty(2**46).sum()


def test_lack_of_memory_says_what_can_be_done(tmp_path: Path) -> None:
    run = small(tmp_path, net=Greedy).run()
    with pytest.raises(TrainingError, match=r"out of memory in update 1, with 8 samples.*train\.micro_batch=4"):
        train(run)


@pytest.mark.parametrize("world", [1, 2])
def test_a_save_that_was_begun_is_on_the_disk_before_a_failure_is_told(world: int, tmp_path: Path) -> None:
    """As when another process dies while the first one writes for all."""
    diary = Diary()
    run = small(tmp_path, world=world).run(observer=Observer([diary]))

    def fail() -> None:
        save(run)
        raise TrainingError("a peer is gone")

    with pytest.raises(TrainingError, match="a peer is gone"), completing_saves(run):
        fail()
    assert diary.happened() == ["saved 0"]
    assert run.store.open(run.store.path_of(0)).step == 0


def test_predictions_that_cannot_be_written_do_not_end_training(tmp_path: Path) -> None:
    (tmp_path / "predictions").touch()
    diary = Diary()
    run = small(tmp_path).run(observer=Observer([diary]), save_predictions=True)
    train(run)
    warnings = [event.text for event in diary.events if isinstance(event, Note) and event.level == "warning"]
    assert run.progress.is_done
    assert warnings
    assert all("predictions/val.csv: predictions cannot be written (" in text for text in warnings)
    assert all(text.endswith("; training goes on") for text in warnings)
