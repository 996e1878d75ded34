"""Names, what they stand for, and the arguments that are known before anything is imported."""

import runpy
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from paceline.core.arguments import Arguments
from paceline.core.mesh import Mesh
from paceline.core.registry import Family, Register, Registry, arguments_of, register
from paceline.engine.step import train_step
from paceline.recipe.build import Builder
from paceline.recipe.load import load
from paceline.recipe.validate import validate


class Small(Arguments):
    width: int = 3


def family(is_open: bool) -> Family:
    return Family(
        prefix="lib/",
        target="operator:mul",
        arguments=Small,
        summary="of a library",
        members=lambda: ["alpha", "beta"],
        is_open=lambda: is_open,
    )


def test_a_name_is_found_with_its_arguments_and_imported_late() -> None:
    registry = Registry("thing")
    registry.add("late", "a.module.that.does.not.exist:Thing", Small, "a summary")
    entry = registry.find("late")
    assert entry is not None
    assert (entry.arguments, entry.summary) == (Small, "a summary")
    with pytest.raises(ModuleNotFoundError):
        entry.resolve()


def test_a_target_may_be_an_object_or_its_address() -> None:
    registry = Registry("thing")
    registry.add("object", len)
    registry.add("address", "math:hypot")
    counting, measuring = (entry.resolve() for entry in registry)
    assert (counting([1, 2]), measuring(3, 4)) == (2, 5.0)


def test_unknown_names_are_not_found() -> None:
    registry = Registry("thing")
    registry.families.append(family(is_open=False))
    assert registry.find("nothing") is None
    assert registry.find("lib/gamma") is None
    assert registry.find("alpha") is None


def test_a_name_is_given_once() -> None:
    registry = Registry("thing")
    registry.add("one", len)
    with pytest.raises(ValueError, match="thing 'one' is registered already"):
        registry.add("one", repr)
    assert [entry.target for entry in registry] == [len]


def test_names_come_in_order_with_those_of_families_last() -> None:
    registry = Registry("thing")
    registry.families.append(family(is_open=False))
    registry.add("zebra", len)
    registry.add("ant", repr)
    assert registry.names() == ["zebra", "ant", "lib/alpha", "lib/beta"]


def test_a_family_fills_in_the_name_of_its_member() -> None:
    entry = family(is_open=False).find("lib/beta")
    assert entry is not None
    maker = entry.resolve()
    assert isinstance(maker, partial)
    assert maker(2) == "betabeta"


def test_a_tag_behind_a_dot_belongs_to_the_architecture() -> None:
    tagged = family(is_open=False).find("lib/alpha.trained_somewhere")
    assert tagged is not None
    assert tagged.member == "alpha.trained_somewhere"
    assert family(is_open=False).find("lib/gamma.alpha") is None


def test_another_version_of_the_library_may_have_more_names() -> None:
    found = family(is_open=True).find("lib/gamma")
    assert found is not None
    assert found.member == "gamma"
    assert family(is_open=True).find("other/gamma") is None


def test_decorators_register_users_things_with_their_summary() -> None:
    register = Register()

    @register.model("mine")
    class Mine:
        """A model of mine.

        With more to say.
        """

        def __init__(self, num_classes: int, in_channels: int, width: int, names: Sequence[str] = ("a",)) -> None:
            self.given = (num_classes, in_channels, width, names)

    entry = register.kind("model").find("mine")
    assert entry is not None
    assert (entry.resolve(), entry.summary) == (Mine, "A model of mine.")
    # What the builder supplies is not the recipe's to give.
    assert set(entry.arguments.model_fields) == {"width", "names"}
    assert dict(entry.arguments.model_validate_json('{"width": 4}')) == {"width": 4, "names": ("a",)}


@pytest.mark.parametrize("given", ['{"width": "wide"}', '{"width": 4, "depth": 2}', "{}"])
def test_arguments_read_off_a_signature_are_strict(given: str) -> None:
    def make(width: int, name: str = "x") -> None: ...

    with pytest.raises(ValidationError):
        arguments_of(make).model_validate_json(given)


