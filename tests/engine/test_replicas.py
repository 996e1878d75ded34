"""Evaluation in threads: a model or a task that keeps values in its forward pass does not mix batches."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, ClassVar

import pytest
import torch
from small_runs import NormedNet, PlainNet, Remembering, Small
from test_evaluate import bits, with_cores
from torch import Tensor, nn

from paceline.core.torchvision_ops import import_torchvision
from paceline.engine.evaluate import evaluate
from paceline.engine.stateful import Replica, make_replicas
from paceline.tasks.classification import Classification

HOOKED = ["legacy_xception", "nasnetalarge", "pit_ti_224", "pnasnet5large", "xception41"]


class OnSelf(NormedNet):
    """Keeps the images on `self`, and uses them a moment later."""

    def forward(self, images: Tensor) -> Tensor:
        self.images = images
        Event().wait(0.002)  # another thread has its turn
        return super().forward(self.images)


class InMethodHook(NormedNet):
    """A hook of its own keeps the features."""

    def __init__(self) -> None:
        super().__init__()
        self.features: list[Tensor] = []
        self.layers[2].register_forward_hook(self.keep)

    def keep(self, module: nn.Module, arguments: Any, output: Tensor) -> None:
        self.features.append(output)

    def forward(self, images: Tensor) -> Tensor:
        logits = super().forward(images)
        Event().wait(0.002)
        return logits + self.features.pop(0).mean(dim=(1, 2, 3))[:, None] * torch.arange(logits.shape[1])


class InClosure(InMethodHook):
    """The hook is a function inside `__init__`: a copy of the model would call the same one."""

    def __init__(self) -> None:
        NormedNet.__init__(self)
        self.features = []
        kept = self.features
        self.layers[2].register_forward_hook(lambda module, arguments, output: kept.append(output))


class Uncopyable(OnSelf):
    """Holds what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.event = Event()


class InClass(NormedNet):
    """All copies of it share a dict."""

    kept: ClassVar[dict[str, Tensor]] = {}

    def forward(self, images: Tensor) -> Tensor:
        self.kept["images"] = images
        Event().wait(0.002)
        return super().forward(self.kept["images"])


class InListOfClosures(NormedNet):
    """Two functions that share a value, in a list."""

    def __init__(self) -> None:
        super().__init__()
        kept: list[Tensor] = []
        self.functions: list[Callable[..., Any]] = [kept.append, lambda: kept.pop(0)]

    def forward(self, images: Tensor) -> Tensor:
        self.functions[0](images)
        Event().wait(0.002)
        return super().forward(self.functions[1]())


class Mindful(NormedNet):
    """Counts batches in an attribute, a list and a buffer, which is also replaced: none may change the next batch."""

    seen: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.history = 0, [0.0]
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        logits = super().forward(images)
        self.calls += 1
        self.history.append(float(images.sum()))
        self.seen += 1
        self.mean = 0.5 * self.mean + logits.mean()
        number = self.calls + len(self.history) + self.seen + self.mean
        return logits + number * torch.arange(logits.shape[1])


def test_what_a_model_remembers_is_the_same_before_every_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Small(tmp_path, dtype=torch.float32, net=Mindful, evaluation_size=131, evaluation_batch=8).run()
    found = []
    for cores in (1, 3, 2, 1):
        with_cores(monkeypatch, cores)
        found.append(bits(evaluate(run, "val")))
    assert found == [found[0]] * 4
    assert isinstance(run.model, Mindful)
    assert (run.model.calls, run.model.history, run.model.seen.item()) == (0, [0.0], 0)


