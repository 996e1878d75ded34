"""Which blocks are found in models of many kinds."""

import pytest
import torch
from checkpointed_nets import NETS, UNet, flat
from torch import nn

from paceline.engine.activation_checkpointing.blocks import best_number, find_blocks, join_neighbors
from paceline.models.minet import minet_resnet50

FOUND = {
    "resnet18": (8, "layer1.0", "layer4.1"),
    "resnet50": (16, "layer1.0", "layer4.2"),
    "timm_resnet50": (16, "layer1.0", "layer4.2"),
    "mobilenet_v2": (20, "features.0", "classifier"),
    "timm_mobilenetv2": (17, "blocks.0", "blocks.6"),
    "vgg16_bn": (8, "features.0-6", "classifier"),
    "timm_vgg11_bn": (6, "features.0-7", "head"),
    "vit_b_16": (12, "encoder.layers.encoder_layer_0", "encoder.layers.encoder_layer_11"),
    "transformer": (4, "blocks.0", "blocks.3"),
    "convnext_tiny": (23, "features.0", "classifier"),
    "timm_convnext": (17, "stem", "head"),
    "efficientnet_b0": (19, "features.0", "classifier"),
    "timm_efficientnet_b0": (16, "blocks.0.0", "blocks.6.0"),
    "swin_t": (16, "features.0", "features.7.1"),
    "densenet121": (62, "features.conv0-pool0", "features.denseblock4.denselayer16"),
    "googlenet": (12, "conv1", "inception5b"),
    "r3d_18": (9, "stem", "layer4.1"),
    "convnet": (9, "stages.0.0-1", "stages.2.3"),
    "unet": (5, "first", "up2"),
    "whole": (5, "net.first", "net.up2"),
}


@pytest.mark.parametrize("name", FOUND)
def test_blocks_are_found_from_the_structure(name: str) -> None:
    with torch.device("meta"):
        blocks = find_blocks(NETS[name]())
    assert (len(blocks), blocks[0].name, blocks[-1].name) == FOUND[name]


@pytest.mark.parametrize("name", FOUND)
def test_no_block_lies_within_another(name: str) -> None:
    with torch.device("meta"):
        net = NETS[name]()
    seen: set[int] = set()
    for block in join_neighbors(net, find_blocks(net), 2):
        inside = {id(each) for module in block.modules() for each in module.modules()}
        assert not inside & seen, block.name
        seen |= inside


def test_a_plain_sequence_is_cut_before_its_layers() -> None:
    assert [block.name for block in find_blocks(flat())] == ["0-5", "6-11", "12-17"]


def test_classes_that_a_model_declares_as_one_piece_are_not_divided() -> None:
    with torch.device("meta"):
        names = [block.name for block in find_blocks(minet_resnet50())]
    assert [name for name in names if not name.startswith("backbone.layer")] == [
        "backbone.stem", *(f"laterals.{i}" for i in range(5)), *(f"decoder.{i}" for i in range(5)), "fuse",
    ]  # fmt: skip


def test_patterns_name_whole_modules() -> None:
    net = UNet()
    assert [block.name for block in find_blocks(net, ["down*", "re:up1"])] == ["down1", "down2", "up1"]


def test_a_pattern_that_names_a_list_stands_for_what_is_in_it() -> None:
    class InAList(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([UNet(), UNet()])

    assert [block.name for block in find_blocks(InAList(), ["parts"])] == ["parts.0", "parts.1"]


def test_a_pattern_that_names_nothing_is_refused_with_near_names() -> None:
    with pytest.raises(ValueError, match=r"match 'layer9' .* layer"):
        find_blocks(NETS["resnet18"](), ["layer9"])


def test_a_model_without_blocks_is_refused() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    with pytest.raises(ValueError, match=r"Bare has no blocks .* match, or set checkpointing to none"):
        find_blocks(Bare())


@pytest.mark.parametrize(
    ("name", "number"), [("resnet18", 1), ("resnet50", 2), ("transformer", 1), ("mobilenet_v2", 1), ("swin_t", 1)]
)
def test_blocks_that_are_narrow_inside_are_joined(name: str, number: int) -> None:
    with torch.device("meta"):
        assert best_number(find_blocks(NETS[name]())) == number


def test_neighbors_are_joined_within_their_sequence() -> None:
    with torch.device("meta"):
        net = NETS["resnet50"]()
    blocks = join_neighbors(net, find_blocks(net), 2)
    assert [block.name for block in blocks] == [
        "layer1.0-1", "layer1.2", "layer2.0-1", "layer2.2-3", "layer3.0-1", "layer3.2-3", "layer3.4-5",
        "layer4.0-1", "layer4.2",
    ]  # fmt: skip
    assert blocks[0].modules() == [net.layer1[0], net.layer1[1]]  # type: ignore[index]
