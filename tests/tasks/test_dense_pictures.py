"""Pictures of predictions for every pixel: three of one size, and a legend of all that is seen."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.core.palette import colours_of
from paceline.core.picture import Picture
from paceline.tasks.dense_pictures import shaped, side_by_side, tinted, with_legend

CLASSES = ["background", "disc"]
CELL, MARGIN = 160, 16


def painted(picture: Picture) -> list[tuple[int, int]]:
    """Height and width of what is drawn in each cell of the first row: all that is neither paper nor a frame."""
    sizes = []
    for left in range(MARGIN, picture.shape[1] - MARGIN, CELL + MARGIN):
        cell = picture[MARGIN : MARGIN + CELL, left : left + CELL].astype(int)
        rows, columns = np.nonzero(cell.max(2) - cell.min(2) > 40)
        sizes.append((int(np.ptp(rows)) + 1, int(np.ptp(columns)) + 1))
    return sizes


@pytest.mark.parametrize(
    ("size", "drawn"),
    [((50, 60), (100, 120)), ((70, 100), (112, 160)), ((160, 90), (160, 90)), ((300, 500), (96, 160))],
)
def test_image_truth_and_prediction_have_one_size(size: tuple[int, int], drawn: tuple[int, int]) -> None:
    image = np.zeros((*size, 3), np.uint8)
    image[..., 0] = 220
    mask = torch.full(size, 255)  # nothing is laid over the image
    row = [shaped(image, mask), tinted(image, mask, CLASSES), tinted(image[::2, ::2], mask, CLASSES)]
    assert painted(side_by_side([row], [["image", "truth", "prediction"]])) == [drawn] * 3


def test_the_legend_names_what_is_ignored_where_it_occurs() -> None:
    page = np.full((20, 400, 3), 255, np.uint8)
    known, unknown = torch.tensor([[0, 1]]), torch.tensor([[0, 255]])
    plain = with_legend(page, CLASSES)
    assert (with_legend(page, CLASSES, [known]) == plain).all()
    more = with_legend(page, CLASSES, [known, unknown])
    assert (more[: plain.shape[0] - 6, :360] == plain[:-6, :360]).all()
    assert (more[20:] < 250).sum() > (plain[20:] < 250).sum()
    for colour in colours_of(CLASSES):
        assert (more[20:] == colour).all(2).any()
