"""The budget: what blocks keep is measured, and as few blocks as possible are checkpointed."""

import copy
from functools import partial
from itertools import combinations

import pytest
import torch
from checkpointed_nets import NETS, UNet
from torch import Tensor, nn

from paceline.engine.activation_checkpointing.blocks import find_blocks
from paceline.engine.activation_checkpointing.memory import SavedBytes, cheapest_choice, measure_saved
from paceline.engine.activation_checkpointing.policies import Blocks, Budget, apply_activation_checkpointing
from paceline.plan.memory import MemoryTracker

IMAGES = torch.rand(2, 3, 32, 32)


def held_by_graph(net: nn.Module, images: Tensor) -> int:
    """Bytes alive behind the output after a forward pass, without the output itself: an independent count."""
    tracker = MemoryTracker()
    with tracker:
        tracker.add([*net.parameters(), *net.buffers(), images], "parameters")
        tracker.phase = "activations"
        output = net.train()(images)
        tracker.add([output], "parameters")
        held = tracker.passing
    del output
    return held


@pytest.mark.parametrize("name", ["resnet18", "unet", "convnet", "transformer"])
def test_what_is_kept_is_what_the_graph_holds(name: str) -> None:
    net = NETS[name]()
    blocks = find_blocks(net)
    saved = measure_saved(net, blocks, lambda: net.train()(IMAGES))
    images = IMAGES.nbytes  # a first convolution keeps them
    assert saved.kept(set()) - images == pytest.approx(held_by_graph(net, IMAGES), rel=0.01)
    apply_activation_checkpointing(net, Blocks(match=[block.name for block in blocks if not block.children]))
    whole = {index for index, block in enumerate(blocks) if not block.children}
    assert saved.kept(whole) - images == pytest.approx(held_by_graph(net, IMAGES), rel=0.03)


def test_a_budget_is_kept_with_the_fewest_blocks_that_it_takes() -> None:
    net = NETS["resnet18"]()
    everything = held_by_graph(copy.deepcopy(net), IMAGES)
    counts = []
    for share in (0.9, 0.8, 0.7):
        each = copy.deepcopy(net)
        names = apply_activation_checkpointing(each, Budget(share=share), lambda each=each: each.train()(IMAGES))  # type: ignore[misc]
        counts.append(len(names))
        assert held_by_graph(each, IMAGES) <= share * everything * 1.02
    assert counts == sorted(counts)
    assert counts[0] < counts[2]


def test_a_budget_that_everything_fits_into_changes_nothing() -> None:
    net = UNet()
    assert apply_activation_checkpointing(net, Budget(megabytes=1e6), lambda: net.train()(IMAGES)) == []


def test_the_choice_depends_on_shapes_alone() -> None:
    chosen = []
    for seed in range(3):
        torch.manual_seed(seed)
        net = NETS["timm_mobilenetv2"]()
        images = torch.rand(2, 3, 32, 32)
        chosen.append(apply_activation_checkpointing(net, Budget(share=0.5), partial(net.train(), images)))
    assert chosen[0] == chosen[1] == chosen[2] != []


def test_the_trial_leaves_no_trace() -> None:
    net = NETS["convnet"]()
    before = copy.deepcopy(net.state_dict())
    buffers = [id(each) for each in net.buffers()]
    state = torch.get_rng_state()
    measure_saved(net, find_blocks(net), lambda: net.train()(IMAGES))
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert [id(each) for each in net.buffers()] == buffers
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_an_impossible_budget_says_what_is_possible() -> None:
    net = UNet()
    kept = r"0\.\d MB of activations stay kept even when every block of 5 is checkpointed"
    with pytest.raises(ValueError, match=rf"budget of 0\.0 MB: {kept}"):
        apply_activation_checkpointing(net, Budget(megabytes=0.01), lambda: net.train()(IMAGES))


def test_a_budget_needs_a_trial_and_one_number() -> None:
    with pytest.raises(ValueError, match="trial"):
        apply_activation_checkpointing(UNet(), Budget(share=0.5))
    with pytest.raises(ValueError, match="either megabytes or share"):
        Budget()
    with pytest.raises(ValueError, match="either megabytes or share"):
        Budget(megabytes=1, share=0.5)


def chain(interiors: list[int], costs: list[float]) -> SavedBytes:
    """Blocks in a row; storage 2k is the input of block k, 2k + 1 what it keeps beside it."""
    saved = SavedBytes()
    for index, (interior, cost) in enumerate(zip(interiors, costs, strict=True)):
        saved.sizes |= {2 * index: 10, 2 * index + 1: interior}
        saved.inside[index], saved.inputs[index] = {2 * index, 2 * index + 1}, {2 * index}
        saved.costs[index] = cost
    return saved


@pytest.mark.parametrize("limit", [40, 95, 140, 200, 260])
def test_what_is_chosen_fits_and_none_of_it_can_be_left_out(limit: int) -> None:
    saved = chain([100, 50, 70, 5], [1.0, 5.0, 1.0, 3.0])
    chosen = cheapest_choice(saved, limit)
    assert chosen is not None
    assert saved.kept(chosen) <= limit
    assert all(saved.kept(chosen - {block}) > limit for block in chosen)
    others = [set(each) for size in range(5) for each in combinations(range(4), size)]
    best = min(sum(saved.costs[block] for block in each) for each in others if saved.kept(each) <= limit)
    assert sum(saved.costs[block] for block in chosen) <= 1.5 * best
