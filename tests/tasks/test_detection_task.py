from __future__ import annotations

import pytest
import torch

from paceline.tasks.detection import precision_recall_curves


def test_of_many_classes_the_mean_and_the_most_frequent_are_drawn() -> None:
    classes = [f"class {number}" for number in range(80)]
    precision = torch.linspace(0, 1, 80, dtype=torch.float64)[:, None].expand(80, 101).clone()
    precision[79] = float("nan")  # a class that the split does not have
    title, curves = precision_recall_curves(classes, precision, torch.arange(80))
    assert list(curves) == ["mean of 79 classes", *(f"class {number}" for number in range(78, 69, -1))]
    assert "9 most frequent" in title
    recall, mean = curves["mean of 79 classes"]
    assert (len(mean), recall[-1]) == (101, 1)
    assert mean[0] == pytest.approx(39 / 79)


def test_few_classes_are_all_drawn_and_a_single_one_without_a_mean() -> None:
    title, curves = precision_recall_curves(["a", "b"], torch.ones(2, 101), torch.tensor([1, 2]))
    assert list(curves) == ["mean of 2 classes", "b", "a"]
    assert "frequent" not in title
    _, curves = precision_recall_curves(["a"], torch.ones(1, 101), torch.tensor([1]))
    assert list(curves) == ["a"]
    assert precision_recall_curves(["a"], torch.full((1, 101), float("nan")), torch.tensor([0]))[1] == {}
