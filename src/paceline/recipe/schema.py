"""The sections and keys of a recipe. Nothing here imports torch, so a wrong recipe is refused at once."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

# Importing the catalogues makes their names known.
import paceline.data.catalogue
import paceline.losses.catalogue
import paceline.metrics.catalogue
import paceline.models.catalogue
import paceline.optim.catalogue
import paceline.optim.schedule_catalogue
import paceline.tasks.catalogue  # noqa: F401
from paceline.core.arguments import Arguments, Count, CountOrZero, NonNegative, PartialShare, Positive, Share
from paceline.recipe.document import PartSpec

Auto = Literal["auto"]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]


class Section(Arguments):
    """A section with fixed keys."""


class Part(Arguments):
    """A section that names something; the arguments of that name stand beside the keys listed here."""

    model_config = ConfigDict(extra="allow")


class TaskPart(Part):
    """Which vision problem is solved."""

    name: str


class ModelPart(Part):
    """The network and what it starts from."""

    name: str
    num_classes: Count | None = None
    """Normally read off the data; if given, the data must agree."""
    weights: str | None = None
    """A file of weights to start from (.safetensors, .pth); the classifier is replaced when its shape differs."""
    checkpointing: Literal["none"] = "none"


class TransformPart(Part):
    """One augmentation or preparation."""

    name: str


class DatasetPart(Part):
    """One split: where samples come from and how they are changed."""

    dataset: str
    transforms: list[TransformPart] = []


class Data(Section):
    """What is learned from, and how it is loaded."""

    batch: Count
    """Samples per optimizer update, over all processes."""
    train: DatasetPart
    val: DatasetPart | None = None
    test: DatasetPart | None = None
    loader: Literal["auto", "memory", "process"] = "auto"
    workers: CountOrZero | Auto = "auto"
    drop_last: bool = False
    """Leave out the last, smaller update of an epoch."""


class LossPart(Part):
    """One loss; several are added, each with its weight."""

    name: str
    weight: NonNegative = 1.0


class OptimizerPart(Part):
    """How gradients change the parameters."""

    name: str
    lr: Positive
    weight_decay: NonNegative = 0.0
    reference_batch: Count | None = None
    """`lr` is meant for this batch and scaled linearly to `data.batch`."""


class SchedulePart(Part):
    """How the learning rate changes over the run."""

    decay: str = "constant"
    warmup: Literal["none", "linear"] = "none"
    warmup_epochs: NonNegative | None = None
    warmup_steps: CountOrZero | None = None
    warmup_from: Share = 0.0
    """The share of the learning rate that warm-up starts from."""
    floor: PartialShare = 0.0
    """The share of the learning rate that decay ends at."""
    per: Literal["step", "epoch"] = "step"


class Train(Section):
    """How long, where and how exactly."""

    epochs: Count | None = None
    steps: Count | None = None
    seed: Seed = 0
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]+)?|mps)$")] = "auto"
    precision: Literal["fp32"] = "fp32"
    strategy: Literal["auto", "single"] = "auto"
    micro_batch: Count | Auto = "auto"
    """Samples per forward and backward pass; an update accumulates as many as `data.batch` needs."""
    clip_norm: Positive | None = None
    averaging: Literal["none"] = "none"
    reproducible: Literal["off", "run"] = "run"
    threads: Count | Auto = "auto"
    """Threads inside one operation; auto: the cores of the machine."""


class MetricPart(Part):
    """A figure beyond those the task brings."""

    name: str


class Evaluate(Section):
    """When and how the model is measured."""

    every_epochs: Positive | None = None
    every_steps: Count | None = None
    batch: Count = 256
    """Samples per evaluation batch; fixed, so that figures do not depend on the number of processes."""
    workers: CountOrZero | Auto = "auto"
    threads: Count = 1
    metrics: list[MetricPart] = []


class Checkpoint(Section):
    """What is kept on disk to continue from."""

    every_epochs: Positive | None = None
    every_steps: Count | None = None
    keep_last: Count = 3
    best: str | None = "auto"
    """The figure by which the best checkpoint is kept; auto: the task's own; null: none."""
    direction: Literal["auto", "max", "min"] = "auto"


class Observe(Section):
    """What is shown and recorded."""

    log_every_steps: Count | None = None
    log_every_epochs: Positive | None = None
    tensorboard: bool = True
    pictures: bool = True


