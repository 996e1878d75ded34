"""The sections and keys of a recipe. Imports no torch, so recipes are checked fast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from paceline.core.arguments import Arguments, Count, CountOrZero, NonNegative, Positive, Share, Weight
from paceline.optim.group_presets import KindName, PresetName
from paceline.recipe.document import are_named_parts

Auto = Literal["auto"]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Threads = Annotated[int, Field(ge=1, le=1024)]  # libraries abort the process if they cannot start as many
# More than these is a slip of the keyboard, which would otherwise show hours later or never.
Workers = Annotated[int, Field(ge=0, le=1024)]
BatchSize = Annotated[int, Field(ge=1, le=2**20)]
Epochs = Annotated[int, Field(ge=1, le=10**6)]
Steps = Annotated[int, Field(ge=1, le=10**9)]
RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
Text = Annotated[str, Field(min_length=1)]


class Section(Arguments):
    """A section of a recipe. One that is made in Python is checked with the whole recipe: all mistakes at once."""

    if not TYPE_CHECKING:

        def __init__(self, **keys: Any) -> None:
            fields = type(self).model_fields.items()
            defaults = {name: field.get_default() for name, field in fields if not field.is_required()}
            known = {"__pydantic_extra__": {}, "__pydantic_fields_set__": set(keys), "__pydantic_private__": None}
            self.__setstate__({"__dict__": defaults | keys, **known})

        __init__.__pydantic_base_init__ = True  # else pydantic would check by calling it

    def given(self) -> dict[str, Any]:
        """The keys that were given when the section was made in Python."""
        return {key: self.__dict__[key] for key in self.model_fields_set}


class UsedModule(Section):
    """A module of the user's own, as a run records it."""

    module: str
    """Its name in Python."""
    file: str
    """Where it is."""
    sha256: str
    """The SHA-256 sum of the file; a run that finds another says so."""


class Part(Section):
    """A section that names a part; its arguments are further keys."""

    model_config = ConfigDict(extra="allow")


class NamedPart(Part):
    """A part that is chosen by its registered name."""

    name: str
    """Its registered name."""


class TaskPart(NamedPart):
    """The vision problem to solve."""


class Weights(Section):
    """Pretrained weights, and how they may differ from the model; everything else must match."""

    file: str
    """A file (.safetensors, .pth), a run or transformers' folder, or timm/NAME, torchvision/NAME, transformers/ID."""
    key: str | None = None
    """The key of a .pth file that holds the tensors, such as net_state; null: state_dict, model or model_state_dict."""
    into: str | None = None
    """The module to load them into, such as backbone; the rest of the model is initialized."""
    strip: list[str] = []
    """Prefixes to remove from tensor names."""
    rename: list[Annotated[list[str], Field(min_length=2, max_length=2)]] = []
    """Pairs of a pattern and its replacement in tensor names."""
    exclude: list[str] = []
    """Patterns of tensors to leave out."""
    head: Literal["auto", "keep", "drop"] | list[str] = "auto"
    """Replace the head: auto if its shapes differ, drop always, keep never; or the modules of the head."""
    head_init: Literal["default", "zeros", "trunc_normal", "normal"] = "default"
    """How the layers of a new head start."""
    first_conv: Literal["auto", "strict"] = "auto"
    """auto fits the first convolution to the number of channels; strict does not."""
    channels: Literal["rgb", "bgr"] = "rgb"
    """The channel order that the weights were trained with."""
    position_embedding: Literal["interpolate", "strict"] = "interpolate"
    """interpolate fits position embeddings to another image size; strict does not."""


class Unfreeze(Section):
    """Modules to unfreeze later."""

    match: Annotated[list[str], Field(min_length=1)]
    """Patterns of the parameters that begin to learn."""
    at_epochs: Positive | None = None
    """When, in epochs."""
    at_steps: Count | None = None
    """When, in steps."""


class CheckpointingPart(NamedPart):
    """Activation checkpointing: which activations to recompute in the backward pass."""


class ModelPart(Part):
    """The model and its initial weights."""

    name: str
    """The model: one of ours, timm/NAME, torchvision/NAME or transformers/NAME."""
    num_classes: Count | None = None
    """Number of classes; null: from the data. If given, the data must match."""
    weights: str | Weights | None = None
    """Pretrained weights; the classifier is replaced if its shape differs."""
    head_batch_norm: bool = False
    """Adds a BatchNorm without affine parameters before the classifier, as in MAE's linear probing."""
    freeze: list[str] = []
    """Patterns of parameters to freeze; all_but_head freezes everything except the classifier."""
    unfreeze: list[Unfreeze] = []
    """What to unfreeze later, and when."""


