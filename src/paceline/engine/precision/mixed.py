"""The precision a run computes in: float32, TF32, autocast, and Apex's levels O0 to O3."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from paceline.core.errors import TrainingError
from paceline.core.torch_private import foreach
from paceline.engine.loss_accumulator import WeightedLoss
from paceline.engine.precision.loss_scale import LossScale, make_loss_scale, unscale
from paceline.engine.precision.master_weights import Copies, cast_at_borders, halve, with_masters
from paceline.optim.clipping import Norm
from paceline.optim.optimizers import unfuse_half

Name = Literal["fp32", "tf32", "bf16", "fp16", "O0", "O1", "O2", "O3"]
_WITHOUT_SCALE = ("fp32", "tf32", "bf16", "O0")
_HALF_WEIGHTS = ("O2", "O3")
_LEAST_EPS = 1e-4  # added to roots of second moments: in float16, 1e-8 is 0, and so are the moments of small gradients


def make_precision(
    name: str,
    device: torch.device,
    loss_scale: float | Literal["dynamic"] | None = None,
    keep_norms: bool | None = None,
) -> Precision:
    """The precision of that name; None leaves the loss scale, and norm layers in float32 or not, to the name.

    Raises ValueError for what does not go together.
    """
    if name not in get_args(Name):
        raise ValueError(f"precision: expected one of {', '.join(get_args(Name))}, got {name!r}")
    if name in _WITHOUT_SCALE and loss_scale is not None:
        raise ValueError(f"precision {name} has no loss scale: its gradients have the range of float32; remove it")
    if name not in _HALF_WEIGHTS and keep_norms is not None:
        raise ValueError(f"precision {name} keeps all weights in float32; only O2 and O3 can choose for norm layers")
    if name in ("fp32", "tf32", "O0"):
        if device.type == "cuda":
            return CudaFloat32(name == "tf32")
        precision = Precision()
        if name == "tf32":
            precision.warning = (
                f"precision tf32 changes nothing here: only CUDA devices have TF32, and this is {device}"
            )
        return precision
    if name == "bf16":
        return Bf16(device)
    usual: float | Literal["dynamic"] = 1.0 if name == "O3" else "dynamic"
    scale = make_loss_scale(usual if loss_scale is None else loss_scale)
    if name in ("fp16", "O1"):
        return Fp16(device, scale)
    return HalfWeights(device, scale, name == "O2", name == "O2" if keep_norms is None else keep_norms)


class Precision:
    """Float32, and the interface of a precision, in the order in which a run calls it."""

    warning: str | None = None
    """A warning for the user before the run, if there is one."""
    has_loss_scale = False
    """Whether a step may be skipped because its losses were scaled too high."""

    def attach(self, model: nn.Module) -> nn.Module:
        """Convert the model's weights: once, after the optimizer is built and before the model is wrapped.

        The result has the model's names and buffers and the weights that the optimizer holds: averages, optimizer
        states and checkpoints are kept by it. Where the model holds those weights itself, it is the model.
        """
        return model

    def compute(self) -> AbstractContextManager[None]:
        """A context for forward passes, in training and evaluation."""
        return nullcontext()

    def backward(self, losses: Sequence[WeightedLoss]) -> None:
        """Add the gradients of the losses, times the loss scale, to those of the step."""
        add_gradients(losses)

    def unscale(self, parameters: Sequence[nn.Parameter]) -> None:
        """Give the optimizer's parameters the unscaled gradient of the step.

        It comes after the last micro-batch and the exchange among processes.
        """

    def update_loss_scale(self, norm: Norm) -> Tensor | None:
        """Update the loss scale; whether it was too high, so that the step must be skipped. None without a loss scale.

        Called once a step, with the norm of the unscaled gradient, which stays on the device.
        """
        return None

    def sync_weights(self) -> None:
        """Copy the optimizer's weights into the model, after any change of them."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""

    def metrics(self) -> dict[str, float]:
        """Values that change during a run and are logged, by name."""
        return {}

    def describe(self) -> str:
        """One line for the start of a run."""
        return "fp32"


class CudaFloat32(Precision):
    """Float32 on CUDA devices, with or without TF32 in matrix products and convolutions.

    The switches belong to the process and torch lets convolutions use TF32, so both are set where they matter.
    """

    def __init__(self, tf32: bool) -> None:
        self.tf32 = tf32

    def compute(self) -> AbstractContextManager[None]:
        return _tf32(self.tf32)

    def backward(self, losses: Sequence[WeightedLoss]) -> None:
        with _tf32(self.tf32):
            add_gradients(losses)

    def describe(self) -> str:
        return "fp32, matrix products and convolutions in tf32" if self.tf32 else "fp32"


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def _autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
    # Its cache would keep a half copy of every weight until the end of the forward pass, though few are used twice.
    return torch.autocast(device.type, dtype, cache_enabled=False)


