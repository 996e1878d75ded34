"""Each parameter gets the learning rate and decay of its kind, of the rules that name it and of its layer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from paceline.core.torchvision_ops import import_torchvision
from paceline.optim.group_presets import KINDS, NORM_KINDS, PRESETS, Preset, Rule, Settings, combine
from paceline.optim.layer_decay import Layers
from paceline.optim.param_groups import Group, RulesError, build_groups, find_parameters

GOLDEN = Path(__file__).parent.parent / "golden"

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(2, 2, 3),
    "conv_without_bias": lambda: nn.Conv2d(2, 2, 3, bias=False),
    "linear": lambda: nn.Linear(2, 2),
    "batch_norm": lambda: nn.BatchNorm2d(2),
    "group_norm": lambda: nn.GroupNorm(1, 2),
    "layer_norm": lambda: nn.LayerNorm(2),
    "instance_norm": lambda: nn.InstanceNorm2d(2, affine=True),
    "rms_norm": lambda: nn.RMSNorm(2),
    "embedding": lambda: nn.Embedding(3, 2),
}


def network(layers: Mapping[str, str]) -> nn.Module:
    """A net of the named layers, nested as their names say."""
    root = nn.Module()
    for name, layer in layers.items():
        *path, last = name.split(".")
        parent = root
        for key in path:
            if key not in dict(parent.named_children()):
                parent.add_module(key, nn.Module())
            parent = parent.get_submodule(key)
        parent.add_module(last, LAYERS[layer]())
    return root


def golden(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((GOLDEN / f"groups_{name}.json").read_text(encoding="utf-8"))
    return content


def by_name(groups: Sequence[Group]) -> dict[str, list[float]]:
    return {name: [group.lr_scale, group.weight_decay] for group in groups for name in group.names}


def grouped(model: nn.Module, weight_decay: float, preset: Preset, **others: Any) -> dict[str, list[float]]:
    groups = build_groups(
        model,
        weight_decay,
        preset.kinds,
        preset.rules,
        no_decay_1d=preset.no_decay_1d,
        use_no_weight_decay=preset.use_no_weight_decay,
        **others,
    )
    return by_name(groups)


def near(expected: Mapping[str, list[float]]) -> dict[str, Any]:
    """What equals these numbers to rounding."""
    return {name: pytest.approx(pair, rel=1e-12) for name, pair in expected.items()}


def kinds(model: nn.Module) -> dict[str, str]:
    return {found.name: found.kind for found in find_parameters(model)}


# Golden numbers


def test_vit_fine_tuning_follows_mae() -> None:
    import_torchvision()
    import timm

    expected = golden("vit")
    with torch.device("meta"):
        model = timm.create_model("vit_base_patch16_224")
    found = grouped(model, expected["weight_decay"], PRESETS["no_decay_1d"], layer_decay=expected["layer_decay"])
    assert found == near(expected["parameters"])


def test_pet_preset() -> None:
    expected = golden("pet")
    found = grouped(network(expected["layers"]), expected["weight_decay"], PRESETS["pet"])
    assert found == near(expected["parameters"])


def test_the_pet_preset_is_right_for_a_net_without_biases() -> None:
    assert grouped(network({"stem": "conv_without_bias"}), 0.1, PRESETS["pet"]) == {"stem.weight": [1.0, 0.1]}


def test_pet_preset_with_a_factor_for_each_stage_and_kind() -> None:
    expected = golden("pet")
    rules = tuple(
        Rule(f"*.{stage}.*", kind, float(factor))
        for stage, factors in expected["stages"].items()
        for kind, factor in factors.items()
    )
    preset = combine(PRESETS["pet"], Preset(rules=rules))
    found = grouped(network(expected["layers"]), expected["weight_decay"], preset)
    assert found == near(expected["with_stages"])


@pytest.mark.parametrize("names", golden("minet")["presets"])
def test_minet_presets(names: str) -> None:
    expected = golden("minet")
    preset = combine(*(PRESETS[name] for name in names.split(", ")))
    found = grouped(network(expected["layers"]), expected["weight_decay"], preset)
    assert found == near(expected["presets"][names])


# Kinds


class GrandNorm2d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2))
        self.bias = nn.Parameter(torch.zeros(2))


class MyRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


class PreNorm(nn.Module):
    """Called a norm, but a block that holds one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2)
        self.fn = nn.Linear(2, 2)
        self.gamma = nn.Parameter(torch.ones(2))


