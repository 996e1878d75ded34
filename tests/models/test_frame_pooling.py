"""Videos classified by image backbones: what is pooled, frozen backbones, published weights, checkpointing."""

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from paceline.core.registry import register
from paceline.engine.activation_checkpointing.blocks import find_blocks
from paceline.engine.activation_checkpointing.checkpointing import checkpoint_block
from paceline.models.frame_pooling import FramePooling
from paceline.models.freezing import Freezing
from paceline.models.surgery import Surgery, find_heads, load_weights
from paceline.models.zoo import build_torchvision

TIMM, TORCHVISION = "timm/mobilenetv2_050", "torchvision/mobilenet_v2"


def built(**arguments: Any) -> FramePooling:
    torch.manual_seed(2)
    return FramePooling(num_classes=3, **arguments)


def gradients(model: FramePooling, clips: Tensor) -> dict[str, Tensor]:
    model(clips).square().sum().backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize(
    ("backbone", "num_features"),
    [
        ("timm/resnet18", 512),
        ("timm/mobilenetv3_small_050", 1024),
        (TORCHVISION, 1280),
        ("torchvision/resnet18", 512),
        ("torchvision/vgg11", 4096),
        ("torchvision/vit_b_32", 768),
        ("torchvision/densenet121", 1024),
    ],
)
def test_any_image_backbone_gives_features(backbone: str, num_features: int) -> None:
    size = 224 if "vit" in backbone else 65
    with torch.device("meta"):
        model = FramePooling(num_classes=5, in_channels=4, backbone=backbone)
        assert model.head.in_features == num_features
        assert model.eval()(torch.empty(2, 4, 3, size, size)).shape == (2, 5)


@pytest.mark.parametrize("backbone", [TIMM, TORCHVISION])
@pytest.mark.parametrize("pooling", ["mean", "max", "statistics"])
def test_it_pools_the_features_of_the_frames(backbone: str, pooling: Literal["mean", "max", "statistics"]) -> None:
    model = built(backbone=backbone, pooling=pooling).eval()
    clips = torch.rand(2, 3, 4, 33, 47)
    with torch.no_grad():
        frames = torch.stack([model.backbone(clips[:, :, at]) for at in range(4)])
        mean, deviation = frames.mean(0), frames.std(0, correction=0)
        statistics = torch.cat([mean, (deviation.square() + 1e-6).sqrt()], 1)
        pooled = {"mean": mean, "max": frames.max(0).values, "statistics": statistics}[pooling]
        torch.testing.assert_close(model(clips), pooled @ model.head.weight.T + model.head.bias)
        backwards = model(clips.flip(2))
    torch.testing.assert_close(model(clips), backwards)


def test_only_its_own_dropout_counts() -> None:
    model = built(backbone=TORCHVISION, dropout=0.3)
    rates = {name: each.p for name, each in model.named_modules() if isinstance(each, torch.nn.Dropout)}
    assert rates == {"dropout": 0.3}


@pytest.mark.parametrize("backbone", [TIMM, TORCHVISION])
def test_every_parameter_gets_a_gradient_with_and_without_checkpointing(backbone: str) -> None:
    clips = torch.rand(2, 3, 4, 64, 64)
    model = built(backbone=backbone)
    expected = gradients(model, clips)
    assert set(expected) == {name for name, _ in model.named_parameters()}
    assert [name for name, gradient in expected.items() if not gradient.any()] == []
    again = built(backbone=backbone)
    blocks = find_blocks(again)
    assert sum(block.name.startswith("backbone.") for block in blocks) >= 10
    for block in blocks:
        checkpoint_block(block)
    found = gradients(again, clips)
    assert all(torch.equal(gradient, found[name]) for name, gradient in expected.items())


@pytest.mark.parametrize("patterns", [["backbone"], ["all_but_head"]])
def test_a_frozen_backbone_gives_the_same_features_in_training(patterns: list[str]) -> None:
    model = built(backbone=TORCHVISION)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    clips = torch.rand(2, 3, 4, 64, 64)
    with torch.no_grad():
        expected = model.eval()(clips)
    freezing = Freezing(model, patterns)
    freezing.train_mode(model)
    assert model.training
    assert torch.equal(model(clips), expected)
    assert set(gradients(model, clips)) == {"head.weight", "head.bias"}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_weights_of_torchvision_s_classifier_go_into_the_backbone() -> None:
    weights = build_torchvision("mobilenet_v2", 1000, 3, {}).state_dict()
    model = built(backbone=TORCHVISION)
    assert find_heads(model) == ["head"]
    report = load_weights(model, weights, Surgery(rename=[("features", "backbone.features")], exclude=["classifier"]))
    assert len(report.loaded) == len(weights) - 2
    assert report.missing == ["head.weight", "head.bias"]
    assert torch.equal(model.state_dict()["backbone.features.18.0.weight"], weights["features.18.0.weight"])


def test_a_backbone_without_a_linear_end_is_refused() -> None:
    with pytest.raises(ValueError, match="torchvision/squeezenet1_1"):
        built(backbone="torchvision/squeezenet1_1")


def test_recipes_know_it() -> None:
    entry = register.kind("model").find("frame_pooling")
    assert entry is not None
    arguments = entry.arguments.model_validate({"backbone": TIMM, "pooling": "max", "dropout": 0.2})
    model = entry.resolve()(num_classes=2, in_channels=3, **arguments.model_dump())
    assert (model.pooling, model.dropout.p) == ("max", 0.2)


def test_frames_that_are_all_alike_have_finite_gradients() -> None:
    model = built(backbone=TIMM, pooling="statistics")
    still = torch.rand(2, 3, 1, 33, 33).expand(-1, -1, 4, -1, -1)
    assert all(gradient.isfinite().all() for gradient in gradients(model.eval(), still).values())
