"""Mistakes in a user's own parts: each is named where it is, in one sentence that says what to write."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import paceline
from paceline import Task, register
from paceline.cli import main
from paceline.core.errors import DataError, PacelineError, RecipeError, TrainingError
from paceline.data.batch import Batch, MissingFieldError
from paceline.losses.loss_term import LossTerm

pytestmark = pytest.mark.usefixtures("own_names")

RECIPE = """\
name: mistakes
task: {name: own_task}
model: {name: convnet, widths: [4], num_classes: 2}
data:
  batch_size: 4
  num_workers: 0
  train: {dataset: own_data}
  val: {dataset: own_data}
losses: [own_loss]
optimizer: {name: sgd, lr: 0.1}
train: {steps: 2, threads: 1, device: cpu, channels_last: false}
logging: {images: false, tensorboard: false}
"""


class Points(Dataset[Any]):
    """Images with a target of two numbers, or what a test gives in its place."""

    target: Callable[[int], Any] = staticmethod(lambda index: torch.tensor([0.5, 0.25]))

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.full((3, 8, 8), index / 8), self.target(index)


class Own(Task):
    """All defaults."""


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    """torch's settings, which building changes, are put back."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(autouse=True)
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe, in the working folder."""
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text(RECIPE)


def step(task: Any = Own, loss: Any = F.mse_loss, data: Any = Points, **keys: Any) -> Any:
    """One step with parts of one's own."""
    for kind, name, part in (("task", "own_task", task), ("loss", "own_loss", loss), ("dataset", "own_data", data)):
        register.kind(kind)._entries.pop(name, None)
        getattr(register, kind)(name)(part)
    run = paceline.build("own.yaml", {key.replace("__", "."): value for key, value in keys.items()})
    paceline.train_step(run, next(iter(run.batches)))
    return run


def refused(kind: type[PacelineError], *words: str, **parts: Any) -> bool:
    """Whether the step is refused by a message with these words."""
    with pytest.raises(kind) as caught:
        step(**parts)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, str(caught.value)
    return True


def data_of(target: Callable[[int], Any], classes: list[str] | None = None) -> type[Points]:
    """A data set with other targets."""
    fields: dict[str, Any] = {"target": staticmethod(target)} | ({"classes": classes} if classes else {})
    return type("Points", (Points,), fields)


# Tasks


def test_the_parts_work_without_a_mistake() -> None:
    assert step().progress.step == 1


def test_losses_of_the_wrong_form_name_the_form() -> None:
    class Scalar(Task):
        def losses(self, model: nn.Module, batch: Batch) -> Any:
            return F.mse_loss(self.forward(model, batch), batch.target)

    class Misnamed(Task):
        def losses(self, model: nn.Module, batch: Batch) -> Any:
            return {"mse": LossTerm(F.mse_loss(self.forward(model, batch), batch.target), 1.0)}

    class Bare(Task):
        def losses(self, model: nn.Module, batch: Batch) -> Any:
            return {"own_loss": F.mse_loss(self.forward(model, batch), batch.target)}

    class Nested(Task):
        def losses(self, model: nn.Module, batch: Batch) -> Any:
            return {"own_loss": LossTerm(self.loss_functions["own_loss"](self.forward(model, batch), batch), 1.0)}  # type: ignore[arg-type]

    expected = '{"own_loss": LossTerm(total, count)}'
    assert refused(TrainingError, "losses gave LossTerm(LossTerm, …) as 'own_loss'", expected, task=Nested)
    assert refused(TrainingError, "task Scalar: losses gave Tensor", expected, task=Scalar)
    assert refused(TrainingError, "task Misnamed: losses gave 'mse', but no 'own_loss'", expected, task=Misnamed)
    assert refused(TrainingError, "task Bare: losses gave Tensor as 'own_loss'", expected, task=Bare)


def test_a_loss_without_gradient_is_refused() -> None:
    class Detached(nn.Module):  # without an __init__ of its own, too
        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return F.mse_loss(output.detach(), target)

    assert refused(TrainingError, "loss own_loss: has no gradient", loss=Detached)


