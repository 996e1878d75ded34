import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.core.errors import DataError
from paceline.data.batch import Batch
from paceline.data.transforms.batch import CutMix, MixUp, MixUpOrCutMix, sample_beta
from paceline.losses.classification import BinaryCrossEntropy, CrossEntropy

Mixing = MixUp | CutMix | MixUpOrCutMix
ALL: list[Mixing] = [MixUp(num_classes=4), CutMix(num_classes=4), MixUpOrCutMix(num_classes=4)]


def drawn(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def uniform(count: int, draws: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).random((count, draws)))


def flat(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Images of 4 × 4 pixels of one value each."""
    return torch.tensor(values).view(-1, 1, 1, 1).expand(-1, 2, 4, 4).to(dtype)


@pytest.mark.parametrize(
    ("alpha", "share_below"),
    [
        (1.0, lambda x: x),
        (0.5, lambda x: 2 / math.pi * math.asin(math.sqrt(x))),
        (2.0, lambda x: 3 * x**2 - 2 * x**3),
        (3.0, lambda x: 10 * x**3 - 15 * x**4 + 6 * x**5),
    ],
)
def test_shares_are_distributed_as_beta(alpha: float, share_below: Any) -> None:
    draws = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
    found = [share_below(x) for x in sample_beta(alpha, draws).tolist()]
    np.testing.assert_allclose(found, draws.numpy(), atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.floats(0.01, 100), st.integers(1, 2**53 - 1))
def test_shares_lie_between_0_and_1_and_are_even(alpha: float, number: int) -> None:
    draw = number / 2**53
    share, opposite = sample_beta(alpha, torch.tensor([draw, 1 - draw], dtype=torch.float64)).tolist()
    assert 0 <= share <= 1
    assert share + opposite == pytest.approx(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_mixup_by_hand(dtype: torch.dtype) -> None:
    images = flat(0, 100, 200, dtype=dtype)
    # In the order of their draws: 1, 2, 0. So the partner of 1 is 2, of 2 is 0, and of 0 is 1.
    draws = drawn([0.9, 0.5, 0.0], [0.1, 0.25, 0.0], [0.3, 0.5, 0.7])
    result = MixUp(alpha=1.0, p=0.7, num_classes=3)({"image": images, "label": torch.tensor([2, 0, 1])}, draws)
    assert result["image"].dtype == dtype
    assert result["image"][:, 0, 0, 0].tolist() == [50, 175, 200]  # 0.25 · 100 + 0.75 · 200, and one that stays
    assert result["label"].tolist() == [[0.5, 0, 0.5], [0.25, 0.75, 0], [0, 1, 0]]
    assert result["label"].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_cutmix_by_hand(dtype: torch.dtype) -> None:
    images = flat(10, 20, dtype=dtype)
    # A share of 3/4 stays: the rectangle has half of each side, so 2 × 2 pixels, around row 2, column 1; and one
    # around row 0, column 3, of which rows −1 to 0 and columns 2 to 3 would be covered.
    draws = drawn([0.1, 0.75, 0.5, 0.25, 0.0], [0.2, 0.75, 0.0, 0.75, 0.0])
    result = CutMix(alpha=1.0, num_classes=2)({"image": images, "label": torch.tensor([0, 1])}, draws)
    assert result["image"].dtype == dtype
    assert result["image"][0, 1].tolist() == [[10] * 4, [20, 20, 10, 10], [20, 20, 10, 10], [10] * 4]
    assert result["image"][1, 0].tolist() == [[20, 20, 10, 10], [20] * 4, [20] * 4, [20] * 4]
    # The share of the label is that of the pixels.
    assert result["label"].tolist() == [[0.75, 0.25], [0.125, 0.875]]


def test_several_labels_are_mixed_as_one_is() -> None:
    labels = torch.tensor([[1.0, 1, 0], [0, 1, 1]])
    batch = {"image": flat(0, 4), "label": labels}
    result = MixUp(alpha=1.0, num_classes=3)(batch, drawn([0.1, 0.75, 0], [0.2, 0.5, 0]))
    assert result["label"].tolist() == [[0.75, 1, 0.25], [0.5, 1, 0.5]]
    whole = MixUp(alpha=1.0, num_classes=3)({**batch, "label": labels.long()}, drawn([0.1, 0.75, 0], [0.2, 0.5, 0]))
    assert torch.equal(whole["label"], result["label"])


def test_one_or_the_other_does_what_each_does() -> None:
    images = torch.rand(6, 3, 8, 6, generator=torch.Generator().manual_seed(0))
    batch = {"image": images, "label": torch.arange(6) % 4}
    draws = uniform(6, 6)
    both = MixUpOrCutMix(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=4)(batch, draws)
    blended = MixUp(alpha=0.8, num_classes=4)(batch, draws[:, [0, 1, 4]])
    cut = CutMix(alpha=1.0, num_classes=4)(batch, draws[:, :5])
    is_cut = draws[:, 5] < 0.5
    assert 0 < is_cut.sum() < 6
    for name in ("image", "label"):
        expected = torch.stack([(cut if chosen else blended)[name][i] for i, chosen in enumerate(is_cut.tolist())])
        torch.testing.assert_close(both[name], expected)


@pytest.mark.parametrize("mixing", ALL, ids=lambda mixing: type(mixing).__name__)
@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 9), seed=st.integers(0, 99), is_clip=st.booleans(), is_whole=st.booleans())
def test_mixing_keeps_what_it_must(mixing: Mixing, count: int, seed: int, is_clip: bool, is_whole: bool) -> None:
    shape = (count, 3, 4, 7, 5) if is_clip else (count, 3, 7, 5)
    images = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, np.uint8))
    images = images if is_whole else images.float()
    batch = {"id": torch.arange(count), "image": images, "label": torch.arange(count) % 4}
    before = {name: value.clone() for name, value in batch.items()}
    result = mixing(batch, uniform(count, mixing.draws, seed))
    assert (result["image"].shape, result["image"].dtype) == (images.shape, images.dtype)
    assert result["id"] is batch["id"]
    assert all(torch.equal(batch[name], before[name]) for name in batch)
    torch.testing.assert_close(result["label"].sum(1), torch.ones(count))
    if count == 1:
        assert torch.equal(result["image"], images)
        assert result["label"].tolist() == [[1, 0, 0, 0]]


def test_every_sample_is_a_partner_once() -> None:
    images = torch.eye(7).view(7, 7, 1, 1)
    batch = {"image": images, "label": torch.arange(7)}
    result = MixUp(alpha=1.0, num_classes=7)(batch, torch.cat([uniform(7, 1), torch.zeros(7, 2)], 1))
    partners = result["image"].view(7, 7)  # the share of the own image is 0
    assert partners.sum(0).tolist() == [1] * 7
    assert partners.diagonal().tolist() == [0] * 7
    assert torch.equal(result["label"], partners)


@pytest.mark.parametrize("mixing", ALL, ids=lambda mixing: type(mixing).__name__)
def test_what_has_a_place_is_not_mixed(mixing: Mixing) -> None:
    draws = uniform(2, mixing.draws)
    with pytest.raises(DataError, match="also have boxes, mask"):
        mixing({"image": flat(1, 2), "label": torch.tensor([0, 1]), "mask": 0, "boxes": []}, draws)
    with pytest.raises(DataError, match="samples have none"):
        mixing({"image": flat(1, 2)}, draws)


@pytest.mark.parametrize("loss", [CrossEntropy(), BinaryCrossEntropy()], ids=["cross_entropy", "bce"])
def test_losses_of_mixed_labels_are_mixed_losses(loss: CrossEntropy | BinaryCrossEntropy) -> None:
    """What mixup is: λ of the loss with the own label and 1 − λ of the loss with the partner's."""
    batch = {"image": flat(0, 1), "label": torch.tensor([0, 3])}
    mixed = MixUp(alpha=1.0, num_classes=4)(batch, drawn([0.1, 0.75, 0], [0.2, 0.25, 0]))
    logits = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    shares = torch.tensor([0.75, 0.25])

    def alone(labels: list[int]) -> Tensor:
        terms = [loss(logits[i : i + 1], Batch(label=torch.tensor([label]))) for i, label in enumerate(labels)]
        return torch.stack([term.numerator for term in terms])

    expected = (shares * alone([0, 3]) + (1 - shares) * alone([3, 0])).sum()
    torch.testing.assert_close(loss(logits, Batch(mixed)).numerator, expected)
