import math
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.core.errors import DataError, RecipeError
from paceline.core.registry import register
from paceline.data.batch import Batch
from paceline.data.transforms.batch import MultiScale
from paceline.engine.loss_accumulator import Normalizer
from paceline.losses.loss_term import Loss, LossTerm
from paceline.losses.pixel import OhemCrossEntropy, PixelBinaryCrossEntropy, PixelCrossEntropy
from paceline.losses.region import consistency_enhanced_loss, dice_loss, iou_loss

CLASSES = 4
WEIGHTS = [0.5, 2.0, 1.0, 3.0]
IGNORED = 255

OF_CLASSES: dict[str, Callable[[], Loss]] = {
    "pixel_cross_entropy": lambda: PixelCrossEntropy(CLASSES, label_smoothing=0.1),
    "pixel_cross_entropy weighted": lambda: PixelCrossEntropy(CLASSES, class_weights=WEIGHTS),
    "ohem": lambda: OhemCrossEntropy(CLASSES, threshold=0.2, min_kept=0.3),
    "ohem weighted": lambda: OhemCrossEntropy(CLASSES, class_weights=WEIGHTS),
    "ohem per image": lambda: OhemCrossEntropy(CLASSES, per_image=True),
    "dice": lambda: dice_loss(CLASSES),
    "dice weighted per image": lambda: dice_loss(CLASSES, per_image=True, class_weights=WEIGHTS),
    "iou weighted": lambda: iou_loss(CLASSES, class_weights=WEIGHTS),
    "iou per image": lambda: iou_loss(CLASSES, per_image=True),
}
OF_GRAY: dict[str, Callable[[], Loss]] = {
    "pixel_bce": PixelBinaryCrossEntropy,
    "cel": consistency_enhanced_loss,
    "cel per image": lambda: consistency_enhanced_loss(per_image=True),
    "binary dice": lambda: dice_loss(1),
    "binary dice per image": lambda: dice_loss(1, per_image=True),
    "binary iou": lambda: iou_loss(1),
}
ALL = OF_CLASSES | OF_GRAY


