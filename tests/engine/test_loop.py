"""Training from where a run stands to its end: what is due when, stopping on request, continuing bit-identically."""

import itertools
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import CLASSES, NormedNet, PlainNet, Small, grouped, one_thread, with_solver  # noqa: F401
from support.waiting import TIMEOUT
from torch import Tensor

from paceline.checkpoint.reader import open_checkpoint
from paceline.checkpoint.store import Store
from paceline.checkpoint.writer import Saver
from paceline.core.errors import CheckpointError, DataError, Stopped, TrainingError
from paceline.core.process import STOP_SIGNALS
from paceline.data.batch import Batch, Sample
from paceline.data.loader import TrainBatches
from paceline.data.split_loader import SplitLoader
from paceline.engine.loop import finish_saves, save, train
from paceline.engine.run import Run
from paceline.engine.state import Choices
from paceline.loggers.events import Evaluated, Event, Logged, Logger, LoggerGroup, Note, Saved, Snapshot
from paceline.losses.classification import CrossEntropy
from paceline.models.freezing import Freezing
from paceline.optim.averaging import ema, swa
from paceline.optim.lr_scheduler import Schedule, Scheduler
from paceline.tasks.classification import Classification

pytestmark = pytest.mark.usefixtures("one_thread")


class Diary(Logger):
    """A sink that writes down what happens."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ticks: list[int] = []

    def handle(self, event: Event) -> None:
        self.events.append(event)

    def tick(self, snapshot: Snapshot) -> None:
        if snapshot.evaluation is None:
            self.ticks.append(snapshot.step)

    def happened(self) -> list[str]:
        names = {Evaluated: "evaluated", Logged: "logged", Saved: "saved"}
        return [f"{names[type(e)]} {e.step}" for e in self.events if isinstance(e, Evaluated | Logged | Saved)]


class AtOnce(Saver):
    """Is done with a save when training goes on, so that it is logged at its step."""

    def start(self, *args: Any, **kwargs: Any) -> None:
        super().start(*args, **kwargs)
        self._join()


def small(out: Path, **changes: Any) -> Small:
    """Six steps, two an epoch, of 24 and 16 samples in micro-batches of about 8."""
    common = Small(
        out, size=40, batch=24, micro_batch_size=8, steps=6, net=NormedNet, dtype=torch.float32, evaluation_size=30
    )
    return replace(common, **changes)


def adam(run: Run) -> Run:
    return with_solver(run, torch.optim.AdamW(grouped(run.model), lr=0.01), 0.01)


def final(run: Run) -> dict[str, Any]:
    """All that a run ends with, tensors as bytes."""

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().numpy().tobytes()
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list) else value

    return {"model": plain(dict(run.model.state_dict())), "state": plain(run.state.state_dict())}


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        ((2, 1, 2), "l1 s2 e2 l2 l3 s4 e4 l4 l5 s6 e6 l6"),
        ((4, 3, 5), "l3 s4 e4 s5 s6 e6 l6"),
        ((100, 100, 100), "s6 e6 l6"),
        ((1.5, 2.5, 100), "s2 e2 s3 e3 l3 s5 e5 l5 s6 e6 l6"),
    ],
)
def test_due_at_a_step_save_then_evaluate_then_record_and_what_is_measured_is_saved(
    every: tuple[float, float, float], expected: str, tmp_path: Path
) -> None:
    diary = Diary()
    run = small(tmp_path, every=every).run(logger=LoggerGroup([diary]))
    run.saver = AtOnce(run.store)
    train(run)
    words = {"e": "evaluated", "l": "logged", "s": "saved"}
    assert diary.happened() == [f"{words[item[0]]} {item[1:]}" for item in expected.split()]
    assert diary.ticks == [1, 2, 3, 4, 5, 6]


def test_records_tell_the_step_its_epoch_and_its_metrics(tmp_path: Path) -> None:
    diary = Diary()
    run = small(tmp_path).run(logger=LoggerGroup([diary]))
    train(run)
    logged = [event for event in diary.events if isinstance(event, Logged)]
    assert [event.epoch for event in logged] == [0.5, 1, 1.5, 2, 2.5, 3]
    assert all(set(event.metrics) == {"loss", "cross_entropy", "top1", "grad_norm", "lr"} for event in logged)
    losses = [event.metrics["loss"] for event in logged]
    assert logged[-1].smoothed["loss"]["mean"] == pytest.approx(sum(losses) / 6, rel=1e-12)
    evaluated = [event for event in diary.events if isinstance(event, Evaluated)]
    assert [(event.split, event.num_samples) for event in evaluated] == [("val", 30)] * 3
    assert run.state.metrics["val"] == evaluated[-1].metrics


class FailsAt(PlainNet):
    """Fails, or gives what is not finite, in one of its forward passes."""

    def __init__(self, at: int = 0, gives: float = 0.0) -> None:
        super().__init__()
        self.at, self.gives = at, gives

    def forward(self, images: Tensor) -> Tensor:
        self.at -= 1
        if self.at == 0 and self.gives == 0:
            raise ValueError("no more")
        return super().forward(images) * (self.gives if self.at == 0 else 1)


@pytest.mark.parametrize(("gives", "written"), [(1.0, 6), (0.0, 4), (math.nan, 4)], ids=["ends", "fails", "NaN"])
def test_lines_are_logged_up_to_the_step_that_fails(gives: float, written: int, tmp_path: Path) -> None:
    diary = Diary()
    made = small(tmp_path, net=partial(FailsAt, 5, gives), size=48, micro_batch_size=24, every=(100, 1, 100))
    run = made.run(logger=LoggerGroup([diary]))
    with nullcontext() if gives == 1 else pytest.raises((ValueError, TrainingError)):
        train(run)
    run.logger.flush()
    logged = [event for event in diary.events if isinstance(event, Logged)]
    assert all(event.clock["time"] > 0 for event in logged)
    assert [event.step for event in logged] == list(range(1, written + 1))


def test_the_test_split_is_left_for_the_end(tmp_path: Path) -> None:
    diary = Diary()
    made = small(tmp_path)
    sets = made.evaluations()
    run = made.run(logger=LoggerGroup([diary]), evaluations={**sets, "test": sets["val"]})
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


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_ends_the_run_at_a_step_with_its_state_saved(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Interrupting, "number", number)
    monkeypatch.setattr(Interrupting, "armed", True)
    before = [signal.getsignal(each) for each in STOP_SIGNALS]
    run = small(tmp_path, net=Interrupting, every=(100, 100, 100)).run()
    with pytest.raises(Stopped, match=rf"stopped after step 2 on request \({number.name}\)"):
        train(run)
    assert [signal.getsignal(each) for each in STOP_SIGNALS] == before
    saved = run.store.newest()
    assert saved is not None
    assert (saved.step, run.progress.step) == (2, 2)


def test_a_request_in_the_last_step_lets_a_run_finish_that_has_nothing_to_measure(tmp_path: Path) -> None:
    run = small(tmp_path, evaluation_size=0).run()
    run.progress.step = 5
    run.stop.requested = True
    train(run)
    assert run.progress.is_done


def trainable(out: Path, kind: str) -> Run:
    """A run with Adam; its first layers may begin to learn with the fourth update, or its weights be averaged."""
    run = adam(small(out).run())
    if kind == "thawing":
        run.freezing = Freezing(run.model, ["layers.0", "layers.1"], [(3, ["layers.0", "layers.1"])])
    if kind == "ema":
        run.averaging = run.state.averaging = ema(decay=0.8)
    if kind == "swa":
        run.averaging = run.state.averaging = swa(total_steps=6, steps_per_epoch=2, start=0.3, every_steps=1)
    return run


@pytest.fixture(scope="module", params=["plain", "thawing", "ema", "swa"])
def uninterrupted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """A kind of run, and what it ends with."""
    run = trainable(tmp_path_factory.mktemp("whole"), request.param)
    train(run)
    return request.param, final(run)


@pytest.mark.parametrize("asked", range(7))
def test_stopped_anywhere_and_continued_a_run_ends_with_the_same_bits(
    asked: int, uninterrupted: tuple[str, Any], tmp_path: Path
) -> None:
    """Asked behind a step, a run stops at once if that step is to be evaluated, else behind the next one."""
    kind, expected = uninterrupted
    first = trainable(tmp_path, kind)
    first.logger = LoggerGroup([StopAt(first, asked)])
    first.stop.requested = asked == 0
    with pytest.raises(Stopped):
        train(first)
    assert first.progress.step == {0: 1, 1: 2, 2: 2, 3: 4, 4: 4, 5: 6, 6: 6}[asked]
    second = continued(tmp_path, lambda out: trainable(out, kind))
    torch.manual_seed(asked)  # no state of a generator is kept, and none is needed
    train(second)
    assert final(second) == expected


def continued(out: Path, make: Callable[[Path], Run], **parts: Any) -> Run:
    """A run that goes on from the newest checkpoint."""
    run = replace(make(out), **parts)
    checkpoint = run.store.newest()
    assert checkpoint is not None
    run.restore(checkpoint)
    return run


class StopAt(Diary):
    """Asks a run to stop when a step is done."""

    def __init__(self, run: Run, step: int) -> None:
        super().__init__()
        self.run, self.step = run, step

    def tick(self, snapshot: Snapshot) -> None:
        if snapshot.step == self.step:
            self.run.stop.requested = True


def test_a_checkpoint_brings_back_what_was_chosen_automatically(tmp_path: Path) -> None:
    first = small(tmp_path).run(choices=Choices(2, 8, 1))
    train(first)
    second = small(tmp_path, micro_batch_size=24).run(choices=Choices(1, 24, 1))
    checkpoint = second.store.newest()
    assert checkpoint is not None
    before = torch.get_num_threads()
    try:
        second.restore(checkpoint)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert (second.state.choices.threads, second.batches.sampler.micro_batch_size) == (2, 8)
    assert second.progress.is_done


def test_a_failing_run_keeps_its_last_good_checkpoint(tmp_path: Path) -> None:
    run = small(tmp_path, every=(100, 100, 2)).run()
    schedule = Schedule(1.0, lambda step: math.inf if step == 2 else 0.1, total_steps=6, steps_per_epoch=2)
    run.scheduler = Scheduler(run.optimizer, schedule)
    with pytest.raises(TrainingError, match="step 4"):
        train(run)
    saved = run.store.newest()
    assert saved is not None
    assert saved.step == 2
    assert all(value.isfinite().all() for value in saved.model.values())


def test_a_checkpoint_carries_the_metrics_of_its_own_weights(tmp_path: Path) -> None:
    """Those of an earlier evaluation would have `best` chosen by what other weights reached."""
    diary = Diary()
    run = small(tmp_path, every=(4, 100, 3)).run(logger=LoggerGroup([diary]), store=Store(tmp_path / "c", 9, "top1"))
    run.saver = AtOnce(run.store)
    train(run)
    assert diary.happened() == ["saved 3", "saved 4", "evaluated 4", "saved 6", "evaluated 6", "logged 6"]
    found = {event.step: event.metrics for event in diary.events if isinstance(event, Evaluated)}
    assert {entry["step"]: entry["metrics"] for entry in run.store.index()} == {3: {}, **found}
    assert open_checkpoint(run.store.path_of(4)).metrics == found[4]


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


def train_with_a_dying_worker(out: Path) -> None:
    run = small(out, net=Sleeping, steps=40).run()
    assert isinstance(run.model, Sleeping)
    run.model.deed = kill_a_worker
    loader = SplitLoader(Reading(), [Widen()], seed=0)
    sampler = run.batches.sampler
    batches = TrainBatches(loader, sampler, run.world, run.progress, workers=1, kind="process")
    try:
        train(replace(run, train_loader=loader, batches=batches))
    except DataError as error:
        (out / "error").write_text(str(error))
    os._exit(0)


def test_a_worker_that_dies_during_a_step_is_a_data_error(tmp_path: Path) -> None:
    """In a process of its own: torch tells of it at any moment, and again, to whatever goes on there."""
    process = multiprocessing.get_context("fork").Process(target=train_with_a_dying_worker, args=(tmp_path,))
    process.start()
    process.join(TIMEOUT)
    process.kill()
    assert "a loader worker died" in (tmp_path / "error").read_text()


class Greedy(PlainNet):
    """Wants more memory than there is."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + torch.empty(2**46).sum()


