"""The interactions of MINet against loops over pixels, and against two cases that were worked out by hand."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.models.minet import AggregateInteraction, SelfInteraction

Map = NDArray[np.float64]  # [channels, rows, columns]
Size = tuple[int, int]
Sizes = Sequence[Size]
Rows = Sequence[Sequence[float]]
TOLERANCE = 1e-12


class ByLoops:
    """A block's arithmetic for one image, with the weights of a module but none of its code."""

    def __init__(self, module: nn.Module) -> None:
        self.weights = {name: value.numpy() for name, value in module.state_dict().items()}

    def convolution(self, name: str, x: Map) -> Map:
        """Products around every pixel added up, with zeros outside of the image."""
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        reach = weight.shape[-1] // 2
        _, rows, columns = x.shape
        out = np.empty((len(weight), rows, columns))
        for row in range(rows):
            for column in range(columns):
                total = bias.copy()
                for down in range(-reach, reach + 1):
                    for right in range(-reach, reach + 1):
                        if 0 <= row + down < rows and 0 <= column + right < columns:
                            total += weight[:, :, reach + down, reach + right] @ x[:, row + down, column + right]
                out[:, row, column] = total
        return out

    def norm(self, name: str, x: Map) -> Map:
        """BatchNorm with the statistics that were gathered before."""
        weight, bias, mean, variance = (
            self.weights[f"{name}.{each}"][:, None, None] for each in ("weight", "bias", "running_mean", "running_var")
        )
        normed: Map = (x - mean) / np.sqrt(variance + 1e-5) * weight + bias
        return normed

    def entered(self, index: int, x: Map) -> Map:
        """The first convolution of an input, with its norm."""
        return rectified(self.norm(f"enter.{index}.1", self.convolution(f"enter.{index}.0", x)))

    def mixed(self, name: str, inputs: Sequence[Map]) -> Map:
        """One convolution for each input, which have the same size, then one norm for their sum."""
        summed = sum(self.convolution(f"{name}.convolutions.{index}", each) for index, each in enumerate(inputs))
        return rectified(self.norm(f"{name}.norm", np.asarray(summed)))

    def aggregate(self, levels: Sequence[Map], own: int) -> Map:
        """What the levels, finest first, become at the resolution of the level `own`."""
        entered = [self.entered(index, level) for index, level in enumerate(levels)]
        exchanged = [
            self.mixed(f"interaction.{index}", [neighbor(each, to) for each in entered[max(0, index - 1) : index + 2]])
            for index, to in enumerate(entered)
        ]
        fused = self.mixed("fuse", [neighbor(each, exchanged[own]) for each in exchanged])
        left = self.norm("leave.1", self.convolution("leave.0", fused))
        return rectified(left + self.convolution("shortcut", levels[own]))

    def interact(self, x: Map) -> Map:
        """What features become that interact with themselves at half of the resolution."""
        _, rows, columns = x.shape
        small = ((rows + 1) // 2, (columns + 1) // 2)
        full, half = self.entered(0, x), self.entered(1, pooled(x, small))
        full, half = (
            self.mixed("interaction.0", [full, bilinear(half, (rows, columns))]),
            self.mixed("interaction.1", [pooled(full, small), half]),
        )
        return self.mixed("fuse", [full, bilinear(half, (rows, columns))]) + x


def rectified(x: Map) -> Map:
    return np.where(x > 0, x, 0.0)


def neighbor(x: Map, like: Map) -> Map:
    """A level as another one sees it: pooled towards a coarser, repeated towards a finer one."""
    size = (like.shape[1], like.shape[2])
    return pooled(x, size) if x.shape[1:] > size else nearest(x, size)


def pooled(x: Map, size: Size) -> Map:
    """Means of 2×2 pixels, or of those that there are at an odd border that the size includes."""
    out = np.empty((len(x), *size))
    for row in range(size[0]):
        for column in range(size[1]):
            out[:, row, column] = x[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].mean(axis=(1, 2))
    return out


def nearest(x: Map, size: Size) -> Map:
    """Each pixel takes the one that its upper left corner falls into."""
    out = np.empty((len(x), *size))
    for row in range(size[0]):
        for column in range(size[1]):
            out[:, row, column] = x[:, row * x.shape[1] // size[0], column * x.shape[2] // size[1]]
    return out


def bilinear(x: Map, size: Size) -> Map:
    """Each pixel's center is put between the centers of four pixels; the border continues outwards."""
    out = np.empty((len(x), *size))
    for row in range(size[0]):
        for column in range(size[1]):
            upper, lower, down = between(row, size[0], x.shape[1])
            left, right, along = between(column, size[1], x.shape[2])
            above = (1 - along) * x[:, upper, left] + along * x[:, upper, right]
            below = (1 - along) * x[:, lower, left] + along * x[:, lower, right]
            out[:, row, column] = (1 - down) * above + down * below
    return out


def between(place: int, length: int, source_length: int) -> tuple[int, int, float]:
    """The two source pixels around a place, and how far from the first to the second it lies."""
    center = max((place + 0.5) * source_length / length - 0.5, 0.0)
    first = int(center)
    return first, min(first + 1, source_length - 1), center - first


def with_random_weights(module: nn.Module) -> nn.Module:
    """In float64 and evaluation, with nothing left at 0 or 1."""
    with torch.no_grad():
        for name, value in module.double().eval().state_dict().items():
            if name.endswith("running_var"):
                value.uniform_(0.5, 2)
            elif value.is_floating_point():
                value.normal_(0.1, 0.5)
    return module


def random_maps(channels: int, size: Size) -> Tensor:
    return torch.randn(2, channels, *size, dtype=torch.float64)


def assert_same(found: Tensor, expected: Sequence[Map]) -> None:
    by_loops = np.stack(expected)
    assert by_loops.std() > 0.1  # the comparison is not one of zeros
    assert found.shape == by_loops.shape
    assert np.abs(found.numpy() - by_loops).max() <= TOLERANCE


EVEN: Sizes = [(8, 12), (4, 6), (2, 3)]
ROUNDED_UP: Sizes = [(7, 9), (4, 5), (2, 3)]  # as a ResNet halves
ROUNDED_DOWN: Sizes = [(7, 9), (3, 4), (1, 2)]  # as a VGG halves


@pytest.mark.parametrize("sizes", [EVEN, ROUNDED_UP, ROUNDED_DOWN])
@pytest.mark.parametrize(
    ("channels", "own"),
    [((2, 3), 0), ((3, 2), 1), ((2, 3, 5), 1), ((5, 4, 2), 1)],
    ids=["finest", "coarsest", "between", "between, narrowing"],
)
def test_levels_aggregate_as_loops_over_pixels_say(channels: tuple[int, ...], own: int, sizes: Sizes) -> None:
    torch.manual_seed(len(channels) + own)
    module = with_random_weights(AggregateInteraction(channels, own, out_channels=4))
    levels = [random_maps(*each) for each in zip(channels, sizes[: len(channels)], strict=True)]
    with torch.no_grad():
        found = module(*levels)
    assert_same(found, [ByLoops(module).aggregate([each[image].numpy() for each in levels], own) for image in range(2)])


@pytest.mark.parametrize("size", [(8, 6), (7, 6), (5, 9), (1, 3)])
def test_features_interact_with_themselves_as_loops_over_pixels_say(size: Size) -> None:
    torch.manual_seed(sum(size))
    module = with_random_weights(SelfInteraction(4, 3))
    x = random_maps(4, size)
    with torch.no_grad():
        found = module(x)
    assert_same(found, [ByLoops(module).interact(each.numpy()) for each in x])


CENTRE: Rows = [[0, 0, 0], [0, 1, 0], [0, 0, 0]]
AROUND: Rows = [[1, 1, 1], [1, 1, 1], [1, 1, 1]]
UPRIGHT: Rows = [[0, 1, 0], [0, 1, 0], [0, 1, 0]]
ALONE: Rows = [[1]]


class Known:
    """A module whose convolutions keep the pixel in the center and whose norms change nothing, by default."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module.double().eval()
        for name, each in module.named_modules():
            if isinstance(each, nn.Conv2d):
                self.convolution(name, CENTRE if each.kernel_size == (3, 3) else ALONE)
            elif isinstance(each, nn.BatchNorm2d):
                self.norm(name, mean=0, scale=1)

    def convolution(self, name: str, kernel: Rows, times: float = 1, bias: float = 0) -> None:
        """Use `times` the kernel for every channel."""
        found = self.module.get_submodule(name)
        assert isinstance(found, nn.Conv2d)
        assert found.bias is not None
        with torch.no_grad():
            found.weight.copy_(times * torch.tensor(kernel))
            found.bias.fill_(bias)

    def norm(self, name: str, mean: float, scale: float) -> None:
        """Subtract the mean, then multiply by the scale."""
        found = self.module.get_submodule(name)
        assert isinstance(found, nn.BatchNorm2d)
        assert found.running_mean is not None
        assert found.running_var is not None
        found.running_mean.fill_(mean)
        found.running_var.fill_(1 - found.eps)  # what is added to it makes it 1
        nn.init.constant_(found.weight, scale)

    def __call__(self, *inputs: Sequence[Rows]) -> list[list[float]]:
        """The only channel of what comes out of one image."""
        with torch.no_grad():
            out = self.module(*(torch.tensor([each], dtype=torch.float64) for each in inputs))
        assert out.shape[:2] == (1, 1)
        rows: list[list[float]] = out[0, 0].tolist()
        return rows


def test_a_level_aggregates_its_coarser_neighbor_as_worked_out_by_hand() -> None:
    known = Known(AggregateInteraction((1, 2), own=0, out_channels=1))
    fine: list[Rows] = [[[1, 2], [3, 4]]]
    coarse: list[Rows] = [[[1]], [[2]]]
    # Each input enters: fine − 1 is 0 1 / 2 3; the channels of coarse give 1 + 2 + 1 = 4.
    known.convolution("enter.0.0", CENTRE, bias=-1)
    known.convolution("enter.1.0", CENTRE, bias=1)
    # Exchange, fine: around any of its pixels lie all four, 0 + 1 + 2 + 3 = 6; coarse is repeated four times,
    # 4 · 4 = 16; and 0.5 + 0.5: 23 everywhere. Coarse: itself, 4, and twice the mean of fine, 2 · 1.5 = 3: 7.
    known.convolution("interaction.0.convolutions.0", AROUND, bias=0.5)
    known.convolution("interaction.0.convolutions.1", AROUND, bias=0.5)
    known.convolution("interaction.1.convolutions.0", CENTRE, times=2)
    # Fuse into fine: 23 + 4 · 7 = 51, then (51 − 41) / 2 = 5.
    known.convolution("fuse.convolutions.1", AROUND)
    known.norm("fuse.norm", mean=41, scale=0.5)
    # Leave: 2 · 5 − 13 = −3, not cut off yet, since the shortcut comes first: 3 · fine − 4 is −1 2 / 5 8.
    known.convolution("leave.0", CENTRE, times=2)
    known.norm("leave.1", mean=13, scale=1)
    known.convolution("shortcut", ALONE, times=3, bias=-4)
    found = known(fine, coarse)
    assert found == [pytest.approx([0, 0], abs=TOLERANCE), pytest.approx([2, 5], abs=TOLERANCE)]


def test_features_interact_with_themselves_as_worked_out_by_hand() -> None:
    known = Known(SelfInteraction(1, 1))
    x: list[Rows] = [[[0, 0, 4, 8]] * 4]
    # Enter: full is x + 1, 1 1 5 9 in each row; half is twice the pooled 0 6, minus 2, at least 0: 0 10 in each row.
    known.convolution("enter.0.0", CENTRE, bias=1)
    known.convolution("enter.1.0", CENTRE, times=2, bias=-2)
    # Exchange: half, four pixels wide, is 0 2.5 7.5 10, so full becomes 1 3.5 12.5 19.
    # Full, pooled, is 1 7, so half becomes 1 17.
    # Fuse: half, four pixels wide, is 1 5 13 17. Added to it, full with the pixels above and below:
    # twice in the outer rows, 3 12 38 55; three times in the inner ones, 4 15.5 50.5 74.
    known.convolution("fuse.convolutions.0", UPRIGHT)
    # The norm subtracts 10 and halves: −3.5 1 14 22.5 and −3 2.75 20.25 32; at least 0; then x is added.
    known.norm("fuse.norm", mean=10, scale=0.5)
    outer, inner = [0, 1, 18, 30.5], [0, 2.75, 24.25, 40]
    assert known(x) == [pytest.approx(row, abs=TOLERANCE) for row in (outer, inner, inner, outer)]
