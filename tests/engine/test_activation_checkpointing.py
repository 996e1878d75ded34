"""Activation checkpointing leaves gradients and buffers bit-identical, and keeps less."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpointed_nets import NETS, DoubleConvolution, UNet, differing, flat, trained
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from paceline.core.registry import register
from paceline.engine.activation_checkpointing.blocks import find_blocks
from paceline.engine.activation_checkpointing.checkpointing import Blocks, NoActivationCheckpointing
from paceline.models.convnet import ConvNet
from paceline.plan.memory import MemoryTracker

SMALL = ["resnet18", "timm_mobilenetv2", "transformer", "convnet", "unet", "flat"]
LARGE = ["densenet121", "timm_convnext", "timm_efficientnet_b0", "efficientnet_b0"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def pair(make: Callable[[], nn.Module], images: Tensor) -> tuple[nn.Module, nn.Module]:
    net = make()
    net.eval()(images)  # lazy layers take their shapes
    return net, copy.deepcopy(net)


def images_of(name: str) -> Tensor:
    return torch.rand(2, 3, 4, 16, 16) if name == "r3d_18" else torch.rand(2, 3, 32, 32)


def assert_same_training(name: str, how: Blocks) -> None:
    images = images_of(name)
    plain, other = pair(NETS[name], images)
    keys = list(other.state_dict())
    names = how.apply(other)
    assert names
    assert list(other.state_dict()) == keys
    assert [key for key, _ in other.named_modules()] == [key for key, _ in plain.named_modules()]
    assert differing(trained(plain, images), trained(other, images)) == []


@pytest.mark.parametrize("how", [Blocks(), Blocks(every=2)], ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_gradients_and_buffers_are_the_same_to_the_bit(name: str, how: Blocks) -> None:
    assert_same_training(name, how)


@pytest.mark.parametrize("name", LARGE)
def test_they_are_in_larger_nets_too(name: str) -> None:
    assert_same_training(name, Blocks())


def test_they_are_under_autocast() -> None:
    images = torch.rand(2, 3, 32, 32)
    plain, other = pair(NETS["convnet"], images)
    Blocks().apply(other)
    assert differing(trained(plain, images, is_bf16=True), trained(other, images, is_bf16=True)) == []


def test_they_are_in_half_precision() -> None:
    images = torch.rand(2, 3, 16, 16).bfloat16()
    plain, other = pair(lambda: ConvNet(3, widths=[4, 4], dropout=0.5).bfloat16(), images)
    Blocks().apply(other)
    assert differing(trained(plain, images), trained(other, images)) == []


def test_none_leaves_the_model_alone() -> None:
    net = UNet()
    assert NoActivationCheckpointing().apply(net) == []
    assert type(net.first) is type(UNet().first)


class CallCounter(nn.Module):
    """Counts its calls in a buffer, puts a new tensor in the place of another, and uses both."""

    counter: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = spectral_norm(nn.Linear(6, 6))
        self.norm = nn.BatchNorm1d(6, momentum=None)
        self.register_buffer("counter", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.counter.add_(1)
        self.mean = 0.5 * self.mean + x.detach().mean(0)
        out: Tensor = self.norm(self.layer(x * self.counter.clone())) + self.mean
        return out.tanh()


def test_buffers_of_any_kind_are_changed_once_and_seen_as_they_were() -> None:
    plain = nn.Sequential(CallCounter(), CallCounter(), CallCounter())
    other = copy.deepcopy(plain)
    assert Blocks(match=["0", "1", "2"]).apply(other) == ["0", "1", "2"]
    values = torch.rand(5, 6)
    assert differing(trained(plain, values), trained(other, values)) == []
    assert other[0].counter == 2


def test_two_passes_before_one_backward_pass() -> None:
    plain = nn.Sequential(CallCounter(), CallCounter())
    other = copy.deepcopy(plain)
    Blocks(match=["*"]).apply(other)
    first, second = torch.rand(5, 6), torch.rand(4, 6)
    for net in (plain, other):
        (net(first).sum() + net(second).square().sum()).backward()
    both = [dict(net.named_parameters()) for net in (plain, other)]
    assert all(torch.equal(both[0][key].grad, both[1][key].grad) for key in both[0])  # type: ignore[arg-type]


def test_copies_behave_alike() -> None:
    images = torch.rand(2, 3, 32, 32)
    plain, other = pair(NETS["flat"], images)
    Blocks().apply(other)
    again = copy.deepcopy(other)
    assert type(again) is type(other)
    assert differing(trained(plain, images), trained(again, images)) == []


def test_a_replica_uses_its_own_parameters() -> None:
    """What `DataParallelStrategy` makes: a copy of the module's attributes under other parameters."""
    net = ConvNet(2, widths=[4])
    Blocks(match=["stages"]).apply(net)
    replica = net.stages._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    for key, child in list(replica._modules.items()):
        replica._modules[key] = copy.deepcopy(child)
    with torch.no_grad():
        for each in replica.parameters():
            each.zero_()
    assert not replica(torch.rand(2, 3, 8, 8)).any()


