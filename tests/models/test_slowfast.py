"""SlowFast-R50: its size, the frames that each pathway sees, gradients, and checkpointing."""

import pytest
import torch
from torch import Tensor, nn

from paceline.core.registry import register
from paceline.engine.activation_checkpointing.blocks import find_blocks
from paceline.engine.activation_checkpointing.checkpointing import checkpoint_block
from paceline.models.slowfast import SlowFast, SpatialMaxPool
from paceline.models.surgery import find_heads


def built(num_classes: int = 3, in_channels: int = 3, dropout: float = 0.0) -> SlowFast:
    torch.manual_seed(1)
    return SlowFast(num_classes, in_channels, dropout=dropout)


def pathway_size(width: int, frames: tuple[int, ...], arriving: tuple[int, ...]) -> int:
    """Weights and norms of one pathway, counted from the tables of the paper."""
    total = 3 * width * frames[0] * 49 + 2 * width
    channels = width
    for stage, depth in enumerate((3, 4, 6, 3)):
        wide = width * 2**stage
        for block in range(depth):
            inputs = channels + arriving[stage] if block == 0 else 4 * wide
            total += (
                inputs * wide * frames[stage + 1] + 9 * wide * wide + 4 * wide * wide + 2 * (wide + wide + 4 * wide)
            )
            if block == 0:
                total += inputs * 4 * wide + 2 * 4 * wide
        channels = 4 * wide
    return total


def test_it_has_the_published_number_of_parameters() -> None:
    slow = pathway_size(64, (1, 1, 1, 3, 3), (16, 64, 128, 256))
    fast = pathway_size(8, (5, 3, 3, 3, 3), (0, 0, 0, 0))
    laterals = sum(7 * channels * 2 * channels + 2 * 2 * channels for channels in (8, 32, 64, 128))
    expected = slow + fast + laterals + (2048 + 256 + 1) * 400
    with torch.device("meta"):
        model = SlowFast(400)
    assert sum(each.numel() for each in model.parameters()) == expected == 34_566_488
    assert round(expected / 1e6, 2) == 34.57


@pytest.mark.parametrize("shape", [(32, 64, 64), (8, 65, 47), (5, 33, 40), (1, 64, 64)])
def test_clips_of_any_length_and_size_are_taken(shape: tuple[int, int, int]) -> None:
    with torch.device("meta"):
        assert SlowFast(5, in_channels=1)(torch.empty(2, 1, *shape)).shape == (2, 5)


def test_pathways_see_the_frames_that_they_should() -> None:
    model = built().eval()
    clips = torch.rand(1, 3, 8, 32, 32)
    seen: dict[str, Tensor] = {}
    for name in ("slow", "fast"):
        stem = getattr(model, name)[0]
        stem.register_forward_pre_hook(lambda _, inputs, name=name: seen.__setitem__(name, inputs[0]))
    with torch.no_grad():
        model(clips)
    assert torch.equal(seen["slow"], clips[:, :, [0, 4]])
    assert torch.equal(seen["fast"], clips)


def test_frames_are_pooled_each_for_itself() -> None:
    clips = torch.rand(2, 3, 4, 9, 12)
    assert torch.equal(SpatialMaxPool()(clips), nn.MaxPool3d((1, 3, 3), (1, 2, 2), (0, 1, 1))(clips))


def gradients(model: SlowFast, clips: Tensor) -> dict[str, Tensor]:
    logits = model(clips)
    (logits * torch.linspace(-1, 1, logits.shape[1])).square().sum().backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def with_open_blocks(model: SlowFast) -> SlowFast:
    """Blocks begin as their shortcuts, with nothing of what they compute: let it count."""
    for name, parameter in model.named_parameters():
        if name.endswith("body.2.norm.weight"):
            nn.init.constant_(parameter, 0.5)
    return model


def test_every_parameter_gets_a_gradient_with_and_without_checkpointing() -> None:
    clips = torch.rand(2, 3, 8, 64, 64)
    model = with_open_blocks(built())
    expected = gradients(model, clips)
    assert set(expected) == {name for name, _ in model.named_parameters()}
    assert [name for name, gradient in expected.items() if not gradient.any()] == []
    again = with_open_blocks(built())
    blocks = find_blocks(again)
    names = [block.name for block in blocks]
    assert len(names) == 2 * (1 + 16) + 4
    assert {"slow.0", "fast.4.2", "laterals.3"} <= set(names)
    for block in blocks:
        checkpoint_block(block)
    found = gradients(again, clips)
    assert all(torch.equal(gradient, found[name]) for name, gradient in expected.items())
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_recipes_know_it_and_its_head() -> None:
    entry = register.kind("model").find("slowfast_r50")
    assert entry is not None
    with torch.device("meta"):
        model = entry.resolve()(
            num_classes=2, in_channels=3, **entry.arguments.model_validate({"alpha": 8}).model_dump()
        )
    assert find_heads(model) == ["head"]
    assert model.alpha == 8
