"""One update: the numbers of a run computed by hand, clipping, and what happens to gradients that are not finite."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import CPU, Net, NormedNet, Small, SoftDice, grouped, one_thread, with_solver  # noqa: F401
from torch import Tensor, nn

from paceline.core.errors import TrainingError
from paceline.core.world import World
from paceline.data.batch import Batch
from paceline.data.datasets.idx import MemoryImages
from paceline.data.loader import MicroBatch, StepBatch, TrainBatches
from paceline.data.sampler import BatchSampler
from paceline.data.split_loader import SplitLoader
from paceline.engine.replay import check_finite
from paceline.engine.run import Run
from paceline.engine.step import train_step
from paceline.losses.classification import CrossEntropy
from paceline.losses.loss_term import Loss, LossTerm
from paceline.models.freezing import Freezing
from paceline.optim.clipping import ClipGradNorm, ClipGradValue
from paceline.optim.decays import cosine
from paceline.optim.lr_scheduler import Schedule, Scheduler

pytestmark = pytest.mark.usefixtures("one_thread")

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "golden" / "curve.json").read_text(encoding="utf-8")
)


def golden_run(out: Path, micro_batch_size: int) -> Run:
    """The run of tests/golden/make_curve.py."""
    pixels = [[math.sin(1 + 4 * sample + place) for place in range(4)] for sample in range(21)]
    images = torch.tensor(pixels, dtype=torch.float64).view(21, 1, 2, 2)
    labels = torch.tensor([sample * sample % 3 for sample in range(21)])
    source = SplitLoader(MemoryImages(images, {"label": labels}, ["a", "b", "c"]), [], seed=7, float_type=torch.float64)
    linear = nn.Linear(4, 3).double()
    with torch.no_grad():
        rows = [[0.1 * (number + 1) * (place - 1.5) for place in range(4)] for number in range(3)]
        linear.weight.copy_(torch.tensor(rows, dtype=torch.float64))
        linear.bias.zero_()
    model = Net(nn.Flatten(), linear)
    small = Small(out, size=21, steps=9, losses={"cross_entropy": (CrossEntropy(label_smoothing=0.1), 1.0)})
    optimizer = torch.optim.SGD(grouped(model), lr=1.0, momentum=0.9, weight_decay=0.01)
    schedule = Schedule(0.5, cosine, total_steps=9, steps_per_epoch=3, warmup_steps=2, warmup_from=0.1, floor=0.05)
    run = small.run(model=model, train_loader=source, optimizer=optimizer, scheduler=Scheduler(optimizer, schedule))
    run.batches = TrainBatches(source, BatchSampler(21, 8, micro_batch_size), run.world, run.progress, workers=0)
    return run


@pytest.mark.parametrize("micro_batch_size", [8, 3, 1])
def test_a_whole_run_has_the_numbers_computed_by_hand(micro_batch_size: int, tmp_path: Path) -> None:
    run = golden_run(tmp_path, micro_batch_size)
    results = [train_step(run, step_batch) for step_batch in run.batches]
    found = [
        {"loss": result.losses["loss"].item(), "grad_norm": float(result.grad_norm), "lr": result.lr}
        for result in results
    ]
    for one, other in zip(found, GOLDEN["steps"], strict=True):
        assert one == pytest.approx(other, rel=1e-10)
    linear = run.optimizer.param_groups[0]["params"]
    expected = torch.tensor(GOLDEN["weight"], dtype=torch.float64), torch.tensor(GOLDEN["bias"], dtype=torch.float64)
    torch.testing.assert_close(tuple(value.detach() for value in linear), expected, rtol=1e-10, atol=1e-12)


def test_a_step_tells_its_rate_and_leaves_no_gradient(tmp_path: Path) -> None:
    run = Small(tmp_path, lr=0.25, micro_batch_size=20).run()
    result = train_step(run, next(iter(run.batches)))
    assert result.lr == 0.25
    assert [group["lr"] for group in run.optimizer.param_groups] == [0.25]
    assert all(parameter.grad is None for parameter in run.model.parameters())
    assert result.should_stop is False


def test_reported_tensors_hold_no_graph(tmp_path: Path) -> None:
    run = Small(tmp_path, micro_batch_size=20, losses={"dice": (SoftDice(), 1.0)}).run()
    result = train_step(run, next(iter(run.batches)))
    assert not any(value.requires_grad for value in [*result.losses.values(), torch.as_tensor(result.grad_norm)])


@pytest.mark.parametrize("limit", [1e-3, 1e3])
def test_clipping_is_that_of_the_whole_update(limit: float, tmp_path: Path) -> None:
    small = Small(tmp_path, micro_batch_size=13, lr=1.0)
    plain, clipped = small.run(), small.run(clip_gradients=ClipGradNorm(limit))
    before = [parameter.detach().clone() for parameter in plain.model.parameters()]
    results = [train_step(run, next(iter(run.batches))) for run in (plain, clipped)]
    norm = float(results[0].grad_norm)
    assert results[1].grad_norm == norm
    scale = min(1.0, limit / (norm + 1e-6))
    for start, free, held in zip(before, plain.model.parameters(), clipped.model.parameters(), strict=True):
        torch.testing.assert_close(held - start, (free - start) * scale, rtol=1e-9, atol=1e-15)


class Poisoned(nn.Module):
    """A net whose gradient, but not its output, is not finite for one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = NormedNet()
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.inner(images)
        # The derivative of the square root at 0 is infinite.
        return logits + (self.scale * (images[:, :1, :1, :1] > 2.5).flatten(1)).abs().sqrt()


