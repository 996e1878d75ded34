"""What users register is checked at once: what is missing is named with an example, and with their file and line."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from paceline.core.contracts import RegistrationError, is_criterion
from paceline.core.registry import Register


class Nothing:
    pass


class OnlyUpdate:
    def update(self, preds: Tensor, target: Tensor) -> None: ...


class NarrowUpdate(OnlyUpdate):
    def update(self, preds: Tensor) -> None: ...  # type: ignore[override]

    def compute(self) -> float:
        return 0.0


class SharedMetric(OnlyUpdate):
    seen: ClassVar[list[float]] = []

    def compute(self) -> float:
        return 0.0


class BareDataset(Dataset[Any]):
    def __len__(self) -> int:
        return 1


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


class Unsized(Dataset[Any]):
    def __getitem__(self, index: int) -> int:
        return index


class NoForward(nn.Module):
    pass


class NarrowLoss(nn.Module):
    def forward(self, output: Tensor) -> Tensor:
        return output.mean()


class Uncounted:
    def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs


class HalfTask:
    def counts(self, batch: Any) -> dict[str, float]:
        return {}

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {}


def one_tensor(output: Tensor) -> Tensor:
    return output


MISSING = [
    ("loss", Nothing, "forward", "def forward(self, output, target)"),
    ("loss", NoForward, "forward", "def forward(self, output, target)"),
    ("loss", NarrowLoss, "(output)", "def forward(self, output, target)"),
    ("loss", Uncounted, "count", "def count(self, batch)"),
    ("loss", one_tensor, "one tensor", "def one_tensor(output, target)"),
    ("dataset", Nothing, "__getitem__", "def __getitem__(self, index)"),
    ("dataset", BareDataset, "__getitem__", "def __getitem__(self, index)"),
    ("dataset", Stream, "iterable", "def __getitem__(self, index)"),
    ("dataset", Unsized, "__len__", "def __len__(self)"),
    ("transform", Nothing, "__call__", "def __call__(self, image)"),
    ("metric", Nothing, "update", "def update(self, preds, target)"),
    ("metric", OnlyUpdate, "compute", "def compute(self)"),
    ("metric", NarrowUpdate, "(preds)", "def update(self, preds, target)"),
    ("metric", SharedMetric, "seen is a list of the class", "`self.seen = []`"),
    ("task", Nothing, "counts", "paceline.Task"),
    ("task", HalfTask, "predict", "def predict(self, model, batch)"),
    ("model", NoForward, "forward", "def forward(self, images)"),
]


@pytest.mark.parametrize(("kind", "target", "missing", "example"), MISSING)
def test_what_is_missing_is_named_with_an_example_and_a_place(
    kind: str, target: Any, missing: str, example: str
) -> None:
    register = Register()
    line = inspect.currentframe().f_lineno + 2  # type: ignore[union-attr]
    with pytest.raises(RegistrationError) as caught:
        getattr(register, kind)("mine")(target)
    message = str(caught.value)
    assert f"{Path(__file__).name}:{line}: register.{kind}('mine'): {target.__name__}" in message
    assert missing in message
    assert example in message
    assert caught.value.exit_code == 2
    assert register.kind(kind).find("mine") is None


def test_a_decorator_without_a_name_is_refused() -> None:
    with pytest.raises(RegistrationError, match=r'test_contracts\.py:\d+: .*write `@register\.loss\("bad"\)`'):

        @Register().loss  # type: ignore[arg-type]
        def bad(output: Tensor, target: Tensor) -> Tensor:
            return output - target


@pytest.mark.parametrize(("kind", "made"), [("loss", nn.CrossEntropyLoss()), ("dataset", BareDataset())])
def test_an_object_is_refused_in_favor_of_its_class(kind: str, made: Any) -> None:
    with pytest.raises(RegistrationError, match=rf"object of {type(made).__name__}; register the class, without \(\)"):
        getattr(Register(), kind)("mine")(made)


def test_a_name_given_twice_names_the_second_place() -> None:
    register = Register()
    register.loss("l1")(nn.L1Loss)
    with pytest.raises(
        RegistrationError, match=r"test_contracts\.py:\d+: register\.loss\('l1'\): .*registered already"
    ):
        register.loss("l1")(nn.MSELoss)


def test_what_is_defined_anew_takes_its_place() -> None:
    """As when a cell of a notebook is run again."""
    register = Register()
    for threshold in (1.0, 2.0):

        @register.loss("mine")
        def mine(output: Tensor, target: Tensor, beta: float = threshold) -> Tensor:
            return output - target

    assert register.kind("loss").find("mine").arguments().beta == 2.0  # type: ignore[union-attr]


def test_a_signature_that_cannot_be_read_names_its_place() -> None:
    def make(width: NoSuchType) -> None: ...  # type: ignore[name-defined] # noqa: F821

    with pytest.raises(RegistrationError, match=r"test_contracts\.py:\d+: register\.model\('wide'\): .*NoSuchType"):
        Register().model("wide")(make)


def test_a_function_is_a_loss_or_makes_one() -> None:
    def plain(prediction, truth, beta=1.0): ...  # type: ignore[no-untyped-def]

    def annotated(output: Tensor, target: torch.Tensor) -> Tensor:
        return output - target

    def maker(beta: float, gamma: float = 2.0) -> nn.Module:
        return nn.L1Loss()

    def with_defaults(beta=1.0): ...  # type: ignore[no-untyped-def]

    assert [is_criterion(each) for each in (plain, annotated, nn.functional.l1_loss)] == [True] * 3
    assert [is_criterion(each) for each in (maker, with_defaults, nn.L1Loss, lambda: None)] == [False] * 4


def test_what_a_recipe_gives_to_losses_of_torch() -> None:
    register = Register()
    register.loss("l1")(nn.L1Loss)
    register.loss("ce")(nn.CrossEntropyLoss)
    register.loss("huber")(nn.functional.huber_loss)
    fields = {name: set(register.kind("loss").find(name).arguments.model_fields) for name in ("l1", "ce", "huber")}  # type: ignore[union-attr]
    assert fields["l1"] == {"size_average", "reduce", "reduction"}
    assert {"ignore_index", "label_smoothing"} <= fields["ce"]
    assert fields["huber"] == {"reduction", "delta", "weight"}


def test_what_the_builder_knows_is_supplied_where_it_is_required() -> None:
    def maker(num_classes: int, gamma: float) -> nn.Module:
        return nn.L1Loss()

    register = Register()
    register.loss("mine")(maker)
    assert set(register.kind("loss").find("mine").arguments.model_fields) == {"gamma"}  # type: ignore[union-attr]