def test_lack_of_memory_says_what_can_be_done(tmp_path: Path) -> None:
    run = small(tmp_path, net=Greedy).run()
    with pytest.raises(TrainingError, match=r"out of memory in step 1, with 8 samples.*train\.micro_batch_size=4"):
        train(run)


class GreedyInEvaluation(PlainNet):
    """Wants more memory than there is, but not to learn."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + (0 if self.training else torch.empty(2**46).sum())


def test_lack_of_memory_in_an_evaluation_is_not_that_of_a_step(tmp_path: Path) -> None:
    run = small(tmp_path, net=GreedyInEvaluation).run()
    with pytest.raises(TrainingError, match=r"out of memory after step \d+.*evaluate\.batch_size="):
        train(run)


@pytest.mark.parametrize("world", [1, 2])
def test_a_save_that_was_begun_is_on_the_disk_before_a_failure_is_reported(world: int, tmp_path: Path) -> None:
    """As when another process dies while the first one writes for all."""
    diary = Diary()
    run = small(tmp_path, world=world).run(logger=LoggerGroup([diary]))

    def fail() -> None:
        save(run)
        raise TrainingError("a peer is gone")

    with pytest.raises(TrainingError, match="a peer is gone"), finish_saves(run):
        fail()
    assert diary.happened() == ["saved 0"]
    assert open_checkpoint(run.store.path_of(0)).step == 0


def test_predictions_that_cannot_be_written_do_not_end_training(tmp_path: Path) -> None:
    (tmp_path / "predictions").touch()
    diary = Diary()
    run = small(tmp_path).run(logger=LoggerGroup([diary]), save_predictions=True)
    train(run)
    warnings = [event.text for event in diary.events if isinstance(event, Note) and event.level == "warning"]
    assert run.progress.is_done
    assert warnings
    assert all("predictions/val.csv: the prediction cannot be written (" in text for text in warnings)
    assert all(text.endswith("; training continues") for text in warnings)


class Deeds:
    """What to do at calls of given numbers, counted from 0; one object for a model and its replicas."""

    def __init__(self) -> None:
        self.by_call: dict[int, Callable[[], None]] = {}
        self.calls = itertools.count()

    def __call__(self) -> None:
        self.by_call.get(next(self.calls), bool)()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Deeds":
        return self


class Evaluating(NormedNet):
    """Does something in its forward pass of a given number of all that are for an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.deeds = Deeds()

    def forward(self, images: Tensor) -> Tensor:
        if not self.training:
            self.deeds()
        return super().forward(images)


