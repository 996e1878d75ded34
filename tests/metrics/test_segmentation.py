import math
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.data.batch import Batch
from paceline.metrics.metric import Metric, MetricValues, merge_states, pack, unpack
from paceline.metrics.segmentation import BoundaryF, Segmentation

NAN = math.nan
IGNORED = 255
CLASSES = 4


def batch_of(masks: Any, first: int = 0) -> Batch:
    return Batch(id=torch.arange(first, first + len(masks)), mask=masks)


def metrics(metric: Metric, predictions: Any, masks: Any, sizes: list[int] | None = None) -> MetricValues:
    """Measure in batches of these sizes (one batch of all if none are given), merge, and compute."""
    states, start = [], 0
    for size in sizes or [len(masks)]:
        part = slice(start, start + size)
        states.append(metric.update(predictions[part], batch_of(masks[part], start)))
        start += size
    return metric.compute(merge_states(states))


def drawn(
    num_samples: int = 5, num_classes: int = CLASSES, seed: int = 0, ignored: float = 0.15
) -> tuple[Tensor, Tensor]:
    """Class numbers in patches, some of them wrong, and masks with ignored pixels."""
    source = torch.Generator().manual_seed(seed)
    patches = torch.randint(num_classes, (num_samples, 4, 5), generator=source)
    masks = patches.repeat_interleave(3, 1).repeat_interleave(3, 2)[:, :11, :13]
    noise = torch.randint(num_classes, masks.shape, generator=source)
    predicted = torch.where(torch.rand(masks.shape, generator=source) < 0.1, noise, masks.roll(1, 2))
    hidden = torch.rand(masks.shape, generator=source) < ignored
    return predicted, masks.masked_fill(hidden, IGNORED).to(torch.uint8)


def bit_identical(one: MetricValues, other: MetricValues) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name].nan_to_num(-1), other[name].nan_to_num(-1))
        if isinstance(one[name], Tensor)
        else one[name] == other[name]
        for name in one
    )


# Intersection over union


def pixel_by_pixel(predicted: Tensor, masks: Tensor, num_classes: int) -> dict[str, Any]:
    """The definitions, followed with sets of pixels."""
    places = [tuple(place) for place in (masks != IGNORED).nonzero().tolist()]
    truth = {c: {place for place in places if int(masks[place]) == c} for c in range(num_classes)}
    found = {c: {place for place in places if int(predicted[place]) == c} for c in range(num_classes)}
    shares = {c: len(truth[c] & found[c]) / len(truth[c] | found[c]) for c in truth if truth[c] | found[c]}
    accuracies = [len(truth[c] & found[c]) / len(truth[c]) for c in truth if truth[c]]
    return {
        "class_iou": [shares.get(c, NAN) for c in truth],
        "miou": sum(shares.values()) / len(shares),
        "pixel_accuracy": sum(len(truth[c] & found[c]) for c in truth) / len(places),
        "mean_accuracy": sum(accuracies) / len(accuracies),
        "frequency_weighted_iou": sum(len(truth[c]) / len(places) * share for c, share in shares.items()),
        "unseen_classes": num_classes - len(shares),
        "confusion": [[len(truth[row] & found[column]) for column in truth] for row in truth],
    }


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), num_classes=st.integers(2, 6), num_samples=st.integers(1, 3))
def test_values_are_those_of_sets_of_pixels(seed: int, num_classes: int, num_samples: int) -> None:
    predicted, masks = drawn(num_samples, num_classes, seed)
    # More classes than are drawn, so that some are never seen, and some only predicted.
    predicted = torch.where(predicted == 0, num_classes, predicted)
    found = metrics(Segmentation(num_classes + 2), predicted, masks)
    expected = pixel_by_pixel(predicted, masks, num_classes + 2)
    assert found.pop("confusion").tolist() == expected.pop("confusion")
    np.testing.assert_allclose(found.pop("class_iou").numpy(), expected.pop("class_iou"), rtol=1e-14)
    assert found == pytest.approx(expected, rel=1e-12)