def test_losses_may_be_computed_by_the_task() -> None:
    class Halved(Task):
        def losses(self, model: nn.Module, batch: Batch) -> dict[str, LossTerm]:
            total = F.mse_loss(self.forward(model, batch), batch.target, reduction="sum") / 4
            return {"own_loss": LossTerm(total, float(batch.size))}

    results = []
    for task in (Own, Halved):
        run = step(task=task)
        results.append(paceline.train_step(run, next(iter(run.batches))).losses["own_loss"])
    assert results[1] != results[0] > 0


def test_a_constructor_that_leaves_the_parts_out_is_refused() -> None:
    class NoParts(Task):
        def __init__(self, k: float = 1.0) -> None:
            self.k = k

    class NoSuper(Task):
        def __init__(self, k: float = 1.0, **parts: Any) -> None:
            self.k = k

    assert refused(RecipeError, "own.yaml:9:9: losses: ", "super().__init__(**parts)", task=NoParts)
    assert refused(RecipeError, "own.yaml:2:7: task: NoSuper", "super().__init__(**parts)", task=NoSuper)


def test_methods_with_other_parameters_are_refused_when_they_are_registered() -> None:
    class Narrow(Task):
        def forward(self, batch: Batch) -> Any:  # type: ignore[override]
            return batch["image"]

    assert refused(
        PacelineError, f"{Path(__file__).name}:", "Narrow.forward", "forward(self, model, batch)", task=Narrow
    )


def test_a_forward_that_returns_nothing_is_blamed_itself() -> None:
    class Silent(Task):
        def forward(self, model: nn.Module, batch: Batch) -> None:
            model(batch["image"])

    assert refused(TrainingError, "task Silent: forward gave None", task=Silent)


def test_a_field_that_a_batch_does_not_have_is_named_with_those_that_it_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Misspelt(Task):
        def forward(self, model: nn.Module, batch: Batch) -> Any:
            return model(batch["images"])

    assert refused(MissingFieldError, "'images'", "'id'", "'image'", task=Misspelt)
    assert main(["check", "own.yaml"]) == 1
    printed = capsys.readouterr().err
    assert f"{Path(__file__).name}:{Misspelt.forward.__code__.co_firstlineno + 1}: " in printed
    assert "Misspelt.forward" in printed
    assert Batch(id=torch.zeros(1)).get("label") is None
    assert not Batch(id=torch.zeros(1)).has_target
    with pytest.raises(KeyError):
        Batch(id=torch.zeros(1))["label"]


def test_metrics_that_are_no_list_of_metrics_are_refused() -> None:
    class Plain:
        def update(self, preds: Tensor, target: Tensor) -> None: ...

        def compute(self) -> float:
            return 0.0

    class AsDict(Task):
        def metrics(self) -> Any:
            return {"plain": Plain()}

    class Bare(Task):
        def metrics(self) -> Any:
            return [*super().metrics(), Plain()]

    assert refused(RecipeError, "own.yaml:2:7: task: AsDict.metrics gave dict", "list", task=AsDict)
    assert refused(RecipeError, "own.yaml:2:7: task: Bare.metrics gave Plain", "evaluate.metrics", task=Bare)


# Losses


def test_what_a_constructor_raises_has_its_line() -> None:
    class Unready(nn.Module):
        def __init__(self, k: float = 1.0) -> None:
            self.inner = nn.MSELoss()

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return self.inner(output, target)  # type: ignore[no-any-return]

    line = Path(__file__).read_text().splitlines().index("            self.inner = nn.MSELoss()") + 1
    place = f"{Path(__file__).name}:{line}: AttributeError"
    assert refused(RecipeError, "own.yaml:9:10: losses.0: ", place, "super().__init__()", loss=Unready)


def test_a_number_in_place_of_a_tensor_is_distinguished_from_other_mistakes() -> None:
    assert refused(
        TrainingError, "gave float", ".item()", loss=lambda output, target: F.mse_loss(output, target).item()
    )


def in_place(output: Tensor, target: Tensor) -> Tensor:
    """A loss that overwrites what its gradient needs."""
    return F.mse_loss(output.exp_().sigmoid_(), target)


def twice(output: Tensor, target: Tensor) -> Tensor:
    """A loss that runs the backward pass itself."""
    loss = F.mse_loss(output, target)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


@pytest.mark.parametrize(("loss", "cure"), [(in_place, "in place"), (twice, "backward()")])
def test_mistakes_that_only_a_backward_pass_meets_have_a_cure(loss: Any, cure: str) -> None:
    assert refused(TrainingError, "backward pass", "model or loss", cure, loss=loss)