def measured(out: Path, kind: str = "plain", **changes: Any) -> Run:
    """Evaluated behind the steps 2, 4 and 6 in 8 batches; an average of the weights in 8 more."""
    run = adam(small(out, net=Evaluating, evaluation_batch=4, **changes).run())
    sets = run.evaluations
    run = replace(run, evaluations={**sets, "test": sets["val"]}, store=Store(out / "checkpoints", 2, "top1"))
    run.averaging = run.state.averaging = {
        "plain": run.averaging,
        "ema": ema(0.8),
        "swa": swa(6, 2, start=0.1, every_steps=1),
    }[kind]
    return run


def story(*diaries: Diary) -> list[Any]:
    """What was recorded, in order, without clocks."""
    events = [event for diary in diaries for event in diary.events]
    return [replace(event, clock={}) for event in events if isinstance(event, Evaluated | Logged)]


def split_of(event: Evaluated | Logged) -> str:
    return event.split if isinstance(event, Evaluated) else "train"


def begin(out: Path, kind: str, deeds: dict[int, Callable[[Run], None]]) -> tuple[Run, Diary]:
    diary = Diary()
    run = replace(measured(out, kind), logger=LoggerGroup([diary]))
    assert isinstance(run.model, Evaluating)
    run.model.deeds.by_call = {number: partial(deed, run) for number, deed in deeds.items()}
    return run, diary


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, list[Any], list[Any]]]:
    """What a kind of run ends with, what it recorded, and what became of its checkpoints."""

    @cache
    def find(kind: str) -> tuple[Any, list[Any], list[Any]]:
        run, diary = begin(tmp_path_factory.mktemp("undisturbed"), kind, {})
        train(run)
        return final(run), story(diary), run.store.index()

    return find


