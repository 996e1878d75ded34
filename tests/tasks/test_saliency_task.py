"""Saliency as the engine sees it: losses at the size of the images, metrics and files at that of the masks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.errors import DataError
from paceline.data.batch import Batch
from paceline.data.transforms.base import KeepOriginal
from paceline.data.transforms.geometric import CenterCrop, Pad, Resize
from paceline.losses.loss_term import LossTerm
from paceline.metrics.metric import MetricValues, State, merge_states
from paceline.metrics.saliency import Saliency as SaliencyFigures
from paceline.tasks.pixel_prediction import warp_to_truth
from paceline.tasks.saliency import Saliency

NONE = np.empty(0)


class MeanSquare:
    """The mean over images of (sigmoid − mask)², a loss of the test's own."""

    def count(self, batch: Batch) -> float:
        return float(len(batch["mask"]))

    def __call__(self, outputs: Tensor, batch: Batch) -> LossTerm:
        wrong = outputs[:, 0].sigmoid() - batch["mask"] / 255
        return LossTerm(wrong.square().mean((1, 2)).sum(), float(len(outputs)))


class Share:
    """The share of pixels that are salient in both, a metric of the test's own."""

    higher_is_better = True

    def update(self, predictions: list[Tensor], batch: Batch) -> State:
        pairs = zip(predictions, batch["mask"], strict=True)
        both = [((found > 0.5) & (mask > 128)).double().mean() for found, mask in pairs]
        return {"both": torch.stack(both)}

    def compute(self, state: State) -> MetricValues:
        return {"both": sum(state["both"].tolist()) / len(state["both"])}


class Brightness(nn.Module):
    """Says that bright pixels are salient, perhaps at a part of the images' size."""

    def __init__(self, shrink: int = 1) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(4.0))
        self.shrink = shrink

    def forward(self, images: Tensor) -> Tensor:
        logits = (images.mean(1, keepdim=True) - 0.5) * self.gain
        return F.avg_pool2d(logits, self.shrink) if self.shrink > 1 else logits


def task() -> Saliency:
    return Saliency({"square": MeanSquare()}, {"square": 2.0}, ["foreground"], [Share()])


