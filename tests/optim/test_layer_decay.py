"""Layers are counted from the input as MAE counts them for transformers, and block by block elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.core.registry import Registry, register
from paceline.core.torchvision_ops import import_torchvision
from paceline.models.convnet import ConvNet
from paceline.optim.layer_decay import LayerMap, Layers, find_layers


def make_timm(name: str, **arguments: Any) -> nn.Module:
    import_torchvision()
    import timm

    with torch.device("meta"):
        model: nn.Module = timm.create_model(name, **arguments)
    return model


def make_torchvision(name: str, **arguments: Any) -> nn.Module:
    torchvision = import_torchvision()
    with torch.device("meta"):
        model: nn.Module = torchvision.models.get_model(name, weights=None, **arguments)
    return model


def sizes(model: nn.Module, layers: Layers) -> list[int]:
    """The number of values in each layer."""
    counts: Counter[int] = Counter()
    for name, parameter in model.named_parameters():
        counts[layers.id_of(name)] += parameter.numel()
    return [counts[number] for number in range(layers.num_layers + 1)]


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> Registry:
    registry = Registry("layer_map")
    monkeypatch.setitem(register.kinds, "layer_map", registry)
    return registry


# Vision transformers


def test_vit_by_the_rule_of_mae() -> None:
    layers = find_layers(make_timm("vit_tiny_patch16_224"))
    assert layers.num_layers == 13
    assert [layers.id_of(name) for name in ("cls_token", "pos_embed", "patch_embed.proj.bias")] == [0, 0, 0]
    assert [layers.id_of(f"blocks.{block}.attn.qkv.weight") for block in range(12)] == list(range(1, 13))
    assert [layers.id_of(name) for name in ("norm.weight", "head.bias", "anything else")] == [13, 13, 13]
    assert layers.scale("cls_token", 0.75) == pytest.approx(0.023757264018058777, rel=1e-15)
    assert layers.scale("norm.bias", 0.75) == 1


def test_all_tokens_and_what_comes_before_the_blocks_are_the_first_layer() -> None:
    distilled = find_layers(make_timm("deit_tiny_distilled_patch16_224"))
    assert {distilled.id_of(name) for name in ("dist_token", "cls_token", "pos_embed")} == {0}
    assert distilled.id_of("head_dist.weight") == distilled.num_layers == 13
    registers = find_layers(make_timm("vit_small_patch14_reg4_dinov2", img_size=28))
    assert registers.id_of("reg_token") == 0
    clip = find_layers(make_timm("vit_base_patch32_clip_224"))
    assert clip.id_of("norm_pre.weight") == 0


def test_vit_is_the_same_in_both_libraries() -> None:
    one, other = make_timm("vit_base_patch16_224"), make_torchvision("vit_b_16")
    assert sizes(one, find_layers(one)) == sizes(other, find_layers(other))


# Convolutional nets and Swin


@pytest.mark.parametrize("make", [make_timm, make_torchvision])
def test_resnet_is_counted_block_by_block(make: Callable[[str], nn.Module]) -> None:
    layers = find_layers(make("resnet50"))
    assert layers.num_layers == 17
    assert {layers.id_of(name) for name in ("conv1.weight", "bn1.weight", "bn1.bias")} == {0}
    blocks = [(stage, block) for stage, depth in enumerate([3, 4, 6, 3], 1) for block in range(depth)]
    assert [layers.id_of(f"layer{s}.{b}.conv2.weight") for s, b in blocks] == list(range(1, 17))
    assert layers.id_of("layer4.0.downsample.1.bias") == 14
    assert layers.id_of("fc.bias") == 17


def test_a_stage_of_single_layers_is_one_layer() -> None:
    model = nn.Module()
    model.layer1 = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    model.layer2 = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    model.fc = nn.Linear(4, 2)
    layers = find_layers(model)
    names = ("layer1.0.weight", "layer1.1.weight", "layer2.0.bias", "layer2.1.bias", "fc.bias")
    assert [layers.id_of(name) for name in names] == [0, 0, 1, 1, 2]


def test_convnext_is_the_same_in_both_libraries() -> None:
    one, other = make_timm("convnext_tiny"), make_torchvision("convnext_tiny")
    layers = find_layers(other)
    assert sizes(one, find_layers(one)) == sizes(other, layers)
    assert [layers.id_of(f"features.{n}.0.weight") for n in (0, 2, 4, 6)] == [0, 4, 7, 16]
    assert layers.id_of("classifier.0.weight") == layers.num_layers == 19


def test_swin_is_the_same_in_both_libraries_but_for_the_final_norm() -> None:
    one, other = make_timm("swin_tiny_patch4_window7_224"), make_torchvision("swin_t")
    declared, found = find_layers(one), find_layers(other)
    assert declared.num_layers == found.num_layers == 13
    assert sizes(one, declared)[:12] == sizes(other, found)[:12]
    assert declared.id_of("norm.weight") == 12  # as timm declares it
    assert found.id_of("norm.weight") == 13


def test_a_sequence_of_blocks_counts_each() -> None:
    layers = find_layers(make_torchvision("mobilenet_v2"))
    assert [layers.id_of(f"features.{n}.conv.1.1.weight") for n in range(2, 18)] == list(range(2, 18))
    assert (layers.id_of("features.0.0.weight"), layers.id_of("features.18.1.bias")) == (0, 18)
    assert layers.id_of("classifier.1.weight") == layers.num_layers == 19


def test_a_norm_layer_belongs_to_the_convolution_before_it() -> None:
    layers = find_layers(make_torchvision("vgg11_bn"))
    convolutions = [0, 4, 8, 11, 15, 18, 22, 25]
    assert [layers.id_of(f"features.{n}.weight") for n in convolutions] == list(range(8))
    assert [layers.id_of(f"features.{n + 1}.bias") for n in convolutions] == list(range(8))
    assert {layers.id_of(f"classifier.{n}.weight") for n in (0, 3, 6)} == {8}


def test_stages_count_block_by_block() -> None:
    layers = find_layers(ConvNet(10, depth=1))
    names = [f"stages.{stage}.{part}" for stage in range(3) for part in ("0.0.weight", "2.body.0.0.weight")]
    assert [layers.id_of(name) for name in names] == [0, 1, 2, 3, 4, 5]
    assert layers.id_of("head.bias") == layers.num_layers == 6


def test_what_comes_before_the_sequence_is_the_first_layer() -> None:
    model = nn.Module()
    model.stem = nn.Conv2d(3, 4, 1)
    model.features = nn.Sequential(nn.Conv2d(4, 4, 1), nn.PReLU(4), nn.Conv2d(4, 4, 1))
    assert find_layers(model).ids == {
        "stem.weight": 0,
        "stem.bias": 0,
        "features.0.weight": 1,
        "features.0.bias": 1,
        "features.1.weight": 1,
        "features.2.weight": 2,
        "features.2.bias": 2,
    }


# Declared groups


class Declaring(nn.Module):
    def __init__(self, stem: str, block: str) -> None:
        super().__init__()
        self.patterns = {"stem": stem, "blocks": block}
        self.first = nn.Linear(2, 2)
        self.features = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.head = nn.Linear(2, 2)

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        assert not coarse
        return self.patterns


def test_any_model_that_declares_its_groups() -> None:
    layers = find_layers(Declaring("^head", r"^features\.(\d)"))
    assert layers.num_layers == 3
    names = ("head.bias", "features.0.weight", "features.1.weight", "first.weight")
    assert [layers.id_of(name) for name in names] == [0, 1, 2, 3]


def test_a_declaration_that_tells_nothing_apart_gives_way_to_structure() -> None:
    layers = find_layers(Declaring("^other", r"^elsewhere\.(\d)"))
    names = ("first.weight", "features.0.weight", "features.1.weight", "head.bias")
    assert [layers.id_of(name) for name in names] == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["efficientnet_b0", "cait_xxs24_224", "xcit_nano_12_p16_224", "levit_128s"])
def test_timm_models_of_other_forms(name: str) -> None:
    model = make_timm(name)
    layers = find_layers(model)
    assert all(sizes(model, layers))
    assert layers.num_layers >= 4


# Parts of a larger model


def test_the_backbone_of_a_larger_model_is_found() -> None:
    model = nn.ModuleDict({"net": nn.ModuleDict({"backbone": ConvNet(10), "neck": nn.Linear(2, 2)})})
    layers = find_layers(model)
    assert layers.id_of("net.backbone.stages.1.0.0.weight") == 2
    assert layers.id_of("net.backbone.head.weight") == layers.id_of("net.neck.weight") == layers.num_layers == 6


def test_two_such_parts_are_refused() -> None:
    model = nn.ModuleDict({"slow": ConvNet(10), "fast": ConvNet(10)})
    with pytest.raises(ValueError, match=r"\(slow, fast\).*register\.layer_map"):
        find_layers(model)


def test_a_part_that_is_not_at_the_input_is_not_taken_for_the_layers() -> None:
    model = nn.ModuleDict({"before": nn.Linear(2, 2), "net": ConvNet(10)})
    with pytest.raises(ValueError, match="layers of ModuleDict"):
        find_layers(model)


def test_an_unknown_structure_says_how_to_register_a_map() -> None:
    with pytest.raises(ValueError, match=r'layers of Linear.*@register\.layer_map\("name"\)'):
        find_layers(nn.Linear(2, 2))


# A user's own map


def by_position(model: nn.Module) -> LayerMap:
    last = len(list(model.children())) - 1
    return lambda name: None if name.startswith(f"{last}.") else int(name[0])


def test_a_registered_map(maps: Registry) -> None:
    register.layer_map("by_position")(by_position)
    layers = find_layers(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))), "by_position")
    assert [layers.id_of(f"{n}.weight") for n in range(4)] == [0, 1, 2, 3]
    assert layers.num_layers == 3


def test_a_map_that_places_the_head_itself(maps: Registry) -> None:
    register.layer_map("sparse")(lambda model: lambda name: 5 if name.startswith("1") else 2)
    layers = find_layers(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "sparse")
    assert (layers.num_layers, layers.id_of("0.bias"), layers.id_of("1.bias")) == (5, 2, 5)


def test_an_unknown_map_is_refused_with_the_nearest(maps: Registry) -> None:
    with pytest.raises(ValueError, match='layer map "mine"'):
        find_layers(nn.Linear(2, 2), "mine")
    register.layer_map("by_position")(by_position)
    with pytest.raises(ValueError, match=r'"by_positon".*"by_position"'):
        find_layers(nn.Linear(2, 2), "by_positon")


@pytest.mark.parametrize("answer", [-1, 1.5, "2"])
def test_a_map_that_gives_no_layer_numbers_is_refused(maps: Registry, answer: Any) -> None:
    register.layer_map("wrong")(lambda model: lambda name: answer)
    with pytest.raises(ValueError, match="for weight, expected"):
        find_layers(nn.Linear(2, 2), "wrong")


def test_a_map_that_places_nothing_is_refused(maps: Registry) -> None:
    register.layer_map("empty")(lambda model: lambda name: None)
    with pytest.raises(ValueError, match="Linear"):
        find_layers(nn.Linear(2, 2), "empty")