def test_a_slice_of_a_sequence_runs() -> None:
    net = flat()
    images = torch.rand(2, 3, 8, 8)
    expected = net[:6](images)
    Blocks().apply(net)
    assert torch.equal(net[:6](images), expected)


def test_blocks_are_the_same_before_and_after() -> None:
    for name in ("flat", "resnet18", "convnet"):
        net = NETS[name]()
        before = [block.name for block in find_blocks(net)]
        Blocks().apply(net)
        assert [block.name for block in find_blocks(net)] == before


def peak_of_training(net: nn.Module, images: Tensor) -> int:
    tracker = MemoryTracker()
    with tracker:
        tracker.phase = "activations"
        net.train()(images).square().mean().backward()
    return tracker.peak_passing


def test_less_is_kept() -> None:
    images = torch.rand(4, 3, 64, 64)
    # Twelve blocks at one resolution: each keeps about five tensors inside for the one between it and the next.
    parts = [DoubleConvolution(3, 8), *(DoubleConvolution(8, 8) for _ in range(11))]
    plain, blocks = (copy.deepcopy(nn.Sequential(*parts)) for _ in range(2))
    Blocks().apply(blocks)
    assert peak_of_training(blocks, images) < 0.5 * peak_of_training(plain, images)


def test_nothing_is_computed_twice_in_evaluation_or_without_gradients() -> None:
    calls = []
    net = UNet()
    net.first[0].register_forward_hook(lambda *_: calls.append(1))
    Blocks().apply(net)
    images = torch.rand(1, 3, 8, 8)
    net.eval()(images).sum().backward()
    assert len(calls) == 1
    with torch.no_grad():
        net.train()(images)
    assert len(calls) == 2
    net(images).sum().backward()
    assert len(calls) == 4


def test_a_block_that_changes_its_input_is_named() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x.relu_())
            return out

    net = nn.Sequential(nn.Linear(3, 3), InPlace())
    Blocks(match=["1"]).apply(net)
    with pytest.raises(ValueError, match="checkpointing: 1 changes its input in place"):
        net(torch.rand(2, 3))


def test_what_comes_first_in_a_block_leaves_its_input_alone() -> None:
    images = torch.rand(2, 3, 8, 8)
    head = [nn.Flatten(), nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(192, 4), nn.ReLU(), nn.Linear(4, 4))]
    plain, other = pair(lambda: nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), *head), images)
    assert Blocks().apply(other) == ["2"]
    assert differing(trained(plain, images), trained(other, images)) == []


def test_the_ways_have_names_for_recipes() -> None:
    ways = register.kind("activation_checkpointing")
    given: dict[str, dict[str, Any]] = {"none": {}, "blocks": {"every": 2}}
    assert ways.names() == sorted(given)
    made = []
    for name, arguments in given.items():
        entry = ways.find(name)
        assert entry is not None
        made.append(entry.resolve()(**dict(entry.arguments(**arguments))))
    assert made == [NoActivationCheckpointing(), Blocks(2, [])]
