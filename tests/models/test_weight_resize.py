"""Tables of positions are resampled as timm does it."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline.core.torchvision_ops import import_torchvision
from paceline.models.weight_resize import fit_position_embedding, resize_position_embedding, resize_relative_bias


def timm_layers() -> Any:
    import_torchvision()
    return importlib.import_module("timm.layers")


sides = st.integers(2, 9)


@settings(max_examples=40, deadline=None)
@given(old=st.tuples(sides, sides), new=st.tuples(sides, sides), tokens=st.integers(0, 5), half=st.booleans())
def test_absolute_positions_equal_timms(old: tuple[int, int], new: tuple[int, int], tokens: int, half: bool) -> None:
    table = torch.randn(1, tokens + old[0] * old[1], 8, dtype=torch.float16 if half else torch.float32)
    expected = timm_layers().resample_abs_pos_embed(table, list(new), list(old), num_prefix_tokens=tokens)
    found = resize_position_embedding(table, old, new, tokens)
    assert found.dtype == table.dtype
    assert found.shape == (1, tokens + new[0] * new[1], 8)
    assert torch.allclose(found, expected, atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(old=st.tuples(sides, sides), new=st.tuples(sides, sides))
def test_tables_that_keep_their_grid_equal_timms(old: tuple[int, int], new: tuple[int, int]) -> None:
    table = torch.randn(1, *old, 8)
    fitted = fit_position_embedding("pos_embed", table, (1, *new, 8), nn.Module())
    assert fitted is not None
    assert torch.allclose(fitted[0], timm_layers().resample_abs_pos_embed_nhwc(table, list(new)), atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(old=st.integers(2, 8), new=st.integers(2, 8), tokens=st.sampled_from([0, 3]))
def test_relative_positions_equal_timms_plain_way(old: int, new: int, tokens: int) -> None:
    table = torch.randn((2 * old - 1) ** 2 + tokens, 3)
    shape = ((2 * new - 1) ** 2 + tokens, 3)
    simple = importlib.import_module(timm_layers().__name__ + ".pos_embed_rel").resize_rel_pos_bias_table_simple
    expected = simple(table, (new, new), shape)
    assert torch.allclose(resize_relative_bias(table, 2 * old - 1, 2 * new - 1), expected, atol=1e-6)
    fitted = fit_position_embedding("attn.relative_position_bias_table", table, shape, nn.Module())
    assert fitted is not None
    assert torch.allclose(fitted[0], expected, atol=1e-6)


class Encoder(nn.Module):
    """Holds a table, as torchvision's does; says nothing about its grid."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Module()


@pytest.mark.parametrize("tokens", [0, 1, 2, 5])
def test_tokens_before_a_square_grid_are_counted(tokens: int) -> None:
    table = torch.randn(1, tokens + 36, 4)
    fitted = fit_position_embedding("encoder.pos_embedding", table, (1, tokens + 16, 4), Encoder())
    assert fitted is not None
    resampled, how = fitted
    assert how == "position embedding 6×6 → 4×4"
    assert resampled[:, :tokens].equal(table[:, :tokens])


def test_a_grid_that_the_model_declares_counts() -> None:
    model: Any = nn.Module()
    model.patch_embed = nn.Module()
    model.patch_embed.grid_size = (2, 8)
    # 17 without a class token would be no grid at all; 16 positions could be 4×4 but are not.
    fitted = fit_position_embedding("pos_embed", torch.randn(1, 26, 4), (1, 17, 4), model)
    assert fitted is not None
    assert fitted[1] == "position embedding 5×5 → 2×8"


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("pos_embed", (1, 15, 4), (1, 16, 4)),  # 15 is no square, with whatever tokens 16 would leave
        ("pos_embed", (1, 17, 4), (1, 26, 5)),
        ("pos_embed", (17, 4), (26, 4)),
        ("blocks.weight", (1, 17, 4), (1, 26, 4)),
        ("relative_position_bias_table", (48, 3), (25, 3)),
        ("relative_position_bias_table", (49, 3), (25, 4)),
        ("pos_embed", (1, 4, 4, 8), (1, 5, 5, 9)),
    ],
)
def test_what_is_unclear_is_left_alone(name: str, old: tuple[int, ...], new: tuple[int, ...]) -> None:
    model = nn.Module()
    model.add_module("blocks", nn.Module())
    assert fit_position_embedding(name, torch.randn(*old), new, model) is None
