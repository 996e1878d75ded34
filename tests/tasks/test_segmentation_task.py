"""Segmentation as the engine sees it: auxiliary heads, views of evaluation, metrics at the size of the masks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from support.registered import arguments_of
from torch import Tensor, nn

from paceline.core.errors import ArgumentError, RecipeError
from paceline.data.batch import Batch
from paceline.losses.loss_term import Loss
from paceline.losses.pixel import PixelCrossEntropy
from paceline.losses.region import dice_loss
from paceline.metrics.metric import MetricValues, merge_states
from paceline.tasks.pixel_prediction import TTA, PixelPrediction, window_starts
from paceline.tasks.segmentation import Segmentation

CLASSES = ["background", "disc", "square"]


class Net(nn.Module):
    """A convolution a head; at a half of the images' size if asked."""

    def __init__(self, auxiliary: bool = False, shrink: int = 1) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.head = nn.Conv2d(3, 3, 3, padding=1, stride=shrink)
        self.side = nn.Conv2d(3, 3, 1)
        self.auxiliary = auxiliary

    def forward(self, images: Tensor) -> Tensor | dict[str, Tensor]:
        logits: Tensor = self.head(images)
        return {"out": logits, "aux": self.side(images)[:, :, ::2, ::2]} if self.auxiliary else logits


class PerPixel(nn.Module):
    """What it says of a pixel depends on that pixel alone."""

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([images * 2, images[:, :1] - images[:, 1:2]], 1)[:, 1:]


def task(**arguments: Any) -> Segmentation:
    return Segmentation(
        {"pixel_cross_entropy": PixelCrossEntropy(3)}, {"pixel_cross_entropy": 2.0}, CLASSES, **arguments
    )


def batch(size: int = 4, height: int = 12, width: int = 16) -> Batch:
    generator = torch.Generator().manual_seed(size)
    masks = torch.randint(0, 4, (size, height, width), generator=generator)
    masks[masks == 3] = 255
    images = torch.randn(size, 3, height, width, generator=generator)
    return Batch(id=torch.arange(size), image=images, mask=masks.to(torch.uint8))


def mean(term: Any) -> float:
    return float(term.numerator.detach() / torch.as_tensor(term.denominator).detach())


def cross_entropy(logits: Tensor, samples: Batch) -> float:
    return F.cross_entropy(logits, samples["mask"].long(), ignore_index=255).item()


@pytest.mark.parametrize("shrink", [1, 2])
def test_the_loss_is_that_of_logits_at_the_size_of_the_masks(shrink: int) -> None:
    net, samples = Net(shrink=shrink), batch()
    terms = task().losses(net, samples)
    logits = F.interpolate(net(samples["image"]), (12, 16), mode="bilinear")
    assert set(terms) == {"pixel_cross_entropy", "pixel_accuracy"}
    assert mean(terms["pixel_cross_entropy"]) == pytest.approx(cross_entropy(logits, samples), rel=1e-5)


def test_an_auxiliary_head_has_losses_of_its_own() -> None:
    net, samples = Net(auxiliary=True), batch()
    losses: dict[str, Loss] = {"pixel_cross_entropy": PixelCrossEntropy(3), "dice_loss": dice_loss(3)}
    chosen = Segmentation(losses, {"pixel_cross_entropy": 1.0, "dice_loss": 0.5}, CLASSES, aux_weight=0.4)
    terms, counts = chosen.losses(net, samples), chosen.counts(samples)
    assert chosen.weights == {
        "pixel_cross_entropy": 1.0,
        "dice_loss": 0.5,
        "aux_pixel_cross_entropy": 0.4,
        "aux_dice_loss": 0.2,
    }
    assert list(counts) == list(chosen.weights)
    assert set(terms) == {*chosen.weights, "pixel_accuracy"}
    assert counts["pixel_cross_entropy"] == counts["aux_pixel_cross_entropy"]
    auxiliary = F.interpolate(net(samples["image"])["aux"], (12, 16), mode="bilinear")
    assert mean(terms["aux_pixel_cross_entropy"]) == pytest.approx(cross_entropy(auxiliary, samples), rel=1e-5)
    (gradient,) = torch.autograd.grad(terms["aux_pixel_cross_entropy"].numerator, net.side.weight)
    assert gradient.abs().sum() > 0
    metrics = chosen.metrics()[0].compute(chosen.metrics()[0].update(chosen.predict(net, samples), samples))
    assert sorted(metrics) == ["dice_loss", "loss", "pixel_cross_entropy"]


