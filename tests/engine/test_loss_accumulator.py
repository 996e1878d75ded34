"""The loss contract: however a step is cut, gradients and losses are those of the whole batch."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_runs import NUM_CLASSES, NormedNet, PlainNet, Small, SoftDice, one_thread  # noqa: F401
from torch import Tensor, nn

from paceline.data.loader import StepBatch
from paceline.data.rng import derive
from paceline.data.transforms.batch import MixUp
from paceline.engine.loss_accumulator import LossAccumulator, Normalizer
from paceline.engine.run import Run
from paceline.engine.stateful import KeptState
from paceline.engine.step import forward, start_losses, train_step, transformed
from paceline.losses.classification import BinaryCrossEntropy, CrossEntropy
from paceline.losses.loss_term import Loss, LossTerm

pytestmark = pytest.mark.usefixtures("one_thread")

CUTS = {"1 × 64": 64, "2 × 32": 32, "4 × 16": 16, "5 uneven": 13}
WEIGHTS = [0.2, 1.0, 3.0]


def one_hot(labels: Tensor) -> Tensor:
    return nn.functional.one_hot(labels, NUM_CLASSES).double()


def weighted_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    factors = torch.tensor(WEIGHTS, dtype=torch.float64)[labels]
    return -(factors * logits.log_softmax(1).gather(1, labels[:, None])[:, 0]).sum() / factors.sum()


def dice(logits: Tensor, labels: Tensor) -> Tensor:
    shares, truth = logits.sigmoid(), one_hot(labels)
    return 1 - 2 * (shares * truth).sum() / (shares.sum() + truth.sum())


Whole = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, dict[str, tuple[Loss, float, Whole]]] = {
    "cross entropy": {"cross_entropy": (CrossEntropy(), 1.0, nn.functional.cross_entropy)},
    "class weights": {"cross_entropy": (CrossEntropy(class_weights=WEIGHTS), 1.0, weighted_cross_entropy)},
    "bce": {
        "bce": (
            BinaryCrossEntropy(),
            1.0,
            lambda logits, labels: nn.functional.binary_cross_entropy_with_logits(logits, one_hot(labels)),
        )
    },
    "two, weighted": {
        "cross_entropy": (CrossEntropy(label_smoothing=0.1), 0.3, nn.CrossEntropyLoss(label_smoothing=0.1)),
        "bce": (
            BinaryCrossEntropy(),
            2.5,
            lambda logits, labels: nn.functional.binary_cross_entropy_with_logits(logits, one_hot(labels)),
        ),
    },
    "dice": {"dice": (SoftDice(), 1.0, dice)},
    "dice and cross entropy": {
        "dice": (SoftDice(), 0.7, dice),
        "cross_entropy": (CrossEntropy(), 1.3, nn.functional.cross_entropy),
    },
}


def small(out: Path, losses: str, micro_batch_size: int, size: int = 64) -> Small:
    chosen = {name: (loss, weight) for name, (loss, weight, _) in LOSSES[losses].items()}
    return Small(out, size=size, micro_batch_size=micro_batch_size, losses=chosen)


def gradients(run: Run, step_batch: StepBatch) -> tuple[list[Tensor], dict[str, Tensor]]:
    """What reaches the optimizer in one step, caught by a hook, and the losses it reports."""
    caught: list[Tensor] = []

    def catch(*_: object) -> None:
        caught.extend(parameter.grad.clone() for parameter in run.optimized if parameter.grad is not None)

    run.optimizer.register_step_pre_hook(catch)
    result = train_step(run, step_batch)
    return caught, result.losses


def whole_batch(run: Run, step_batch: StepBatch, losses: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The same by autograd over all samples of the step at once."""
    ids = torch.cat([micro.batch.ids for micro in step_batch.micro_batches])
    dataset = run.train_loader.dataset
    batch = run.train_loader.fetch(0, ids.numpy())
    logits = run.model(batch["image"])
    assert len(dataset) >= len(ids)
    named = {name: whole(logits, batch["label"]) for name, (_, _, whole) in LOSSES[losses].items()}
    total = torch.stack([weight * named[name] for name, (_, weight, _) in LOSSES[losses].items()]).sum()
    found = torch.autograd.grad(total, list(run.model.parameters()))
    return list(found), {"loss": total.detach(), **{name: value.detach() for name, value in named.items()}}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("losses", LOSSES)
