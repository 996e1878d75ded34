"""Images of a run: which samples are drawn, what is kept of them, and what becomes of failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as PILImage
from small_runs import CLASSES, CPU, Small
from torch import Tensor

from paceline.core.errors import DamagedFileError
from paceline.core.world import World
from paceline.data.batch import Batch
from paceline.engine.evaluate import evaluate
from paceline.engine.loop import log_evaluation, train
from paceline.engine.run import Run
from paceline.engine.visualizer import Visualizer, visualize_samples
from paceline.loggers.events import Event, Logger, LoggerGroup, Note, Visualized
from paceline.losses.classification import CrossEntropy
from paceline.tasks.classification import Classification
from paceline.tasks.task import Task
from paceline.visualize.grid import Panel
from paceline.visualize.image import Image

Draw = Callable[[Batch, Any, int], Sequence[Panel]]
WHITE = np.full((4, 5, 3), 255, np.uint8)


class Diary(Logger):
    """Remembers events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def handle(self, event: Event) -> None:
        self.events.append(event)

    @property
    def warnings(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Note) and event.level == "warning"]


class Drawing(Classification):
    """Draws as a test says; how many is not said."""

    num_visualized = Task.num_visualized

    def __init__(self, draw: Draw) -> None:
        super().__init__({"cross_entropy": CrossEntropy()}, {"cross_entropy": 1.0}, CLASSES, top_k=(1,))
        self._draw = draw

    def draw(self, batch: Batch, predictions: Tensor | None, index: int) -> list[Panel]:
        return list(self._draw(batch, predictions, index))


def small(out: Path, draw: Draw | None = None, **parts: Any) -> tuple[Run, Diary]:
    diary = Diary()
    chosen: dict[str, Any] = {} if draw is None else {"task": Drawing(draw)}
    run = Small(out, evaluation_size=100).run(visualize=True, logger=LoggerGroup([diary]), **chosen, **parts)
    return run, diary


def by_id(batch: Batch, predictions: Any, index: int) -> list[Panel]:
    return [Panel(WHITE, str(int(batch.ids[index])))]


def test_eight_samples_are_evenly_spaced_unless_the_task_says_otherwise(tmp_path: Path) -> None:
    panels = evaluate(small(tmp_path, by_id)[0], "val").drawn.panels
    assert list(panels) == [0, 12, 25, 37, 50, 62, 75, 87]
    assert [panel.caption for (panel,) in panels.values()] == [str(sample) for sample in panels]
    assert len(evaluate(small(tmp_path)[0], "val").drawn.panels) == 24


def test_a_task_draws_nothing_if_it_wants_none(tmp_path: Path) -> None:
    def draw(batch: Batch, predictions: Any, index: int) -> list[Panel]:
        raise AssertionError

    run, diary = small(tmp_path, draw)
    run.task.num_visualized = 0
    train(run)
    assert {path.name[:13] for path in (tmp_path / "images").iterdir()} == {"val-confusion"}
    assert diary.warnings == []


def test_training_and_evaluation_write_images_and_tell_of_them(tmp_path: Path) -> None:
    run, diary = small(tmp_path)
    train(run)
    events = [event for event in diary.events if isinstance(event, Visualized)]
    reported = {path for event in events for path in event.images.values()}
    assert reported == set((tmp_path / "images").iterdir())
    evaluated = [f"val-{kind}-0000000{step}" for kind in ("confusion", "predictions") for step in (2, 4)]
    assert sorted(path.stem for path in reported) == ["train-samples-00000001", *evaluated]
    for path in reported:
        with PILImage.open(path) as image:
            assert min(image.size) > 96
    assert {(event.step, event.split) for event in events} == {(1, "train"), (2, "val"), (4, "val")}


def test_only_small_images_are_kept(tmp_path: Path) -> None:
    large = np.zeros((600, 1200, 3), np.uint8)
    run, _ = small(tmp_path, lambda *_: [Panel(large[:, ::-1], np.str_("a"), np.True_)])  # type: ignore[arg-type]
    visualizer = Visualizer(run, 3)
    visualizer.add(Batch(id=torch.arange(3), label=torch.zeros(3, dtype=torch.int64)), torch.zeros(3, 3))
    panels, worst = visualizer.gather()
    assert [each.panels for each in worst] == list(panels.values())
    assert list(panels) == [0, 1, 2]
    assert {panel.image.shape for each in panels.values() for panel in each} == {(256, 512, 3)}
    assert panels[0][0][1:] == ("a", True, ())