class Bf16(Precision):
    """Autocast to bfloat16; it has the range of float32, so losses are not scaled."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def compute(self) -> AbstractContextManager[None]:
        return _autocast(self._device, torch.bfloat16)

    def describe(self) -> str:
        return "bf16 autocast"


class Scaled(Precision):
    """The base class of precisions with a loss scale."""

    has_loss_scale = True

    def __init__(self, device: torch.device, scale: LossScale) -> None:
        self.device = device
        self.scale = scale
        if device.type == "cpu":
            slow = "float16 is slow on a CPU, often many times slower than fp32"
            self.warning = f"{slow}; use it there only to try things out"

    def backward(self, losses: Sequence[WeightedLoss]) -> None:
        add_gradients(losses, self.scale.factor)

    def unscale(self, parameters: Sequence[nn.Parameter]) -> None:
        unscale(parameters, self.scale.factor)

    def update_loss_scale(self, norm: Norm) -> Tensor:
        return self.scale.update(torch.as_tensor(norm))

    def state_dict(self) -> dict[str, Any]:
        return self.scale.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale.load_state_dict(state)

    def metrics(self) -> dict[str, float]:
        return {"loss_scale": self.scale.value, "skipped_updates": self.scale.skipped}


class Fp16(Scaled):
    """Autocast to float16, with a loss scale."""

    def compute(self) -> AbstractContextManager[None]:
        return _autocast(self.device, torch.float16)

    def describe(self) -> str:
        return f"fp16 autocast, {self.scale.describe()}"


class HalfWeights(Scaled):
    """A model that holds and computes float16, norm layers excepted if they are kept.

    With `has_masters` the optimizer keeps the float32 weights it was made over and the model gets rounded copies, so
    that changes too small for float16 add up. Without, the optimizer's own weights become float16.
    """

    def __init__(self, device: torch.device, scale: LossScale, has_masters: bool, keep_norms: bool) -> None:
        super().__init__(device, scale)
        self.has_masters = has_masters
        self.keep_norms = keep_norms
        self._copies: Copies = {}

    def attach(self, model: nn.Module) -> nn.Module:
        self._copies = halve(model, self.keep_norms, self.has_masters)
        cast_at_borders(model, self.keep_norms)
        return with_masters(model, self._copies) if self.has_masters else model

    def unscale(self, parameters: Sequence[nn.Parameter]) -> None:
        """Move the gradients from the copies to their masters and divide them by the loss scale."""
        for master in parameters:
            copy = self._copies.get(master)
            if copy is not None:
                master.grad = None if copy.grad is None else copy.grad.to(master.dtype)
                copy.grad = None
        super().unscale(parameters)

    @torch.no_grad()
    def sync_weights(self) -> None:
        if self._copies:
            foreach("copy_", list(self._copies.values()), list(self._copies))

    def describe(self) -> str:
        masters = "fp32 master weights" if self.has_masters else f"no master weights, eps at least {_LEAST_EPS:g}"
        norms = "fp32" if self.keep_norms else "fp16"
        return f"fp16 weights, {masters}, norm layers in {norms}, {self.scale.describe()}"


def fit_half_weights(optimizer: torch.optim.Optimizer) -> None:
    """Raise the eps of an optimizer over float16 weights to what float16 can represent.

    It also takes its plain form where the fused one is wrong for them.
    """
    unfuse_half(optimizer)
    for group in optimizer.param_groups:
        if "eps" in group and any(parameter.dtype == torch.float16 for parameter in group["params"]):
            group["eps"] = max(group["eps"], _LEAST_EPS)


_GRAPH_ERRORS = {
    "modified by an inplace operation": "use no operation in place, such as exp_ or +=, on what a gradient needs",
    "through the graph a second time": "call no backward(), and detach() what you keep from one step to the next",
}
"""What torch says about mistakes that only a backward pass meets, and their cures."""


def add_gradients(losses: Sequence[WeightedLoss], scale: float | Tensor = 1.0) -> None:
    """Add the gradients of the losses, times `scale`, to those of the leaves."""
    # The factors enter where the chain rule starts: a multiplication in the graph would cost several times more.
    roots = [loss for loss in losses if loss.value.requires_grad]
    # Beyond the range of a float16 value a factor becomes infinite, and the step an overflow.
    factors = [_like(loss.value, loss.weight * scale) for loss in roots]
    try:
        torch.autograd.backward([loss.value for loss in roots], factors)
    except RuntimeError as error:
        cure = next((cure for words, cure in _GRAPH_ERRORS.items() if words in str(error)), None)
        if cure is None:
            raise
        found = str(error).partition(" Hint:")[0].partition(". Saved")[0].rstrip(".")
        raise TrainingError(f"the backward pass failed: {found}; in your model or loss, {cure}") from error


def _like(value: Tensor, factor: float | Tensor) -> Tensor:
    # The scale of the first step is still on the host, and must not wait for the device.
    return factor.to(value, non_blocking=True) if isinstance(factor, Tensor) else value.new_full((), factor)
