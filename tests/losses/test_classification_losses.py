import math
from itertools import pairwise

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
from paceline.losses.classification import BinaryCrossEntropy, CrossEntropy
from paceline.losses.loss_term import Loss, LossTerm

WEIGHTS = [0.5, 2.0, 1.0, 3.0]


def some_logits(num_samples: int = 9, num_classes: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(num_samples, num_classes, generator=torch.Generator().manual_seed(seed)) * 3


def some_labels(num_samples: int = 9, num_classes: int = 4, seed: int = 1) -> Tensor:
    return torch.randint(num_classes, (num_samples,), generator=torch.Generator().manual_seed(seed))


def some_targets(num_samples: int = 9, num_classes: int = 4, seed: int = 2) -> Tensor:
    return torch.rand(num_samples, num_classes, generator=torch.Generator().manual_seed(seed)).softmax(dim=1)


def batch_of(labels: Tensor) -> Batch:
    return Batch(id=torch.arange(len(labels)), label=labels)


def ratio(term: LossTerm) -> float:
    assert term.numerator.ndim == 0
    return float(term.numerator) / float(term.denominator)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    ("labels", "weights"),
    [(some_labels(), None), (some_labels(), WEIGHTS), (some_targets(), None)],
    ids=["hard", "weighted", "soft"],
)
def test_cross_entropy_of_a_whole_batch_is_torchs_mean(
    labels: Tensor, weights: list[float] | None, smoothing: float
) -> None:
    logits, batch = some_logits(), batch_of(labels)
    loss = CrossEntropy(label_smoothing=smoothing, class_weights=weights)
    term = loss(logits, batch)
    expected = F.cross_entropy(
        logits, labels, weight=None if weights is None else torch.tensor(weights), label_smoothing=smoothing
    )
    assert ratio(term) == pytest.approx(expected.item(), rel=1e-6)
    assert loss.count(batch) == pytest.approx(float(term.denominator), rel=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_soft_targets_weigh_what_their_classes_do(smoothing: float) -> None:
    """Torch divides by their number, and so tells two losses for the same truth, as numbers and as shares."""
    loss = CrossEntropy(label_smoothing=smoothing, class_weights=WEIGHTS)
    hard, shares = batch_of(some_labels()), batch_of(F.one_hot(some_labels(), 4).float())
    assert ratio(loss(some_logits(), shares)) == pytest.approx(ratio(loss(some_logits(), hard)), rel=1e-6)
    mixed = batch_of(some_targets())
    assert loss.count(shares) == pytest.approx(loss.count(hard))
    assert loss.count(mixed) == pytest.approx(float(loss(some_logits(), mixed).denominator), rel=1e-6)
    assert loss.count(mixed) == pytest.approx(float((some_targets() @ torch.tensor(WEIGHTS)).sum()), rel=1e-6)


def test_cross_entropy_by_hand() -> None:
    # Odds of 3 : 1 for class 1; sample 0 is of class 1 and sample 1 of class 0, with weights 2 and 1.
    logits = torch.tensor([[0.0, math.log(3)], [0.0, math.log(3)]])
    term = CrossEntropy(class_weights=[1.0, 2.0])(logits, batch_of(torch.tensor([1, 0])))
    assert float(term.numerator) == pytest.approx(2 * math.log(4 / 3) + math.log(4))
    assert float(term.denominator) == 3


def test_unweighted_denominators_are_plain_numbers() -> None:
    batch = batch_of(some_labels())
    for loss in (CrossEntropy(), BinaryCrossEntropy()):
        assert loss(some_logits(), batch).denominator == loss.count(batch) == 9.0


@settings(max_examples=40, deadline=None)
@given(
    slices=st.sets(st.integers(1, 8)),
    loss=st.sampled_from([CrossEntropy(0.1), CrossEntropy(class_weights=WEIGHTS), BinaryCrossEntropy(0.1, WEIGHTS)]),
)
def test_the_gradient_of_a_step_does_not_depend_on_its_micro_batches(slices: set[int], loss: Loss) -> None:
    labels, weight = some_labels(), some_logits(4, seed=5).double().requires_grad_()
    inputs = some_logits().double()
    edges = [0, *sorted(slices), 9]
    parts = [slice(start, stop) for start, stop in pairwise(edges)]

    def gradient(slices: list[slice]) -> Tensor:
        batches = [batch_of(labels[part]) for part in slices]
        total = sum(count for batch in batches if (count := loss.count(batch)) is not None)
        terms = [loss(inputs[part] @ weight, batch).numerator for part, batch in zip(slices, batches, strict=True)]
        return torch.autograd.grad(torch.stack(terms).sum() / total, weight)[0]

    torch.testing.assert_close(gradient(parts), gradient([slice(0, 9)]), rtol=1e-12, atol=1e-14)


def test_an_empty_batch_adds_nothing() -> None:
    batch = batch_of(torch.zeros(0, dtype=torch.int64))
    for loss in (CrossEntropy(), CrossEntropy(class_weights=WEIGHTS), BinaryCrossEntropy()):
        logits = torch.zeros(0, 4, requires_grad=True)
        term = loss(logits, batch)
        term.numerator.backward()  # type: ignore[no-untyped-call]
        assert term.numerator.item() == float(term.denominator) == loss.count(batch) == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_bce_of_several_labels_is_torchs_mean(dtype: torch.dtype, weights: list[float] | None) -> None:
    logits, targets = some_logits(), (some_targets() > 0.25)
    batch = batch_of(targets.to(dtype))
    loss = BinaryCrossEntropy(pos_weight=weights)
    expected = F.binary_cross_entropy_with_logits(
        logits, targets.float(), pos_weight=None if weights is None else torch.tensor(weights)
    )
    assert ratio(loss(logits, batch)) == pytest.approx(expected.item(), rel=1e-6)
    assert loss.count(batch) == 9.0


def test_bce_of_one_label_is_that_of_its_one_hot() -> None:
    logits, labels = some_logits(), some_labels()
    expected = F.binary_cross_entropy_with_logits(logits, F.one_hot(labels, 4).float())
    assert ratio(BinaryCrossEntropy()(logits, batch_of(labels))) == pytest.approx(expected.item(), rel=1e-6)


def test_bce_smoothing_of_several_labels_draws_to_the_middle() -> None:
    logits, targets = torch.tensor([[2.0, -1.0]]), torch.tensor([[1, 0]])
    term = BinaryCrossEntropy(label_smoothing=0.2)(logits, batch_of(targets))

    def entropy(logit: float, target: float) -> float:
        return target * math.log1p(math.exp(-logit)) + (1 - target) * math.log1p(math.exp(logit))

    assert ratio(term) == pytest.approx((entropy(2, 0.9) + entropy(-1, 0.1)) / 2)


def test_bce_smoothing_of_one_label_spreads_over_the_classes() -> None:
    logits, labels = some_logits(), some_labels()
    smooth = F.one_hot(labels, 4) * 0.8 + 0.05
    expected = F.binary_cross_entropy_with_logits(logits, smooth)
    loss = BinaryCrossEntropy(label_smoothing=0.2)
    assert ratio(loss(logits, batch_of(labels))) == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("loss", [CrossEntropy(class_weights=WEIGHTS), BinaryCrossEntropy(0.1, WEIGHTS)])
def test_half_precision_outputs_are_summed_in_full(loss: Loss) -> None:
    halves, batch = some_logits(300).bfloat16(), batch_of(some_labels(300))
    term = loss(halves, batch)
    assert term.numerator.dtype == torch.float32
    assert float(term.numerator) == float(loss(halves.float(), batch).numerator)


@pytest.mark.parametrize(
    ("loss", "argument"),
    [
        (CrossEntropy(class_weights=[1.0, 2.0, 3.0]), "class_weights"),
        (BinaryCrossEntropy(pos_weight=[1.0, 2.0, 3.0]), "pos_weight"),
    ],
)
def test_weights_that_do_not_fit_the_model_are_refused(loss: Loss, argument: str) -> None:
    with pytest.raises(RecipeError, match=rf"{argument}: got 3 numbers.*4 classes"):
        loss(some_logits(), batch_of(torch.zeros(9, dtype=torch.int64)))


def test_weights_that_do_not_fit_the_labels_are_refused_when_counted() -> None:
    with pytest.raises(RecipeError, match=r"class_weights: got 2 numbers.* class 3"):
        CrossEntropy(class_weights=[1.0, 2.0]).count(batch_of(torch.tensor([0, 3, 1])))


def test_labels_that_do_not_fit_are_refused() -> None:
    several = torch.ones(9, 4, dtype=torch.uint8)
    with pytest.raises(DataError, match=r"\[9, 4\].*bce"):
        CrossEntropy()(some_logits(), batch_of(several))
    with pytest.raises(DataError, match=r"\[9, 3\].*\[9, 4\]"):
        CrossEntropy()(some_logits(), batch_of(some_targets(num_classes=3)))
    with pytest.raises(DataError, match=r"\[9, 3\].*\[9, 4\]"):
        BinaryCrossEntropy()(some_logits(), batch_of(several[:, :3]))


@pytest.mark.parametrize("loss", [CrossEntropy(0.1, WEIGHTS), BinaryCrossEntropy(0.1, WEIGHTS)])
def test_a_dry_run_on_fake_tensors_leaves_nothing_behind(loss: Loss) -> None:
    for _ in range(2):
        with FakeTensorMode():
            assert loss(torch.empty(9, 4), batch_of(torch.zeros(9, dtype=torch.int64))).numerator.ndim == 0
    assert math.isfinite(loss(some_logits(), batch_of(some_labels())).numerator.item())


@pytest.mark.parametrize("loss", [CrossEntropy(0.1, WEIGHTS), BinaryCrossEntropy(0.1, WEIGHTS)])
def test_training_can_follow_an_evaluation(loss: Loss) -> None:
    batch = batch_of(some_labels())
    with torch.inference_mode():
        loss(some_logits(), batch)
    logits = some_logits().requires_grad_()
    loss(logits, batch).numerator.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())


def test_recipes_can_name_the_losses() -> None:
    losses = register.kind("loss")
    for name, component in (("cross_entropy", CrossEntropy), ("bce", BinaryCrossEntropy)):
        entry = losses.find(name)
        assert entry is not None
        assert entry.resolve() is component
        component(**entry.arguments().model_dump())
        with pytest.raises(ValidationError):
            entry.arguments.model_validate({"label_smoothing": 1.0})