def test_a_complex_number_is_refused() -> None:
    assert refused(TrainingError, "gave complex64 []", loss=lambda output, target: torch.fft.fft(output).mean())


@pytest.mark.parametrize(
    ("target", "classes", "words"),
    [
        (lambda index: float(index % 2), None, ["output float32 [4, 2], target float32 [4]", "int(label)"]),
        (lambda index: torch.tensor([index % 2]), None, ["target int64 [4, 1]", "int(label)"]),
        (lambda index: torch.ones(3), None, ["target float32 [4, 3]", "model.num_classes: 3"]),
        (lambda index: 2, None, ["labels are from 2 to 2", "0 to 1"]),
    ],
    ids=["float", "tensor of one", "wider", "beyond"],
)
def test_targets_that_do_not_fit_are_printed_beside_the_output(
    target: Any, classes: list[str] | None, words: list[str]
) -> None:
    loss = F.mse_loss if "model.num_classes: 3" in words else F.cross_entropy
    assert refused(TrainingError, "loss own_loss: ", *words, data=data_of(target, classes), loss=loss)


def test_check_refuses_a_loss_without_a_gradient(capsys: pytest.CaptureFixture[str]) -> None:
    register.task("own_task")(Own)
    register.dataset("own_data")(Points)
    register.loss("own_loss")(lambda output, target: F.mse_loss(output.detach(), target))
    assert main(["check", "own.yaml"]) == 1
    assert "loss own_loss: has no gradient" in capsys.readouterr().err


def test_find_lr_takes_no_mistake_for_a_loss_that_diverges(capsys: pytest.CaptureFixture[str]) -> None:
    register.task("own_task")(Own)
    register.dataset("own_data")(Points)
    register.loss("own_loss")(lambda output, target: fail(output) + target)
    assert main(["find-lr", "own.yaml"]) == 1
    printed = capsys.readouterr().err
    assert "loss own_loss: " in printed
    assert "no luck" in printed
    assert "diverged" not in printed


def test_check_names_a_loss_that_is_not_finite_and_no_folder_that_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    register.task("own_task")(Own)
    register.dataset("own_data")(Points)
    register.loss("own_loss")(lambda output, target: F.mse_loss(output, target) * torch.nan)
    assert main(["check", "own.yaml"]) == 1
    printed = capsys.readouterr().err
    assert "the loss own_loss is not" in printed
    assert "replay" not in printed
    assert "optimizer.lr" not in printed


def test_check_suggests_the_main_metric_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    class Misspelt(Task):
        main_metric = "own_los"

    register.task("own_task")(Misspelt)
    register.dataset("own_data")(Points)
    register.loss("own_loss")(nn.MSELoss)
    assert main(["check", "own.yaml"]) == 0
    assert "own.yaml:2:7: task: main_metric of Misspelt: " in (printed := capsys.readouterr().err)
    assert "did you mean 'own_loss'?" in printed


# Data sets


def test_labels_without_classes_are_refused() -> None:
    words = "data set own_data has labels but no `classes`", "model.num_classes"
    Path("own.yaml").write_text(RECIPE.replace(", num_classes: 2", ""))
    assert refused(RecipeError, "own.yaml:3:", *words, data=data_of(lambda index: 1))
    assert refused(RecipeError, "own.yaml:3:", "model.num_classes", "number of outputs")
    step(data=data_of(lambda index: 1, ["a", "b"]), loss=F.cross_entropy)


@pytest.mark.parametrize("label", [2, -1])
def test_a_label_outside_the_classes_names_the_sample_and_the_range(label: int) -> None:
    data = data_of(lambda index: label if index == 3 else 0, ["a", "b"])
    words = "data set own_data: sample 3: ", f"label {label}", "0 to 1"
    assert refused(DataError, *words, data=data, loss=F.cross_entropy, data__batch_size=8)
    step(data=data_of(lambda index: -100 if index else 1, ["a", "b"]), loss=F.cross_entropy)


def test_images_of_different_channels_are_told_from_those_of_different_sizes() -> None:
    class Mixed(Points):
        def __getitem__(self, index: int) -> Any:
            return torch.zeros(1 + 2 * (index % 2), 8, 8), torch.zeros(2)

    assert refused(DataError, "1", "3", "channels", data=Mixed, data__batch_size=8)


