"""Losses of images of different sizes: a padded batch counts what its images count one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_pixel_losses import ALL, CLASSES, IGNORED, OF_GRAY, case
from torch import Tensor, nn

from paceline.data.batch import Batch, crop_padding
from paceline.losses.adapter import as_loss
from paceline.losses.pixel import OhemCrossEntropy, PixelCrossEntropy
from paceline.losses.region import dice_loss

SIZES = [(5, 7), (2, 7), (5, 3), (4, 4)]


def padded(name: str) -> tuple[Tensor, Batch]:
    """Logits, and a batch whose padding has a value that would show."""
    _, logits, masks = case(name)
    logits, masks = logits[: len(SIZES)], masks[: len(SIZES)].clone()
    for mask, (height, width) in zip(masks, SIZES, strict=True):
        mask[height:] = mask[:, width:] = IGNORED
    images = torch.zeros(len(SIZES), 3, *masks.shape[1:])
    return logits, Batch(id=torch.arange(len(SIZES)), image=images, mask=masks, image_size=torch.tensor(SIZES))


def alone(batch: Batch, logits: Tensor, index: int) -> tuple[Tensor, Batch]:
    mask = crop_padding(batch["mask"][index], batch, index)[None]
    return crop_padding(logits[index], batch, index)[None], Batch(id=batch.ids[:1], image=mask[:, None], mask=mask)


WITHOUT_IGNORED: dict[str, Callable[[], Any]] = {
    "pixel_cross_entropy": lambda: PixelCrossEntropy(CLASSES, ignore_index=None),
    "pixel_cross_entropy weighted": lambda: PixelCrossEntropy(CLASSES, None, class_weights=[0.5, 2.0, 1.0, 3.0]),
    "ohem weighted": lambda: OhemCrossEntropy(CLASSES, None, class_weights=[0.5, 2.0, 1.0, 3.0]),
    "dice": lambda: dice_loss(CLASSES, ignore_index=None),
}


@pytest.mark.parametrize("name", WITHOUT_IGNORED)
def test_padding_is_left_out_where_no_id_is_ignored(name: str) -> None:
    loss, (logits, batch) = WITHOUT_IGNORED[name](), padded(name)
    batch["mask"] = batch["mask"].clamp(max=CLASSES - 1)  # else ids that are no class, and are refused
    is_inside = batch.is_inside()
    assert is_inside is not None
    batch["mask"][~is_inside] = IGNORED
    each = [alone(batch, logits, index) for index in range(batch.size)]
    term = loss(logits, batch)
    assert term.numerator.item() == pytest.approx(sum(loss(*one).numerator.item() for one in each), rel=1e-5)
    expected = sum(float(loss(*one).denominator) for one in each)
    assert float(term.denominator) == pytest.approx(expected, rel=1e-5)
    count = loss.count(batch)
    assert count is None or float(count) == pytest.approx(expected, rel=1e-5)
    assert loss.check(batch) is None
    batch["mask"][0, 0, 0] = CLASSES
    assert loss.check(batch) is not None


@pytest.mark.parametrize("name", ALL)
def test_a_padded_batch_has_the_sums_and_counts_of_its_images(name: str) -> None:
    loss, (logits, batch) = ALL[name](), padded(name)
    each = [alone(batch, logits, index) for index in range(batch.size)]
    terms = [loss(*one) for one in each]
    term = loss(logits.requires_grad_(), batch)
    assert term.numerator.item() == pytest.approx(sum(float(one.numerator) for one in terms), rel=1e-5)
    assert torch.as_tensor(term.denominator).item() == pytest.approx(
        sum(float(one.denominator) for one in terms), rel=1e-5
    )
    if (count := loss.count(batch)) is not None:
        assert float(count) == pytest.approx(sum(float(loss.count(one) or 0) for _, one in each), rel=1e-6)
    term.numerator.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    is_inside = batch.is_inside()
    assert is_inside is not None
    assert (logits.grad.abs().sum(1)[~is_inside] == 0).all()
    assert (logits.grad.abs().sum(1)[is_inside] > 0).any()


def test_cross_entropy_is_the_mean_of_shares_by_torch() -> None:
    logits, batch = padded("pixel_cross_entropy")
    total = count = 0.0
    for index, (height, width) in enumerate(SIZES):
        own, one = alone(batch, logits, index)
        total += F.cross_entropy(own, one["mask"].long(), ignore_index=IGNORED, reduction="sum").item() / height / width
        count += (one["mask"] != IGNORED).double().mean().item()
    term = PixelCrossEntropy(CLASSES)(logits, batch)
    assert float(term.numerator) / float(term.denominator) == pytest.approx(total / count, rel=1e-6)


@pytest.mark.parametrize("criterion", [nn.BCEWithLogitsLoss(), nn.BCEWithLogitsLoss(reduction="none"), nn.MSELoss()])
def test_a_criterion_of_a_users_is_given_each_image_without_its_padding(criterion: nn.Module) -> None:
    logits, batch = padded(next(iter(OF_GRAY)))
    term = as_loss("mine", criterion)(logits, batch)
    each = [alone(batch, logits, index) for index in range(batch.size)]
    means = [criterion(own[:, 0], one["mask"].float()).mean().item() for own, one in each]
    assert term.numerator.item() == pytest.approx(sum(means), rel=1e-5)
    assert term.denominator == batch.size