class TransformerLike(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.queries = nn.Parameter(torch.zeros(10, 4))
        self.layer_scale = nn.Parameter(torch.ones(4, 1, 1))
        self.temperature = nn.Parameter(torch.ones(()))
        self.relative_position_bias_table = nn.Parameter(torch.zeros(9, 1))
        self.q_bias = nn.Parameter(torch.zeros(4))
        self.attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
        self.words = nn.Embedding(5, 4)


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (nn.BatchNorm1d(2), "batch_norm"),
        (nn.BatchNorm3d(2), "batch_norm"),
        (nn.SyncBatchNorm(2), "batch_norm"),
        (nn.GroupNorm(1, 2), "group_norm"),
        (nn.LayerNorm(2), "layer_norm"),
        (nn.InstanceNorm1d(2, affine=True), "instance_norm"),
        (nn.RMSNorm(2), "rms_norm"),
        (MyRMSNorm(), "rms_norm"),
        (GrandNorm2d(), "other_norm"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else value,
)
def test_weight_and_bias_of_a_norm_layer_are_norm(module: nn.Module, kind: str) -> None:
    assert set(kinds(module).values()) == {kind}


def test_norm_layers_of_timm_and_torchvision() -> None:
    torchvision = import_torchvision()
    import timm.layers

    expected = {
        "BatchNormAct2d": "batch_norm",
        "GroupNorm1": "group_norm",
        "GroupNormAct": "group_norm",
        "LayerNorm2d": "layer_norm",
        "LayerNormAct2d": "layer_norm",
        "RmsNorm": "rms_norm",
        "RmsNorm2d": "rms_norm",
        "RmsNormAct": "rms_norm",
        "SimpleNorm": "other_norm",
        "EvoNorm2dS0": "other_norm",
        "EvoNorm2dB1": "other_norm",
        "FilterResponseNormTlu2d": "other_norm",
    }
    arguments = {"GroupNormAct": {"group_size": 4}, "EvoNorm2dS0": {"group_size": 4}}
    found = {name: getattr(timm.layers, name)(8, **arguments.get(name, {})) for name in expected}
    assert {name: set(kinds(module).values()) for name, module in found.items()} == {
        name: {kind} for name, kind in expected.items()
    }
    assert set(kinds(torchvision.models.convnext.LayerNorm2d(8)).values()) == {"layer_norm"}
    assert kinds(torchvision.ops.FrozenBatchNorm2d(8)) == {}


def test_kinds_come_from_modules_not_from_names() -> None:
    model = network({"norm": "linear", "bias": "conv", "weight": "batch_norm", "embedding": "linear"})
    assert kinds(model) == {
        "norm.weight": "weight",
        "norm.bias": "bias",
        "bias.weight": "weight",
        "bias.bias": "bias",
        "weight.weight": "batch_norm",
        "weight.bias": "batch_norm",
        "embedding.weight": "weight",
        "embedding.bias": "bias",
    }


def test_tokens_and_tables_are_embeddings_but_factors_are_not() -> None:
    found = kinds(TransformerLike())
    of_kind = {kind: {name for name, one in found.items() if one == kind} for kind in found.values()}
    assert of_kind == {
        "embedding": {"cls_token", "queries", "relative_position_bias_table", "words.weight"},
        "bias": {
            "q_bias",
            "attention.in_proj_bias",
            "attention.bias_k",
            "attention.bias_v",
            "attention.out_proj.bias",
        },
        "weight": {"layer_scale", "temperature", "attention.in_proj_weight", "attention.out_proj.weight"},
    }


def test_a_block_that_is_called_a_norm_is_none() -> None:
    assert kinds(PreNorm()) == {
        "gamma": "weight",
        "norm.weight": "layer_norm",
        "norm.bias": "layer_norm",
        "fn.weight": "weight",
        "fn.bias": "bias",
    }


def test_a_parametrised_weight_stays_a_weight() -> None:
    assert kinds(spectral_norm(nn.Linear(2, 3))) == {"bias": "bias", "parametrizations.weight.original": "weight"}


def test_settings_of_one_norm_win_over_those_of_all_where_they_are_given() -> None:
    model = network({"a": "batch_norm", "b": "group_norm", "c": "layer_norm"})
    settings = {"norm": Settings(3.0, 0.0), "group_norm": Settings(weight_decay=0.2), "layer_norm": Settings(5.0)}
    found = by_name(build_groups(model, 0.1, settings))
    assert (found["a.weight"], found["b.weight"], found["c.weight"]) == ([3.0, 0.0], [3.0, 0.2], [5.0, 0.0])


# Rules

NET = {
    "backbone.stem.conv": "conv",
    "backbone.stage1.conv": "conv",
    "backbone.stage1.norm": "group_norm",
    "backbone.stage10.conv": "conv",
    "head": "linear",
}


@pytest.mark.parametrize(
    ("match", "kind", "expected"),
    [
        ("head", None, {"head.weight", "head.bias"}),
        ("backbone.stage1", None, {f"backbone.stage1.{m}.{p}" for m in ("conv", "norm") for p in ("weight", "bias")}),
        ("head.bias", None, {"head.bias"}),
        ("*.stage1.*", "bias", {"backbone.stage1.conv.bias"}),
        ("*.stage1.*", "norm", {"backbone.stage1.norm.weight", "backbone.stage1.norm.bias"}),
        ("*", "group_norm", {"backbone.stage1.norm.weight", "backbone.stage1.norm.bias"}),
        ("backbone.stage?.conv.weight", None, {"backbone.stage1.conv.weight"}),
        (r"re:backbone\.stage\d+\.conv\.weight", None, {"backbone.stage1.conv.weight", "backbone.stage10.conv.weight"}),
    ],
)
def test_what_a_rule_matches(match: str, kind: str | None, expected: set[str]) -> None:
    found = by_name(build_groups(network(NET), 0.1, {}, [Rule(match, kind, lr_scale=0.5)]))
    assert {name for name, (scale, _) in found.items() if scale == 0.5} == expected


def test_a_regular_expression_has_to_fit_the_whole_name() -> None:
    with pytest.raises(RulesError, match="re:head"):
        build_groups(network(NET), 0.1, {}, [Rule("re:head")])


def test_factors_multiply_and_the_last_decay_wins() -> None:
    rules = [
        Rule("backbone", lr_scale=0.5, weight_decay=0.3),
        Rule("*.stage1.*", lr_scale=0.25, weight_decay=0.2),
        Rule("*", "bias", lr_scale=8.0),
    ]
    found = by_name(build_groups(network(NET), 0.1, {"bias": Settings(2.0, 0.0)}, rules))
    assert found["backbone.stage1.conv.weight"] == [0.125, 0.2]
    assert found["backbone.stage1.conv.bias"] == [2.0, 0.2]
    assert found["backbone.stem.conv.bias"] == [8.0, 0.3]
    assert found["head.bias"] == [16.0, 0.0]


def test_rules_that_match_nothing_are_all_refused_with_near_names() -> None:
    rules = [Rule("backbon.*"), Rule("head"), Rule("re:(stem"), Rule("head", "norm"), Rule("zzzz")]
    with pytest.raises(RulesError) as caught:
        build_groups(network(NET), 0.1, {}, rules)
    problems = dict(caught.value.problems)
    assert problems.keys() == {0, 2, 3, 4}
    assert re.match(r"match 'backbon\.\*' matches no name; .*\bbackbone\b", problems[0])
    assert problems[2].startswith('"re:(stem" is not a regular expression: ')
    assert problems[3] == '"head" matches no parameter of kind norm; those it matches are of kind weight, bias'
    assert re.match(r"match 'zzzz' matches no name; .*\bbackbone, head$", problems[4])


def test_a_rule_for_frozen_parameters_is_not_refused() -> None:
    model = network(NET)
    model.get_submodule("backbone").requires_grad_(False)
    groups = build_groups(model, 0.1, {}, [Rule("backbone", lr_scale=0.1)])
    assert by_name(groups) == {"head.weight": [1.0, 0.1], "head.bias": [1.0, 0.1]}


# Exceptions from decay, sharing, merging, labels


class Listing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(2, 2))
        self.inner = nn.ModuleDict({"tau": nn.Linear(2, 2), "rho": nn.Linear(2, 2)})

    def no_weight_decay(self) -> set[str]:
        return {"table", "*.tau.weight", "absent"}


