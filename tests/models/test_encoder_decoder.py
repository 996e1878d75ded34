"""Decoders on backbones of two libraries: sizes, gradients, published weights, checkpointing, determinism."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from paceline.core.registry import register
from paceline.engine.activation_checkpointing.blocks import find_blocks
from paceline.engine.activation_checkpointing.checkpointing import checkpoint_block
from paceline.models.encoder_decoder import PixelClassifier, build_encoder, fpn, unet
from paceline.models.freezing import Freezing
from paceline.models.surgery import Surgery, find_heads, load_weights

BUILDERS: list[Callable[..., PixelClassifier]] = [unet, fpn]
TORCHVISION = "torchvision/mobilenet_v2"
LOADED_TENSORS = 312  # of the published file: all but the weight and the bias of its classifier
Builder = Callable[..., PixelClassifier]


def built(make: Builder, seed: int = 3, **arguments: Any) -> PixelClassifier:
    torch.manual_seed(seed)
    return make(**arguments)


def gradients(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    logits = model(images)
    (logits * torch.linspace(-1, 1, logits.shape[-1])).square().mean().backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize(
    "backbone", ["timm/test_efficientnet", "timm/test_convnext", "timm/vgg11", TORCHVISION, "torchvision/resnet18"]
)
@pytest.mark.parametrize("make", BUILDERS)
def test_logits_have_the_size_of_the_images(make: Builder, backbone: str) -> None:
    with torch.device("meta"):
        model = make(num_classes=5, in_channels=4, backbone=backbone)
        for size in [(64, 64), (65, 97), (47, 33)]:
            assert model(torch.empty(2, 4, *size)).shape == (2, 5, *size)


@pytest.mark.parametrize("make", BUILDERS)
def test_transformers_work_at_the_size_that_they_are_made_for(make: Builder) -> None:
    for name in ("swin_tiny_patch4_window7_224", "vit_tiny_patch16_224"):
        with torch.device("cpu"):  # they compute tables while they are made
            model = make(num_classes=2, backbone=f"timm/{name}", backbone_args={"img_size": 64}).eval()
        with torch.no_grad():
            assert model(torch.rand(1, 3, 64, 64)).shape == (1, 2, 64, 64)


@pytest.mark.parametrize("backbone", ["timm/test_efficientnet", TORCHVISION])
@pytest.mark.parametrize("make", BUILDERS)
def test_every_parameter_gets_the_same_gradient_every_time(make: Builder, backbone: str) -> None:
    images = torch.rand(2, 3, 65, 47)
    model = built(make, num_classes=2, backbone=backbone)
    states = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first = gradients(model, images)
    assert set(first) == {name for name, _ in model.named_parameters()}
    # A bias before a norm layer would have none, so there is no such bias.
    assert [name for name, gradient in first.items() if not gradient.any()] == []
    model.load_state_dict(states)
    again = gradients(model, images)
    assert all(torch.equal(gradient, again[name]) for name, gradient in first.items())
    other = built(make, num_classes=2, backbone=backbone).state_dict()
    assert all(torch.equal(tensor, other[name]) for name, tensor in states.items())


def test_maps_come_from_the_last_layer_of_each_resolution() -> None:
    mobile = build_encoder(TORCHVISION, 3, {})
    assert mobile.channels == [16, 24, 32, 96, 1280]
    assert mobile.strides == [2, 4, 8, 16, 32]
    assert mobile.module.output_layers == {f"features.{index}" for index in (1, 3, 6, 13, 18)}
    residual = build_encoder("torchvision/resnet18", 3, {})
    assert residual.channels == [64, 64, 128, 256, 512]
    assert residual.module.output_layers == {"relu", "layer1", "layer2", "layer3", "layer4"}
    assert residual.module.training


def test_an_encoder_computes_what_the_library_s_model_computes() -> None:
    from paceline.models.zoo import build_torchvision

    torch.manual_seed(5)
    whole: Any = build_torchvision("mobilenet_v2", 1, 3, {}).eval()
    torch.manual_seed(5)
    levels = build_encoder(TORCHVISION, 3, {}).module.eval()
    images = torch.rand(1, 3, 65, 97)
    with torch.no_grad():
        maps = levels(images)
        assert torch.equal(maps[-1], whole.features(images))
        assert torch.equal(maps[1], whole.features[:4](images))
    assert [tuple(each.shape[-2:]) for each in maps] == [(33, 49), (17, 25), (9, 13), (5, 7), (3, 4)]


def test_the_decoders_are_light() -> None:
    with torch.device("meta"):
        encoder = sum(each.numel() for each in build_encoder(TORCHVISION, 3, {}).module.parameters())
        sizes = [
            sum(each.numel() for each in make(num_classes=1, backbone=TORCHVISION).parameters()) for make in BUILDERS
        ]
    assert encoder == 2_223_872  # the library's 3,504,872 without 1280 · 1000 + 1000 of the classifier
    # Joined channels into 128, 64, 32 and 16, and each again into itself; norms have two numbers a channel.
    joined = [(128 + 96, 128), (128 + 32, 64), (64 + 24, 32), (32 + 16, 16)]
    steps = sum(9 * (inputs + width) * width + 4 * width for inputs, width in joined)
    assert sizes[0] - encoder == (1280 * 128 + 2 * 128) + steps + (16 + 1)
    laterals = sum(inputs * 64 + 2 * 64 for inputs in (24, 32, 96, 1280))
    assert sizes[1] - encoder == laterals + 5 * (9 * 64 * 64 + 2 * 64) + (64 + 1)


def test_widths_are_those_asked_for() -> None:
    model = unet(num_classes=3, backbone="timm/test_convnext", widths=[48, 24, 12])
    assert model.head.in_channels == 12
    assert fpn(num_classes=3, backbone="timm/test_convnext", width=20).head.in_channels == 20
    with pytest.raises(ValueError, match=r"widths .* 4 maps.* 3 stages"):
        unet(num_classes=3, backbone="timm/test_convnext", widths=[48, 24])


def test_backbones_without_such_maps_are_refused() -> None:
    with pytest.raises(ValueError, match="torchvision/swin_t"):
        build_encoder("torchvision/swin_t", 3, {})


def test_backbones_that_timm_cannot_cut_are_refused() -> None:
    with pytest.raises(ValueError, match="timm/visformer_tiny"):
        build_encoder("timm/visformer_tiny", 3, {})


@pytest.mark.parametrize("backbone", ["timm/mobilenetv2_050", "torchvision/resnet18"])
@pytest.mark.parametrize("make", BUILDERS)
def test_blocks_of_encoder_and_decoder_can_be_computed_again(make: Builder, backbone: str) -> None:
    images = torch.rand(2, 3, 64, 48)
    model = built(make, num_classes=2, backbone=backbone)
    expected = gradients(model, images)
    again = built(make, num_classes=2, backbone=backbone)
    blocks = find_blocks(again)
    assert sum(block.name.startswith("backbone.") for block in blocks) >= 8
    assert sum(block.name.startswith("decoder.") for block in blocks) >= 4
    for block in blocks:
        checkpoint_block(block)
    found = gradients(again, images)
    assert all(torch.equal(gradient, found[name]) for name, gradient in expected.items())
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())


def published_surgery() -> Surgery:
    return Surgery(rename=[("features", "backbone.features")], exclude=["classifier", "decoder"])


@pytest.mark.parametrize("make", BUILDERS)
def test_weights_of_torchvision_s_classifier_go_into_the_encoder(make: Builder) -> None:
    from paceline.models.zoo import build_torchvision

    torch.manual_seed(9)
    weights = build_torchvision("mobilenet_v2", 1000, 3, {}).state_dict()
    model = built(make, num_classes=2, backbone=TORCHVISION)
    assert find_heads(model) == ["head"]
    report = load_weights(model, weights, published_surgery())
    assert len(report.loaded) == len(weights) - 2 == LOADED_TENSORS
    assert report.unexpected == []
    assert report.missing == ["head.weight", "head.bias"]
    own = model.state_dict()
    assert all(torch.equal(own[f"backbone.{n}"], tensor) for n, tensor in weights.items() if n.startswith("features"))


@pytest.mark.real_data
def test_the_published_file_goes_into_the_encoder(real_data: Path) -> None:
    file = real_data / "weights" / "mobilenet_v2-b0353104.pth"
    if not file.exists():
        pytest.skip(f"{file} is not there")
    model = unet(num_classes=1, backbone=TORCHVISION)
    report = load_weights(model, torch.load(file, weights_only=True), published_surgery())
    assert len(report.loaded) == LOADED_TENSORS


def test_weights_of_timm_go_into_the_encoder() -> None:
    from paceline.models.zoo import build_timm

    weights = build_timm("mobilenetv2_050", 10, 3, {}).state_dict()
    model = unet(num_classes=2, in_channels=1, backbone="timm/mobilenetv2_050")
    unused = ["backbone.conv_head", "backbone.bn2", "backbone.classifier"]
    report = load_weights(model, weights, Surgery(rename=[("*", "backbone.*")], exclude=[*unused, "decoder"]))
    assert [*report.reshaped] == ["backbone.conv_stem.weight"]
    assert report.missing == ["head.weight", "head.bias"]


def test_a_frozen_encoder_keeps_its_statistics() -> None:
    model = built(unet, num_classes=2, backbone=TORCHVISION)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    freezing = Freezing(model, ["backbone"])
    freezing.train_mode(model)
    learned = gradients(model, torch.rand(2, 3, 64, 64))
    assert {name.partition(".")[0] for name in learned} == {"decoder", "head"}
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert {name.partition(".")[0] for name in changed} == {"decoder"}


def test_recipes_know_them_and_refuse_unknown_backbones() -> None:
    models = register.kind("model")
    entry = models.find("unet")
    assert entry is not None
    arguments = entry.arguments.model_validate({"backbone": TORCHVISION})
    with torch.device("meta"):
        model = entry.resolve()(num_classes=1, in_channels=3, **arguments.model_dump())
        assert model(torch.empty(1, 3, 64, 64)).shape == (1, 1, 64, 64)
    with pytest.raises(
        ValidationError, match=r"there is no model 'timm/mobilenetv2_1OO'; there is .*timm/mobilenetv2_100"
    ):
        entry.arguments.model_validate({"backbone": "timm/mobilenetv2_1OO"})
    with pytest.raises(ValidationError, match="expected timm/NAME or torchvision/NAME"):
        entry.arguments.model_validate({"backbone": "mobilenet_v2"})
