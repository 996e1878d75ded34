"""The sections and keys of a recipe. Nothing here imports torch, so a wrong recipe is refused at once."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from paceline.core.arguments import Arguments, Count, CountOrZero, NonNegative, Positive, Share, Weight
from paceline.recipe.document import PartSpec, are_named_parts

Auto = Literal["auto"]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Threads = Annotated[int, Field(ge=1, le=1024)]
"""Of one operation; libraries end the process where they cannot start as many as they are told."""
PresetName = Literal["pet", "bias_double", "no_decay_bias_norm", "backbone_tenth", "no_decay_1d"]
KindName = Literal[
    "weight", "bias", "norm", "embedding",
    "batch_norm", "group_norm", "layer_norm", "instance_norm", "rms_norm", "other_norm",
]  # fmt: skip
RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]


class Section(Arguments):
    """A section with fixed keys."""


class Part(Arguments):
    """A section that names something; the arguments of that name stand beside the keys listed here."""

    model_config = ConfigDict(extra="allow")


class TaskPart(Part):
    """Which vision problem is solved."""

    name: str


class Weights(Section):
    """Weights to start from, and how they may differ from the model; what is not declared here must match."""

    file: str
    """A .safetensors or .pth file, a run directory, or a library's own: timm/NAME, torchvision/NAME."""
    key: str | None = None
    """The key of a .pth file that holds the tensors, such as net_state; null: state_dict, model or model_state_dict."""
    into: str | None = None
    """The part of the model that they are for, such as backbone; the rest of the model starts fresh."""
    strip: list[str] = []
    """Prefixes that are taken off the names."""
    rename: list[Annotated[list[str], Field(min_length=2, max_length=2)]] = []
    """Patterns and what takes their place."""
    exclude: list[str] = []
    """Patterns of tensors that are not loaded."""
    head: Literal["auto", "keep", "drop"] | list[str] = "auto"
    """auto replaces the head when its shapes differ, drop always, keep never; or the modules that make it up."""
    head_init: Literal["default", "zeros", "trunc_normal", "normal"] = "default"
    first_conv: Literal["auto", "strict"] = "auto"
    channels: Literal["rgb", "bgr"] = "rgb"
    """The order of channels that the weights were made for."""
    position_embedding: Literal["interpolate", "strict"] = "interpolate"


class Unfreeze(Section):
    """Parts that begin to learn later."""

    match: Annotated[list[str], Field(min_length=1)]
    at_epochs: Positive | None = None
    at_steps: Count | None = None


class CheckpointingPart(Part):
    """Which activations are computed again in the backward pass instead of being kept."""

    name: str


class ModelPart(Part):
    """The network and what it starts from."""

    name: str
    num_classes: Count | None = None
    """Normally read off the data; if given, the data must agree."""
    weights: str | Weights | None = None
    """A file of weights to start from; the classifier is replaced when its shape differs."""
    freeze: list[str] = []
    """Patterns of parameters that do not learn; all_but_head freezes everything else than the classifier."""
    unfreeze: list[Unfreeze] = []
    """What begins to learn later, and when."""


class TransformPart(Part):
    """One augmentation or preparation."""

    name: str


class DatasetPart(Part):
    """One split: where samples come from and how they are changed."""

    dataset: str
    transforms: list[TransformPart] = []


SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$")]


def _test_form(value: Any) -> str:
    """Which of the two forms a value has, before validation or after it."""
    is_valid = isinstance(value, dict) and any(isinstance(part, DatasetPart) for part in value.values())
    return "several" if is_valid or are_named_parts(value) else "one"


TestSets = Annotated[
    Annotated[DatasetPart, Tag("one")] | Annotated[dict[SetName, DatasetPart], Tag("several")],
    Discriminator(_test_form),
]


class Data(Section):
    """What is learned from, and how it is loaded."""

    batch_size: Count
    """Samples per optimizer update, over all processes."""
    train: DatasetPart
    val: DatasetPart | None = None
    test: TestSets | None = None
    """One data set to measure on after the last step, or several by name."""
    loader: Literal["auto", "memory", "thread", "process", "dali"] = "auto"
    """What reads samples ahead; auto: what is found to be fastest here, which never changes a pixel."""
    num_workers: CountOrZero | Auto = "auto"
    cache: Literal["none", "memory"] = "none"
    """Whether decoded samples are kept in memory, shared by the processes of a machine."""
    on_error: Literal["stop", "skip"] = "stop"
    """What to do about a sample that cannot be read: end the run, or leave the sample out and list it."""
    max_skipped: CountOrZero | Auto = "auto"
    """How many samples of each split may be left out; auto: one in a hundred, from 1 to 100."""
    drop_last: bool = False
    """Leave out the last, smaller step of an epoch."""

    def splits(self) -> dict[str, DatasetPart]:
        """The data sets by split: train, val, test; of several test sets each as test.NAME."""
        tests = {f"test.{name}": part for name, part in self.test.items()} if isinstance(self.test, dict) else {}
        named = {"train": self.train, "val": self.val, "test": None if tests else self.test, **tests}
        return {split: part for split, part in named.items() if isinstance(part, DatasetPart)}