def test_what_a_model_lists_goes_without_decay_if_asked() -> None:
    model = nn.ModuleDict({"net": Listing()})
    assert [group.weight_decay for group in build_groups(model, 0.1, {})] == [0.1]
    found = by_name(build_groups(model, 0.1, {}, use_no_weight_decay=True))
    assert {name for name, (_, decay) in found.items() if decay == 0} == {"net.table", "net.inner.tau.weight"}


def test_one_dimension_goes_without_decay_unless_a_rule_gives_it() -> None:
    model = network({"conv": "conv", "norm": "layer_norm"})
    found = by_name(build_groups(model, 0.1, {"norm": Settings(weight_decay=0.7)}, [], no_decay_1d=True))
    assert found == {"conv.weight": [1, 0.1], "conv.bias": [1, 0], "norm.weight": [1, 0], "norm.bias": [1, 0]}
    found = by_name(build_groups(model, 0.1, {}, [Rule("norm", weight_decay=0.3)], no_decay_1d=True))
    assert found["norm.weight"] == [1, 0.3]


def test_shared_parameters_are_counted_once_under_their_first_name() -> None:
    model = network({"first": "embedding", "middle": "linear", "last": "linear"})
    first, last = model.get_submodule("first"), model.get_submodule("last")
    last.weight = first.weight
    groups = build_groups(model, 0.1, {"embedding": Settings(0.5)})
    assert [group.names for group in groups] == [
        ["first.weight"],
        ["middle.weight", "middle.bias", "last.bias"],
    ]