def test_values_are_scikit_learns() -> None:
    predicted, masks = drawn()
    is_counted = masks != IGNORED
    truth, guess = masks[is_counted].numpy(), predicted[is_counted].numpy()
    found = metrics(Segmentation(CLASSES), predicted, masks)
    assert found["class_iou"].tolist() == pytest.approx(oracle.jaccard_score(truth, guess, average=None).tolist())
    assert found["miou"] == pytest.approx(oracle.jaccard_score(truth, guess, average="macro"))
    weighted = oracle.jaccard_score(truth, guess, average="weighted")
    assert found["frequency_weighted_iou"] == pytest.approx(weighted)
    assert found["pixel_accuracy"] == oracle.accuracy_score(truth, guess)
    assert found["mean_accuracy"] == pytest.approx(oracle.balanced_accuracy_score(truth, guess))
    assert found["confusion"].tolist() == oracle.confusion_matrix(truth, guess).tolist()


def test_segmentation_by_hand() -> None:
    masks = torch.tensor([[[0, 0, 1], [0, 255, 1]]], dtype=torch.uint8)
    predicted = torch.tensor([[[0, 2, 1], [0, 3, 0]]])
    found = metrics(Segmentation(4, classes=["sky", "road", "car", "dog"]), predicted, masks)
    assert found.pop("class_iou").nan_to_num(-1).tolist() == [2 / 4, 1 / 2, 0, -1]
    assert found.pop("confusion").tolist() == [[2, 0, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert found == {
        "miou": 1 / 3,  # sky, road, and the car that was predicted only; the dog is on an ignored pixel
        "pixel_accuracy": 3 / 5,
        "mean_accuracy": (2 / 3 + 1 / 2) / 2,
        "frequency_weighted_iou": 0.5,
        "unseen_classes": 1,
        "absent.car": 1,
        "absent.dog": 1,
        "iou.sky": 0.5,
        "iou.road": 0.5,
        "iou.car": 0.0,
    }


def test_an_ignored_id_may_be_that_of_a_class() -> None:
    masks = torch.tensor([[[0, 1, 2]]], dtype=torch.uint8)
    found = metrics(Segmentation(3, ignore_index=0), torch.tensor([[[0, 1, 1]]]), masks)
    assert found["confusion"].tolist() == [[0, 0, 0], [0, 1, 0], [0, 1, 0]]
    assert found["miou"] == 0.25
    assert found["unseen_classes"] == 0


def test_a_pixel_taken_for_the_ignored_class_is_wrong_and_no_more() -> None:
    masks = torch.tensor([[[0, 1, 1, 2, 2]]], dtype=torch.uint8)
    found = metrics(Segmentation(3, 0, ["void", "road", "car"]), torch.tensor([[[1, 1, 0, 2, 2]]]), masks)
    assert (found["iou.road"], found["iou.car"], found["miou"]) == (0.5, 1.0, 0.75)
    assert (found["pixel_accuracy"], found["unseen_classes"]) == (0.75, 0)
    assert not {"iou.void", "absent.void"} & found.keys()


def test_without_labelled_pixels_there_are_no_shares() -> None:
    masks = torch.full((2, 3, 3), IGNORED, dtype=torch.uint8)
    found = metrics(Segmentation(2, classes=["a", "b"]), torch.zeros(2, 3, 3, dtype=torch.int64), masks)
    assert set(found) == {"unseen_classes", "absent.a", "absent.b", "class_iou", "confusion"}
    assert found["unseen_classes"] == 2
    assert bool(found["class_iou"].isnan().all())
    assert metrics(BoundaryF(2), torch.zeros(2, 3, 3, dtype=torch.int64), masks).keys() == {"class_boundary_f"}


def test_pixels_without_a_prediction_are_never_right() -> None:
    masks = torch.zeros(1, 2, 2, dtype=torch.uint8)
    logits = torch.zeros(1, 3, 2, 2)
    logits[0, 2, 0, 0] = logits[0, 0, 1, 1] = NAN
    found = metrics(Segmentation(3), logits, masks)
    assert found["pixel_accuracy"] == 0.5 == found["miou"]
    assert found["unseen_classes"] == 2
    assert bit_identical(found, metrics(Segmentation(3), torch.tensor([[[3, 0], [0, -1]]]), masks))


# Boundaries


def by_all_pairs(predicted: Tensor, masks: Tensor, num_classes: int, distance: float) -> list[float]:
    """The definition, followed with lists of boundary pixels and all their distances; one number a class."""
    scores: list[list[float]] = [[] for _ in range(num_classes)]
    for numbers, truth in zip(predicted.tolist(), masks.tolist(), strict=True):
        height, width = len(truth), len(truth[0])
        guess = [[-1 if truth[y][x] == IGNORED else numbers[y][x] for x in range(width)] for y in range(height)]

        def boundary(rows: list[list[int]], c: int, height: int = height, width: int = width) -> list[tuple[int, int]]:
            def is_boundary(y: int, x: int) -> bool:
                around = [(y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)]
                return any(0 <= v < height and 0 <= u < width and rows[v][u] != c for v, u in around)

            return [(y, x) for y in range(height) for x in range(width) if rows[y][x] == c and is_boundary(y, x)]

        def share(places: list[tuple[int, int]], others: list[tuple[int, int]]) -> float:
            near = [any(math.dist(place, other) <= distance + 1e-9 for other in others) for place in places]
            return sum(near) / len(near)

        for c in range(num_classes):
            if not any(c in row for row in truth):
                continue
            ours, theirs = boundary(guess, c), boundary(truth, c)
            if ours and theirs:
                precision, recall = share(ours, theirs), share(theirs, ours)
                scores[c].append(2 * precision * recall / (precision + recall) if precision + recall else 0.0)
            else:
                scores[c].append(float(ours == theirs and any(c in row for row in guess)))
    return [sum(own) / len(own) if own else NAN for own in scores]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num_classes=st.integers(1, 4),
    distance=st.sampled_from([0.0, 1.0, math.sqrt(2), 2.5, 13.0]),
)
def test_boundaries_are_those_found_pair_by_pair(seed: int, num_classes: int, distance: float) -> None:
    predicted, masks = drawn(2, num_classes, seed, ignored=0.02)
    found = metrics(BoundaryF(num_classes + 1, distance=distance), predicted, masks)
    expected = by_all_pairs(predicted, masks, num_classes + 1, distance)
    np.testing.assert_allclose(found["class_boundary_f"].numpy(), expected, rtol=1e-12)
    assert found["boundary_f"] == pytest.approx(np.nanmean(expected))


def test_boundaries_by_hand() -> None:
    # The border between left and right is predicted two columns too far to the right.
    masks, predicted = torch.zeros(1, 8, 10, dtype=torch.uint8), torch.zeros(1, 8, 10, dtype=torch.int64)
    masks[:, :, 4:] = 1
    predicted[:, :, 6:] = 1
    for distance, expected in ((1.0, 0.0), (1.9, 0.0), (2.0, 1.0)):
        found = metrics(BoundaryF(3, distance=distance, classes=["left", "right", "top"]), predicted, masks)
        assert found["boundary_f"] == expected == found["boundary_f.left"] == found["boundary_f.right"]
        assert found["class_boundary_f"].isnan().tolist() == [False, False, True]
        assert "boundary_f.top" not in found


def test_the_distance_grows_with_the_image() -> None:
    # 0.75 % of the diagonal of 400×300 pixels is 3.75, of 200×150 half of that.
    for height, width, near in ((300, 400, 3), (150, 200, 1)):
        masks, predicted = torch.zeros(2, height, width, dtype=torch.uint8), torch.zeros(2, height, width).long()
        masks[:, :, 100:] = 1
        predicted[0, :, 100 + near :] = 1
        predicted[1, :, 101 + near :] = 1
        assert metrics(BoundaryF(2), predicted, masks)["boundary_f"] == 0.5


@pytest.mark.parametrize(
    ("predicted", "expected"),
    [([[0, 0], [0, 0]], 1.0), ([[1, 1], [1, 1]], 0.0), ([[0, 1], [0, 0]], 0.0)],
    ids=["met", "missed", "broken"],
)
def test_a_class_that_fills_the_image_has_no_boundary(predicted: list[list[int]], expected: float) -> None:
    found = metrics(BoundaryF(2), torch.tensor([predicted]), torch.zeros(1, 2, 2, dtype=torch.uint8))
    assert found["boundary_f"] == expected
    assert found["class_boundary_f"].isnan().tolist() == [False, True]


# What holds for both


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5), seed=st.integers(0, 1000))
def test_values_do_not_depend_on_batches(sizes: list[int], seed: int) -> None:
    predicted, masks = drawn(sum(sizes), CLASSES, seed)
    for metric in (Segmentation(CLASSES + 1), BoundaryF(CLASSES + 1, distance=1.5)):
        at_once = metrics(metric, predicted, masks)
        assert bit_identical(metrics(metric, predicted, masks, sizes), at_once)
        assert bit_identical(metrics(metric, predicted, masks, [1] * sum(sizes)), at_once)
        state = metric.update(predicted, batch_of(masks))
        assert bit_identical(metric.compute(unpack(pack(state))), at_once)


