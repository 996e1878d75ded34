"""The optimizers and averages that recipes can name."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from paceline.core.arguments import Arguments, Count, CountOrZero, NonNegative, PartialShare, Positive
from paceline.core.registry import register
from paceline.optim.third_party import TabledFamily, any_arguments, members_of, other_version_of, tabled_arguments

optimizers = register.kind("optimizer")
averages = register.kind("averaging")

Betas = Annotated[list[PartialShare], Field(min_length=2, max_length=2)]


class SgdArguments(Arguments):
    """Arguments of `sgd`."""

    momentum: PartialShare = 0.9
    dampening: PartialShare = 0.0
    nesterov: bool = False


class AdamArguments(Arguments):
    """Arguments of `adam` and `adamw`."""

    betas: Betas = [0.9, 0.999]
    eps: Positive = 1e-8
    amsgrad: bool = False


class RmspropArguments(Arguments):
    """Arguments of `rmsprop`."""

    alpha: PartialShare = 0.99
    eps: Positive = 1e-8
    momentum: PartialShare = 0.0
    centered: bool = False


class AdadeltaArguments(Arguments):
    """Arguments of `adadelta`."""

    rho: PartialShare = 0.9
    eps: Positive = 1e-6


class AdagradArguments(Arguments):
    """Arguments of `adagrad`."""

    lr_decay: NonNegative = 0.0
    initial_accumulator_value: NonNegative = 0.0
    eps: Positive = 1e-10


class LambArguments(Arguments):
    """Arguments of `lamb`."""

    betas: Betas = [0.9, 0.999]
    eps: Positive = 1e-6
    bias_correction: bool = True
    grad_averaging: bool = True
    max_grad_norm: Positive | None = 1.0
    """Clips the norm of the whole gradient, apart from the recipe's own clipping; null: not."""
    trust_clip: bool = False
    """Lets a layer's learning rate only be lowered."""
    always_adapt: bool = False
    """Adapts layers without weight decay too."""


class LarsArguments(Arguments):
    """Arguments of `lars`."""

    momentum: PartialShare = 0.9
    dampening: PartialShare = 0.0
    nesterov: bool = False
    trust_coeff: Positive = 0.001
    eps: Positive = 1e-8
    trust_clip: bool = False
    """Lets a layer's learning rate only be lowered (LARC)."""
    always_adapt: bool = False
    """Adapts layers without weight decay too."""


class LionArguments(Arguments):
    """Arguments of `lion`."""

    betas: Betas = [0.9, 0.99]
    caution: bool = False
    """Leaves out what points against the gradient."""


class MuonArguments(Arguments):
    """Arguments of `muon`: Muon for matrices and filters, AdamW (`betas`, `fallback_lr_scale`) for the rest."""

    momentum: PartialShare = 0.95
    nesterov: bool = False
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """Rounds in which an update is made orthogonal."""
    eps: Positive = 1e-7
    adjust_lr_fn: Literal["match_rms_adamw", "original", "rms_to_rms"] = "match_rms_adamw"
    """How a matrix's step depends on its shape; the default suits the lr and weight_decay of AdamW."""
    betas: Betas = [0.9, 0.95]
    fallback_lr_scale: Positive = 1.0
    """The learning rate of AdamW's part, as a multiple of `lr`."""
    adamw: list[str] = []
    """Names or patterns of further parameters for AdamW: Muon is for hidden layers, so heads and embeddings."""


class TrustRatioArguments(Arguments):
    """Arguments of `add_trust_ratio`."""

    coefficient: Positive = 0.02
    clip: bool = True
    """Lets a layer's learning rate only be lowered (LARC); false: multiplies it (LARS)."""
    eps: NonNegative = 1e-8


class EmaArguments(Arguments):
    """Arguments of `ema`."""

    decay: PartialShare = 0.9999
    warmup: bool = True
    """Forgets faster at first."""
    every_steps: Count = 1
    start_step: CountOrZero = 0


class SwaArguments(Arguments):
    """Arguments of `swa`."""

    start: PartialShare | Count = 0.75
    """A share of the run, or a number of steps."""
    every_steps: Count | None = None
    """null: once an epoch."""


_OURS = "paceline.optim.optimizers"
optimizers.add("sgd", "torch.optim:SGD", SgdArguments, "stochastic gradient descent with momentum")
optimizers.add("adam", "torch.optim:Adam", AdamArguments, "Adam; weight decay is part of the gradient")
optimizers.add("adamw", "torch.optim:AdamW", AdamArguments, "Adam with decoupled weight decay")
optimizers.add("rmsprop", "torch.optim:RMSprop", RmspropArguments, "RMSprop, with momentum if asked for")
optimizers.add("adadelta", "torch.optim:Adadelta", AdadeltaArguments, "Adadelta; its own lr is 1")
optimizers.add("adagrad", "torch.optim:Adagrad", AdagradArguments, "Adagrad: steps shrink as gradients add up")
optimizers.add("lamb", f"{_OURS}:lamb", LambArguments, "Adam with a trust ratio per layer, for large batches")
optimizers.add("lars", f"{_OURS}:lars", LarsArguments, "SGD with a trust ratio per layer, for large batches")
optimizers.add("lion", f"{_OURS}:lion", LionArguments, "the sign of a momentum; wants a tenth of AdamW's lr")
optimizers.add("muon", f"{_OURS}:muon", MuonArguments, "orthogonal steps for matrices and filters, AdamW for the rest")
for _class, _summary in {
    "Adamax": "Adam by the largest gradient instead of their squares",
    "NAdam": "Adam with Nesterov momentum",
    "RAdam": "Adam that warms up by itself",
    "ASGD": "SGD that averages its steps",
    "Rprop": "steps by the gradient's sign alone; for whole data sets as one batch; no weight decay",
    "Adafactor": "Adam with little memory: rows and columns of squares",
}.items():
    _name = _class.lower()
    optimizers.add(_name, f"torch.optim:{_class}", tabled_arguments("torch", _name), _summary)
optimizers.families.append(
    TabledFamily(
        prefix="timm/",
        target=f"{_OURS}:timm_optimizer",
        arguments=any_arguments("timm"),
        summary="any optimizer of timm, by its name there",
        members=members_of("timm"),
        is_open=other_version_of("timm"),
    )
)

averages.add("none", "paceline.optim.averaging:NoAveraging", summary="no average")
averages.add("ema", "paceline.optim.averaging:Ema", EmaArguments, "exponential moving average of the weights")
averages.add(
    "swa", "paceline.optim.averaging:Swa", SwaArguments, "plain mean of the weights of the last part of the run"
)
