"""Settings of parameter groups: by kind, by name, and presets of both.

Nothing here imports torch, so that a recipe's kinds and rules are checked before it is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

KindName = Literal[
    "weight", "bias", "norm", "embedding",
    "batch_norm", "group_norm", "layer_norm", "instance_norm", "rms_norm", "other_norm",
]  # fmt: skip
"""What a parameter can be; `norm` stands for all norm kinds together."""
PresetName = Literal["pet", "bias_double", "no_decay_bias_norm", "backbone_tenth", "no_decay_1d"]
KINDS: tuple[str, ...] = get_args(KindName)
NORM_KINDS = KINDS[4:]


@dataclass(frozen=True)
class Settings:
    """What one kind of parameter gets; what is None is taken from the general kind, and from the optimizer last."""

    lr_scale: float | None = None
    weight_decay: float | None = None

    def over(self, other: Settings) -> Settings:
        """These settings, with those of `other` where this one gives none."""
        return Settings(
            other.lr_scale if self.lr_scale is None else self.lr_scale,
            other.weight_decay if self.weight_decay is None else self.weight_decay,
        )


@dataclass(frozen=True)
class Rule:
    """A factor on the learning rate, and perhaps a decay, for parameters found by name.

    `match` is a pattern as in models/patterns.py: a name or glob, of a parameter or of a module with all below it, or a
    regular expression written `re:…` that has to fit the whole name. `kind` narrows the rule to one kind of parameter.
    """

    match: str
    kind: str | None = None
    lr_scale: float = 1.0
    weight_decay: float | None = None
    may_match_none: bool = False
    """Whether the rule is right for models without such a parameter too."""


@dataclass(frozen=True)
class Preset:
    """Kinds, rules and exceptions from decay that belong together."""

    kinds: Mapping[str, Settings] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    no_decay_1d: bool = False
    """Whether tensors of one dimension go without decay."""
    use_no_weight_decay: bool = False
    """Whether what the model lists in its `no_weight_decay()` goes without decay."""


PRESETS: dict[str, Preset] = {
    # Biases, those of norm layers too, learn twice as fast without decay; group norm has no decay.
    "pet": Preset(
        {"group_norm": Settings(weight_decay=0.0)},
        (Rule("*bias*", lr_scale=2.0, weight_decay=0.0, may_match_none=True),),  # Pet: "bias" in the name
    ),
    "bias_double": Preset({"bias": Settings(2.0, 0.0)}),
    "no_decay_bias_norm": Preset({"bias": Settings(weight_decay=0.0), "norm": Settings(weight_decay=0.0)}),
    "backbone_tenth": Preset(rules=(Rule("backbone.*", lr_scale=0.1),)),
    "no_decay_1d": Preset(no_decay_1d=True, use_no_weight_decay=True),
}


def combine(*presets: Preset) -> Preset:
    """All of them as one: a later one's settings of a kind win, rules follow each other, exceptions add up."""
    kinds: dict[str, Settings] = {}
    for preset in presets:
        for kind, settings in preset.kinds.items():
            kinds[kind] = settings.over(kinds.get(kind, Settings()))
    return Preset(
        kinds,
        tuple(rule for preset in presets for rule in preset.rules),
        any(preset.no_decay_1d for preset in presets),
        any(preset.use_no_weight_decay for preset in presets),
    )


def general_kind(kind: str) -> str:
    """`norm` for one of its kinds, any other kind as it is."""
    return "norm" if kind in NORM_KINDS else kind