@pytest.mark.parametrize("metric", [Segmentation(CLASSES), BoundaryF(CLASSES)])
def test_numbers_logits_and_lists_of_samples_are_the_same(metric: Metric) -> None:
    predicted, masks = drawn()
    expected = metrics(metric, predicted, masks)
    logits = torch.nn.functional.one_hot(predicted, CLASSES).movedim(-1, 1).float()
    for given_as in (logits, logits.bfloat16(), logits.requires_grad_(), predicted.to(torch.uint8), list(predicted)):
        assert bit_identical(metrics(metric, given_as, masks), expected)
        assert bit_identical(metrics(metric, given_as, list(masks)), expected)
    state = metric.update(logits, batch_of(masks))
    assert not any(value.requires_grad for value in state.values())
    assert {value.dtype for value in state.values()} <= {torch.int64, torch.float64}


@pytest.mark.parametrize("metric", [Segmentation(CLASSES), BoundaryF(CLASSES)])
def test_samples_may_differ_in_size(metric: Metric) -> None:
    predicted, masks = drawn(2)
    cropped = [predicted[0], predicted[1, :7, 2:]], [masks[0], masks[1, :7, 2:]]
    whole = metrics(metric, *cropped)
    assert bit_identical(whole, metrics(metric, *cropped, [1, 1]))