@pytest.mark.parametrize("net", [OnSelf, InMethodHook, InClosure, InClass, InListOfClosures, Uncopyable])
def test_batches_in_threads_are_not_mixed(net: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Small(tmp_path, dtype=torch.float32, net=net, evaluation_size=131, evaluation_batch=8).run()
    with_cores(monkeypatch, 1)
    one_at_a_time = bits(evaluate(run, "val"))
    with_cores(monkeypatch, 3)
    assert [bits(evaluate(run, "val")) for _ in range(2)] == [one_at_a_time] * 2


class Keeping(Classification):
    """A task that keeps its batch on `self`."""

    def predict(self, model: nn.Module, batch: Any) -> Any:
        self.batch = batch
        Event().wait(0.002)
        return super().predict(model, self.batch)


def test_tasks_in_threads_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Small(tmp_path, dtype=torch.float32, evaluation_size=131, evaluation_batch=8).run()
    with_cores(monkeypatch, 1)
    expected = bits(evaluate(run, "val"))
    run.task.__class__ = Keeping
    with_cores(monkeypatch, 3)
    assert bits(evaluate(run, "val")) == expected


@pytest.mark.parametrize(
    ("change", "number"),
    [
        (lambda model: None, 3),
        (lambda model: model.register_forward_hook(lambda *_: None), 1),
        (lambda model: setattr(model, "forward", lambda images: images), 1),
        (lambda model: setattr(model, "kept", model(torch.zeros(1, 2, 6, 6))), 1),  # a tensor of a graph
        (lambda model: model.compile(backend="eager"), 1),
    ],
    ids=["plain", "function hook", "forward replaced", "tensor of a graph", "compiled"],
)
def test_only_independent_copies_are_made(change: Callable[[nn.Module], None], number: int, tmp_path: Path) -> None:
    model = PlainNet()
    change(model)
    replicas = make_replicas(Replica(model, Small(tmp_path).run().task, [], {}), 3)
    assert len(replicas) == number
    assert replicas[0].model is model
    for replica in replicas:
        assert list(map(id, replica.model.parameters())) == list(map(id, model.parameters()))
        assert [each is model for each in (replica.model,)] == [replica is replicas[0]]


@pytest.mark.parametrize("name", HOOKED)
def test_backbones_of_timm_that_use_hooks_evaluate_in_threads(name: str, tmp_path: Path) -> None:
    import_torchvision()
    import timm

    torch.manual_seed(0)
    size = 224 if name == "pit_ti_224" else 96
    model = timm.create_model(name, features_only=True).eval()
    inputs = [torch.rand(1, 3, size, size) for _ in range(4)]
    with torch.inference_mode():
        expected = [model(each) for each in inputs]
    replicas = make_replicas(Replica(model, Small(tmp_path).run().task, [], {}), 2)
    assert len(replicas) == 2

    def features(number: int) -> list[list[Tensor]]:
        with torch.inference_mode():
            return [replicas[number].model(each) for each in inputs[number::2]]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(features, range(2)))
    for index, maps in enumerate(expected):
        for one, other in zip(maps, found[index % 2][index // 2], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


class OnSelfMetric:
    """Keeps the predictions on itself, and measures them a moment later."""

    higher_is_better = True

    def update(self, predictions: Tensor, batch: Any) -> dict[str, Tensor]:
        self.predictions = predictions
        Event().wait(0.002)
        return {"sum": self.predictions.double().sum().reshape(1)}

    def compute(self, state: dict[str, Tensor]) -> dict[str, Any]:
        return {"sum": sum(state["sum"].tolist())}


class OnSelfLoss(Remembering):
    """A loss that remembers how large outputs were."""

    def __call__(self, outputs: Tensor, batch: Any) -> Any:
        self.outputs = outputs
        Event().wait(0.002)
        return super().__call__(self.outputs, batch)


def test_metrics_and_losses_are_not_mixed_and_no_batch_knows_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = OnSelfLoss(131)
    small = Small(tmp_path, losses={"own": (loss, 1.0)}, evaluation_size=131, evaluation_batch=8)
    run = small.run(parts={"loss own": loss})
    run.task._metrics.append(OnSelfMetric())
    with_cores(monkeypatch, 1)
    expected = bits(evaluate(run, "val"))
    with_cores(monkeypatch, 3)
    assert [bits(evaluate(run, "val")) for _ in range(2)] == [expected] * 2
    assert loss.seen.sum() == 0
    assert loss.heat == 1


class Counting(PlainNet):
    """Counts the batches that it sees in a buffer, in place."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, images: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(images)


@pytest.mark.parametrize("number", [1, 3])
def test_an_evaluation_leaves_the_buffers_of_the_model_as_they_were(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Small(tmp_path, net=Counting, evaluation_size=131, evaluation_batch=8).run()
    with_cores(monkeypatch, number)
    evaluate(run, "val")
    assert run.model.seen == 0


def test_a_teacher_of_the_task_is_not_copied(tmp_path: Path) -> None:
    task = Small(tmp_path).run().task
    task.teacher = NormedNet()  # type: ignore[attr-defined]
    _, copied = make_replicas(Replica(PlainNet(), task, [], {}), 2)
    assert copied.task is not task
    assert list(map(id, copied.task.teacher.parameters())) == list(map(id, task.teacher.parameters()))  # type: ignore[attr-defined]
    task.teacher.register_forward_hook(lambda *_: None)  # type: ignore[attr-defined]
    assert len(make_replicas(Replica(PlainNet(), task, [], {}), 2)) == 1