class LossPart(Part):
    """One loss; several are added, each with its weight."""

    name: str
    weight: Weight = 1.0


class ParamGroup(Section):
    """What some parameters get: those of a kind, those found by name, or those of a preset."""

    preset: PresetName | None = None
    """Settings that are known by name; takes no other key."""
    match: str | None = None
    """A name (of a module, with all below it), a glob, or a regular expression after `re:`."""
    kind: KindName | None = None
    """The kind of parameter; beside `match`, those of this kind only. A kind of norm layer wins over norm."""
    lr_scale: NonNegative | None = None
    """A factor on the learning rate."""
    weight_decay: NonNegative | None = None


class TrustRatio(Section):
    """LARC, or LARS without clip: no layer's step is large beside its weights."""

    coefficient: Positive = 0.02
    clip: bool = True
    eps: NonNegative = 1e-8


class OptimizerPart(Part):
    """How gradients change the parameters."""

    name: str
    lr: Positive
    weight_decay: NonNegative = 0.0
    base_batch_size: Count | None = None
    """`lr` is meant for this batch and scaled to `data.batch_size` by `lr_scaling`."""
    lr_scaling: Literal["linear", "sqrt"] = "linear"
    """linear: lr × batch / base_batch_size; sqrt: lr × its square root."""
    param_groups: list[ParamGroup] = []
    """Learning rates and decays: presets, then kinds, then names, wherever they stand in the list."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """The factor from each layer to the one before it."""
    layer_map: str | None = None
    """A registered map from parameters to layers, where the model's structure does not tell."""
    trust_ratio: TrustRatio | None = None


class TransitionPart(Part):
    """A value that goes from `start` to `end` over the run as a decay goes from 1 to 0."""

    decay: str = "cosine"
    start: NonNegative
    end: NonNegative
    per: Literal["step", "epoch", "fraction"] = "step"


class SchedulePart(Part):
    """How the learning rate, and perhaps momentum and weight decay, change over the run."""

    decay: str = "constant"
    per: Literal["step", "epoch", "fraction"] = "step"
    """epoch holds a value for a whole epoch; fraction counts epochs as real numbers."""
    warmup: Literal["none", "constant", "linear"] = "none"
    warmup_epochs: NonNegative | None = None
    warmup_steps: CountOrZero | None = None
    warmup_from: Share = 0.0
    """The share of the learning rate that warm-up starts from, or that constant warm-up uses."""
    count_from: Literal[0, 1] = 0
    """The number of the first step in warm-up: with 1 its last step has the whole learning rate."""
    decay_from: Literal["auto", "start", "warmup"] = "auto"
    """Where decay begins to count; auto leaves it to the decay."""
    floor: Share = 0.0
    """The share of the learning rate that decay ends at."""
    floor_lr: NonNegative | None = None
    """The learning rate that decay ends at."""
    momentum: TransitionPart | None = None
    weight_decay: TransitionPart | None = None


class AveragingPart(Part):
    """An average of the weights, measured beside them."""

    name: str


class StrategyPart(Part):
    """How the model is shared among processes."""

    name: str