def test_what_is_given_stays_as_it_is() -> None:
    predicted, masks = drawn()
    before = predicted.clone(), masks.clone()
    for metric in (Segmentation(CLASSES), BoundaryF(CLASSES)):
        metric.update(predicted, batch_of(masks))
    assert torch.equal(predicted, before[0])
    assert torch.equal(masks, before[1])


@pytest.mark.parametrize("kind", [Segmentation, BoundaryF])
def test_predictions_and_masks_that_do_not_fit_are_refused(kind: Any) -> None:
    predicted, masks = drawn()
    batch = batch_of(masks, first=20)
    with pytest.raises(DataError, match=r"sample 20: .* 13×10 .* 13×11"):
        kind(CLASSES).update(predicted[:, 1:], batch)
    with pytest.raises(DataError, match=r"4 classes.* 7"):
        kind(CLASSES).update(torch.zeros(5, 7, 11, 13), batch)
    with pytest.raises(DataError, match=r"torch\.float32"):
        kind(CLASSES).update(predicted.float(), batch)
    with pytest.raises(DataError, match=r"sample 20 .* id 255; expected 0 to 3, .*ignore_index"):
        kind(CLASSES, ignore_index=None).update(predicted, batch)
    masks[2, 0, 0] = 9
    with pytest.raises(DataError, match=r"sample 22 .* id 9; expected 0 to 3, or 255"):
        kind(CLASSES).update(predicted, batch)
    with pytest.raises(DataError, match="masks"):
        kind(CLASSES).update(predicted, Batch(id=torch.arange(5)))


@pytest.mark.parametrize(
    ("name", "component", "wrong"),
    [("segmentation", Segmentation, {"num_classes": 3}), ("boundary_f", BoundaryF, {"distance": -1.0})],
)
def test_recipes_can_name_the_metrics(name: str, component: Any, wrong: dict[str, Any]) -> None:
    entry = register.kind("metric").find(name)
    assert entry is not None
    assert entry.resolve() is component
    component(num_classes=3, **entry.arguments().model_dump())
    with pytest.raises(ValidationError):
        entry.arguments.model_validate(wrong)
