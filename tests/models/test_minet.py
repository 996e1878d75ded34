"""MINet: its size, its structure by a closed check, and images of any size."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paceline.core.registry import register
from paceline.models.minet import MINet, downsample, minet_light, minet_resnet50, minet_vgg16


@pytest.mark.parametrize(
    ("make", "expected"), [(minet_vgg16, 47_562_737), (minet_resnet50, 162_378_305), (minet_light, 24_906_305)]
)
def test_it_has_the_published_number_of_parameters(make: Callable[[], MINet], expected: int) -> None:
    with torch.device("meta"):
        net = make()
    assert sum(parameter.numel() for parameter in net.parameters()) == expected


def with_known_weights(net: nn.Module) -> nn.Module:
    net = net.to_empty(device="cpu").double().eval()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.fill_(1 / module.weight[0].numel())
                if module.bias is not None:
                    module.bias.fill_(0.01)
            elif isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.weight.fill_(1)
                module.bias.fill_(-0.05)
                module.running_mean.fill_(0)
                module.running_var.fill_(1)
    return net


def waves() -> Tensor:
    row, column = torch.meshgrid(*[torch.arange(64, dtype=torch.float64)] * 2, indexing="ij")
    return torch.stack([(column / 5).sin(), (row / 7).cos(), ((column + row) / 9).sin()])[None] + 1


def test_its_structure_gives_the_logits_that_another_implementation_gave() -> None:
    with torch.device("meta"):
        net = minet_resnet50()
    with torch.no_grad():
        logits = with_known_weights(net)(waves())[0, 0]
    found = [logits.mean().item(), logits[10, 20].item(), logits[50, 3].item()]
    assert found == pytest.approx([1381902.4216, 1493912.7583, 644221.1287], abs=1e-3)


@pytest.mark.parametrize("make", [minet_vgg16, minet_resnet50, minet_light])
@pytest.mark.parametrize("size", [(64, 96), (33, 47), (50, 64)])
def test_logits_have_the_size_of_the_images(make: Callable[..., MINet], size: tuple[int, int]) -> None:
    with torch.device("meta"):
        net = make(num_classes=2, in_channels=4)
        assert net(torch.empty(2, 4, *size)).shape == (2, 2, *size)


def test_every_parameter_learns() -> None:
    torch.manual_seed(0)
    net = minet_light()
    net(torch.rand(2, 3, 64, 64)).square().mean().backward()
    assert [name for name, each in net.named_parameters() if each.grad is None or not each.grad.any()] == []


def test_layers_of_the_encoder_have_the_names_of_the_library() -> None:
    with torch.device("meta"):
        resnet, vgg = minet_light().state_dict(), minet_vgg16().state_dict()
    assert {"backbone.stem.conv1.weight", "backbone.stem.bn1.bias", "backbone.layer3.5.conv2.weight"} <= resnet.keys()
    numbers = {int(name.split(".")[3]) for name in vgg if name.startswith("backbone.")}
    convolutions = [0, 3, 7, 10, 14, 17, 20, 24, 27, 30, 34, 37, 40]
    assert numbers == {*convolutions, *(number + 1 for number in convolutions)}


def test_an_odd_border_is_halved_as_the_other_branch_wants_it() -> None:
    image = torch.arange(9.0).view(1, 1, 3, 3)
    assert downsample(image, (1, 1)).tolist() == [[[[2.0]]]]
    assert downsample(image).tolist() == downsample(image, (2, 2)).tolist() == [[[[2.0, 3.5], [6.5, 8.0]]]]


@pytest.mark.parametrize("name", ["minet_vgg16", "minet_resnet50", "minet_light"])
def test_recipes_can_name_it(name: str) -> None:
    entry = register.kind("model").find(name)
    assert entry is not None
    with torch.device("meta"):
        assert isinstance(entry.resolve()(num_classes=1, in_channels=3), MINet)