def request_stop(run: Run) -> None:
    run.stop.requested = True


def fail(run: Run) -> None:
    raise ZeroDivisionError("a user's metric")


@pytest.mark.parametrize(
    ("kind", "number", "step"),
    [
        ("plain", 0, 2),
        ("plain", 11, 4),  # in the middle of the second evaluation
        ("plain", 16, 6),
        ("plain", 26, 6),  # in that of the test split
        ("ema", 20, 4),
        ("ema", 28, 4),  # while the average is measured
        ("swa", 9, 2),  # while BatchNorm statistics of the average are
    ],
)
@pytest.mark.parametrize(("deed", "error"), [(request_stop, Stopped), (fail, TrainingError)])
def test_an_evaluation_that_does_not_end_costs_no_step_and_is_done_first_afterwards(
    kind: str,
    number: int,
    step: int,
    deed: Callable[[Run], None],
    error: type[Exception],
    undisturbed: Callable[[str], tuple[Any, list[Any], list[Any]]],
    tmp_path: Path,
) -> None:
    first, early = begin(tmp_path, kind, {number: deed})
    with pytest.raises(error):
        train(first)
    assert first.progress.step == step
    late = Diary()
    second = continued(tmp_path, lambda out: measured(out, kind), logger=LoggerGroup([late]))
    assert second.progress.step == step
    kept = [event for event in story(early) if event.step < step or split_of(event) not in second.pending_splits]
    train(second)
    expected = undisturbed(kind)
    assert final(second) == expected[0]
    assert kept + story(late) == expected[1]
    assert second.store.index() == expected[2]


