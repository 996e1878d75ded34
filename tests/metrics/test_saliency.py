"""Saliency metrics against PySODMetrics' golden numbers, their definitions written out, and hand-computed ones."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from saliency_cases import NUM_REAL, fingerprint, noisy, real_cases, real_masks, synthetic_cases

from paceline.core.errors import DataError, RecipeError
from paceline.core.registry import register
from paceline.data.batch import Batch
from paceline.metrics.metric import MetricValues, merge_states
from paceline.metrics.saliency import SALIENCY_VALUES, Saliency

Case = tuple[npt.NDArray[Any], npt.NDArray[np.uint8]]

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "saliency.json").read_text())
CASES = synthetic_cases()
WAYS = [("stretched", True), ("as it is", False)]
TOLERANCE = 1e-9  # agreement is wanted to 1e-6; what is seen is much better


def measured(cases: Sequence[Case], metric: Saliency | None = None, sizes: Sequence[int] | None = None) -> MetricValues:
    """Measure in batches of these sizes (one batch of all if none are given), merge, and compute."""
    metric, states, start = metric or Saliency(), [], 0
    for size in sizes or [len(cases)]:
        part = [tuple(torch.from_numpy(each.copy()) for each in case) for case in cases[start : start + size]]
        batch = Batch(id=torch.arange(start, start + size), mask=[mask for _, mask in part])
        states.append(metric.update([prediction for prediction, _ in part], batch))
        start += size
    return metric.compute(merge_states(states))


def drawn(seed: int, height: int, width: int, share: float) -> Case:
    """A coarse prediction, with many equal values, and a mask of which about `share` is salient."""
    draw = np.random.default_rng(seed)
    mask = np.where(draw.random((height, width)) < share, 255, 0).astype(np.uint8)
    return (draw.integers(0, 6, (height, width)) * 51).astype(np.uint8), mask


SHAPES = st.builds(
    drawn, st.integers(0, 2**16), st.integers(1, 14), st.integers(1, 14), st.sampled_from([0.0, 0.03, 0.3, 0.9, 1.0])
)


@pytest.mark.parametrize(("way", "stretch"), WAYS)
@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_pysodmetrics(name: str, way: str, stretch: bool) -> None:
    golden = GOLDEN["synthetic"][name]
    assert fingerprint(*CASES[name]) == golden["fingerprint"], "not the case that the golden numbers were made from"
    found = measured([CASES[name]], Saliency(stretch=stretch))
    known = {metric: value for metric, value in golden[way].items() if value is not None}
    assert {metric: found[metric] for metric in known} == pytest.approx(known, abs=TOLERANCE)
    assert known.keys() | {"s_measure"} == set(SALIENCY_VALUES)


@pytest.mark.parametrize("name", ["noisy, corner mask", "one row"])
def test_regions_without_a_pixel_count_for_nothing(name: str) -> None:
    assert GOLDEN["synthetic"][name]["stretched"]["s_measure"] is None
    assert 0 <= measured([CASES[name]])["s_measure"] <= 1


@pytest.mark.parametrize(("way", "stretch"), WAYS)
def test_values_of_many_images_are_those_of_pysodmetrics(way: str, stretch: bool) -> None:
    sound = [case for name, case in CASES.items() if None not in GOLDEN["synthetic"][name][way].values()]
    assert len(sound) == len(CASES) - 2
    found = measured(sound, Saliency(stretch=stretch))
    assert found == pytest.approx(GOLDEN["all that have numbers"][way], abs=TOLERANCE)
    assert list(found) == list(SALIENCY_VALUES)


@pytest.mark.real_data
@pytest.mark.parametrize(("way", "alter"), [("as it is", False), ("some emptied, some filled", True)])
def test_values_of_real_masks_are_those_of_pysodmetrics(real_data: Path, way: str, alter: bool) -> None:
    masks = real_masks(real_data / "ecssd" / "ground_truth_mask")
    if len(masks) < NUM_REAL:
        pytest.skip(f"no ECSSD in {real_data}: {len(masks)} masks of {NUM_REAL} are there")
    metric = Saliency()
    states = []
    for number, case in enumerate(real_cases(masks, alter)):
        prediction, mask = (torch.from_numpy(each) for each in case)
        states.append(metric.update(prediction[None], Batch(id=torch.tensor([number]), mask=mask[None])))
    assert metric.compute(merge_states(states)) == pytest.approx(GOLDEN["ecssd"][way], abs=TOLERANCE)


def test_values_by_hand() -> None:
    prediction = np.array([[0.0, 0.2], [0.6, 1.0]])
    mask = np.array([[0, 0], [255, 255]], np.uint8)
    found = measured([(prediction, mask)])
    assert found["mae"] == pytest.approx(0.6 / 4)
    assert found["max_f"] == 1  # above 0.2 and up to 0.6
    # At level 0 all are called, up to 51 three, up to 153 the right two, and beyond one of them.
    f = [1.3 * p * r / (0.3 * p + r) for p, r in ((1 / 2, 1), (2 / 3, 1), (1, 1), (1, 1 / 2))]
    assert found["mean_f"] == pytest.approx((f[0] + 51 * f[1] + 102 * f[2] + 102 * f[3]) / 256)
    assert found["adaptive_f"] == pytest.approx(f[3])  # twice the mean is 0.9
    assert (found["iou"], found["ber"]) == (1, 0)
    assert found["max_e"] == pytest.approx(4 / 3)  # as published, divided by one pixel less


def test_a_perfect_prediction_has_perfect_values() -> None:
    mask = CASES["noisy 64 x 64"][1]
    found = measured([(mask, mask)])
    assert found["mae"] == found["ber"] == 0
    assert [found[name] for name in ("max_f", "adaptive_f", "weighted_f", "s_measure", "iou")] == pytest.approx([1] * 5)


@settings(deadline=None, max_examples=60)
@given(SHAPES)
def test_curves_are_what_each_threshold_gives(case: Case) -> None:
    prediction, mask = case
    truth, f, e = mask > 128, [], []
    for level in range(256):
        called = np.floor(prediction / 255 * 255) >= level
        hits = (called & truth).sum()
        f.append(1.3 * hits / (0.3 * truth.sum() + called.sum()) if hits else 0.0)
        e.append(alignment(called, truth).sum() / max(1, truth.size - 1))
    found = measured([case], Saliency(["max_f", "mean_f", "max_e", "mean_e"], stretch=False))
    expected = {"max_f": max(f), "mean_f": np.mean(f), "max_e": max(e), "mean_e": np.mean(e)}
    assert found == pytest.approx(expected, abs=TOLERANCE)


def alignment(called: npt.NDArray[np.bool_], truth: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """The enhanced alignment of each pixel."""
    if truth.all() or not truth.any():
        return np.asarray(called == truth, np.float64)
    off, true_off = called - called.mean(), truth - truth.mean()
    return np.asarray((2 * off * true_off / (off**2 + true_off**2 + 2.0**-52) + 1) ** 2 / 4)


@settings(deadline=None, max_examples=150)
@given(SHAPES)
def test_the_weighted_f_is_that_of_a_whole_distance_transform(case: Case) -> None:
    from scipy import ndimage  # slow to import, and needed nowhere else

    prediction, mask = case[0] / 255, case[1] > 128
    found = measured([case], Saliency(["weighted_f"], stretch=False))["weighted_f"]
    if not mask.any():
        assert found == 0
        return
    distance, (rows, columns) = ndimage.distance_transform_edt(~mask, return_indices=True)
    errors = abs(prediction - mask)
    bell = np.exp(-(np.arange(-3, 4) ** 2) / 50)
    kernel = np.outer(bell, bell) / np.outer(bell, bell).sum()
    smooth = ndimage.convolve(errors[rows, columns], kernel, mode="constant")
    missed = np.minimum(errors, smooth)[mask].sum()
    wrongly = (errors * (2 - 0.5 ** (distance / 5)))[~mask].sum()
    recall, precision = 1 - missed / mask.sum(), (mask.sum() - missed) / (mask.sum() - missed + wrongly + 2.0**-52)
    assert found == pytest.approx(2 * recall * precision / (recall + precision + 2.0**-52), abs=TOLERANCE)


@settings(deadline=None, max_examples=40)
@given(st.lists(SHAPES, min_size=2, max_size=6), st.data())
def test_any_cut_into_batches_is_bit_identical(cases: list[Case], data: st.DataObject) -> None:
    slices = sorted(data.draw(st.sets(st.integers(1, len(cases) - 1))))
    sizes = np.diff([0, *slices, len(cases)]).tolist()
    assert measured(cases, sizes=sizes) == measured(cases)


def placed(array: npt.NDArray[Any], offset: int) -> npt.NDArray[Any]:
    """The same array so many elements after the start of its memory."""
    memory = np.empty(array.size + offset, array.dtype)
    memory[offset:] = array.ravel()
    return memory[offset:].reshape(array.shape)


@pytest.mark.parametrize("name", ["noisy 48 x 33", "noisy 64 x 47", "real numbers"])
def test_where_arrays_lie_in_memory_does_not_matter(name: str) -> None:
    metric, (prediction, mask) = Saliency(), CASES[name]
    found, held = [], []
    for offset in range(24):
        held.append(np.empty(1000 * offset + 8, np.uint8))  # so that what is allocated in between moves too
        maps, masks = (torch.from_numpy(placed(each, offset))[None] for each in (prediction, mask))
        found.append(metric.compute(metric.update(maps, Batch(id=torch.tensor([0]), mask=masks))))
    assert all(each == found[0] for each in found)


@settings(deadline=None, max_examples=30)
@given(st.permutations(range(6)))
def test_the_order_of_images_does_not_matter(order: list[int]) -> None:
    cases = list(CASES.values())[:6]
    assert measured([cases[place] for place in order]) == measured(cases)


@settings(deadline=None, max_examples=40)
@given(SHAPES)
def test_values_are_numbers_from_0_to_1(case: Case) -> None:
    found = measured([case])
    for name in ("max_e", "mean_e", "adaptive_e"):  # as published these may exceed 1 by a pixel's share
        found[name] *= max(1, case[1].size - 1) / case[1].size
    assert all(0 <= value <= 1 + 1e-12 for value in found.values())


def test_selected_values_are_unchanged() -> None:
    everything = measured([CASES["noisy 25 x 31"]])
    for name in SALIENCY_VALUES:
        assert measured([CASES["noisy 25 x 31"]], Saliency([name])) == {name: everything[name]}
    assert list(measured([CASES["perfect"]], Saliency(["iou", "mae"]))) == ["mae", "iou"]


def test_stretching_undoes_a_scale() -> None:
    prediction, mask = CASES["real numbers"]
    found = measured([(prediction * 0.25 + 0.5, mask)], Saliency(["mae", "s_measure"]))
    assert found == pytest.approx(measured([(prediction, mask)], Saliency(["mae", "s_measure"])), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_predictions_of_any_precision_with_a_channel(dtype: torch.dtype) -> None:
    prediction, mask = (torch.from_numpy(each.copy()) for each in CASES["noisy 48 x 33"])
    metric, batch = Saliency(), Batch(id=torch.arange(2), mask=torch.stack([mask, mask]))
    low = (prediction / 255).to(dtype)
    found = metric.compute(metric.update(low.expand(2, 1, -1, -1), batch))
    assert found == pytest.approx(measured([(low.double().numpy(), mask.numpy())]), abs=1e-12)


def test_pixels_that_are_not_numbers_are_entirely_wrong() -> None:
    mask = np.array([[0, 255], [0, 255]], np.uint8)
    found = measured([(np.array([[math.nan, math.nan], [0.0, 1.0]]), mask)])
    assert (found["mae"], found["ber"]) == (0.5, 0.5)
    assert measured([(np.full((2, 2), math.nan), mask)])["mae"] == 1


def test_an_image_of_one_pixel_has_values() -> None:
    found = measured([(np.full((1, 1), 255, np.uint8), np.full((1, 1), 255, np.uint8))])
    assert found["mae"] == 0
    assert [found[name] for name in ("max_f", "s_measure", "max_e", "iou")] == [1, 1, 1, 1]


def test_states_are_small_and_of_fixed_width() -> None:
    prediction, mask = (torch.from_numpy(each.copy()) for each in CASES["perfect"])
    state = Saliency().update(prediction[None], Batch(id=torch.tensor([0]), mask=mask[None]))
    curves = {name for name, value in state.items() if value.shape == (256,)}
    assert curves == {"f_curve", "e_curve"}
    assert all(state[name].dtype == torch.int64 for name in curves)
    assert all(value.shape == (1,) for name, value in state.items() if value.is_floating_point())


def test_a_prediction_of_another_size_is_named() -> None:
    batch = Batch(id=torch.tensor([17]), mask=torch.zeros(1, 6, 8, dtype=torch.uint8))
    with pytest.raises(DataError, match=r"sample 17: .* 3 x 4, .* 6 x 8"):
        Saliency().update(torch.zeros(1, 3, 4), batch)


@pytest.mark.parametrize("value", [-0.01, 1.5, math.inf])
def test_logits_are_refused(value: float) -> None:
    batch = Batch(id=torch.tensor([0]), mask=torch.zeros(1, 2, 2, dtype=torch.uint8))
    with pytest.raises(RecipeError, match="from 0 to 1"):
        Saliency().update(torch.full((1, 2, 2), value), batch)


def test_arguments() -> None:
    entry = register.kind("metric").find("saliency")
    assert entry is not None
    assert entry.resolve() is Saliency
    assert tuple(dict(entry.arguments())["metrics"]) == SALIENCY_VALUES
    wrongly: list[dict[str, Any]] = [{"metrics": ["max_g"]}, {"metrics": []}, {"stretch": 1}]
    for wrong in wrongly:
        with pytest.raises(ValidationError):
            entry.arguments.model_validate(wrong)


def test_predictions_that_are_noisy_are_neither_perfect_nor_useless() -> None:
    mask = CASES["noisy 64 x 64"][1]
    found = measured([(noisy(mask, np.random.default_rng(1)), mask)])
    assert 0.5 < found["max_f"] <= 1
    assert 0 < found["mae"] < 0.4