class Train(Section):
    """How long, where and how exactly."""

    epochs: Count | None = None
    steps: Count | None = None
    seed: Seed = 0
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]+)?|mps)$")] = "auto"
    devices: Annotated[list[CountOrZero], Field(min_length=1)] | None = None
    """Which CUDA devices, by their numbers among the visible ones; null: all."""
    precision: Literal["fp32", "tf32", "bf16", "fp16", "O0", "O1", "O2", "O3"] = "fp32"
    """bf16 and fp16 compute with autocast; O0 to O3 are Apex's levels."""
    loss_scale: Positive | Literal["dynamic"] | None = None
    """What losses are multiplied by where gradients are float16; null: what the precision's name stands for."""
    keep_norms_fp32: bool | None = None
    """Whether O2 and O3 leave norm layers in float32; null: O2 does, O3 does not."""
    strategy: StrategyPart = StrategyPart(name="auto")
    activation_checkpointing: CheckpointingPart = CheckpointingPart(name="none")
    sync_bn: bool = False
    """Takes BatchNorm's statistics over the micro-batches that all processes compute at the same time."""
    channels_last: bool | Auto = "auto"
    """Lays images out pixel by pixel, which many convolutions are faster with; auto: measured, on CPU."""
    compile: bool = False
    """Has torch.compile translate the model: slow to start, faster afterwards."""
    micro_batch_size: Count | Auto = "auto"
    """Samples per forward and backward pass; a step accumulates as many as `data.batch_size` needs."""
    clip_grad_norm: Positive | None = None
    clip_grad_value: Positive | None = None
    adaptive_clip: Positive | None = None
    """Each unit's gradient at most this share of the unit's weights; 0.01 is usual."""
    averaging: AveragingPart = AveragingPart(name="none")
    reproducible: Literal["off", "run", "world"] = "run"
    """run: the same command gives the same bits; world: on any number of processes too."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What to do about a step whose gradient is not finite: end the run, or leave it out (at most 10 in a row)."""
    hang_seconds: Positive = 600.0
    """How long several processes may make no progress before they are started again."""
    threads: Threads | Auto = "auto"
    """Threads inside one operation; auto: the machine's cores by the processes on it, with reproducible world: 1."""


class MetricPart(Part):
    """A metric beyond those the task brings."""

    name: str


class Evaluate(Section):
    """When and how the model is measured."""

    every_epochs: Positive | None = None
    every_steps: Count | None = None
    batch_size: Count | Auto = "auto"
    """Samples per evaluation batch; fixed, so that metrics do not depend on the number of processes. auto: 256, on a
    CPU fewer of large samples (16 of 224×224), since each core evaluates a batch."""
    num_workers: CountOrZero | Auto = "auto"
    threads: Threads = 1
    metrics: list[MetricPart] = []
    original_size: bool | Auto = "auto"
    """Measures and saves predicted maps at the size that the masks have in their files, not at that of the model's
    images; auto: as the task's field measures, true for saliency."""
    save_predictions: bool = False
    """Writes what is predicted for each sample below predictions/: a PNG file of a map, else a row of a CSV file."""


class Checkpoint(Section):
    """What is kept on disk to continue from; one is also saved before each evaluation."""

    every_epochs: Positive | None = None
    every_steps: Count | None = None
    keep_last: Count = 3
    keep_every: Count | None = None
    """Checkpoints whose step is a multiple of this are kept for good."""
    best: str | None = "auto"
    """The metric by which the best checkpoint is kept; auto: the task's own; null: none."""
    direction: Literal["auto", "max", "min"] = "auto"
    """Whether the greatest or the least of it is best; auto: as `higher_is_better` of its metric says."""


class Logging(Section):
    """What is shown and recorded."""

    every_steps: Count | None = None
    every_epochs: Positive | None = None
    tensorboard: bool = True
    images: bool = True
    results: Annotated[str, Field(pattern=r"^.+\.(csv|xlsx)$")] | None = None
    """A table that keeps a row for each run and split; a relative path is one from the current folder, as runs/ is."""


class Recipe(Section):
    """A whole recipe."""

    name: RunName
    task: TaskPart
    model: ModelPart
    data: Data
    losses: list[LossPart] = []
    """What is minimized; left out where the task or the model brings its own losses, as in detection."""
    optimizer: OptimizerPart
    schedule: SchedulePart = SchedulePart()
    train: Train
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()
    expect: dict[str, float] = {}
    """What this recipe is known to reach; compared at the end."""


_SPLITS = ("train", "val", "test{}")
PARTS = [
    PartSpec(("task",), "task", "name", TaskPart),
    PartSpec(("model",), "model", "name", ModelPart),
    *(PartSpec(("data", split), "dataset", "dataset", DatasetPart) for split in _SPLITS),
    *(PartSpec(("data", split, "transforms", "*"), "transform", "name", TransformPart) for split in _SPLITS),
    PartSpec(("losses", "*"), "loss", "name", LossPart),
    PartSpec(("optimizer",), "optimizer", "name", OptimizerPart),
    PartSpec(("schedule",), "schedule", "decay", SchedulePart),
    PartSpec(("schedule", "momentum"), "schedule", "decay", TransitionPart),
    PartSpec(("schedule", "weight_decay"), "schedule", "decay", TransitionPart),
    PartSpec(("train", "averaging"), "averaging", "name", AveragingPart),
    PartSpec(("train", "strategy"), "strategy", "name", StrategyPart),
    PartSpec(("train", "activation_checkpointing"), "activation_checkpointing", "name", CheckpointingPart),
    PartSpec(("evaluate", "metrics", "*"), "metric", "name", MetricPart),
]
