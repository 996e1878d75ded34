"""Models of timm and torchvision by name."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch
from torch import nn

from paceline.core.registry import register
from paceline.models.zoo import build_timm, build_torchvision, timm_models, torchvision_models

LIBRARIES = {"timm": timm_models, "torchvision": torchvision_models}
MODELS = ["timm/resnet18", "torchvision/mobilenet_v2"]


def built(name: str, num_classes: int, in_channels: int, **args: Any) -> nn.Module:
    entry = register.kind("model").find(name)
    assert entry is not None
    model: nn.Module = entry.resolve()(num_classes=num_classes, in_channels=in_channels, args=args)
    return model


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_models_take_the_channels_and_classes_of_the_data(name: str, channels: int) -> None:
    model = built(name, num_classes=7, in_channels=channels)
    assert model(torch.rand(2, channels, 32, 32)).shape == (2, 7)
    assert model.training


@pytest.mark.parametrize("name", MODELS)
def test_the_same_seed_gives_the_same_weights(name: str) -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(11)
        states.append(built(name, num_classes=3, in_channels=1).state_dict())
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


def test_another_first_convolution_differs_in_nothing_but_its_input() -> None:
    color, gray = (built("torchvision/mobilenet_v2", 5, channels) for channels in (3, 1))
    differing = {
        name: (tuple(one.shape), tuple(other.shape))
        for (name, one), other in zip(color.state_dict().items(), gray.state_dict().values(), strict=True)
        if one.shape != other.shape
    }
    assert differing == {"features.0.0.weight": ((32, 3, 3, 3), (32, 1, 3, 3))}
    first, other = (model.get_submodule("features.0.0") for model in (color, gray))
    for attribute in ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode"):
        assert getattr(first, attribute) == getattr(other, attribute)
    assert first.bias is other.bias is None


def test_arguments_are_handed_on() -> None:
    assert built("timm/resnet18", 3, 3, drop_rate=0.25).drop_rate == 0.25
    assert built("torchvision/mobilenet_v2", 3, 3, dropout=0.4).get_submodule("classifier.0").p == 0.4


def test_a_tag_of_weights_may_stand_behind_a_timm_name() -> None:
    assert built("timm/resnet18.a1_in1k", 3, 1)(torch.rand(2, 1, 32, 32)).shape == (2, 3)


@pytest.mark.parametrize(
    "name", ["timm/resnet_eighteen", "torchvision/mobilenet_v9", "torchvision/", "timm/", "hub/resnet18", "resnet18"]
)
def test_unknown_names_are_refused(name: str) -> None:
    assert register.kind("model").find(name) is None


@pytest.mark.parametrize("name", ["timm/resnet18", "torchvision/lraspp_mobilenet_v3_large"])
def test_nothing_is_ever_downloaded(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise URLError("a download was tried")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "urlopen", refuse)
    assert sum(parameter.numel() for parameter in built(name, num_classes=3, in_channels=3).parameters()) > 1_000_000
    assert list(tmp_path.rglob("*")) == []


def test_a_library_is_imported_only_when_named_and_then_works() -> None:
    """In a fresh interpreter, where nothing has brought torchvision in before."""
    code = (
        "import sys\n"
        "import paceline.models.zoo as zoo\n"
        "assert not {'timm', 'torchvision'} & set(sys.modules)\n"
        "timm = zoo.build_timm('resnet18', 4, 1, {})\n"
        "vision = zoo.build_torchvision('mobilenet_v2', 4, 1, {})\n"
        "print(type(timm).__name__, type(vision).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "ResNet MobileNetV2\n", done.stderr


def test_a_misfit_is_an_error_of_the_library() -> None:
    with pytest.raises(TypeError, match="no_such_argument"):
        build_timm("resnet18", 3, 3, {"no_such_argument": 1})
    with pytest.raises(TypeError, match="no_such_argument"):
        build_torchvision("mobilenet_v2", 3, 3, {"no_such_argument": 1})


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_names_are_those_of_the_installed_library(library: str) -> None:
    family = next(each for each in register.kind("model").families if each.prefix == f"{library}/")
    assert family.names() == [f"{library}/{name}" for name in LIBRARIES[library]()]
    assert len(family.names()) > 100


@pytest.mark.parametrize("library", LIBRARIES)
def test_with_another_version_other_names_may_exist(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models, name = register.kind("model"), f"{library}/not_yet_written"
    assert models.find(name) is None
    monkeypatch.setattr(metadata, "version", lambda _: "99.0+cpu")
    assert models.find(name) is not None