def sample(height: int, width: int, seed: int = 0) -> dict[str, np.ndarray]:
    """A bright rectangle, and the mask of it."""
    random = np.random.default_rng(seed)
    mask = np.zeros((height, width), np.uint8)
    mask[height // 4 : height * 3 // 4, width // 3 :] = 255
    image = np.where(mask[..., None] > 0, 220, 30) + random.integers(-20, 20, (height, width, 3))
    return {"image": image.astype(np.uint8), "mask": mask}


def batch_of(samples: list[dict[str, np.ndarray]]) -> Batch:
    """What the loader makes of them: truths as a list, the rest stacked."""
    fields = {name: torch.from_numpy(np.stack([each[name] for each in samples])) for name in ("image", "mask")}
    found = Batch(id=torch.arange(len(samples)), image=fields["image"].permute(0, 3, 1, 2) / 255, mask=fields["mask"])
    if "truth" in samples[0]:
        found["truth"] = [torch.from_numpy(each["truth"]) for each in samples]
        found["matrix"] = torch.from_numpy(np.stack([each["matrix"] for each in samples]))
    return found


def kept(height: int, width: int, side: int = 32) -> dict[str, np.ndarray]:
    return Resize([side, side])(KeepOriginal()(sample(height, width), NONE), NONE)


@pytest.mark.parametrize("shrink", [1, 4])
def test_losses_are_fractions_at_the_size_of_the_masks(shrink: int) -> None:
    chosen, model, samples = task(), Brightness(shrink), batch_of([sample(16, 24), sample(16, 24, 1)])
    term = chosen.losses(model, samples)["square"]
    logits = F.interpolate(model(samples["image"]), (16, 24), mode="bilinear")
    expected = (logits[:, 0].sigmoid() - samples["mask"] / 255).square().mean()
    assert (term.numerator / term.denominator).item() == pytest.approx(expected.item(), rel=1e-6)
    assert chosen.counts(samples) == {"square": 2.0}
    (gradient,) = torch.autograd.grad(term.numerator, model.gain)
    assert gradient != 0


def test_predictions_have_the_size_of_each_truth() -> None:
    samples = batch_of([kept(40, 60), kept(25, 90)])
    predictions = task().predict(Brightness(), samples)
    assert [tuple(found.shape) for found in predictions.maps] == [(40, 60), (25, 90)]
    assert predictions.logits.shape == (2, 1, 32, 32)
    for found, truth in zip(predictions.maps, samples["truth"], strict=True):
        assert 0 <= found.min() <= found.max() <= 1
        assert ((found > 0.5) == (truth > 128)).float().mean() > 0.95
    expected = F.interpolate(predictions.logits[:1].sigmoid(), (40, 60), mode="bilinear")[0, 0]
    assert torch.equal((predictions.maps[0] * 255).round(), (expected * 255).round().double())


def test_without_a_truth_masks_are_measured_as_they_are() -> None:
    samples = batch_of([sample(16, 24), sample(16, 24, 1)])
    predictions = task().predict(Brightness(), samples)
    expected = (predictions.logits[:, 0].sigmoid() * 255).round().double() / 255
    assert torch.equal(torch.stack(predictions.maps), expected)


@pytest.mark.parametrize("then", [Pad(size=[64, 96]), Pad(size_divisor=32), CenterCrop([24, 40])])
def test_padding_and_cropping_are_undone(then: Pad | CenterCrop) -> None:
    """Values that tell their place come back to that place."""
    rows, columns = np.mgrid[:40, :60].astype(np.uint8)
    placed = {"image": np.stack([rows, columns, rows], -1), "mask": np.zeros((40, 60), np.uint8)}
    changed = batch_of([then(KeepOriginal()(placed, NONE), NONE)])
    planes = next(iter(warp_to_truth(changed["image"] * 255, changed)))
    seen = slice(8, 32), slice(10, 50)  # what the crop has
    assert planes.shape == (3, 40, 60)
    assert planes[0][seen].numpy() == pytest.approx(rows[seen].astype(np.float64), abs=1e-2)
    assert planes[1][seen].numpy() == pytest.approx(columns[seen].astype(np.float64), abs=1e-2)


def test_a_resized_crop_comes_back_too() -> None:
    rows, columns = np.mgrid[:48, :64].astype(np.uint8)
    placed = {"image": np.stack([4 * rows, 3 * columns, rows], -1), "mask": np.zeros((48, 64), np.uint8)}
    changed = Resize([80, 80])(CenterCrop([40, 40])(KeepOriginal()(placed, NONE), NONE), NONE)
    planes = next(iter(warp_to_truth(batch_of([changed])["image"] * 255, batch_of([changed]))))
    seen = slice(6, 42), slice(14, 50)
    assert planes[0][seen].numpy() == pytest.approx(4.0 * rows[seen], abs=1.1)
    assert planes[1][seen].numpy() == pytest.approx(3.0 * columns[seen], abs=1.1)


def test_metrics_do_not_depend_on_how_samples_were_cut() -> None:
    chosen, everything = task(), [kept(40 + number, 60 - number) for number in range(5)]
    found = []
    for slices in ([0, 5], [0, 2, 5], [0, 1, 2, 3, 4, 5]):
        metrics: MetricValues = {}
        for metric in chosen.metrics():
            parts = [batch_of(everything[start:stop]) for start, stop in pairwise(slices)]
            states = [metric.update(chosen.predict(Brightness(), part), part) for part in parts]
            metrics |= metric.compute(merge_states(states))
        found.append({name: value for name, value in metrics.items() if name not in ("loss", "square")})
    assert found[0] == found[1] == found[2]
    assert chosen.main_metric in found[0]
    assert found[0]["max_f"] > 0.9
    assert found[0]["both"] == pytest.approx(1 / 3, abs=0.02)


def test_a_metric_that_is_named_takes_the_place_of_the_usual_one() -> None:
    chosen = Saliency({"square": MeanSquare()}, {"square": 1.0}, ["foreground"], [SaliencyFigures(["mae"])])
    samples = batch_of([kept(20, 30)])
    predictions = chosen.predict(Brightness(), samples)
    metrics = [metric.compute(metric.update(predictions, samples)) for metric in chosen.metrics()]
    assert [sorted(each) for each in metrics] == [["loss", "square"], ["mae"]]


def test_metrics_are_those_of_the_saved_maps() -> None:
    samples = batch_of([kept(200, 300)])
    predictions = task().predict(Brightness(), samples)
    (saved,) = task().maps(predictions)
    assert saved.dtype == np.uint8
    assert saved.shape == (200, 300)
    measured, metric = Batch(samples, mask=samples["truth"]), SaliencyFigures()
    of_the_file = metric.compute(metric.update([torch.from_numpy(saved)], measured))
    assert metric.compute(metric.update(predictions.maps, measured)) == of_the_file


def test_image_truth_and_prediction_are_drawn_at_the_shape_of_the_truth() -> None:
    samples = batch_of([kept(20, 30), kept(30, 20)])
    predictions = task().predict(Brightness(), samples)
    for index, shape in enumerate([(100, 150, 3), (150, 100, 3)]):
        alone, panels = task().draw(samples, None, index), task().draw(samples, predictions, index)
        assert [panel.caption for panel in alone] == ["image", "truth"]
        assert [panel.image.shape for panel in panels] == [shape] * 3
        assert all((one.image == other.image).all() for one, other in zip(alone, panels, strict=False))
        metric = SaliencyFigures()
        state = metric.update([predictions.maps[index]], Batch(mask=[samples["truth"][index]]))
        assert panels[2].caption == f"prediction, MAE {metric.compute(state)['mae']:.3f}"
    assert task().draw_metrics({}) == {}


def test_what_is_not_saliency_is_refused() -> None:
    with pytest.raises(DataError, match="set binary: true"):
        Saliency({"square": MeanSquare()}, {"square": 1.0}, ["a", "b"])
    with pytest.raises(DataError, match="3 maps"):
        task().losses(nn.Identity(), batch_of([sample(8, 8)]))
    with pytest.raises(DataError, match="masks"):
        KeepOriginal()({"image": sample(8, 8)["image"]}, NONE)
