"""Frozen parts do not learn, do not count, and begin to learn when their step comes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.models.freezing import Freezing
from paceline.models.zoo import build_timm, build_torchvision


class Small(nn.Module):
    """A backbone of two blocks with norm layers, one of them without parameters, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)),
            nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, affine=False)),
        )
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(images).mean((2, 3))))
        return logits


BLOCK_0 = ["blocks.0.0.weight", "blocks.0.0.bias", "blocks.0.1.weight", "blocks.0.1.bias"]
BLOCK_1 = ["blocks.1.0.weight", "blocks.1.0.bias"]
NORM = ["norm.weight", "norm.bias"]
HEAD = ["head.weight", "head.bias"]


def learning(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def frozen_norms(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if not module.training]


def train(model: nn.Module, size: int = 8) -> None:
    """One update of whatever learns."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    model(torch.rand(4, 3, size, size)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("patterns", "frozen", "norms"),
    [
        (["blocks"], BLOCK_0 + BLOCK_1, ["blocks.0.1", "blocks.1.1"]),
        (["blocks.0"], BLOCK_0, ["blocks.0.1"]),
        (["blocks.0.*", "norm"], BLOCK_0 + NORM, ["blocks.0.1", "norm"]),
        (["blocks.1"], BLOCK_1, ["blocks.1.1"]),
        (["*.bias"], ["blocks.0.0.bias", "blocks.0.1.bias", "blocks.1.0.bias", "norm.bias", "head.bias"], []),
        (["re:blocks[.]0[.]1[.].*"], BLOCK_0[2:], ["blocks.0.1"]),
        (["all_but_head"], BLOCK_0 + BLOCK_1 + NORM, ["blocks.0.1", "blocks.1.1", "norm"]),
        (["head"], HEAD, []),
    ],
)
def test_patterns_choose_parameters_and_the_norm_layers_they_fill(
    patterns: list[str], frozen: list[str], norms: list[str]
) -> None:
    model = Small()
    freezing = Freezing(model, patterns)
    assert freezing.frozen_at(0) == freezing.frozen_at(10**6) == frozen
    assert learning(model) == [name for name, _ in model.named_parameters() if name not in frozen]
    assert frozen_norms(model) == norms
    model.eval()
    freezing.train_mode(model)
    assert frozen_norms(model) == norms


def test_what_is_frozen_keeps_every_bit_and_has_no_gradient() -> None:
    torch.manual_seed(0)
    model = Small()
    freezing = Freezing(model, ["blocks"])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in range(3):
        model.eval()
        freezing.train_mode(model)
        train(model)
    for name, tensor in model.state_dict().items():
        assert tensor.equal(before[name]) == name.startswith("blocks"), name
    assert all((parameter.grad is None) == name.startswith("blocks") for name, parameter in model.named_parameters())


def test_parts_begin_to_learn_at_their_step_and_stay_free() -> None:
    model = Small()
    freezing = Freezing(model, ["all_but_head"], [(20, ["blocks.0"]), (10, ["blocks.1", "norm"])])
    assert freezing.unfreeze_steps == (10, 20)
    assert [freezing.frozen_at(step) for step in (0, 9, 10, 19, 20, 99)] == [
        *[BLOCK_0 + BLOCK_1 + NORM] * 2,
        *[BLOCK_0] * 2,
        *[[]] * 2,
    ]
    assert {step: due for step in range(30) if (due := freezing.due(step))} == {10: BLOCK_1 + NORM, 20: BLOCK_0}
    freezing.apply(10)
    assert learning(model) == BLOCK_1 + NORM + HEAD
    assert frozen_norms(model) == ["blocks.0.1"]
    freezing.apply(20)
    assert frozen_norms(model) == []
    train(model)
    # Going back, as a run does that is continued from an earlier checkpoint.
    freezing.apply(5)
    assert learning(model) == HEAD
    assert model.get_parameter("blocks.0.0.weight").grad is None
    assert frozen_norms(model) == ["blocks.0.1", "blocks.1.1", "norm"]


def test_a_step_changes_no_mode_of_a_model_that_is_evaluated() -> None:
    model = Small().eval()
    freezing = Freezing(model, ["blocks"], [(3, ["blocks"])])
    freezing.apply(3)
    assert not any(module.training for module in model.modules())


stages = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.sampled_from(["blocks.0", "blocks.1", "norm", "*.bias"]), min_size=1)),
    max_size=3,
)


@settings(max_examples=60, deadline=None)
@given(unfreeze=stages, resumed=st.integers(0, 8))
def test_what_is_frozen_follows_from_the_step_alone(unfreeze: list[tuple[int, list[str]]], resumed: int) -> None:
    walked, jumped = Small(), Small()
    try:
        walking = Freezing(walked, ["all_but_head"], unfreeze)
    except ValueError:
        reject()  # something is unfrozen twice
    jumping = Freezing(jumped, ["all_but_head"], unfreeze)
    freed: set[str] = set()
    for step in range(resumed + 1):
        freed.update(walking.due(step))
        if walking.due(step):
            walking.apply(step)
    jumping.apply(resumed)
    assert (learning(walked), frozen_norms(walked)) == (learning(jumped), frozen_norms(jumped))
    assert freed == set(walking.frozen_at(0)) - set(walking.frozen_at(resumed))
    assert set(walking.unfreeze_steps) == {step for step in range(10) if walking.due(step)}


@pytest.mark.parametrize(
    ("patterns", "unfreeze", "words"),
    [
        (["block"], [], r"freeze 'block' .* blocks"),
        (["blocks", "blocks.2.*"], [], r"freeze 'blocks\.2\.\*' .* blocks"),
        (["zzz"], [], "blocks, norm, head"),
        (["*"], [], r"freeze '\*' leaves nothing to train"),
        (["all_but_head", "head"], [], "'all_but_head', 'head' leaves nothing to train"),
        (["blocks"], [(5, ["bloks.1"])], r"unfreeze 'bloks\.1' .* blocks\.1"),
        (["blocks"], [(5, ["head"])], "unfreeze 'head' at step 5"),
        (["blocks"], [(5, ["blocks"]), (9, ["blocks.1"])], r"unfreeze 'blocks\.1' at step 9"),
        (["blocks"], [(0, ["blocks"])], "unfreeze at step 0: expected a step ≥ 1"),
    ],
)
def test_wrong_declarations_change_nothing(
    patterns: list[str], unfreeze: list[tuple[int, list[str]]], words: str
) -> None:
    model = Small()
    with pytest.raises(ValueError, match=words):
        Freezing(model, patterns, unfreeze)
    assert len(learning(model)) == len(list(model.parameters()))
    assert frozen_norms(model) == []


def test_a_model_without_a_head_says_so() -> None:
    with pytest.raises(ValueError, match="all_but_head"):
        Freezing(nn.Sequential(nn.Conv2d(3, 8, 3)), ["all_but_head"])


def test_a_shared_parameter_is_frozen_under_any_of_its_names() -> None:
    model: Any = nn.Module()
    model.encoder, model.decoder, model.head = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    model.decoder.weight = model.encoder.weight
    freezing = Freezing(model, ["decoder"], [(4, ["decoder.weight"])])
    assert freezing.frozen_at(0) == ["encoder.weight", "decoder.bias"]
    assert freezing.due(4) == ["encoder.weight"]


def test_what_the_model_itself_holds_fixed_is_never_unfrozen() -> None:
    model = Small()
    model.get_submodule("blocks.0.1").requires_grad_(False)
    freezing = Freezing(model, ["blocks"], [(4, ["blocks"])])
    assert "blocks.0.1.weight" not in freezing.frozen_at(0)
    assert "blocks.0.1" in frozen_norms(model)
    freezing.apply(4)
    assert not model.get_parameter("blocks.0.1.weight").requires_grad


def test_the_description_counts_and_names_whole_modules() -> None:
    freezing = Freezing(Small(), ["blocks.0", "*.bias", "norm"], [(7, ["blocks.0"]), (9, ["norm.bias"])])
    # Block 0: 3·4·9 + 4 and 4 + 4; block 1: 4·4·9 + 4; norm 4 + 4; head 8 + 2.
    assert freezing.describe() == [
        "frozen: 134 of 286 parameters (8 of 10 tensors): blocks.0, blocks.1.0.bias, norm, head.bias",
        "unfrozen at step 7: 120 of them (4 tensors): blocks.0",
        "unfrozen at step 9: 4 of them (1 tensor): norm.bias",
    ]
    many = nn.Sequential(*(nn.Linear(1, 1) for _ in range(9)))
    assert Freezing(many, ["[0-7]"]).describe() == [
        "frozen: 16 of 18 parameters (16 of 18 tensors): 0, 1, 2, 3, 4, 5 and 2 more"
    ]


def test_no_freezing_does_nothing() -> None:
    model = Small()
    freezing = Freezing(model)
    model.eval()
    freezing.apply(0)
    freezing.train_mode(model)
    assert (frozen_norms(model), len(learning(model))) == ([], 10)
    assert (freezing.frozen_at(0), freezing.due(3), freezing.describe(), freezing.unfreeze_steps) == ([], [], [], ())


def test_mobilenet_learns_in_its_head_alone() -> None:
    torch.manual_seed(0)
    model = build_torchvision("mobilenet_v2", 2, 3, {"width_mult": 0.25})
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    model(torch.rand(8, 3, 32, 32))  # statistics with which features reach the head
    freezing = Freezing(model, ["all_but_head"])
    assert learning(model) == ["classifier.1.weight", "classifier.1.bias"]
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    assert frozen_norms(model) == norms
    assert len(norms) == 52
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    freezing.train_mode(model)
    train(model, size=32)
    changed = {name for name, tensor in model.state_dict().items() if not tensor.equal(before[name])}
    assert changed == {"classifier.1.weight", "classifier.1.bias"}
    assert freezing.describe()[0].endswith(": features")


def test_a_vit_is_unfrozen_from_the_top_down() -> None:
    args = {"img_size": 32, "depth": 3, "embed_dim": 24, "num_heads": 2}
    model = build_timm("vit_tiny_patch16_224", 5, 3, args)
    freezing = Freezing(model, ["all_but_head"], [(10, ["blocks.2", "norm"]), (20, ["blocks"])])
    assert learning(model) == ["head.weight", "head.bias"]
    # A block: two norms of 2·24, attention 24·72 + 72 and 24·24 + 24, MLP 24·96 + 96 and 96·24 + 24: 7,224.
    assert freezing.describe()[1:] == [
        "unfrozen at step 10: 7,272 of them (14 tensors): blocks.2, norm",
        "unfrozen at step 20: 14,448 of them (24 tensors): blocks.0, blocks.1",
    ]
    freezing.apply(20)
    assert freezing.frozen_at(20) == ["cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"]
    freezing.train_mode(model)
    assert frozen_norms(model) == []
    train(model, size=32)