def test_a_cut_update_equals_the_whole_batch(losses: str, cut: str, tmp_path: Path) -> None:
    run = small(tmp_path, losses, CUTS[cut]).run()
    step_batch = next(iter(run.batches))
    assert step_batch.num_micro_batches == len(step_batch.micro_batches) == -(-64 // CUTS[cut])
    expected, expected_losses = whole_batch(run, step_batch, losses)
    found, found_losses = gradients(run, step_batch)
    assert list(found_losses) == list(expected_losses)
    torch.testing.assert_close(found_losses, expected_losses, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("losses", LOSSES)
def test_the_last_smaller_update_of_an_epoch_is_its_own_whole(losses: str, tmp_path: Path) -> None:
    run = small(tmp_path, losses, micro_batch_size=13, size=64 + 29).run()
    step_batch = list(run.batches)[1]
    assert [micro.batch.size for micro in step_batch.micro_batches] == [9, 10, 10]
    expected, expected_losses = whole_batch(run, step_batch, losses)
    found, found_losses = gradients(run, step_batch)
    torch.testing.assert_close(found_losses, expected_losses, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cut", CUTS)
def test_what_losses_are_divided_by_is_counted_after_samples_are_mixed(cut: str, tmp_path: Path) -> None:
    mixing = [MixUp(1.0, num_classes=NUM_CLASSES)]
    run = replace(small(tmp_path, "class weights", CUTS[cut]), transforms=mixing, dtype=torch.float32).run()
    step_batch = next(iter(run.batches))
    mixed = [transformed(run, micro) for micro in step_batch.micro_batches]
    images, labels = (torch.cat([batch[name] for batch in mixed]) for name in ("image", "label"))
    shares = labels * torch.tensor(WEIGHTS)  # [N, C], what each class of a sample weighs
    loss = -(shares * run.model(images).log_softmax(1)).sum() / shares.sum()
    expected = list(torch.autograd.grad(loss, list(run.model.parameters())))
    found, found_losses = gradients(run, step_batch)
    torch.testing.assert_close(found_losses["loss"].float(), loss.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_totals_do_not_depend_on_which_process_counted(tmp_path: Path) -> None:
    """Weights such as 0.2 do not add up alike in every order."""
    run = small(tmp_path, "class weights", 5).run()
    step_batch = next(iter(run.batches))
    in_order = 0.0
    for micro in step_batch.micro_batches:
        in_order += float(CrossEntropy(class_weights=WEIGHTS).count(micro.batch))
    assert counted(run, step_batch).normalizers["cross_entropy"] == Normalizer(in_order)
    shuffled = step_batch._replace(micro_batches=[*step_batch.micro_batches[1::2], *step_batch.micro_batches[::2]])
    assert counted(run, shuffled).normalizers["cross_entropy"] == Normalizer(in_order)


@pytest.mark.parametrize("losses", ["class weights", "two, weighted"])
@pytest.mark.parametrize("cut", CUTS)
def test_counts_that_stay_on_a_device_give_the_same_step(
    losses: str, cut: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tensors that the host does not read; in float32 the gradients have the same bits."""
    wanted = replace(small(tmp_path, losses, CUTS[cut]), dtype=torch.float32)
    run = wanted.run()
    expected, expected_losses = gradients(run, next(iter(run.batches)))
    count = CrossEntropy.count
    monkeypatch.setattr(CrossEntropy, "count", lambda *given: torch.as_tensor(count(*given)).double())
    monkeypatch.setattr("paceline.engine.loss_accumulator._is_on_host", lambda count: False)
    run = wanted.run()
    step_batch = next(iter(run.batches))
    assert counted(run, step_batch).normalizers["cross_entropy"].count_on_device is not None
    found, found_losses = gradients(run, step_batch)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    torch.testing.assert_close(found_losses, expected_losses, rtol=1e-6, atol=1e-6)


def counted(run: Run, step_batch: StepBatch) -> LossAccumulator:
    losses = start_losses(run, step_batch)
    losses.wait()
    return losses


def test_only_ratio_losses_take_a_first_pass(tmp_path: Path) -> None:
    mixed = small(tmp_path, "dice and cross entropy", micro_batch_size=32)
    run = mixed.run()
    losses = counted(run, next(iter(run.batches)))
    assert losses.normalizers["dice"].ratio is not None
    assert losses.normalizers["cross_entropy"] == Normalizer(64.0)
    assert losses.should_stop is False
    single = replace(mixed, micro_batch_size=64).run()
    assert "dice" not in counted(single, next(iter(single.batches))).normalizers  # its only term will tell


def test_a_request_to_stop_travels_with_the_counts(tmp_path: Path) -> None:
    run = small(tmp_path, "cross entropy", 64).run()
    run.stop.requested = True
    assert counted(run, next(iter(run.batches))).should_stop is True


def test_an_update_in_which_nothing_counts_has_no_gradient(tmp_path: Path) -> None:
    """All its samples are of classes with weight 0: the loss is 0, and not 0 / 0."""
    run = Small(tmp_path, losses={"cross_entropy": (CrossEntropy(class_weights=[0.0, 0.0, 0.0]), 1.0)}).run()
    found, losses = gradients(run, next(iter(run.batches)))
    assert losses["loss"].item() == 0
    assert all(gradient.abs().max() == 0 for gradient in found)


def test_generators_start_from_seed_step_and_micro_batch(tmp_path: Path) -> None:
    run = Small(tmp_path, micro_batch_size=16, net=NormedNet, steps=3).run()
    step_batch = list(run.batches)[2]
    micro = step_batch.micro_batches[3]
    torch.rand(5)
    terms = forward(run, micro)
    torch.default_generator.manual_seed(derive(7, 2, 3))
    logits = run.model(micro.batch["image"])
    expected = nn.functional.cross_entropy(logits, micro.batch["label"], reduction="sum")
    assert terms["cross_entropy"].numerator.item() == expected.item()


@pytest.mark.parametrize("losses", ["dice", "dice and cross entropy"])
def test_the_first_pass_of_a_ratio_leaves_buffers_alone(losses: str, tmp_path: Path) -> None:
    """BatchNorm sees every micro-batch once, in order, although a ratio loss takes two passes."""
    run = replace(small(tmp_path, losses, micro_batch_size=16), net=NormedNet).run()
    step_batch = next(iter(run.batches))
    assert isinstance(run.model, NormedNet)
    convolution, norm = run.model.layers[0], run.model.layers[1]
    assert isinstance(norm, nn.BatchNorm2d)
    reference = nn.BatchNorm2d(5).double()
    with torch.no_grad():
        for micro in step_batch.micro_batches:
            reference(convolution(micro.batch["image"]))
    train_step(run, step_batch)
    assert norm.num_batches_tracked is not None
    assert norm.num_batches_tracked.item() == 4
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert torch.equal(norm.running_mean, reference.running_mean)  # type: ignore[arg-type]
    assert torch.equal(norm.running_var, reference.running_var)  # type: ignore[arg-type]


def test_the_first_pass_of_a_ratio_sees_the_same_noise(tmp_path: Path) -> None:
    """With dropout, N and D of the first pass are those of the second: the reported parts add up to N / D."""
    run = replace(small(tmp_path, "dice", micro_batch_size=16), net=NormedNet).run()
    step_batch = next(iter(run.batches))
    with torch.no_grad(), KeptState(run.model.modules(), {}):
        terms = [forward(run, micro)["dice"] for micro in step_batch.micro_batches]
    numerator = torch.stack([term.numerator for term in terms]).sum()
    denominator = torch.stack([torch.as_tensor(term.denominator) for term in terms]).sum()
    result = train_step(run, step_batch)
    assert result.losses["dice"].item() == pytest.approx((numerator / denominator).item(), rel=1e-14)


class Counter(PlainNet):
    """Counts its calls in a buffer that it replaces instead of changing it."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, images: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return super().forward(images)


def test_buffers_that_are_replaced_come_back_too() -> None:
    model = Counter()
    with torch.no_grad(), KeptState(model.modules(), {}):
        model(torch.zeros(1, 2, 6, 6))
        assert model.calls == 1
    assert model.calls == 0


class PlainRatio:
    """A mean over samples that says its denominator late, and as a plain number."""

    def count(self, batch: dict[str, Tensor]) -> None:
        return None

    def __call__(self, outputs: Tensor, batch: dict[str, Tensor]) -> LossTerm:
        numerator = nn.functional.cross_entropy(outputs, batch["label"], reduction="sum")
        return LossTerm(numerator / 3, len(outputs) / 3)


def test_a_ratio_whose_denominator_is_a_plain_number_keeps_its_digits(tmp_path: Path) -> None:
    run = Small(tmp_path, micro_batch_size=13, losses={"late": (PlainRatio(), 1.0)}).run()
    step_batch = next(iter(run.batches))
    expected, _ = whole_batch(run, step_batch, "cross entropy")
    found, _ = gradients(run, step_batch)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_an_update_without_a_readable_sample_has_no_loss_and_no_gradient(tmp_path: Path) -> None:
    run = small(tmp_path, "dice", micro_batch_size=32).run()
    step_batch = next(iter(run.batches))
    padding = [replace(micro, is_padding=True) for micro in step_batch.micro_batches]
    result = train_step(run, step_batch._replace(micro_batches=padding))
    assert result.grad_norm == 0
    assert result.losses["loss"].item() == 0
