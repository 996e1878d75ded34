"""Confusion matrices: colors, counts, names, and sizes that can be looked at."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.visualize.confusion_matrix import draw_confusion_matrix
from paceline.visualize.image import Image

WHITE, DARKEST = (255, 255, 255), (8, 48, 107)


def extent(image: Image, color: tuple[int, int, int]) -> tuple[int, int]:
    """Height and width of the box around all pixels of exactly that color."""
    rows, columns = np.nonzero((image == color).all(axis=2))
    return int(np.ptp(rows)) + 1, int(np.ptp(columns)) + 1


def test_cells_are_colored_by_the_fraction_of_the_row() -> None:
    image = draw_confusion_matrix(np.array([[50, 0], [2, 2]]), ["cat", "dog"], "Confusion")
    height, width = extent(image, DARKEST)
    assert min(height, width) >= 70  # the cell of cats taken for cats, whole
    left = int(np.nonzero((image == DARKEST).all(axis=2))[1].min())
    top = int(np.nonzero((image == DARKEST).all(axis=2))[0].min())
    cell = 72
    corners = [tuple(image[top + row * cell + 3, left + column * cell + 3]) for row in (0, 1) for column in (0, 1)]
    assert corners[0] == DARKEST
    assert corners[1] == WHITE
    assert corners[2] == corners[3]
    assert corners[2] not in (DARKEST, WHITE)


def test_a_class_without_samples_is_white() -> None:
    image = draw_confusion_matrix(np.array([[0, 0], [0, 0]]), ["a", "b"], "nothing")
    assert not (image == DARKEST).all(axis=2).any()


@pytest.mark.parametrize("num_classes", [1, 2, 10, 30, 31, 100, 101, 1000, 1500])
def test_size_is_sensible(num_classes: int) -> None:
    names = [f"class {index} with a very long name that nobody reads to its end" for index in range(num_classes)]
    matrix = np.eye(num_classes, dtype=np.int64) * 12345
    image = draw_confusion_matrix(matrix, names, "Confusion")
    assert image.dtype == np.uint8
    assert image.shape[2] == 3
    assert max(image.shape) < 1700
    for edge in (image[:8], image[-8:], image[:, :8], image[:, -8:]):
        assert (edge == 255).all()


def test_numbers_are_written_up_to_thirty_classes() -> None:
    def white_on_dark(num_classes: int) -> bool:
        names = [""] * num_classes
        image = draw_confusion_matrix(np.eye(num_classes, dtype=np.int64) * 8, names, "")
        dark_rows, dark_columns = np.nonzero((image == DARKEST).all(axis=2))
        cell = {30: 32, 31: 13}[num_classes]
        top, left = int(dark_rows.min()), int(dark_columns.min())
        first = image[top : top + cell, left : left + cell]
        return bool((first != DARKEST).any())

    assert white_on_dark(30)
    assert not white_on_dark(31)