def test_a_missing_head_and_a_wrong_number_of_classes_are_reported() -> None:
    with pytest.raises(RecipeError, match=r"task\.aux_weight"):
        task(aux_weight=0.4).losses(Net(), batch())
    with pytest.raises(RecipeError, match=r"5 maps.* 3 classes"):
        task().losses(nn.Conv2d(3, 5, 1), batch())
    with pytest.raises(RecipeError, match=r"model: .*\[4, 7\]"):
        task().losses(nn.Sequential(nn.Flatten(), nn.Linear(3 * 12 * 16, 7)), batch())


def test_metrics_are_measured_at_the_size_of_each_truth() -> None:
    chosen, samples = task(), batch(2)
    samples["truth"] = [torch.zeros(24, 32, dtype=torch.uint8), torch.ones(6, 9, dtype=torch.uint8)]
    samples["matrix"] = torch.tensor([[[2.0, 0, 0], [0, 2.0, 0]], [[9 / 16, 0, 0], [0, 0.5, 0]]])
    predictions = chosen.predict(Net(), samples)
    assert [tuple(found.shape) for found in predictions.maps] == [(24, 32), (6, 9)]
    right = [int((found == truth).sum()) for found, truth in zip(predictions.maps, samples["truth"], strict=True)]
    metrics: MetricValues = {}
    for metric in chosen.metrics():
        metrics |= metric.compute(metric.update(predictions, samples))
    assert metrics["pixel_accuracy"] == sum(right) / (24 * 32 + 6 * 9)
    assert chosen.main_metric in metrics
    assert {"iou.background", "iou.disc", "loss", "pixel_cross_entropy"} <= metrics.keys()
    assert metrics["confusion"].shape == (3, 3)


def test_metrics_do_not_depend_on_how_samples_were_cut() -> None:
    chosen, samples = task(), batch(5)
    found = []
    for slices in ([0, 5], [0, 2, 5]):
        states: dict[int, Any] = {}
        for start, stop in pairwise(slices):
            part = Batch({name: value[start:stop] for name, value in samples.items()})
            for number, metric in enumerate(chosen.metrics()[1:]):
                states.setdefault(number, []).append(metric.update(chosen.predict(Net(), part), part))
        metrics = chosen.metrics()[1:]
        computed = [metric.compute(merge_states(states[number])) for number, metric in enumerate(metrics)]
        found.append([{name: value for name, value in each.items() if isinstance(value, float)} for each in computed])
    assert found[0] == found[1]


def test_pixels_without_a_number_are_never_right() -> None:
    samples = batch(1)
    samples["mask"].zero_()
    predictions = task().predict(nn.Conv2d(3, 3, 1).requires_grad_(False).apply(_break), samples)
    assert set(predictions.maps[0].flatten().tolist()) == {3}
    measured = task().metrics()[1]
    assert measured.compute(measured.update(predictions, samples))["pixel_accuracy"] == 0