@pytest.mark.parametrize("clip", [None, ClipGradNorm(1.0), ClipGradValue(1.0)])
def test_gradients_that_are_not_finite_end_the_run_before_the_weights_change(
    clip: ClipGradNorm | ClipGradValue | None, tmp_path: Path
) -> None:
    run = Small(tmp_path, micro_batch_size=16, net=Poisoned, lr=0.01).run(**({"clip_gradients": clip} if clip else {}))
    step_batch = next(iter(run.batches))
    before = {name: value.detach().clone() for name, value in run.model.named_parameters()}
    named = r"outputs are finite, the gradients of scale are not"  # of no other parameter, clipped or not
    with pytest.raises(TrainingError, match=rf"gradient of step 1 is not finite.*: {named}.*the model or the loss"):
        check_finite(run, [train_step(run, step_batch)])
    assert all(torch.equal(value, before[name]) for name, value in run.model.named_parameters())
    assert not run.optimizer.state


def test_a_loss_that_is_not_a_number_ends_the_run_and_is_named(tmp_path: Path) -> None:
    run = Small(tmp_path).run()
    with torch.no_grad():
        next(run.model.parameters()).fill_(math.nan)
    step_batch = next(iter(run.batches))
    result = train_step(run, step_batch)
    with pytest.raises(TrainingError) as caught:
        check_finite(run, [result])
    first = ", ".join(str(number) for number in step_batch.micro_batches[0].batch.ids[:8].tolist())
    assert f"layers.0 (Conv2d) gives what is not finite for samples {first} and 56 more" in str(caught.value)


class Nothing:
    """A loss for which this micro-batch has nothing: no boxes, no pixels. Its term is a plain zero."""

    def count(self, batch: Batch) -> float:
        return 0.0

    def __call__(self, outputs: Tensor, batch: Batch) -> LossTerm:
        return LossTerm(torch.zeros(()), 0.0)


def test_a_loss_without_a_gradient_beside_one_with_is_no_obstacle(tmp_path: Path) -> None:
    with_it = Small(tmp_path, losses={"cross_entropy": (CrossEntropy(), 1.0), "nothing": (Nothing(), 1.0)}).run()
    without = Small(tmp_path).run()
    results = [train_step(run, next(iter(run.batches))) for run in (with_it, without)]
    assert results[0].grad_norm == results[1].grad_norm
    assert results[0].losses["nothing"] == 0