class TransformPart(NamedPart):
    """One transform."""


class DatasetPart(Part):
    """One split: its data set and transforms."""

    dataset: str
    """The format of the data set, by its registered name."""
    transforms: list[TransformPart] = []
    """What is done to each sample, in this order."""


SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$")]


def _test_form(value: Any) -> str:
    return "several" if are_named_parts(value) else "one"


_Several = Annotated[dict[SetName, DatasetPart], Tag("several")]
TestSets = Annotated[Annotated[DatasetPart, Tag("one")] | _Several, Discriminator(_test_form)]


class Data(Section):
    """The data sets and how to load them."""

    batch_size: BatchSize
    """Samples per optimizer step, over all processes."""
    train: DatasetPart
    """The data set that the model learns from."""
    val: DatasetPart | None = None
    """The data set that is measured on during training; it decides which checkpoint is the best."""
    test: TestSets | None = None
    """A data set to evaluate after the last step, or several by name."""
    fold: CountOrZero | None = None
    """The fold to hold out in cross-validation: the `fold` of each data set that takes one."""
    loader: Literal["auto", "memory", "thread", "process", "dali"] = "auto"
    """How to load samples; auto: by index if in memory, else by threads. Only dali changes pixels, in training."""
    num_workers: Workers | Auto = "auto"
    """Threads or processes that read samples ahead; auto: one for each core, at most 16 threads."""
    on_error: Literal["stop", "skip"] = "stop"
    """What to do about an unreadable sample: stop the run, or skip the sample and list it."""
    max_skipped: CountOrZero | Auto = "auto"
    """How many samples per split may be skipped; auto: 1 %, from 1 to 100."""
    drop_last: bool = False
    """Drop the last, smaller step of an epoch."""
    aspect_ratio_group_factor: Annotated[int, Field(ge=0, le=16)] | None = None
    """Fill each step with images of similar width / height, in 2k + 2 groups; 0: upright ones and others."""

    def splits(self) -> dict[str, DatasetPart]:
        """The data sets by split: train, val, test; of several test sets each as test.NAME."""
        tests = {f"test.{name}": part for name, part in self.test.items()} if isinstance(self.test, dict) else {}
        named = {"train": self.train, "val": self.val, "test": None if tests else self.test, **tests}
        return {split: part for split, part in named.items() if isinstance(part, DatasetPart)}


class LossPart(NamedPart):
    """One loss; several are summed with their weights."""

    weight: Weight = 1.0
    """The factor of this loss in the sum."""


class ParamGroup(Section):
    """Settings of some parameters: by kind, by name, or a preset."""

    preset: PresetName | None = None
    """A common combination of settings; takes no other key."""
    match: str | None = None
    """A name (of a module, including all below it), a glob, or a regular expression after `re:`."""
    kind: KindName | None = None
    """The kind of parameter; with `match`, only those of this kind. A kind of norm layer wins over norm."""
    lr_scale: NonNegative | None = None
    """A factor on the learning rate."""
    weight_decay: NonNegative | None = None
    """Their weight decay."""


class TrustRatio(Section):
    """LARC, or LARS without clip: limits the step of each layer relative to its weights."""

    coefficient: Positive = 0.02
    """The greatest step of a layer, as a share of the norm of its weights."""
    clip: bool = True
    """Whether the ratio only lowers a learning rate (LARC)."""
    eps: NonNegative = 1e-8
    """A small number that keeps divisions finite."""
    exclude_1d: bool = False
    """Neither scales nor decays biases and norm parameters, as in MAE's LARS."""


class OptimizerPart(Part):
    """The optimizer."""

    name: str
    """The optimizer, by its registered name, or timm/NAME."""
    lr: Positive
    """The learning rate, at `base_batch_size` if that is given, else at `data.batch_size`."""
    weight_decay: NonNegative = 0.0
    """The weight decay of parameters whose group sets none."""
    base_batch_size: BatchSize | None = None
    """The batch size that `lr` is for; `lr_scaling` scales it to `data.batch_size`."""
    lr_scaling: Literal["linear", "sqrt"] = "linear"
    """linear: lr × batch_size / base_batch_size; sqrt: lr × the square root of that ratio."""
    param_groups: list[ParamGroup] = []
    """Learning rates and decays: presets, then kinds, then names, wherever they stand in the list."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """Layer-wise learning rate decay: the factor from each layer to the one before it."""
    layer_map: str | None = None
    """A registered map from parameters to layers, for models whose structure is unknown."""
    trust_ratio: TrustRatio | None = None
    """Limits each layer's step by the norm of its weights; null: no limit."""