def _break(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        module.weight.fill_(float("nan"))


def test_one_view_is_the_models_own_answer() -> None:
    images = batch()["image"]
    assert torch.equal(TTA()(PerPixel(), images), PerPixel()(images))


def test_flipped_views_are_averaged_as_probabilities() -> None:
    net, images = Net().requires_grad_(False), batch()["image"]
    plain, turned = net(images).softmax(1), net(images.flip(-1)).flip(-1).softmax(1)
    found = TTA(flip=True)(net, images).softmax(1)
    assert torch.allclose(found, (plain + turned) / 2, atol=1e-6)
    assert torch.allclose(TTA(flip=True)(net, images.flip(-1)).flip(-1).softmax(1), found, atol=1e-6)


def test_views_at_several_sizes_are_brought_back_and_averaged() -> None:
    net, images = Net().requires_grad_(False), batch()["image"]
    asked: list[Sequence[int]] = []

    def predict(view: Tensor) -> Tensor:
        asked.append(tuple(view.shape[-2:]))
        logits: Tensor = net(view)
        return logits

    found = TTA(scales=(0.5, 1.0, 1.5))(predict, images)
    assert asked == [(6, 8), (12, 16), (18, 24)]
    expected = torch.zeros_like(found)
    for size in asked:
        view = F.interpolate(images, tuple(size), mode="bilinear")
        expected += F.interpolate(net(view), (12, 16), mode="bilinear").softmax(1) / 3
    assert torch.allclose(found.softmax(1), expected, atol=1e-6)


@given(st.integers(1, 40), st.integers(1, 40), st.data())
def test_windows_cover_a_side_without_gaps(length: int, window: int, data: st.DataObject) -> None:
    window = min(window, length)
    places = window_starts(length, window, data.draw(st.integers(1, window)))
    covered = {pixel for place in places for pixel in range(place, place + window)}
    assert covered == set(range(length))
    assert len(set(places)) == len(places)


@pytest.mark.parametrize(
    ("window", "stride"), [((5, 7), (3, 4)), ((12, 16), (12, 16)), ((50, 6), (50, 6)), ((5, 5), None)]
)
def test_windows_put_together_are_the_whole(window: Sequence[int], stride: Sequence[int] | None) -> None:
    """What a pixel is called here depends on no other, so windows must not be seen in the result."""
    images = batch()["image"]
    found = TTA(window=window, stride=stride)(PerPixel(), images)
    assert torch.allclose(found, PerPixel()(images), atol=1e-6)


def test_overlapping_windows_are_averaged() -> None:
    answers = iter([torch.zeros(1, 2, 4, 4), torch.ones(1, 2, 4, 4)])
    found = TTA(window=(4, 4), stride=(4, 2))(lambda view: next(answers), torch.zeros(1, 3, 4, 6))
    assert found[0, 0, 0].tolist() == [0, 0, 0.5, 0.5, 1, 1]


def test_a_task_looks_as_its_recipe_says() -> None:
    samples, net = batch(), Net().requires_grad_(False)
    chosen = task(flip=True, scales=[1.0, 1.25], window=8, stride=[6, 4])
    expected = TTA(True, (1.0, 1.25), (8, 8), (6, 4))(net, samples["image"])
    assert torch.equal(chosen.predict(net, samples).logits, expected)


def test_maps_are_saved_as_ids() -> None:
    predictions = task().predict(Net(), batch(2))
    for saved, found in zip(task().maps(predictions), predictions.maps, strict=True):
        assert saved.dtype == np.uint8
        assert saved.tolist() == found.tolist()


def test_classes_are_drawn_over_the_image_and_named() -> None:
    samples, chosen = batch(3), task()
    samples["mask"][1] = torch.tensor([1, 255]).repeat(12, 8)
    image, truth, prediction = chosen.draw(samples, chosen.predict(Net(), samples), 1)
    assert [panel.caption for panel in (image, truth, prediction)] == ["image", "truth", "prediction"]
    assert {panel.image.shape for panel in (image, truth, prediction)} == {(120, 160, 3)}
    assert [(entry.name, entry.color) for entry in truth.legend] == [("disc", chosen.palette[1]), ("ignored", None)]
    assert {entry.name for entry in prediction.legend} <= set(CLASSES)
    blended = (0.45 * image.image[0, 0] + 0.55 * np.array(chosen.palette[1])).round()
    assert truth.image[0, 0].tolist() == blended.tolist()
    assert truth.image[0, -1].tolist() == image.image[0, -1].tolist()
    assert len(chosen.draw(samples, None, 1)) == 2


@pytest.mark.parametrize("size", [(50, 60), (70, 100), (160, 90), (300, 500)])
def test_images_are_drawn_at_the_shape_of_their_truth(size: tuple[int, int]) -> None:
    samples = Batch(batch(1), truth=[torch.zeros(size, dtype=torch.uint8)])
    prediction = PixelPrediction(torch.empty(1, 3, 12, 16), [torch.zeros(size, dtype=torch.int16)])
    panels = task().draw(samples, prediction, 0)
    assert len({panel.image.shape for panel in panels}) == 1
    height, width, _ = panels[0].image.shape
    assert max(height, width) > 80
    assert abs(height / width - size[0] / size[1]) < 0.01


def test_the_confusion_matrix_is_drawn_if_there_is_one() -> None:
    assert list(task().draw_metrics({"confusion": torch.eye(3)})) == ["confusion"]
    assert task().draw_metrics({}) == {}


def test_strides_need_windows_at_least_as_large() -> None:
    arguments = arguments_of("task", "segmentation")
    arguments(window=[8, 9], stride=8)
    with pytest.raises(ValidationError, match="stride needs window"):
        arguments(stride=4)
    with pytest.raises(ArgumentError, match=r"stride: .*\[4, 5\].*\[4, 4\]"):
        Segmentation({}, {}, ["a", "b"], window=4, stride=[4, 5])