def test_parameters_that_do_not_learn_stay(tmp_path: Path) -> None:
    run = Small(tmp_path).run()
    assert isinstance(run.model, Net)
    frozen = run.model.layers[0]
    for parameter in frozen.parameters():
        parameter.requires_grad_(False)
    run = with_solver(run, torch.optim.SGD(grouped(run.model), lr=0.1), 0.1)
    before = [parameter.clone() for parameter in frozen.parameters()]
    result = train_step(run, next(iter(run.batches)))
    assert all(torch.equal(one, other) for one, other in zip(frozen.parameters(), before, strict=True))
    assert result.grad_norm > 0


def test_owning_the_loop_is_the_same_as_training(tmp_path: Path) -> None:
    """`for update in run.batches: train_step(run, update)` advances the run as `train` does."""
    run = Small(tmp_path, size=40, batch=16, steps=6).run()
    run.freezing = Freezing(run.model, ["layers.0"], [(2, ["layers.0"])])
    learned = []
    for done, step_batch in enumerate(run.batches, start=1):
        before = next(run.model.parameters()).detach().clone()
        train_step(run, step_batch)
        learned.append(not torch.equal(before, next(run.model.parameters())))
        assert run.progress.step == done
    assert learned == [False, False, True, True, True, True]
    assert run.progress.is_done
    assert list(run.batches) == []


class Recorded(World):
    """One process of two, in this one: notes what it adds, and adds what the other was noted to add before it."""

    def __init__(self, others: list[Tensor]) -> None:
        super().__init__(0, 2, 0, CPU)
        object.__setattr__(self, "others", iter(others))
        object.__setattr__(self, "added", [])

    def start_sum(self, numbers: list[float]) -> Callable[[], list[float]]:
        sums: list[float] = self.sum(torch.tensor(numbers, dtype=torch.float64)).tolist()
        return lambda: sums

    def sum(self, tensor: Tensor) -> Tensor:
        added: list[Tensor] = self.__dict__["added"]
        added.append(tensor.clone())
        other: Tensor = next(self.__dict__["others"], torch.zeros_like(tensor))
        assert (other.shape, other.dtype) == (tensor.shape, tensor.dtype)
        return tensor.add_(other)


@pytest.mark.parametrize("loss", [CrossEntropy(), SoftDice()])
def test_an_empty_rank_joins_every_collective(loss: Loss, tmp_path: Path) -> None:
    small = Small(tmp_path, micro_batch_size=32, losses={"one": (loss, 1.0)})
    full = next(iter(small.run().batches))
    busy = Recorded([])
    expected = train_step(small.run(world=busy), full)
    idle = Recorded(busy.__dict__["added"])
    empty = StepBatch(full.step, full.num_samples, full.num_micro_batches, [])
    found = train_step(small.run(world=idle), empty)
    assert len(idle.__dict__["added"]) == len(busy.__dict__["added"])
    assert list(found.losses) == list(expected.losses)
    assert all(value == 0 for value in found.losses.values())


def test_micro_batches_may_be_handed_in_by_hand(tmp_path: Path) -> None:
    run = Small(tmp_path, micro_batch_size=32).run()
    other = Small(tmp_path, micro_batch_size=32).run()
    step_batch = next(iter(run.batches))
    copied = [MicroBatch(micro.step, micro.index, micro.epoch, micro.batch) for micro in step_batch.micro_batches]
    one = train_step(run, step_batch)
    two = train_step(other, StepBatch(0, 64, 2, copied))
    assert torch.equal(one.losses["loss"], two.losses["loss"])


def test_a_step_that_was_set_on_the_optimizer_is_called(tmp_path: Path) -> None:
    """As wrappers and torch's schedulers set it."""
    run, called = Small(tmp_path, steps=2).run(), []
    torch_step = run.optimizer.step

    def own_step() -> None:
        called.append(run.progress.step)
        torch_step()

    run.optimizer.step = own_step  # type: ignore[method-assign, assignment]
    before = [parameter.clone() for parameter in run.optimized]
    for step_batch in run.batches:
        train_step(run, step_batch)
    assert called == [0, 1]
    assert not any(torch.equal(one, other) for one, other in zip(before, run.optimized, strict=True))
