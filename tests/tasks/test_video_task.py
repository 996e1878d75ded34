"""Videos as the engine sees them: clips, views that make one prediction, metrics and images."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.core.errors import DataError
from paceline.data.batch import Batch, collate
from paceline.data.transforms.video import MultiCrop
from paceline.losses.classification import BinaryCrossEntropy, CrossEntropy
from paceline.metrics.metric import MetricValues, merge_states
from paceline.tasks.video import VideoClassification

CLASSES = ["circling", "growing", "sideways"]
NONE = np.empty(0)


class Net(nn.Module):
    """A linear layer on the mean of every channel, which remembers how many clips it saw at a time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.head = nn.Linear(3, 3)
        self.seen: list[tuple[int, ...]] = []

    def forward(self, clips: Tensor) -> Tensor:
        self.seen.append(tuple(clips.shape))
        logits: Tensor = self.head(clips.mean((2, 3, 4)) * 10)
        return logits


def task(multi_label: bool = False) -> VideoClassification:
    losses: dict[str, Any] = {"bce": BinaryCrossEntropy()} if multi_label else {"cross_entropy": CrossEntropy()}
    return VideoClassification(losses, dict.fromkeys(losses, 1.0), CLASSES, top_k=(1, 2), multi_label=multi_label)


def batch(*shape: int) -> Batch:
    clips = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    return Batch(id=torch.arange(len(clips)), image=clips, label=torch.arange(len(clips)) % 3)


def test_a_clip_is_classified_as_an_image_is() -> None:
    net, samples = Net(), batch(4, 3, 2, 6, 8)
    term = task().losses(net, samples)["cross_entropy"]
    logits = net(samples["image"])
    expected = nn.functional.cross_entropy(logits, samples["label"])
    assert (term.numerator / term.denominator).item() == pytest.approx(expected.item(), rel=1e-6)
    assert task().counts(samples) == {"cross_entropy": 4.0}
    assert torch.equal(task().predict(net, samples), logits)


def test_views_make_one_prediction_a_video() -> None:
    net, samples = Net(), batch(4, 5, 3, 2, 6, 8)
    logits = task().predict(net, samples)
    assert net.seen == [(4, 3, 2, 6, 8)] * 5, "a view of all videos at a time"
    assert torch.equal(logits, torch.stack([net(view) for view in samples["image"].unbind(1)], 1))
    expected = nn.functional.nll_loss(logits.softmax(2).mean(1).log(), samples["label"]).item()
    term = task().losses(net, samples)["cross_entropy"]
    assert (term.numerator / term.denominator).item() == pytest.approx(expected, rel=1e-5)
    assert measured(task(), logits, samples)["cross_entropy"] == pytest.approx(expected, rel=1e-5)


def test_views_of_several_labels_are_averaged_label_by_label() -> None:
    net, samples = Net(), batch(4, 5, 3, 2, 6, 8)
    samples["label"] = nn.functional.one_hot(samples["label"], 3).float()
    logits = task(multi_label=True).predict(net, samples)
    expected = nn.functional.binary_cross_entropy(logits.sigmoid().mean(1), samples["label"]).item()
    term = task(multi_label=True).losses(net, samples)["bce"]
    assert (term.numerator / term.denominator).item() == pytest.approx(expected, rel=1e-5)
    assert measured(task(multi_label=True), logits, samples)["bce"] == pytest.approx(expected, rel=1e-5)
    sure = nn.Sequential(net, Largest())
    assert task(multi_label=True).losses(sure, samples)["bce"].numerator.isfinite()
    certain = measured(task(multi_label=True), task().predict(sure, samples), samples)
    assert np.isfinite(certain["bce"])


class Largest(nn.Module):
    def forward(self, logits: Tensor) -> Tensor:
        return logits.sign() * 1e6


def measured(chosen: VideoClassification, predictions: Tensor, *batches: Batch) -> MetricValues:
    metrics: MetricValues = {}
    for metric in chosen.metrics():
        metrics |= metric.compute(merge_states(metric.update(predictions, each) for each in batches))
    return metrics


def test_a_sure_view_does_not_outvote_all_others() -> None:
    """By probabilities two to one win, where by logits the single view would."""
    views = torch.tensor([[[50.0, 0.0, 0.0], [0.0, 4.0, 0.0], [0.0, 4.0, 0.0]]])
    samples = batch(1, 3, 3, 2, 4, 4) | {"label": torch.tensor([1])}
    metrics = measured(task(), views, Batch(samples))
    assert (metrics["top1"], metrics["clip_top1"]) == (1, 2 / 3)