def source(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_logits(num_samples: int = 6, num_classes: int = CLASSES, height: int = 5, width: int = 7) -> Tensor:
    return torch.randn(num_samples, num_classes, height, width, generator=source(0)) * 2


def some_masks(num_samples: int = 6, height: int = 5, width: int = 7) -> Tensor:
    """Class ids, a fifth of the pixels ignored, in no two images as many."""
    masks = torch.randint(CLASSES, (num_samples, height, width), generator=source(1))
    ignored = torch.rand(masks.shape, generator=source(2)) < torch.linspace(0, 0.4, num_samples).view(-1, 1, 1)
    return masks.masked_fill(ignored, IGNORED).to(torch.uint8)


def some_gray(num_samples: int = 6, height: int = 5, width: int = 7) -> Tensor:
    gray = torch.rand(num_samples, height, width, generator=source(3))
    return (gray * 400 - 70).clamp(0, 255).to(torch.uint8)  # many black and white ones, some between


def batch_of(masks: Tensor) -> Batch:
    return Batch(id=torch.arange(len(masks)) + 10, mask=masks)


def case(name: str) -> tuple[Loss, Tensor, Tensor]:
    """A loss with logits and masks for it."""
    if name in OF_GRAY:
        return OF_GRAY[name](), some_logits(num_classes=1), some_gray()
    return OF_CLASSES[name](), some_logits(), some_masks()


def ratio(term: LossTerm) -> float:
    assert term.numerator.ndim == 0
    denominator = torch.as_tensor(term.denominator)
    return float(term.numerator.detach()) / float(denominator.detach())


# Cross-entropy of pixels


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("ignore_index", [None, 255, 1])
def test_pixel_cross_entropy_is_torchs_mean(
    ignore_index: int | None, weights: list[float] | None, smoothing: float
) -> None:
    logits, masks = some_logits().double(), some_masks()
    masks = masks if ignore_index == 255 else masks % CLASSES
    loss = PixelCrossEntropy(CLASSES, ignore_index, weights, smoothing)
    term = loss(logits, batch_of(masks))
    expected = F.cross_entropy(
        logits,
        masks.long(),
        weight=None if weights is None else torch.tensor(weights).double(),
        ignore_index=-100 if ignore_index is None else ignore_index,
        label_smoothing=smoothing,
    )
    assert ratio(term) == pytest.approx(expected.item(), rel=1e-6)
    assert loss.count(batch_of(masks)) == pytest.approx(float(term.denominator), rel=1e-6)
    if ignore_index is None and weights is None:
        assert term.denominator == loss.count(batch_of(masks)) == 6.0


def test_pixel_cross_entropy_by_hand() -> None:
    # Odds of 3 : 1 for class 1 everywhere; of four pixels one is of class 1, two are of class 0, one is ignored.
    logits = torch.zeros(1, 2, 2, 2)
    logits[:, 1] = math.log(3)
    batch = batch_of(torch.tensor([[[1, 0], [255, 0]]], dtype=torch.uint8))
    term = PixelCrossEntropy(2)(logits, batch)
    assert float(term.denominator) == 0.75 == PixelCrossEntropy(2).count(batch)
    assert float(term.numerator) * 4 == pytest.approx(math.log(4 / 3) + 2 * math.log(4))
    assert PixelCrossEntropy(2, class_weights=[1.0, 5.0]).count(batch) == 7 / 4


@pytest.mark.parametrize("name", OF_CLASSES)
def test_ignored_pixels_have_no_influence(name: str) -> None:
    loss, logits, masks = case(name)
    ignored = (masks == IGNORED).unsqueeze(1)
    logits = logits.double().requires_grad_()
    term = loss(logits, batch_of(masks))
    (gradient,) = torch.autograd.grad(term.numerator, logits)
    assert bool((gradient.masked_select(ignored) == 0).all())
    assert not bool((gradient.masked_select(~ignored) == 0).all())
    other = loss(torch.where(ignored, 50 * some_logits().flip(0), logits), batch_of(masks))
    for one, changed in zip(term, other, strict=True):
        torch.testing.assert_close(changed, one, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", OF_CLASSES)
def test_nothing_but_ignored_pixels_is_a_loss_of_zero(name: str) -> None:
    loss, logits, masks = case(name)
    logits.requires_grad_()
    term = loss(logits, batch_of(torch.full_like(masks, IGNORED)))
    term.numerator.backward()  # type: ignore[no-untyped-call]
    assert term.numerator.item() == 0
    assert torch.as_tensor(term.denominator).item() >= 0
    assert logits.grad is not None
    assert not bool(logits.grad.any())


def test_a_step_that_resizes_does_not_change_what_the_sum_is_divided_by() -> None:
    """Denominators are counted on the masks as loaded, numerators on what the step made of them."""
    loaded = torch.zeros(3, 32, 32, dtype=torch.uint8)
    loaded[:, :, 16:] = IGNORED
    resize = MultiScale([16])
    small = resize({"image": torch.zeros(3, 3, 32, 32), "mask": loaded}, torch.zeros(1, 1))["mask"]
    assert small.shape == (3, 16, 16)
    for loss in (PixelCrossEntropy(2), PixelCrossEntropy(2, class_weights=[3.0, 1.0])):
        term = loss(torch.zeros(3, 2, 16, 16), batch_of(small))
        assert float(term.denominator) == loss.count(batch_of(loaded))
    gray = PixelBinaryCrossEntropy()
    assert gray(torch.zeros(3, 16, 16), batch_of(small)).denominator == gray.count(batch_of(loaded)) == 3.0
    assert ratio(gray(torch.zeros(3, 16, 16), batch_of(small))) == pytest.approx(math.log(2))


# Hard pixels


def hard_by_hand(losses: Tensor, masks: Tensor, threshold: float, min_kept: float) -> Tensor:
    hard = torch.zeros(masks.shape, dtype=torch.bool)
    for image in range(len(masks)):
        pixels = [(y, x) for y, x in (masks[image] != IGNORED).nonzero().tolist()]
        pixels.sort(key=lambda place: -float(losses[image][place]))
        least = math.ceil(min_kept * len(pixels))
        for rank, place in enumerate(pixels):
            hard[image][place] = rank < least or math.exp(-float(losses[image][place])) < threshold
    return hard


@pytest.mark.parametrize("threshold", [0.02, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("min_kept", [0.0, 0.25, 1.0])
def test_hard_pixels_are_those_chosen_one_by_one(threshold: float, min_kept: float) -> None:
    logits, masks = some_logits().double(), some_masks()
    losses = F.cross_entropy(logits, masks.long(), reduction="none", ignore_index=IGNORED)
    hard = hard_by_hand(losses, masks, threshold, min_kept)
    weights = torch.tensor(WEIGHTS).double()[masks.long().clamp(max=3)] * hard
    term = OhemCrossEntropy(CLASSES, IGNORED, None, threshold, min_kept)(logits, batch_of(masks))
    assert float(term.denominator) == int(hard.sum())
    assert float(term.numerator) == pytest.approx(float((losses * hard).sum()), rel=1e-12)
    term = OhemCrossEntropy(CLASSES, IGNORED, WEIGHTS, threshold, min_kept)(logits, batch_of(masks))
    assert float(term.denominator) == pytest.approx(float(weights.sum()), rel=1e-12)
    assert float(term.numerator) == pytest.approx(float((losses * weights).sum()), rel=1e-12)


def test_all_pixels_are_hard_if_asked_for() -> None:
    logits, masks = some_logits().double(), some_masks()
    everything = OhemCrossEntropy(CLASSES, min_kept=1.0)(logits, batch_of(masks))
    assert ratio(everything) == pytest.approx(ratio(PixelCrossEntropy(CLASSES)(logits, batch_of(masks))), rel=1e-6)


def test_hard_pixels_of_images_can_be_averaged_by_themselves() -> None:
    logits, masks = some_logits().double(), some_masks()
    whole = OhemCrossEntropy(CLASSES)
    means = [ratio(whole(logits[i : i + 1], batch_of(masks[i : i + 1]))) for i in range(6)]
    loss = OhemCrossEntropy(CLASSES, per_image=True)
    term = loss(logits, batch_of(masks))
    assert ratio(term) == pytest.approx(sum(means) / 6, rel=1e-6)
    assert loss.count(batch_of(masks)) == term.denominator == 6.0
    assert whole.count(batch_of(masks)) is None


@pytest.mark.parametrize("min_kept", [0.0, 0.5])
def test_a_loss_that_is_not_a_number_does_not_hide(min_kept: float) -> None:
    logits = some_logits()
    logits[2, :, 0, 0] = math.nan
    term = OhemCrossEntropy(CLASSES, None, min_kept=min_kept)(logits, batch_of(some_masks() % CLASSES))
    assert math.isnan(float(term.numerator))


# Gray masks


@pytest.mark.parametrize("with_channel", [True, False])
def test_pixel_bce_is_torchs_mean(with_channel: bool) -> None:
    logits, masks = some_logits(num_classes=1).double(), some_gray()
    outputs = logits if with_channel else logits.squeeze(1)
    loss = PixelBinaryCrossEntropy()
    expected = F.binary_cross_entropy_with_logits(logits.squeeze(1), masks.double() / 255)
    assert ratio(loss(outputs, batch_of(masks))) == pytest.approx(expected.item(), rel=1e-12)
    assert loss.count(batch_of(masks)) == 6.0


def test_overlaps_by_hand() -> None:
    # Probabilities 3/4, 1/4, 1/2, 1/2 and truths 1, 0, 1, 0.
    logits = torch.tensor([[[math.log(3), -math.log(3)], [0.0, 0.0]]], dtype=torch.float64)
    batch = batch_of(torch.tensor([[[255, 0], [255, 0]]], dtype=torch.uint8))
    wrong = 1 / 4 + 1 / 4 + 1 / 2 + 1 / 2
    shared, total = 3 / 4 + 1 / 2, 2 + 2
    assert total - 2 * shared == wrong
    squares = (9 + 1 + 4 + 4) / 16 + 2
    for per_image in (False, True):
        cel = consistency_enhanced_loss(per_image)(logits, batch)
        assert ratio(cel) == pytest.approx(wrong / (total + 1e-6), rel=1e-12)
        iou = iou_loss(1, per_image)(logits, batch)
        assert ratio(iou) == pytest.approx(1 - shared / (total - shared), abs=1e-6)
        dice = dice_loss(1, per_image)(logits, batch)
        assert ratio(dice) == pytest.approx(1 - 2 * shared / squares, abs=1e-6)


def test_sums_over_the_batch_are_not_means_of_images() -> None:
    logits, masks = some_logits(num_classes=1).double(), some_gray()
    p, g = logits.squeeze(1).sigmoid(), masks.double() / 255
    wrong, whole = (p - p * g + g - p * g).sum((1, 2)), (p + g).sum((1, 2))
    together = ratio(consistency_enhanced_loss()(logits, batch_of(masks)))
    apart = ratio(consistency_enhanced_loss(per_image=True)(logits, batch_of(masks)))
    assert together == pytest.approx(float(wrong.sum() / (whole.sum() + 6e-6)), rel=1e-12)
    assert apart == pytest.approx(float((wrong / (whole + 1e-6)).mean()), rel=1e-12)
    assert together != pytest.approx(apart, rel=1e-6)


@pytest.mark.parametrize("loss", [dice_loss(1), iou_loss(1), consistency_enhanced_loss()])
@pytest.mark.parametrize("gray", [0, 255])
def test_empty_and_full_masks_that_are_met(loss: Loss, gray: int) -> None:
    logits = torch.full((2, 1, 4, 4), 1000.0 if gray else -1000.0, requires_grad=True)
    term = loss(logits, batch_of(torch.full((2, 4, 4), gray, dtype=torch.uint8)))
    value = term.numerator / term.denominator
    value.backward()  # type: ignore[no-untyped-call]
    assert value.item() == 0
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())


# Regions of several classes


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("name", ["dice", "iou"])
def test_overlaps_of_several_classes_are_those_summed_one_by_one(name: str, weights: list[float] | None) -> None:
    logits, masks = some_logits().double(), some_masks()
    sums = torch.zeros(6, CLASSES, 2, dtype=torch.float64)
    held = torch.zeros(6, CLASSES)
    for image, row, column in (masks != IGNORED).nonzero().tolist():
        probabilities = logits[image, :, row, column].softmax(0)
        held[image, int(masks[image, row, column])] = 1
        for number in range(CLASSES):
            p, g = float(probabilities[number]), float(masks[image, row, column] == number)
            parts = (p * p + g * g - 2 * p * g, p * p + g * g) if name == "dice" else (p + g - 2 * p * g, p + g - p * g)
            sums[image, number] += torch.tensor(parts)
    own = torch.tensor(weights or [1.0] * CLASSES).double()
    make = dice_loss if name == "dice" else iou_loss
    together = make(CLASSES, class_weights=weights)(logits, batch_of(masks))
    weighted = (sums * own[:, None]).sum((0, 1))
    assert ratio(together) == pytest.approx(float(weighted[0] / weighted[1]), rel=1e-6)
    apart = make(CLASSES, True, class_weights=weights)(logits, batch_of(masks))
    ratios = (sums[..., 0] / sums[..., 1] * own * held).sum(1) / (own * held).sum(1)
    assert ratio(apart) == pytest.approx(float(ratios.mean()), rel=1e-6)
    assert apart.denominator == 6.0


def test_a_class_that_an_image_lacks_does_not_count_there() -> None:
    # All right but for a class that is in no mask, which has no ratio of its own.
    masks = torch.tensor([[[0, 1]]], dtype=torch.uint8)
    logits = torch.tensor([[1e3, 0.0], [0.0, 1e3], [-1e3, -1e3]]).view(1, 3, 1, 2)
    for make in (dice_loss, iou_loss):
        assert ratio(make(3, per_image=True)(logits, batch_of(masks))) == 0


# What holds for all of them


@settings(max_examples=60, deadline=None)
@given(slices=st.sets(st.integers(1, 5)), name=st.sampled_from(sorted(ALL)))
def test_the_gradient_of_a_step_does_not_depend_on_its_micro_batches(slices: set[int], name: str) -> None:
    loss, inputs, masks = case(name)
    inputs = inputs.double()
    scale = torch.linspace(0.5, 2.0, 35, dtype=torch.float64).view(5, 7).requires_grad_()

    def terms(edges: list[int]) -> list[LossTerm]:
        return [loss(inputs[a:b] * scale, batch_of(masks[a:b])) for a, b in pairwise(edges)]

    (whole,) = terms([0, 6])
    count = loss.count(batch_of(masks))
    divisor = whole.denominator if count is None else count
    (expected,) = torch.autograd.grad(whole.numerator / divisor, scale)
    parts = terms([0, *sorted(slices), 6])
    counts = [loss.count(batch_of(masks[a:b])) for a, b in pairwise([0, *sorted(slices), 6])]
    if counts[0] is None:
        assert set(counts) == {None}
        denominator = torch.stack([torch.as_tensor(part.denominator) for part in parts]).detach().double().sum()
        value = torch.stack([part.numerator for part in parts]).detach().sum() / denominator
        total = Normalizer(1.0, denominator, value)
        objectives = [total.scale(part, 1.0).value for part in parts]
    else:
        objectives = [part.numerator / math.fsum(count or 0 for count in counts) for part in parts]
        value = torch.stack(objectives).detach().sum()
    (found,) = torch.autograd.grad(torch.stack(objectives).sum(), scale)
    assert float(value) == pytest.approx((whole.numerator / divisor).item(), rel=1e-12)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("name", ALL)
def test_gradients_are_those_of_small_differences(name: str) -> None:
    loss, logits, masks = case(name)
    inputs = logits[:2, :, :3, :4].double().requires_grad_()

    def value(outputs: Tensor) -> Tensor:
        term = loss(outputs, batch_of(masks[2:4, :3, :4]))
        return term.numerator / term.denominator

    assert torch.autograd.gradcheck(value, inputs, eps=1e-7, atol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_an_empty_batch_adds_nothing(name: str) -> None:
    loss, logits, masks = case(name)
    outputs = logits[:0].requires_grad_()
    term = loss(outputs, batch_of(masks[:0]))
    term.numerator.backward()  # type: ignore[no-untyped-call]
    assert term.numerator.item() == torch.as_tensor(term.denominator).item() == 0
    assert loss.count(batch_of(masks[:0])) in (0, None)


@pytest.mark.parametrize("name", ALL)
def test_half_precision_outputs_are_summed_in_full(name: str) -> None:
    loss, logits, masks = case(name)
    halves, batch = logits.bfloat16(), batch_of(masks)
    term = loss(halves, batch)
    assert term.numerator.dtype == torch.float32
    assert float(term.numerator) == float(loss(halves.float(), batch).numerator)


@pytest.mark.parametrize("name", ALL)
def test_a_dry_run_on_fake_tensors_leaves_nothing_behind(name: str) -> None:
    loss, logits, masks = case(name)
    for _ in range(2):
        with FakeTensorMode():
            fake = batch_of(torch.zeros(masks.shape, dtype=torch.uint8))
            assert loss(torch.empty(logits.shape), fake).numerator.ndim == 0
    assert math.isfinite(loss(logits, batch_of(masks)).numerator.item())


@pytest.mark.parametrize("name", ALL)
def test_training_can_follow_an_evaluation(name: str) -> None:
    loss, logits, masks = case(name)
    with torch.inference_mode():
        loss(logits, batch_of(masks))
    logits = logits.requires_grad_()
    loss(logits, batch_of(masks)).numerator.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())


@pytest.mark.parametrize("name", ALL)
def test_outputs_of_another_size_are_refused(name: str) -> None:
    loss, logits, masks = case(name)
    with pytest.raises(DataError, match=r"6 outputs of 7×4 .* 6 masks of 7×5"):
        loss(logits[:, :, :4], batch_of(masks))
    with pytest.raises(DataError, match="masks"):
        loss(logits, Batch(id=torch.arange(6)))
    with pytest.raises(DataError, match=r"\[6, 2, 5, 7\]"):
        loss(logits[:, :1].expand(-1, 2, -1, -1), batch_of(masks))


@pytest.mark.parametrize("name", OF_CLASSES)
def test_ids_of_no_class_are_found_where_data_is_loaded(name: str) -> None:
    loss: Any = case(name)[0]
    masks = some_masks()
    assert loss.check(batch_of(masks)) is None
    masks[3, 1, 1] = 9
    sample, message = loss.check(batch_of(masks))
    assert sample == 13
    assert re.search(r"sample 13 .* id 9; expected 0 to 3, or 255", message)


@pytest.mark.parametrize("loss", [PixelCrossEntropy(CLASSES, None), OhemCrossEntropy(CLASSES, None)])
def test_ids_of_no_class_are_refused_in_an_evaluation(loss: Loss) -> None:
    with pytest.raises(DataError, match=r"expected 0 to 3, .*ignore_index"):
        loss(some_logits(), batch_of(some_masks()))


def test_weights_that_do_not_fit_are_refused() -> None:
    loss = PixelCrossEntropy(CLASSES, class_weights=[1.0, 2.0])
    with pytest.raises(RecipeError, match=r"class_weights: got 2 numbers.*4 classes"):
        loss.count(batch_of(some_masks()))
    for each in (loss, dice_loss(CLASSES, class_weights=[1.0, 2.0])):
        with pytest.raises(RecipeError, match=r"class_weights: got 2 numbers.*4 classes"):
            each(some_logits(), batch_of(some_masks()))


@pytest.mark.parametrize(
    ("name", "supplied", "wrong"),
    [
        ("pixel_cross_entropy", {"num_classes": 3}, {"ignore_index": 256}),
        ("ohem_cross_entropy", {"num_classes": 3}, {"threshold": 0.0}),
        ("pixel_bce", {}, {"per_image": True}),
        ("cel", {}, {"ignore_index": 255}),
        ("dice_loss", {"num_classes": 3}, {"class_weights": [-1.0]}),
        ("iou_loss", {"num_classes": 1}, {"num_classes": 3}),
    ],
)
def test_recipes_can_name_the_losses(name: str, supplied: dict[str, int], wrong: dict[str, Any]) -> None:
    entry = register.kind("loss").find(name)
    assert entry is not None
    made = entry.resolve()(**supplied, **entry.arguments().model_dump())
    assert made.count(batch_of(torch.zeros(2, 4, 4, dtype=torch.uint8))) in (2.0, None)
    with pytest.raises(ValidationError):
        entry.arguments.model_validate(wrong)
