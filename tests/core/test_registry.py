"""Names, what they stand for, and the arguments that are known before anything is imported."""

import runpy
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from pydantic import Field, ValidationError

from paceline.core.arguments import ExactlyOneOf
from paceline.core.registry import Definition, Family, Library, Register, Registry, Row, UnlistedArguments
from paceline.core.signatures import arguments_of
from paceline.core.world import World
from paceline.engine.step import train_step
from paceline.recipe.build import Builder
from paceline.recipe.load import load
from paceline.recipe.validate import validate

ROWS: dict[str, Row] = {
    "late": {
        "target": "a.module.that.does.not.exist:Thing",
        "summary": "a summary",
        "arguments": {"width": {"type": "integer", "minimum": 1, "default": 3}, "name": {"type": "string"}},
        "checks": [["Requires", "width", "name"]],
    },
    "address": {"target": "math:hypot", "summary": "", "arguments": {}},
}


def family(version: str = metadata.version("pydantic"), members: Any = ("alpha", "beta")) -> Family:
    library = {"distribution": "pydantic", "version": version, "members": members}
    arguments = {"width": {"type": "integer", "default": 3}}
    row = {"target": "operator:mul", "summary": "of a library", "arguments": arguments, "library": library}
    return Family("lib/", row)


def one() -> None:
    """The first."""


def other() -> None: ...


def test_a_name_of_the_table_is_found_with_its_arguments_and_imported_late() -> None:
    entry = Registry("thing", ROWS).find("late")
    assert entry is not None
    assert entry.summary == "a summary"
    assert dict(entry.arguments.model_validate_json('{"name": "x"}')) == {"width": 3, "name": "x"}
    for wrong in ("{}", '{"name": "x", "width": 0}', '{"name": "x", "height": 1}'):
        with pytest.raises(ValidationError):
            entry.arguments.model_validate_json(wrong)
    with pytest.raises(ModuleNotFoundError):
        entry.resolve()


def test_a_target_may_be_an_object_or_its_address() -> None:
    registry = Registry("thing", ROWS)
    registry.add(Definition("thing", "object", one))
    assert registry.find("object").resolve() is one  # type: ignore[union-attr]
    assert registry.find("address").resolve()(3, 4) == 5.0  # type: ignore[union-attr]


def test_unknown_names_are_not_found() -> None:
    register = Register(lambda: {"thing": {"lib/": family()._row}})
    registry = register.kind("thing")
    for name in ("nothing", "lib/gamma", "alpha", "lib/", "lib"):
        assert registry.find(name) is None


def test_a_name_is_given_once() -> None:
    registry = Registry("thing")
    registry.add(Definition("thing", "one", one))
    with pytest.raises(ValueError, match="thing 'one' is registered already"):
        registry.add(Definition("thing", "one", other))
    assert [entry.target for entry in registry] == [one]


def test_a_user_cannot_take_a_name_of_the_table() -> None:
    registry = Registry("thing", ROWS)
    with pytest.raises(ValueError, match="thing 'address' is registered already, as math:hypot"):
        registry.add(Definition("thing", "address", one))


def test_the_package_itself_wins_over_a_table_that_is_old() -> None:
    registry = Registry("thing", ROWS)
    registry.add(Definition("thing", "address", arguments_of))
    assert registry.find("address").resolve() is arguments_of  # type: ignore[union-attr]


def test_two_of_the_package_cannot_have_one_name() -> None:
    register = Register()
    register.task("arguments")(arguments_of)
    with pytest.raises(ValueError, match=r"is defined by paceline.core.signatures:arguments_of and by paceline.core"):
        register.task("arguments")(Registry)


def test_names_come_in_order_with_those_of_families_last() -> None:
    registry = Registry("thing", {"lib/": family()._row, **ROWS})
    registry.add(Definition("thing", "ant", one))
    assert registry.names() == ["late", "address", "ant", "lib/alpha", "lib/beta"]


def test_a_family_fills_in_the_name_of_its_member() -> None:
    entry = family().find("lib/beta")
    assert entry is not None
    maker = entry.resolve()
    assert isinstance(maker, partial)
    assert maker(2) == "betabeta"


def test_a_tag_behind_a_dot_belongs_to_the_architecture() -> None:
    tagged = family().find("lib/alpha.trained_somewhere")
    assert tagged is not None
    assert tagged.member == "alpha.trained_somewhere"
    assert family().find("lib/gamma.alpha") is None


def test_another_version_of_the_library_may_have_more_names() -> None:
    found = family("0.0").find("lib/gamma")
    assert found is not None
    assert found.member == "gamma"
    assert dict(found.arguments()) == {"width": 3}
    assert family("0.0").find("other/gamma") is None


def test_members_may_have_arguments_of_their_own() -> None:
    own = family("0.0", {"alpha": {"width": {"type": "number"}}})
    assert dict(own.find("lib/alpha").arguments.model_validate({"width": 2.5})) == {"width": 2.5}  # type: ignore[union-attr]
    assert own.find("lib/gamma").arguments is UnlistedArguments  # type: ignore[union-attr]
    assert set(own.arguments.model_fields) == {"width"}


