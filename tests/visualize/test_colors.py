"""Colors of classes."""

from __future__ import annotations

import pytest

from paceline.visualize.colors import BACKGROUND, class_color, class_colors


@pytest.mark.parametrize("name", ["background", "Background", "_bg_", "void", "unlabeled"])
def test_a_background_by_its_name_is_gray(name: str) -> None:
    assert class_colors([name, "dog"]) == [BACKGROUND, class_color(1)]


def test_all_ids_have_colors_of_their_own() -> None:
    colors = class_colors(["cat", "dog"], 256)
    assert len(colors) == 256
    assert len(set(colors)) > 250
    assert all(0 <= value <= 255 for color in colors for value in color)
    assert class_colors(["cat", "dog", "hat"], 1) == colors[:3]