def test_metrics_count_videos_however_they_are_cut() -> None:
    chosen, net, samples = task(), Net(), batch(6, 4, 3, 2, 6, 8)
    found = []
    for slices in ([0, 6], [0, 2, 6], [0, 1, 2, 3, 4, 5, 6]):
        parts = [
            Batch({name: value[start:stop] for name, value in samples.items()}) for start, stop in pairwise(slices)
        ]
        metrics: MetricValues = {}
        for metric in chosen.metrics():
            metrics |= metric.compute(merge_states(metric.update(chosen.predict(net, part), part) for part in parts))
        found.append({name: value for name, value in metrics.items() if isinstance(value, float)})
    assert found[0] == found[1] == found[2]
    assert chosen.main_metric in found[0]
    assert int(metrics["confusion"].sum()) == 6


def test_several_labels_have_their_metrics() -> None:
    chosen, samples = task(multi_label=True), batch(6, 2, 3, 2, 6, 8)
    samples["label"] = nn.functional.one_hot(samples["label"], 3).float()
    metrics: MetricValues = {}
    for metric in chosen.metrics():
        metrics |= metric.compute(metric.update(chosen.predict(Net(), samples), samples))
    assert chosen.main_metric in metrics
    assert "bce" in metrics


def test_images_are_no_videos() -> None:
    with pytest.raises(DataError, match=r"expected clips \[N, C, T, H, W\]"):
        task().predict(Net(), batch(4, 3, 6, 8))


@pytest.mark.parametrize("shape", [(3, 3, 8, 4, 6), (3, 2, 3, 8, 4, 6), (3, 3, 1, 4, 6)])
def test_four_frames_of_the_first_view_are_drawn(shape: tuple[int, ...]) -> None:
    samples = batch(*shape)
    clip = samples["image"][1, 0] if len(shape) == 6 else samples["image"][1]
    for predictions, is_correct in ((torch.eye(3), True), (torch.eye(3)[:, None].repeat(1, 2, 1), True), (None, None)):
        (panel,) = task().draw(samples, predictions, 1)
        assert panel.is_correct is is_correct
        assert panel.caption == "growing"
        assert panel.image.shape == ((106, 158, 3) if shape[-3] > 1 else (104, 156, 3))
        expected = (clip - clip.min()) / (clip.max() - clip.min()) * 255
        assert panel.image[0, 0].tolist() == expected[:, 0, 0, 0].round().tolist()
        assert panel.image[-1, -1].tolist() == expected[:, shape[-3] * 3 // 4, -1, -1].round().tolist()


@pytest.mark.parametrize(("height", "width"), [(10, 30), (30, 10), (10, 10)])
def test_crops_lie_along_the_longer_side(height: int, width: int) -> None:
    rows, columns = np.mgrid[:height, :width].astype(np.uint8)
    clip = np.stack([np.stack([rows, columns, np.full_like(rows, frame)], -1) for frame in range(4)])
    views = MultiCrop(8)({"image": clip, "label": 1}, NONE)["image"]
    assert views.shape == (3, 4, 8, 8, 3)
    corners = [tuple(view[0, 0, 0, :2].tolist()) for view in views]
    expected = {(10, 30): [(1, 0), (1, 11), (1, 22)], (30, 10): [(0, 1), (11, 1), (22, 1)]}
    assert corners == expected.get((height, width), [(1, 0), (1, 1), (1, 2)])
    if height != width:
        clip = clip[:, : height - 1, : width - 1]  # an odd rest in both directions: half a pixel is rounded up
    assert MultiCrop(8, num_crops=1)({"image": clip}, NONE)["image"][0, 0, 0, 0, :2].tolist() == [
        math.ceil((clip.shape[1] - 8) / 2),
        math.ceil((clip.shape[2] - 8) / 2),
    ]


def test_every_clip_gets_its_crops() -> None:
    clips = np.random.default_rng(0).integers(0, 256, (2, 4, 10, 14, 3), np.uint8)
    views = MultiCrop(10, num_crops=3)({"image": clips, "label": 0}, NONE)["image"]
    assert views.shape == (6, 4, 10, 10, 3)
    assert np.array_equal(views[4], clips[1][:, :, 2:12])
    together = collate([0, 1], [{"image": views, "label": 0}, {"image": views, "label": 2}])
    assert together["image"].shape == (2, 6, 3, 4, 10, 10)


def test_what_cannot_be_cropped_is_reported() -> None:
    with pytest.raises(DataError, match=r"frames are 6×8; add \{name: resize, size: 7\} before it"):
        MultiCrop(7)({"image": np.zeros((2, 8, 6, 3), np.uint8)}, NONE)
    with pytest.raises(DataError, match="an image of 6×8"):
        MultiCrop(7)({"image": np.zeros((8, 6, 3), np.uint8)}, NONE)