def test_the_longer_of_two_prefixes_is_asked_first() -> None:
    inner = {**family("0.0")._row, "target": "operator:add"}
    registry = Registry("thing", {"lib/": family("0.0")._row, "lib/inner/": inner})
    assert registry.find("lib/inner/new").target == "operator:add"  # type: ignore[union-attr]


def test_a_user_registers_the_names_of_a_library() -> None:
    register = Register()

    @register.model("my_zoo/", library=Library("pydantic", lambda: ["small", "large"]))
    def build(name: str, num_classes: int, depth: Annotated[int, Field(ge=1)] = 2) -> tuple[str, int, int]:
        return name, num_classes, depth

    entry = register.kind("model").find("my_zoo/small")
    assert entry is not None
    assert dict(entry.arguments()) == {"depth": 2}
    assert entry.resolve()(num_classes=3, depth=1) == ("small", 3, 1)
    assert register.kind("model").names() == ["my_zoo/small", "my_zoo/large"]
    with pytest.raises(ValueError, match="model 'my_zoo/' is registered already"):
        register.model("my_zoo/", library=Library("pydantic", lambda: ["other"]))(build)


def test_decorators_register_users_things_with_their_summary() -> None:
    register = Register()

    @register.model("mine")
    class Mine:
        """A model of mine.

        With more to say.
        """

        def __init__(
            self, num_classes: int, in_channels: int, width: Annotated[int, Field(ge=2)], names: Sequence[str] = ("a",)
        ) -> None:
            self.given = (num_classes, in_channels, width, names)

        def forward(self, images: object) -> object:
            return images

    entry = register.kind("model").find("mine")
    assert entry is not None
    assert (entry.resolve(), entry.summary) == (Mine, "A model of mine.")
    # What the builder supplies is not the recipe's to give.
    assert set(entry.arguments.model_fields) == {"width", "names"}
    assert dict(entry.arguments.model_validate_json('{"width": 4}')) == {"width": 4, "names": ("a",)}
    with pytest.raises(ValidationError):
        entry.arguments.model_validate_json('{"width": 1}')


def test_a_user_may_check_arguments_together() -> None:
    register = Register()

    @register.transform("fit", checks=[ExactlyOneOf("size", "multiple")])
    def fit(size: int | None = None, multiple: int | None = None) -> None: ...

    arguments = register.kind("transform").find("fit").arguments  # type: ignore[union-attr]
    assert dict(arguments.model_validate({"size": 3})) == {"size": 3, "multiple": None}
    for wrong in ({}, {"size": 3, "multiple": 4}):
        with pytest.raises(ValidationError, match="give either size or multiple"):
            arguments.model_validate(wrong)


def test_only_what_a_recipe_gives_must_be_defined_when_a_name_is_registered() -> None:
    def make(width: int, num_classes: "Later") -> "Later": ...  # type: ignore[name-defined] # noqa: F821

    assert set(arguments_of(make, {"num_classes"}).model_fields) == {"width"}


def test_names_that_only_a_type_checker_imports_may_annotate_what_is_supplied() -> None:
    """Python 3.14 evaluates annotations when they are read; before it, they have to be text for that."""
    opening = "" if sys.version_info >= (3, 14) else "from __future__ import annotations\n"
    names: dict[str, Any] = {"__name__": "user"}
    text = "def focal(output: Tensor, target: Tensor, gamma: float = 2.0) -> Tensor: ...\n"
    text += "class Net:\n    def __init__(self, num_classes: Count, width: int = 3): ...\n"
    text += "    def forward(self, images: Tensor): ...\n"
    exec(compile(opening + text, "user.py", "exec", dont_inherit=True), names)
    register = Register()
    register.loss("focal")(names["focal"])
    register.model("net")(names["Net"])
    found = [register.kind(kind).find(name) for kind, name in (("loss", "focal"), ("model", "net"))]
    assert [entry and dict(entry.arguments()) for entry in found] == [{"gamma": 2.0}, {"width": 3}]


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
from paceline.data.datasets.idx import fashion_small
from paceline.losses.loss_term import LossTerm
from paceline.metrics.metric import LossMetrics


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

    def __call__(self, outputs: Tensor, batch: Batch) -> LossTerm:
        wanted = torch.nn.functional.one_hot(batch["label"], self.num_classes)
        return LossTerm((outputs - wanted).abs().pow(self.power).sum(), float(batch.size))


@paceline.register.metric("users_metric")
class Metric:
    def update(self, predictions: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"seen": torch.tensor(batch.size)}

    def compute(self, state: dict[str, Tensor]) -> dict[str, float]:
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
def torch_settings() -> Iterator[None]:
    """torch's settings, which building changes, are put back."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.mark.usefixtures("own_names", "torch_settings")
@pytest.mark.parametrize("part", PARTS)
def test_what_a_user_registers_builds_and_takes_a_step(part: str, tmp_path: Path) -> None:
    code, overrides = PARTS[part]
    module = tmp_path / f"users_{part}.py"
    module.write_text(IMPORTS + code, encoding="utf-8")
    runpy.run_path(str(module))
    checked = validate(load("quickstart", ["train.threads=1", *overrides]))
    run = Builder(checked, World(0, 1, 0, torch.device("cpu"))).run(tmp_path)
    train_step(run, next(iter(run.batches)))
