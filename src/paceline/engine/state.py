"""The state of a run: everything that a checkpoint holds, so that a resumed run is bit-identical."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.reader import Checkpoint
from paceline.checkpoint.shards import TensorShard
from paceline.checkpoint.state import Stateful, Tree, load_optimizer, optimizer_tree
from paceline.core.errors import CheckpointError
from paceline.core.intervals import Progress
from paceline.engine.nonfinite import FiniteCheck
from paceline.engine.precision.mixed import Precision
from paceline.engine.stateful import load_state
from paceline.engine.strategies.single import SingleStrategy
from paceline.loggers.meters import Meters
from paceline.models.placement import use_channels_last, with_strides_of
from paceline.optim.averaging import Averaging

Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = float | Literal["nan", "inf", "-inf"]


@dataclass
class Choices:
    """Values chosen automatically at the first start; a resumed run keeps them, whatever this machine would choose."""

    threads: int
    micro_batch_size: int
    world: int
    """The number of processes they were chosen for."""
    channels_last: bool | None = None
    """How images and weights lie in memory; None: to be chosen before the first step."""


@dataclass
class RunState:
    """Everything that resumes, in one list. Everything else is built from the recipe."""

    model: nn.Module
    """The model with the weights that the optimizer holds."""
    optimizer: Optimizer
    progress: Progress
    strategy: SingleStrategy
    """Knows which part of each tensor this process holds; it has no state itself."""
    choices: Choices
    averaging: Averaging = field(default_factory=Averaging)
    precision: Precision = field(default_factory=Precision)
    finite_check: FiniteCheck = field(default_factory=FiniteCheck)
    parts: dict[str, Stateful] = field(default_factory=dict)
    """Losses, the task and whatever else remembers something, by name."""
    meters: Meters = field(default_factory=Meters)
    """Smoothed training metrics."""
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    """The metrics of the last evaluation of each split."""
    evaluated_step: int | None = None
    """The step of the validation metrics; those of other weights do not count for a checkpoint."""
    pending: list[str] = field(default_factory=list)
    """What is due at the present step and not done yet, in order; a checkpoint keeps what is left when it is saved."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """The resolved recipe."""
    data: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What identifies the data of each split; see `data.fingerprint`."""

    def state_dict(self) -> Tree:
        """Everything but the model, as this rank writes it into a checkpoint."""
        optimizer = optimizer_tree(self.optimizer, self.model)
        return {
            "progress": self.progress.state_dict(),
            "optimizer": {**optimizer, "state": _map_tensors(optimizer["state"], self.strategy.part)},
            "averaging": _map_tensors(self.averaging.state_dict(), self.strategy.part),
            "precision": self.precision.state_dict(),
            "finite_check": self.finite_check.state_dict(),
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
            "meters": self.meters.state_dict(),
            "metrics": self.metrics,
            "pending": [action for action in self.pending if action != "save"],
            **asdict(self.choices),
            "recipe": self.recipe,
            "data": self.data,
            "versions": {"torch": torch.__version__},
        }

    def model_state_dict(self) -> dict[str, Tensor]:
        """The full weights and buffers of the model; all ranks must call it together."""
        self.strategy.share_buffers()
        return {name: self.strategy.whole(tensor) for name, tensor in self.model.state_dict().items()}

    def model_parts(self) -> dict[str, Tensor | TensorShard]:
        """The weights and buffers as this rank writes them into a checkpoint."""
        self.strategy.share_buffers()
        return {name: self.strategy.part(tensor) for name, tensor in self.model.state_dict().items()}

    def load(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint of the same recipe; raises CheckpointError if it does not fit."""
        check_state(checkpoint)
        state = checkpoint.state
        self.load_model(checkpoint)
        with explain_misfit("optimizer", checkpoint.path):
            self._load_optimizer(state["optimizer"])
        self.progress.load_state_dict(state["progress"])
        self.load_average(checkpoint)
        with explain_misfit("precision", checkpoint.path):
            self.precision.load_state_dict(state["precision"])
        self.finite_check.load_state_dict(state.get("finite_check", {}))
        with explain_misfit("losses or task", checkpoint.path):
            load_state(self.parts, state.get("parts", {}))
        self.meters.load_state_dict(state["meters"])
        self.metrics = state["metrics"]
        self.pending = [action for action in state.get("pending", []) if action != "test" or self.progress.is_done]
        if checkpoint.metrics:  # its evaluation was finished, after it was saved
            self.metrics = {**self.metrics, "val": checkpoint.metrics}
            self.evaluated_step = self.progress.step
        self._keep_choices(state)

    def load_model(self, checkpoint: Checkpoint) -> None:
        """Load the weights of a checkpoint into the model."""
        if self.choices.channels_last is None and checkpoint.state.get("channels_last") is not None:
            self.set_channels_last(checkpoint.state["channels_last"])
        try:
            self.model.load_state_dict(self._placed(checkpoint.model, self.model.state_dict()))
        except RuntimeError as error:
            raise CheckpointError(f"{checkpoint.path} does not fit the model of this recipe: {error}") from error
        self.precision.sync_weights()

    def load_average(self, checkpoint: Checkpoint) -> None:
        """Load the average of the weights, if there is one."""
        state = checkpoint.state["averaging"]
        average = self._placed(state.get("average", {}), dict(self.model.named_parameters()))
        with explain_misfit("average of the weights", checkpoint.path):
            self.averaging.load_state_dict({**state, "average": average} if average else state)

    def set_channels_last(self, enabled: bool) -> None:
        """Set the memory layout of images and weights, before the first step or while a checkpoint is loaded."""
        self.choices.channels_last = enabled
        if not enabled:  # as the model was built
            return
        for model in {self.model, self.strategy.model}:
            use_channels_last(model)
        self.strategy.rewrap()
        for parameter, state in self.optimizer.state.items():  # some optimizers have one before their first step
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    state[name] = with_strides_of(value, parameter)

    def _placed(self, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this rank keeps of each full tensor."""
        place = self.strategy.place
        return {name: place(tensor, like[name]) if name in like else tensor for name, tensor in tensors.items()}

    def _load_optimizer(self, saved: Tree) -> None:
        shapes, place = dict(self.model.named_parameters()), self.strategy.place
        state = {
            name: {key: place(value, shapes[name]) if isinstance(value, Tensor) else value for key, value in of.items()}
            for name, of in saved["state"].items()
            if name in shapes
        }
        load_optimizer(self.optimizer, self.model, {**saved, "state": state})

    def _keep_choices(self, saved: Tree) -> None:
        if saved["world"] == self.choices.world or self.strategy.name == "deterministic":
            self.choices.threads = saved["threads"]
            self.choices.micro_batch_size = saved["micro_batch_size"]


def _map_tensors(tree: Tree, function: Callable[[Tensor], Tensor | TensorShard]) -> Tree:
    """The tree with every tensor replaced."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: _map_tensors(value, function) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_map_tensors(value, function) for value in tree]
    return tree


class _Saved(BaseModel):
    """Values of exactly these types; additions of later versions are accepted."""

    model_config = ConfigDict(strict=True, extra="allow", arbitrary_types_allowed=True)


class _Progress(_Saved):
    step: Count


class _Group(_Saved):
    names: list[str]


class _Optimizer(_Saved):
    kind: str
    shapes: dict[str, list[Count]]
    state: dict[str, dict[str, Any]]
    groups: list[_Group]


class _Average(_Saved):
    steps: Count = 0
    count: Count = 0
    average: dict[str, Tensor] = {}


class _Meter(_Saved):
    window: list[Number]
    sum: Number
    count: Count


_AS_LIST = Field(strict=False)  # JSON has no tuples
_Pair = Annotated[tuple[Count, Count], _AS_LIST]


class _Data(_Saved):
    classes: list[str]
    num_samples: Count
    digest: str
    groups: dict[str, Annotated[tuple[Count, Count, str], _AS_LIST]]
    channels: Count = 3
    joints: Annotated[tuple[list[str], list[_Pair], list[_Pair]], _AS_LIST] | None = None
    category_ids: list[int] | None = None


class _State(_Saved):
    progress: _Progress
    optimizer: _Optimizer
    averaging: _Average
    precision: dict[str, Any]
    finite_check: dict[str, Count] = {}
    parts: dict[str, Any] = {}
    meters: dict[str, _Meter]
    metrics: dict[str, dict[str, Number | None]]
    pending: list[Literal["save", "evaluate", "log", "test"]] = []
    threads: Annotated[int, Field(ge=1, le=65536)]
    micro_batch_size: Annotated[int, Field(ge=1, lt=2**63)]
    world: Annotated[int, Field(ge=1, lt=2**31)]
    channels_last: bool | None = None
    recipe: dict[str, Any]
    data: dict[str, _Data] = {}


def check_state(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if the state is not that of a run, whatever its checksums say."""
    try:
        saved = _State.model_validate(checkpoint.state)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))[:200]
        found = "" if first["type"] == "missing" else f", found {repr(first['input'])[:60]}"
        raise CheckpointError(f"{checkpoint.path}: state.json: {place}: {first['msg']}{found}") from error
    if saved.progress.step != checkpoint.step:
        raise CheckpointError(
            f"{checkpoint.path}: state.json: progress.step: expected {checkpoint.step}, found {saved.progress.step}"
        )


@contextmanager
def explain_misfit(what: str, path: Path) -> Iterator[None]:
    """Re-raise the errors of a part whose saved state does not fit as CheckpointError."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise CheckpointError(f"{path}: the {what} cannot be restored: {type(error).__name__}: {reason}") from error