def test_labels_tell_what_brought_parameters_into_a_group() -> None:
    model = network(NET)
    layers = Layers(3, {name: 1 if "stem" in name else 3 for name, _ in model.named_parameters()})
    rules = [Rule("backbone.*", lr_scale=0.1)]
    groups = build_groups(model, 0.1, {"bias": Settings(2.0, 0.0)}, rules, layers, 0.5)
    assert [group.label for group in groups] == [
        "weight · backbone.* · layer 1",
        "bias · backbone.* · layer 1",
        "weight, norm · backbone.* · layer 3",
        "bias · backbone.* · layer 3",
        "weight · layer 3",
        "bias · layer 3",
    ]
    specific = build_groups(model, 0.1, {"group_norm": Settings(weight_decay=0.0)})
    assert [group.label for group in specific] == ["weight, bias", "group_norm"]


def test_equal_labels_are_distinguished() -> None:
    model = network({"a": "conv", "b": "conv"})
    model.get_submodule("a").weight = nn.Parameter(torch.zeros(2))
    groups = build_groups(model, 0.1, {"bias": Settings(2.0)}, no_decay_1d=True)
    assert [group.label for group in groups] == ["weight · ×1, decay 0", "bias", "weight · ×1, decay 0.1"]


def test_layer_decay_must_be_positive() -> None:
    with pytest.raises(ValueError, match="layer-wise decay: expected a number > 0, got 0"):
        build_groups(network(NET), 0.1, {}, layer_decay=0)


# Properties

segments = st.sampled_from(["a", "b", "c10"])
names = st.lists(segments, min_size=1, max_size=3).map(".".join)
nets = st.dictionaries(names, st.sampled_from(sorted(LAYERS)), min_size=1, max_size=8).filter(
    lambda layers: not any(a != b and b.startswith(f"{a}.") for a in layers for b in layers)
)
scales = st.sampled_from([0.1, 0.5, 1.0, 2.0, 3.0])
decays = st.sampled_from([None, 0.0, 0.01, 0.3])


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, str], list[str], dict[str, Settings], list[Rule], dict[str, int]]:
    """A net with frozen names, settings of kinds, rules of which each matches, and a layer for each parameter."""
    net = draw(nets)
    parameters = list(kinds(network(net)))
    frozen = draw(st.lists(st.sampled_from(parameters), unique=True, max_size=3))
    settings = draw(st.dictionaries(st.sampled_from(KINDS), st.builds(Settings, scales, decays), max_size=4))
    rules = []
    for name in draw(st.lists(st.sampled_from(parameters), max_size=4)):
        shapes = [name, f"{name[:2]}*", f"*{name[-5:]}", f"*{name[1:-1]}?"]
        rules.append(Rule(draw(st.sampled_from(shapes)), None, draw(scales), draw(decays)))
    layers = {name: draw(st.integers(0, 4)) for name in parameters}
    return net, frozen, settings, rules, layers