def test_unannotated_arguments_take_anything() -> None:
    def make(anything, number: float = 1.0): ...  # type: ignore[no-untyped-def]

    checked = arguments_of(make).model_validate_json('{"anything": [1, "two"], "number": 3}')
    assert dict(checked) == {"anything": [1, "two"], "number": 3.0}


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    register = Register()
    with pytest.raises(AttributeError, match=r"there is no register\.modle; there are model, dataset"):
        register.modle("mine")


IMPORTS = """
import torch
from torch import Tensor

import paceline
"""

COMPONENTS = """
from paceline.data.batch import Batch
from paceline.data.datasets.embedded import fashion_small
from paceline.losses.term import Term
from paceline.metrics.loss import LossFigures


@paceline.register.model("users_model")
class Model(torch.nn.Sequential):
    def __init__(self, num_classes: int, in_channels: int, width: int = 4) -> None:
        convolution, linear = torch.nn.Conv2d(in_channels, width, 28), torch.nn.Linear(width, num_classes)
        super().__init__(convolution, torch.nn.Flatten(), linear)


@paceline.register.dataset("users_data")
def data(split: str):
    return fashion_small(split)


@paceline.register.transform("users_scaling")
class Scaling:
    draws = 0
    is_batch = True

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, batch: dict, draws: Tensor) -> dict:
        return {**batch, "image": batch["image"].float() * self.factor}


@paceline.register.loss("users_loss")
class Loss:
    def __init__(self, num_classes: int, power: float = 2.0) -> None:
        self.num_classes, self.power = num_classes, power

    def count(self, batch: Batch) -> float:
        return float(batch.size)

    def __call__(self, outputs: Tensor, batch: Batch) -> Term:
        wanted = torch.nn.functional.one_hot(batch["label"], self.num_classes)
        return Term((outputs - wanted).abs().pow(self.power).sum(), float(batch.size))


@paceline.register.metric("users_metric")
class Metric:
    def measure(self, predictions: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"seen": torch.tensor(batch.size)}

    def figures(self, state: dict[str, Tensor]) -> dict[str, float]:
        return {"seen": float(state["seen"])}
"""

SCHEDULE = """
@paceline.register.schedule("users_schedule")
def users_schedule(done: float) -> float:
    return (1 - done) ** 2
"""

OPTIMIZER = """
@paceline.register.optimizer("users_optimizer")
class Optimizer(torch.optim.SGD):
    def __init__(self, params, lr: float, weight_decay: float = 0.0, push: float = 0.5) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, momentum=push)
"""

TASK = """
from paceline.tasks.classification import Classification

@paceline.register.task("users_task")
class Task(Classification):
    pass
"""

PARTS: dict[str, tuple[str, list[str]]] = {
    "components": (
        COMPONENTS,
        [
            "model={name: users_model, width: 2}",
            "data.train={dataset: users_data, split: train, transforms: [{name: users_scaling, factor: 0.01}]}",
            "data.val={dataset: users_data, split: test, transforms: [{name: users_scaling, factor: 0.01}]}",
            "losses=[{name: users_loss, power: 1.5}]",
            "evaluate.metrics=[{name: users_metric}]",
        ],
    ),
    "schedule": (SCHEDULE, ["schedule.decay=users_schedule", "model.widths=[2]"]),
    "optimizer": (OPTIMIZER, ["optimizer={name: users_optimizer, lr: 0.01, push: 0.25}", "model.widths=[2]"]),
    "task": (TASK, ["task=users_task", "model.widths=[2]"]),
}


@pytest.fixture
def users_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Names that are registered meanwhile are forgotten, and torch's settings, which building changes, put back."""
    for registry in register.kinds.values():
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.mark.usefixtures("users_names")
@pytest.mark.parametrize("part", PARTS)
def test_what_a_user_registers_builds_and_takes_a_step(part: str, tmp_path: Path) -> None:
    code, overrides = PARTS[part]
    module = tmp_path / f"users_{part}.py"
    module.write_text(IMPORTS + code, encoding="utf-8")
    runpy.run_path(str(module))
    checked = validate(load("quickstart", ["train.threads=1", *overrides]))
    run = Builder(checked, Mesh(0, 1, 0, torch.device("cpu"))).run(tmp_path)
    train_step(run, next(iter(run.batches)))
