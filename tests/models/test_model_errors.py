"""Inputs that a model cannot take, and models of absurd sizes, are refused with advice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paceline.core.errors import RecipeError, TrainingError
from paceline.core.process import free_memory
from paceline.data.batch import Batch
from paceline.models.convnet import ConvNet
from paceline.models.encoder_decoder import fpn, unet
from paceline.models.model_errors import call_model, explained_allocation
from paceline.models.zoo import build_timm
from paceline.tasks.detection import Detection

SMALL = {"depth": 4, "embed_dim": 24, "num_heads": 2}


def error_of(model: nn.Module, *shape: int) -> str:
    with pytest.raises(RecipeError) as caught:
        call_model(model.eval(), torch.zeros(*shape))
    return str(caught.value)


@pytest.mark.parametrize("make", [unet, fpn])
def test_a_backbone_made_for_one_size_can_be_made_for_another(make: type) -> None:
    vit = "timm/vit_tiny_patch16_224"
    message = error_of(make(2, backbone=vit, backbone_args=SMALL), 1, 3, 64, 64)
    assert message.startswith("model: cannot take 1 image of 64×64 pixels: Input height (64) doesn't match model (224)")
    assert "model.backbone_args: {img_size: 64}, " in message
    assert (
        call_model(
            make(2, backbone=vit, backbone_args={**SMALL, "img_size": 64}).eval(), torch.zeros(1, 3, 64, 64)
        ).ndim
        == 4
    )
    message = error_of(make(2, backbone=vit, backbone_args=SMALL), 2, 3, 64, 96)
    assert message.startswith("model: cannot take 2 images of 96×64 pixels")
    assert "model.backbone_args: {img_size: [64, 96]}, " in message, "height first, as timm has it"


def test_a_classifier_takes_its_size_as_its_own_argument() -> None:
    assert "model.args: {img_size: 64}, " in error_of(build_timm("vit_tiny_patch16_224", 2, 3, SMALL), 1, 3, 64, 64)


def test_models_of_any_size_get_no_size_advice() -> None:
    message = error_of(build_timm("test_resnet", 2, 3, {}), 1, 3, 1, 32, 32)
    assert message.startswith("model: cannot take 1 clip of 1 frame of 32×32 pixels: ")
    assert "img_size" not in message
    assert "transforms" in message


def test_errors_that_are_not_about_shapes_are_raised_unchanged() -> None:
    class Failing(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("a neighbor has gone")

    with pytest.raises(RuntimeError, match="a neighbor has gone"):
        call_model(Failing(), torch.zeros(1, 3, 8, 8))


def test_an_allocation_that_fails_names_what_it_asked_for() -> None:
    with pytest.raises(ValueError, match=r"more than 4e\+06 GB .* build a smaller model"), explained_allocation():
        nn.Linear(10**6, 10**9)
    with pytest.raises(RuntimeError, match="inconsistent"), explained_allocation():
        torch.ones(2) @ torch.ones(3)


def test_the_free_memory_is_a_sensible_number() -> None:
    assert 1 << 20 < free_memory() < 1 << 50


class _OneValue(nn.Module):
    """A detector whose last map is 1×1, as SSD has one."""

    loss_names = ("bbox_regression",)

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, images: Tensor, targets: object = None) -> object:
        return self.norm(images.mean((2, 3), keepdim=True))


def test_a_last_step_of_one_sample_is_explained_in_detection_too() -> None:
    model = _OneValue()
    boxes, classes, crowd = [torch.ones(1, 4)], [torch.zeros(1, dtype=torch.int64)], [torch.zeros(1, dtype=torch.bool)]
    batch = Batch(image=torch.zeros(1, 3, 8, 8), boxes=boxes, classes=classes, crowd=crowd)
    with pytest.raises(RecipeError) as caught:
        Detection(model, ["cell"]).losses(model, batch)
    assert "cannot take 1 image of 8×8 pixels" in str(caught.value)
    assert "data.drop_last" in str(caught.value)


def test_mistakes_in_a_model_name_it_and_its_line() -> None:
    class Mistaken(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return self.layerz(images)  # type: ignore[no-any-return, operator]

    class Forgetful(nn.Module):
        def forward(self, images: Tensor) -> None: ...

    for model in (Mistaken(), nn.DataParallel(Mistaken())):
        with pytest.raises(TrainingError, match=r"^model Mistaken: .*test_model_errors.py:\d+: AttributeError.*layerz"):
            call_model(model, torch.zeros(1, 3, 4, 4))
    with pytest.raises(TrainingError, match="model Forgetful: forward gave None"):
        call_model(Forgetful(), torch.zeros(1, 3, 4, 4))
    with pytest.raises(TypeError):  # a mistake of ours shows where it is
        call_model(ConvNet(2, 3, [4]), None)  # type: ignore[arg-type]


def test_a_wrong_number_of_channels_is_named() -> None:
    assert "images have 3 channels: build the model with in_channels" in error_of(nn.Conv2d(1, 2, 3), 1, 3, 8, 8)


class _Own(nn.Module):
    """A model of a user's: a layer behind the last pooling, or a sum with images."""

    def __init__(self, *layers: nn.Module, adds: bool = False) -> None:
        super().__init__()
        self.layers, self.adds = nn.Sequential(*layers), adds

    def forward(self, images: Tensor) -> Tensor:
        output: Tensor = self.layers(images)
        return output + images if self.adds else output


@pytest.mark.parametrize(
    ("model", "line", "advice", "is_of_images"),
    [
        (_Own(nn.Flatten(), nn.Linear(5, 2)), 2, "layers.1, Linear(in_features=5, ", False),
        (_Own(nn.Conv2d(3, 4, 1), nn.Conv2d(5, 2, 1)), 2, "layers.1, Conv2d(5, 2, ", False),
        (_Own(nn.Conv2d(3, 3, 3, stride=2), nn.Upsample(scale_factor=2), adds=True), 3, "strides", False),
        (_Own(nn.MaxPool2d(16)), 2, "transforms", True),
    ],
    ids=["linear", "channels", "sum", "too small"],
)
def test_sizes_that_do_not_fit_in_a_users_model_name_line_and_layer(
    model: nn.Module, line: int, advice: str, is_of_images: bool
) -> None:
    message = error_of(model, 1, 3, 9, 9)
    first = _Own.forward.__code__.co_firstlineno
    assert f"test_model_errors.py, line {first + line - 1})" in message
    assert advice in message
    assert ("transforms" in message) == is_of_images


def test_layers_of_torch_that_a_function_put_together_are_named() -> None:
    message = error_of(nn.Sequential(nn.Flatten(), nn.Linear(5, 2)), 1, 3, 8, 8)
    assert "1, Linear(in_features=5, " in message
    assert "transforms" not in message