class Recipe(Section):
    """A whole recipe."""

    name: RunName
    task: TaskPart
    model: ModelPart
    data: Data
    losses: Annotated[list[LossPart], Field(min_length=1)]
    optimizer: OptimizerPart
    schedule: SchedulePart = SchedulePart()
    train: Train
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    observe: Observe = Observe()
    expect: dict[str, float] = {}
    """What this recipe is known to reach; compared at the end."""


_SPLITS = ("train", "val", "test")
PARTS = [
    PartSpec(("task",), "task", "name", TaskPart),
    PartSpec(("model",), "model", "name", ModelPart),
    *(PartSpec(("data", split), "dataset", "dataset", DatasetPart) for split in _SPLITS),
    *(PartSpec(("data", split, "transforms", "*"), "transform", "name", TransformPart) for split in _SPLITS),
    PartSpec(("losses", "*"), "loss", "name", LossPart),
    PartSpec(("optimizer",), "optimizer", "name", OptimizerPart),
    PartSpec(("schedule",), "schedule", "decay", SchedulePart),
    PartSpec(("evaluate", "metrics", "*"), "metric", "name", MetricPart),
]

_EITHER = [
    ("train.epochs", "train.steps"),
    ("evaluate.every_epochs", "evaluate.every_steps"),
    ("checkpoint.every_epochs", "checkpoint.every_steps"),
    ("observe.log_every_epochs", "observe.log_every_steps"),
    ("schedule.warmup_epochs", "schedule.warmup_steps"),
]


def cross_checks(recipe: Recipe) -> list[tuple[list[str], str]]:
    """Combinations that cannot work: the keys involved, and a sentence."""
    return [*_either_or(recipe), *_batch(recipe), *_schedule(recipe), *_figures(recipe), *_names(recipe)]


def _either_or(recipe: Recipe) -> list[tuple[list[str], str]]:
    found = []
    for epochs, steps in _EITHER:
        if _value(recipe, epochs) is not None and _value(recipe, steps) is not None:
            found.append(([steps, epochs], f"cannot be given together with {epochs}; keep one of them"))
    if recipe.train.epochs is None and recipe.train.steps is None:
        found.append((["train.epochs"], "expected train.epochs or train.steps, got neither"))
    return found


def _batch(recipe: Recipe) -> list[tuple[list[str], str]]:
    micro, batch = recipe.train.micro_batch, recipe.data.batch
    if micro != "auto" and micro > batch:
        message = f"expected at most data.batch ({batch}), got {micro}"
        return [(["train.micro_batch", "data.batch"], message)]
    return []


def _schedule(recipe: Recipe) -> list[tuple[list[str], str]]:
    schedule, train = recipe.schedule, recipe.train
    keys = [key for key in ("warmup_epochs", "warmup_steps") if getattr(schedule, key)]
    if schedule.warmup == "none" and keys:
        return [
            (
                [f"schedule.{keys[0]}", "schedule.warmup"],
                "given, but schedule.warmup is none; set it to linear",
            )
        ]
    if schedule.warmup != "none" and not keys:
        return [(["schedule.warmup"], "needs schedule.warmup_epochs or schedule.warmup_steps greater than 0")]
    for key, unit in (("warmup_epochs", "epochs"), ("warmup_steps", "steps")):
        warmup, total = getattr(schedule, key), getattr(train, unit)
        if warmup and total and warmup >= total:
            message = f"expected less than train.{unit} ({total}), got {warmup:g}"
            return [([f"schedule.{key}", f"train.{unit}"], message)]
    return []


def _figures(recipe: Recipe) -> list[tuple[list[str], str]]:
    found = []
    if recipe.data.val is None and recipe.data.test is None:
        if recipe.expect:
            found.append((["expect", "data.val"], "given, but there is neither data.val nor data.test to measure on"))
        if recipe.checkpoint.best not in (None, "auto"):
            message = "given, but there is no data.val to measure it on; add data.val or set it to null"
            found.append((["checkpoint.best", "data.val"], message))
    return found


def _names(recipe: Recipe) -> list[tuple[list[str], str]]:
    names = [loss.name for loss in recipe.losses]
    doubled = sorted({name for name in names if names.count(name) > 1})
    return [(["losses"], f"{name} is listed more than once; list each loss once") for name in doubled]


def _value(recipe: Recipe, key: str) -> object:
    value: object = recipe
    for part in key.split("."):
        value = getattr(value, part)
    return value