def expected_kind(layer: str, name: str) -> tuple[str, str]:
    """The kind of a parameter and the general kind above it, from the layer it was made as."""
    if layer in NORM_KINDS:
        return layer, "norm"
    kind = "embedding" if layer == "embedding" else name.rpartition(".")[2]
    return kind, kind


@given(cases(), st.sampled_from([None, 0.5, 0.9]))
def test_each_parameter_is_in_one_group_with_the_product_of_its_factors(case: Any, layer_decay: float | None) -> None:
    net, frozen, settings, rules, layer_of = case
    model = network(net)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    groups = build_groups(model, 0.05, settings, rules, Layers(4, layer_of), layer_decay)

    grouped = [name for group in groups for name in group.names]
    learning = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert sorted(grouped) == sorted(learning)
    assert [id(p) for g in groups for p in g.parameters] == [id(model.get_parameter(name)) for name in grouped]
    assert len({(group.lr_scale, group.weight_decay) for group in groups}) == len(groups)
    firsts = [learning.index(group.names[0]) for group in groups]
    assert firsts == sorted(firsts)
    for group in groups:
        assert group.names == [name for name in learning if name in group.names]

    for name, (lr_scale, decay) in by_name(groups).items():
        kind, general = expected_kind(net[name.rpartition(".")[0]], name)
        given_scales = [settings[k].lr_scale for k in (kind, general) if k in settings]
        given_decays = [settings[k].weight_decay for k in (general, kind) if k in settings]
        meant = [rule for rule in rules if fnmatchcase(name, rule.match)]
        factors = [*given_scales[:1], *(rule.lr_scale for rule in meant)]
        factors += [] if layer_decay is None else [layer_decay] * (4 - layer_of[name])
        assert lr_scale == pytest.approx(reduce(lambda a, b: a * b, factors, 1.0))
        decays = [d for d in [0.05, *given_decays, *(rule.weight_decay for rule in meant)] if d is not None]
        assert decay == decays[-1]


# Optimizers


@pytest.mark.parametrize(
    ("optimizer", "arguments", "weight", "bias"),
    [
        # weight 2 with gradient 0, decay 0.5, rate 0.1; bias 1 with gradient 1, no decay, rate 0.2
        (SGD, {"momentum": 0.9}, 1.9, 0.8),
        (Adam, {}, 1.9, 0.8),
        (AdamW, {}, 1.9, 0.8),
        (RMSprop, {"alpha": 0.99, "momentum": 0.9}, 1.0, -1.0),  # the gradient over √0.01 of itself
    ],
)
def test_every_optimizer_keeps_groups_and_decay(
    optimizer: type[Optimizer], arguments: dict[str, Any], weight: float, bias: float
) -> None:
    model = nn.Linear(1, 1).double()
    with torch.no_grad():
        model.weight.fill_(2.0)
        model.bias.fill_(1.0)
    groups = build_groups(model, 0.5, PRESETS["bias_double"].kinds)
    made: Any = optimizer
    learner = made([group.as_optimizer_group(0.1) for group in groups], lr=0.1, weight_decay=9.0, **arguments)
    kept = [(g["lr"], g["weight_decay"], g["lr_scale"], g["label"]) for g in learner.param_groups]
    assert kept == [(0.1, 0.5, 1.0, "weight"), (0.2, 0.0, 2.0, "bias")]

    model.weight.grad = torch.zeros_like(model.weight)
    model.bias.grad = torch.ones_like(model.bias)
    learner.step()
    assert [model.weight.item(), model.bias.item()] == pytest.approx([weight, bias], abs=1e-6)
    stored = learner.state_dict()["param_groups"]
    assert [(group["lr_scale"], group["label"]) for group in stored] == [(1.0, "weight"), (2.0, "bias")]


# Presets


def test_presets_combine() -> None:
    own = Preset(kinds={"norm": Settings(lr_scale=0.5)}, rules=(Rule("head", lr_scale=10.0),))
    both = combine(PRESETS["no_decay_bias_norm"], PRESETS["backbone_tenth"], PRESETS["no_decay_1d"], own)
    assert both.kinds == {"bias": Settings(None, 0.0), "norm": Settings(0.5, 0.0)}
    assert [rule.match for rule in both.rules] == ["backbone.*", "head"]
    assert both.no_decay_1d
    assert both.use_no_weight_decay
    assert combine() == Preset()


def test_presets_need_no_torch() -> None:
    code = "import sys, paceline.optim.group_presets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
