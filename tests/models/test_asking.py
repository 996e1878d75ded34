"""What is said when a model cannot take what it is given."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.core.errors import RecipeError
from paceline.models.decoders import fpn, unet
from paceline.models.forward import call_model
from paceline.models.zoo import build_timm

SMALL = {"depth": 4, "embed_dim": 24, "num_heads": 2}


def told(model: nn.Module, *shape: int) -> str:
    with pytest.raises(RecipeError) as caught:
        call_model(model.eval(), torch.zeros(*shape))
    return str(caught.value)


@pytest.mark.parametrize("make", [unet, fpn])
def test_a_backbone_made_for_one_size_can_be_made_for_another(make: type) -> None:
    vit = "timm/vit_tiny_patch16_224"
    message = told(make(2, backbone=vit, backbone_args=SMALL), 1, 3, 64, 64)
    assert message.startswith("model: cannot take 1 image of 64×64 pixels: Input height (64) doesn't match model (224)")
    assert "; make it for this size, model.backbone_args: {img_size: 64}, change the size" in message
    assert (
        call_model(
            make(2, backbone=vit, backbone_args={**SMALL, "img_size": 64}).eval(), torch.zeros(1, 3, 64, 64)
        ).ndim
        == 4
    )
    message = told(make(2, backbone=vit, backbone_args=SMALL), 2, 3, 64, 96)
    assert message.startswith("model: cannot take 2 images of 96×64 pixels")
    assert "model.backbone_args: {img_size: [64, 96]}, " in message, "height first, as timm has it"


def test_a_classifier_takes_its_size_as_its_own_argument() -> None:
    assert "model.args: {img_size: 64}, " in told(build_timm("vit_tiny_patch16_224", 2, 3, SMALL), 1, 3, 64, 64)


def test_others_are_not_told_of_a_size_to_be_made_for() -> None:
    message = told(build_timm("test_resnet", 2, 3, {}), 1, 3, 1, 32, 32)
    assert message.startswith("model: cannot take 1 clip of 1 frame of 32×32 pixels: ")
    assert "img_size" not in message
    assert message.endswith("; change the size or the number of frames in data's transforms, or take another model")


def test_what_is_not_about_shapes_is_left_as_it_is() -> None:
    class Failing(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("a neighbor has gone")

    with pytest.raises(RuntimeError, match="a neighbor has gone"):
        call_model(Failing(), torch.zeros(1, 3, 8, 8))
