"""Torchvision's segmentation and video models by name."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.core.errors import RecipeError
from paceline.core.registry import Entry, register
from paceline.engine.activation_checkpointing.blocks import find_blocks
from paceline.engine.activation_checkpointing.checkpointing import checkpoint_block
from paceline.models.model_errors import call_model
from paceline.models.surgery import Surgery, find_heads, load_weights

SEGMENTATION = [
    "deeplabv3_mobilenet_v3_large",
    "deeplabv3_resnet101",
    "deeplabv3_resnet50",
    "fcn_resnet101",
    "fcn_resnet50",
    "lraspp_mobilenet_v3_large",
]
VIDEO = ["mc3_18", "mvit_v1_b", "mvit_v2_s", "r2plus1d_18", "r3d_18", "swin3d_b", "swin3d_s", "swin3d_t"]


def entry_of(name: str) -> Entry:
    entry = register.kind("model").find(f"torchvision/{name}")
    assert entry is not None
    return entry


def built(name: str, num_classes: int = 5, in_channels: int = 3, **arguments: Any) -> nn.Module:
    entry = entry_of(name)
    given = entry.arguments.model_validate(arguments).model_dump()
    torch.manual_seed(4)
    model: nn.Module = entry.resolve()(num_classes=num_classes, in_channels=in_channels, **given)
    return model


def gradients(model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(6)
    outputs = model(inputs)
    found = outputs.values() if isinstance(outputs, dict) else [outputs]
    loss: Tensor = torch.stack([each.square().mean() for each in found]).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def test_the_families_hold_the_library_s_models() -> None:
    names = {family.prefix: family.names() for family in register.kind("model").families}
    assert names["torchvision/segmentation/"] == [f"torchvision/segmentation/{name}" for name in SEGMENTATION]
    assert names["torchvision/video/"] == [f"torchvision/video/{name}" for name in VIDEO]
    assert entry_of("segmentation/fcn_resnet50").target == "paceline.models.zoo:build_segmentation"
    assert register.kind("model").find("torchvision/segmentation/resnet18") is None


@pytest.mark.parametrize("name", ["deeplabv3_mobilenet_v3_large", "fcn_resnet50", "lraspp_mobilenet_v3_large"])
def test_logits_have_the_size_of_the_images(name: str) -> None:
    outputs = {"out"} if "lraspp" in name else {"out", "aux"}
    with torch.device("meta"):
        model = built(f"segmentation/{name}", in_channels=4)
        for size in [(64, 64), (65, 97)]:
            logits = model(torch.empty(2, 4, *size))
            assert {key: tuple(value.shape) for key, value in logits.items()} == dict.fromkeys(outputs, (2, 5, *size))
        if "aux" in outputs:
            assert set(built(f"segmentation/{name}", aux=False)(torch.empty(2, 3, 64, 64))) == {"out"}


@pytest.mark.parametrize("name", ["deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"])
def test_every_parameter_gets_a_gradient_with_and_without_checkpointing(name: str) -> None:
    images = torch.rand(2, 3, 65, 64)
    model = built(f"segmentation/{name}")
    expected = gradients(model, images)
    assert set(expected) == {each for each, _ in model.named_parameters()}
    again = built(f"segmentation/{name}")
    blocks = find_blocks(again)
    assert len(blocks) >= 10
    for block in blocks:
        checkpoint_block(block)
    found = gradients(again, images)
    assert all(torch.equal(gradient, found[each]) for each, gradient in expected.items())


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("deeplabv3_mobilenet_v3_large", ["classifier.4", "aux_classifier.4"]),
        ("fcn_resnet50", ["classifier.4", "aux_classifier.4"]),
        ("lraspp_mobilenet_v3_large", ["classifier.low_classifier", "classifier.high_classifier"]),
    ],
)
def test_weights_for_other_classes_replace_every_head(name: str, heads: list[str]) -> None:
    weights = built(f"segmentation/{name}", num_classes=21).state_dict()
    model = built(f"segmentation/{name}", num_classes=5)
    assert find_heads(model) == heads
    report = load_weights(model, weights, Surgery())
    assert set(report.replaced) == {f"{head}.{kind}" for head in heads for kind in ("weight", "bias")}
    assert len(report.loaded) == len(weights) - 4


@pytest.mark.parametrize("name", ["mc3_18", "mvit_v2_s", "r2plus1d_18", "swin3d_t"])
def test_video_models_take_the_classes_and_channels_of_the_data(name: str) -> None:
    frames, size = (16, 224) if "mvit" in name else (5, 64)
    with torch.device("meta"):
        model = built(f"video/{name}", in_channels=1)
        assert model(torch.empty(2, 1, frames, size, size)).shape == (2, 5)
    assert sum(each.shape[0] == 5 for each in model.parameters()) == 2


def test_r2plus1d_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        model = built("video/r2plus1d_18", num_classes=400)
    assert sum(each.numel() for each in model.parameters()) == 31_505_325


def test_a_video_model_trains_with_and_without_checkpointing() -> None:
    clips = torch.rand(2, 3, 4, 32, 32)
    model = built("video/mc3_18")
    expected = gradients(model, clips)
    assert set(expected) == {each for each, _ in model.named_parameters()}
    again = built("video/mc3_18")
    for block in find_blocks(again):
        checkpoint_block(block)
    found = gradients(again, clips)
    assert all(torch.equal(gradient, found[each]) for each, gradient in expected.items())


@pytest.mark.parametrize("name", ["mvit_v2_s", "r2plus1d_18", "swin3d_t"])
def test_video_models_have_blocks(name: str) -> None:
    with torch.device("meta"):
        assert len(find_blocks(built(f"video/{name}"))) >= 8


def test_a_clip_that_mvit_cannot_take_is_named() -> None:
    with torch.device("meta"):
        model = built("video/mvit_v2_s")
        with pytest.raises(RecipeError, match=r"cannot take 1 clip of 8 frames of 64×112 pixels.*change the size"):
            call_model(model, torch.empty(1, 3, 8, 112, 64))


def test_naming_them_needs_neither_torch_nor_the_libraries() -> None:
    code = (
        "import sys\n"
        "from paceline import register\n"
        "entry = register.kind('model').find('torchvision/segmentation/fcn_resnet50')\n"
        "entry.arguments(aux=False)\n"
        "print({'torch', 'timm', 'torchvision'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "set()\n", done.stderr