def test_classes_that_are_no_names_are_refused() -> None:
    data = type("Points", (Points,), {"classes": 3})
    assert refused(RecipeError, "own.yaml:7:", "`classes` are 3", "names", data=data)


def test_an_error_in_an_installed_library_names_the_users_line() -> None:
    class Missing(Points):
        def __getitem__(self, index: int) -> Any:
            return PIL.Image.open("missing.png"), 0

    line = Missing.__getitem__.__code__.co_firstlineno + 1
    assert refused(DataError, f"test_own_mistakes.py:{line}: FileNotFoundError", "missing.png", data=Missing)


@pytest.mark.parametrize(
    ("target", "found"),
    [
        (lambda index: 1.0, "'target' float32 ["),
        (lambda index: torch.tensor([1]), "'target' int64 ["),
        (lambda index: {"label": torch.tensor(1.0)}, "labels float32 ["),
    ],
    ids=["float", "vector", "field"],
)
def test_labels_that_are_no_whole_numbers_are_named_by_dtype_and_shape(target: Any, found: str) -> None:
    parts = {"data": data_of(target, ["a", "b"]), "task__name": "classification"}
    for loss in ("cross_entropy", "bce"):
        assert refused(DataError, f"{loss} ", found, "int(label)", losses=[loss], **parts)
    own = lambda output, target: F.mse_loss(output.mean(1), target.flatten().float())  # noqa: E731
    assert refused(DataError, "classification ", found, "int(label)", loss=own, **parts)


# Names


def test_an_unknown_name_is_followed_by_those_that_are_registered() -> None:
    step()
    with pytest.raises(RecipeError, match=r'losses\.0\.name: unknown loss "nothing_like_it".*own_loss'):
        paceline.build("own.yaml", {"losses": ["nothing_like_it"]})
    with pytest.raises(RecipeError, match=r"register no schedule, but .*task own_task"):
        paceline.build("own.yaml", {"schedule.decay": "nothing_like_it"})


def test_a_default_tells_the_type_of_an_argument() -> None:
    def scaled(output, target, gamma=2, kind="a", flag=True, size=None):  # type: ignore[no-untyped-def]
        return gamma * F.mse_loss(output, target)

    register.loss("scaled")(scaled)
    good = {"name": "scaled", "gamma": 1.5, "kind": "b", "flag": False, "size": [1, 2]}
    step(losses=[good])
    for key, value in {"gamma": "hello", "kind": 3, "flag": "yes"}.items():
        with pytest.raises(RecipeError, match=re.escape(f"losses.0.{key}: expected ")):
            paceline.build("own.yaml", {"losses": [good | {key: value}]})


# Models


def test_an_error_while_a_model_is_built_names_its_line() -> None:
    @register.model("own_model")
    def own_model(num_classes: int) -> nn.Module:
        return nn.Sequential(nn.Linear(3, num_classes)(torch.zeros(2, 5)))

    words = ("own.yaml:3", "model", "test_own_mistakes.py:", "RuntimeError")
    assert refused(RecipeError, *words, model={"name": "own_model"})


def test_a_label_in_a_dict_is_one_of_the_classes() -> None:
    data = data_of(lambda index: {"label": 7}, ["a", "b"])
    assert refused(DataError, "sample", "label 7", "expected 0 to 1", data=data, loss=F.cross_entropy)


def test_an_output_that_is_not_pooled_is_named_by_its_shape() -> None:
    @register.model("own_model")
    def own_model(num_classes: int, in_channels: int) -> nn.Module:
        return nn.Conv2d(in_channels, num_classes, 3)

    data = data_of(lambda index: index % 2, ["a", "b"])
    words = ("model", "[4, 2, 6, 6]", "expected [4, 2]")
    assert refused(
        RecipeError, *words, data=data, loss=F.cross_entropy, model={"name": "own_model"}, task__name="classification"
    )