class TransitionPart(Part):
    """A schedule from `start` to `end` over the run, in the shape of a decay."""

    decay: str = "cosine"
    """The shape of the change, by its registered name."""
    start: NonNegative
    """The value of the first step."""
    end: NonNegative
    """The value of the last step."""
    per: Literal["step", "epoch", "fraction"] = "step"
    """How progress is read: each step, each whole epoch, or fractions of epochs."""


class SchedulePart(Part):
    """The schedule of the learning rate, and optionally of momentum and weight decay."""

    decay: str = "constant"
    """The shape of the decay, by its registered name."""
    per: Literal["step", "epoch", "fraction"] = "step"
    """When to update: every step, every epoch, or by fractions of epochs."""
    warmup: Literal["none", "constant", "linear"] = "none"
    """How the learning rate starts: at once, constant and low, or rising."""
    warmup_epochs: NonNegative | None = None
    """The length of warm-up, in epochs."""
    warmup_steps: CountOrZero | None = None
    """The length of warm-up, in steps."""
    warmup_from: Share = 0.0
    """The factor that warm-up starts from, or that constant warm-up uses."""
    count_from: Literal[0, 1] = 0
    """The number of the first warm-up step; with 1, the last one has the full learning rate."""
    decay_from: Literal["auto", "start", "warmup"] = "auto"
    """Where the decay starts to count; auto: depends on the decay."""
    floor: Share = 0.0
    """The factor at the end of the decay."""
    floor_lr: NonNegative | None = None
    """The learning rate at the end of the decay."""
    momentum: TransitionPart | None = None
    """A schedule of the momentum; null: constant."""
    weight_decay: TransitionPart | None = None
    """A schedule of the weight decay; null: constant."""


class AveragingPart(NamedPart):
    """An average of the weights, evaluated beside them."""


class StrategyPart(NamedPart):
    """How the model is replicated or sharded over processes."""


class Train(Section):
    """Length, device, precision, strategy and reproducibility."""

    epochs: Epochs | None = None
    """The length of the run, in epochs; give this or steps."""
    steps: Steps | None = None
    """The length of the run, in steps; give this or epochs."""
    seed: Seed = 0
    """The seed of everything random: initial weights, order, augmentation, dropout."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]+)?|mps)$")] = "auto"
    """Where to compute; auto: on a GPU if there is one."""
    devices: Annotated[list[CountOrZero], Field(min_length=1)] | None = None
    """Indices of the CUDA devices to use, among the visible ones; null: all."""
    precision: Literal["fp32", "tf32", "bf16", "fp16", "O0", "O1", "O2", "O3"] = "fp32"
    """bf16 and fp16 use autocast; O0 to O3 are Apex levels."""
    loss_scale: Positive | Literal["dynamic"] | None = None
    """Loss scale for float16 gradients; null: the default of the precision."""
    keep_norms_fp32: bool | None = None
    """Whether O2 and O3 keep norm layers in float32; null: O2 does, O3 does not."""
    strategy: StrategyPart = StrategyPart(name="auto")
    """How processes share the model."""
    activation_checkpointing: CheckpointingPart = CheckpointingPart(name="none")
    """Which activations backward recomputes instead of keeping them."""
    sync_bn: bool = False
    """Synchronize BatchNorm statistics over all processes."""
    channels_last: bool | Auto = "auto"
    """Lays images out pixel by pixel, which many convolutions are faster with; auto: by a rule, on CPU."""
    compile: bool = False
    """Use torch.compile: slow to start, faster afterwards."""
    micro_batch_size: BatchSize | Auto = "auto"
    """Samples per forward and backward pass; a step accumulates gradients up to `data.batch_size`."""
    clip_grad_norm: Positive | None = None
    """The norm that the gradient of all parameters is clipped to."""
    clip_grad_value: Positive | None = None
    """The value that each element of the gradient is clipped to."""
    adaptive_clip: Positive | None = None
    """Adaptive gradient clipping: maximum ratio of a unit's gradient to its weights; 0.01 is common."""
    averaging: AveragingPart = AveragingPart(name="none")
    """An average of the weights, evaluated beside them."""
    reproducible: Literal["off", "run", "world"] = "run"
    """run: the same command gives bit-identical results; world: on any number of processes too."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What to do about a gradient that is not finite: stop the run, or skip the step (at most 10 in a row)."""
    hang_seconds: Positive = 600.0
    """Seconds without progress before several processes are restarted."""
    threads: Threads | Auto = "auto"
    """Intra-op threads; auto: cores per process, or 1 with reproducible: world."""