def test_what_was_measured_before_a_kill_is_not_measured_again_and_best_follows(
    undisturbed: Callable[[str], tuple[Any, list[Any], list[Any]]], tmp_path: Path
) -> None:
    """As when the kill comes between the manifest, which tells what was measured, and the link."""
    expected, _, index = undisturbed("plain")
    first, _ = begin(tmp_path, "plain", {26: fail})
    with pytest.raises(TrainingError):
        train(first)
    first.store.link.unlink()
    late = Diary()
    second = continued(tmp_path, measured, logger=LoggerGroup([late]))
    train(second)
    assert [event.split for event in late.events if isinstance(event, Evaluated)] == ["test"]
    assert final(second) == expected
    assert [entry["step"] for entry in index if entry["best"]] == [int(second.store.link.resolve().name[5:])]


class Undrawable(Classification):
    def draw(self, batch: Batch, predictions: Any | None, index: int) -> Any:
        raise ValueError("no sample" if predictions is None else "no prediction")

    def draw_metrics(self, metrics: dict[str, Any]) -> Any:
        raise RuntimeError("no table")


def test_what_cannot_be_drawn_is_logged_and_training_goes_on(tmp_path: Path) -> None:
    diary = Diary()
    run = small(tmp_path).run(logger=LoggerGroup([diary]), visualize=True)
    run.task = Undrawable({"cross_entropy": CrossEntropy()}, {"cross_entropy": 1.0}, CLASSES, top_k=(1,))
    train(run)
    warnings = [event.text for event in diary.events if isinstance(event, Note) and event.level == "warning"]
    for message in ("ValueError: no sample", "ValueError: no prediction", "RuntimeError: no table"):
        assert sum(message in text for text in warnings) >= 1
    assert run.progress.is_done
    assert run.store.newest() is not None


def test_a_save_that_failed_is_tried_again_before_a_run_counts_as_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was reported when it failed; a request to stop at the same step must not take it for saved."""
    monkeypatch.setattr("paceline.engine.loop._SECONDS_BETWEEN", 0.0)
    run, diary = begin(tmp_path, "plain", {0: request_stop})
    run.store.root.write_bytes(b"in the way")
    with pytest.raises(CheckpointError, match="after step 2 could not be saved"):
        train(run)
    run.store.root.unlink()

    def make_room_and_ask(run: Run) -> None:
        run.store.root.unlink()
        request_stop(run)

    run, diary = begin(tmp_path, "plain", {0: make_room_and_ask})
    run.store.root.write_bytes(b"in the way")
    with pytest.raises(Stopped):
        train(run)
    assert diary.happened() == ["logged 1", "saved 2"]
    saved = run.store.newest()
    assert saved is not None
    assert (saved.step, saved.state["pending"]) == (2, ["evaluate", "log"])