class Listed(nn.Module):
    """A model whose layers are in a list, where torch does not find them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Flatten(), nn.Linear(192, 2)]


@pytest.mark.parametrize(
    ("made", "words"), [(None, "nothing"), (len, "builtin_function_or_method"), (Listed(), "nn.ModuleList")]
)
def test_what_is_no_model_is_refused(made: Any, words: str) -> None:
    register.model("own_model")(lambda: made)
    assert refused(RecipeError, "own.yaml:3:", "own_model", words, model={"name": "own_model"})


@pytest.mark.parametrize(("rows", "columns"), [(3, 2), (4, 1)], ids=["samples", "classes"])
def test_too_few_outputs_are_named_by_their_shape(rows: int, columns: int) -> None:
    class Few(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)

        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images.mean((2, 3)))[:rows, :columns]

    register.model("own_model")(Few)
    parts = {"data": data_of(lambda index: 1, ["a", "b"]), "loss": F.cross_entropy, "task__name": "classification"}
    words = f"[{rows}, {columns}]", "expected [4, 2]"
    assert refused(RecipeError, "model: ", *words, model={"name": "own_model"}, **parts)


def test_an_argument_under_another_name_than_the_one_it_is_given_by() -> None:
    @register.model("own_model")
    def own_model(n_classes: int) -> nn.Module:
        return nn.Linear(3, n_classes)

    assert refused(RecipeError, "model.n_classes", "num_classes", model={"name": "own_model"})


# Errors of any kind


def fail(*_: Any) -> Any:
    """What a part runs into, far from what Paceline calls."""
    raise RuntimeError("no luck")


class Net(nn.Module):
    """A model."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.inner = nn.Linear(3, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return fail(self.inner(images.mean((2, 3))))  # type: ignore[no-any-return]


class Counted:
    """A loss that says what it is divided by."""

    def count(self, batch: Batch) -> float:
        return 1.0

    def __call__(self, outputs: Tensor, batch: Batch) -> LossTerm:
        return fail(outputs, batch)  # type: ignore[no-any-return]


class Stateless:
    """A metric whose state Paceline keeps."""

    def update(self, predictions: Any, batch: Batch) -> dict[str, Tensor]:
        return fail(predictions, batch)  # type: ignore[no-any-return]

    def compute(self, state: dict[str, Tensor]) -> dict[str, float]:
        return {}


class Samples:
    """A data set with `read`."""

    classes = ("a", "b")
    channels = 3

    def __len__(self) -> int:
        return 8

    def read(self, index: int) -> Any:
        return fail(index)


class Shift:
    """A transform of samples."""

    draws = 0

    def __call__(self, sample: Any, draws: Any) -> Any:
        return fail(sample, draws)


PARTS = {"model": Net, "loss": Counted, "metric": Stateless, "dataset": Samples, "transform": Shift}


@pytest.mark.parametrize(
    ("keys", "code", "called"),
    [
        (["model.name=unlucky"], 1, "Net.forward"),
        (["losses=[unlucky]"], 1, "Counted.__call__"),
        (["evaluate.metrics=[unlucky]"], 1, "Stateless.update"),
        (["data.train.dataset=unlucky", "data.loader=process", "data.num_workers=1"], 3, "Samples.read"),
        (["data.train.transforms=[unlucky]"], 3, "Shift.__call__"),
    ],
    ids=list(PARTS),
)
def test_any_error_of_a_part_names_its_line_and_none_of_ours(
    keys: list[str], code: int, called: str, capsys: pytest.CaptureFixture[str]
) -> None:
    step(data=data_of(lambda index: index % 2, ["a", "b"]), loss=F.cross_entropy)
    keys = [*keys, "task.name=classification"]
    for kind, part in PARTS.items():
        getattr(register, kind)("unlucky")(part)
    assert main(["train", "own.yaml", *keys]) == code
    line = Path(__file__).read_text().splitlines().index('    raise RuntimeError("no luck")') + 1
    printed = capsys.readouterr().err
    assert f"{Path(__file__).name}:{line}: RuntimeError: no luck" in printed
    assert called in printed
    assert "Traceback" not in printed
    assert "src/paceline" not in printed
    assert main(["train", "own.yaml", *keys, "--fresh", "--traceback"]) == code
    traced = capsys.readouterr().err
    assert "Traceback (most recent call last)" in traced
    assert f'{Path(__file__).name}", line {line}, in fail' in traced


def test_a_module_that_is_not_there_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "own.yaml", "--use", "nosuch"]) == 2
    assert "--use nosuch" in capsys.readouterr().err