class MetricPart(NamedPart):
    """A metric in addition to those of the task."""


class Evaluate(Section):
    """When and how to evaluate."""

    every_epochs: Positive | None = None
    """How often, in epochs; by default after each."""
    every_steps: Count | None = None
    """How often, in steps."""
    batch_size: BatchSize | Auto = "auto"
    """Samples per evaluation batch; auto: 256, on a CPU fewer of large samples (16 of 224×224), a batch per core."""
    num_workers: Workers | Auto = "auto"
    """Processes that read samples ahead; auto: none on a CPU, whose threads read themselves."""
    threads: Threads = 1
    """Threads inside one operation."""
    metrics: list[MetricPart] = []
    """Metrics beyond those the task brings."""
    original_size: bool | Auto = "auto"
    """Evaluate and save maps at the original size of the masks, not that of the input; auto: true for saliency."""
    save_predictions: bool = False
    """Write the prediction of each sample to predictions/: PNG files of maps, else a CSV table."""


class Checkpoint(Section):
    """When to save and which checkpoints to keep; one is also saved before each evaluation."""

    every_epochs: Positive | None = None
    """How often, in epochs; by default after each."""
    every_steps: Count | None = None
    """How often, in steps."""
    keep_last: Count = 3
    """How many of the newest checkpoints are kept."""
    keep_every: Count | None = None
    """Never delete checkpoints whose step is a multiple of this."""
    best: str | None = "auto"
    """The metric that selects the best checkpoint; auto: the task's main metric; null: none."""
    direction: Literal["auto", "max", "min"] = "auto"
    """Whether higher or lower is better; auto: `higher_is_better` of the metric."""


class Wandb(Section):
    """Weights & Biases; install `paceline[wandb]`."""

    project: Text
    """The project that the run belongs to."""
    entity: Text | None = None
    """The team or user that owns the project; null: your default."""
    group: Text | None = None
    """The group that the run belongs to."""
    tags: list[Text] = []
    """Tags of the run."""
    mode: Literal["online", "offline"] = "online"
    """offline: write to RUN/wandb only, to be sent later by `wandb sync`."""


class Mlflow(Section):
    """MLflow; install `paceline[mlflow]`."""

    experiment: Text = "Default"
    """The experiment that the run belongs to; created if there is none."""
    tracking_uri: Text | None = None
    """A server (http://HOST:5000) or a database (sqlite:///mlflow.db); null: MLflow's own default."""
    tags: dict[str, str] = {}
    """Tags of the run."""


class Logging(Section):
    """What to log, and how often."""

    every_steps: Count | None = None
    """How often, in steps; by default every 20."""
    every_epochs: Positive | None = None
    """How often, in epochs."""
    tensorboard: bool = True
    """Whether event files for TensorBoard are written."""
    images: bool = True
    """Whether samples, predictions and metrics are drawn."""
    lr_change_ratio: Annotated[float, Field(ge=1)] = 1.1
    """Changes of the learning rate by more than this ratio are logged."""
    results: Annotated[str, Field(pattern=r"^.+\.(csv|xlsx)$")] | None = None
    """A results table with one row per run and split; relative to the current folder."""
    wandb: Wandb | None = None
    """Also log to Weights & Biases."""
    mlflow: Mlflow | None = None
    """Also log to MLflow."""


class Recipe(Section):
    """A whole recipe."""

    name: RunName
    """The run's name: its directory is runs/NAME."""
    use: str | list[str | UsedModule] = []
    """Modules of your own to import first: a .py file, relative to the recipe's, or the name of a module."""
    task: TaskPart
    """The vision problem."""
    model: ModelPart
    """The network and what it starts from."""
    data: Data
    """What is learned from and measured on."""
    losses: list[LossPart] = []
    """What is minimized; left out where the task or the model brings its own losses, as in detection."""
    optimizer: OptimizerPart
    """How gradients change the parameters."""
    schedule: SchedulePart = SchedulePart()
    """How the learning rate changes over the run."""
    train: Train
    """How long, where and how exactly."""
    evaluate: Evaluate = Evaluate()
    """When and how the model is measured."""
    checkpoint: Checkpoint = Checkpoint()
    """What is kept on disk to continue from."""
    logging: Logging = Logging()
    """What is logged, and how often."""
    expect: dict[str, float] = {}
    """Metrics that this recipe reaches in its own length; compared at the end."""