def fail(*_: Any) -> list[Panel]:
    raise KeyError("no such thing")


FAIL = f"test_visualizer.py:{fail.__code__.co_firstlineno + 1}"


def wrong_type(*_: Any) -> list[Panel]:
    return [Panel(np.zeros((4, 4, 3)), "a")]  # type: ignore[arg-type]


def damaged(*_: Any) -> list[Panel]:
    raise DamagedFileError("a.jpg: empty")


DAMAGED = f"test_visualizer.py:{damaged.__code__.co_firstlineno + 1}"


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (fail, f"{FAIL}: KeyError: 'no such thing'"),
        (wrong_type, "got float64 [4, 4, 3]"),
        (damaged, f"{DAMAGED}: a.jpg: empty"),
    ],
)
def test_what_cannot_be_drawn_is_reported_and_training_goes_on(tmp_path: Path, draw: Draw, words: str) -> None:
    run, diary = small(tmp_path, draw)
    train(run)
    assert run.progress.is_done
    evaluations = [text for text in diary.warnings if "cannot draw predictions" in text]
    assert len(evaluations) == 2
    assert all(words in text for text in evaluations)
    assert any("cannot draw train at step 1" in text for text in diary.warnings)
    assert {path.name for path in (tmp_path / "images").iterdir()} == {
        "val-confusion-00000002.png",
        "val-confusion-00000004.png",
    }


@dataclass(frozen=True)
class Pair(World):
    """The first of two processes; what the other one sends is known."""

    others: list[Tensor] = field(default_factory=list)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor, self.others.pop(0)]


def test_the_first_process_hears_of_the_failures_of_others(tmp_path: Path) -> None:
    sent: list[Tensor] = []

    class Last(World):
        def gather(self, tensor: Tensor) -> list[Tensor]:
            sent.append(tensor)
            return [tensor]

    last = Visualizer(small(tmp_path, fail, world=Last(1, 2, 1, CPU))[0], 2)
    last.add(Batch(id=torch.tensor([1]), label=torch.tensor([0])), torch.tensor([[0.0, 5.0, 0.0]]))
    last.gather()
    first = Visualizer(small(tmp_path, by_id, world=Pair(0, 2, 0, CPU, 2, sent))[0], 2)
    first.add(Batch(id=torch.tensor([0]), label=torch.tensor([0])), torch.zeros(1, 3))
    panels, worst = first.gather()
    assert list(panels) == [0]
    assert [(each.sample, each.panels == []) for each in worst] == [(1, True), (0, False)]
    assert first.problem is not None
    assert first.problem.endswith(f"{FAIL}: KeyError: 'no such thing'")


def test_metrics_that_cannot_be_drawn_cost_no_other_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Classification, metrics: dict[str, Any]) -> dict[str, Image]:
        raise RuntimeError("no plot")

    monkeypatch.setattr(Classification, "draw_metrics", fail)
    run, diary = small(tmp_path)
    log_evaluation(run, evaluate(run, "val"))
    assert [path.name for path in (tmp_path / "images").iterdir()] == ["val-predictions-00000000.png"]
    assert len(diary.warnings) == 1
    assert "cannot draw val at step 0: " in diary.warnings[0]
    assert f"test_visualizer.py:{fail.__code__.co_firstlineno + 1}: RuntimeError: no plot" in diary.warnings[0]


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "images").touch()
    run, diary = small(tmp_path)
    visualize_samples(run)
    assert len(diary.warnings) == 1
    assert "images" in diary.warnings[0]
    assert not any(isinstance(event, Visualized) for event in diary.events)


def test_samples_without_panels_are_left_out(tmp_path: Path) -> None:
    run, diary = small(tmp_path, lambda *_: [])
    log_evaluation(run, evaluate(run, "val"))
    visualize_samples(run)
    assert [path.name for path in (tmp_path / "images").iterdir()] == ["val-confusion-00000000.png"]
    assert diary.warnings == []
