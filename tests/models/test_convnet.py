"""The small residual net."""

import pytest
import torch

from paceline.models.convnet import ConvNet, ResidualBlock


def normed(inputs: int, outputs: int) -> int:
    """Parameters of a 3×3 convolution without bias and its BatchNorm."""
    return 9 * inputs * outputs + 2 * outputs


@pytest.mark.parametrize(("widths", "depth"), [((4,), 1), ((4, 8), 1), ((3, 5, 7), 2)])
def test_it_has_the_parameters_that_its_shape_asks_for(widths: tuple[int, ...], depth: int) -> None:
    expected, inputs = 0, 3
    for width in widths:
        expected += normed(inputs, width) + depth * 2 * normed(width, width)
        inputs = width
    expected += widths[-1] * 10 + 10
    net = ConvNet(num_classes=10, widths=widths, depth=depth)
    assert sum(parameter.numel() for parameter in net.parameters()) == expected


@pytest.mark.parametrize("size", [(28, 28), (7, 13), (1, 1), (32, 5)])
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_images_of_any_size_become_logits(size: tuple[int, int], channels: int) -> None:
    net = ConvNet(num_classes=4, in_channels=channels, widths=[2, 3, 4, 5, 6, 7])
    assert net(torch.rand(2, channels, *size)).shape == (2, 4)


def test_each_stage_halves_the_resolution() -> None:
    net = ConvNet(num_classes=2, widths=[4, 8, 16])
    features = net.stages(torch.rand(2, 3, 30, 28))
    assert features.shape == (2, 16, 4, 4)


def test_a_residual_block_starts_from_its_input() -> None:
    block = ResidualBlock(3).eval()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.zero_()
    images = torch.rand(2, 3, 5, 5)
    assert torch.equal(block(images), images)


def test_dropout_is_for_training_alone() -> None:
    net = ConvNet(num_classes=3, widths=[8], dropout=0.5)
    images = torch.rand(4, 3, 8, 8)
    net.eval()
    assert torch.equal(net(images), net(images))
    net.train()
    assert not torch.equal(net(images), net(images))


def test_every_parameter_learns() -> None:
    net = ConvNet(num_classes=3, widths=[4, 6])
    net(torch.rand(4, 3, 9, 9)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters())
