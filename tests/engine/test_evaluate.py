"""The evaluation contract: each sample once, bit-identical for any number of processes, lanes and workers."""

import gc
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from evaluated_splits import SPLITS, measure_all, tables, written_images
from small_runs import ALONE, NUM_CLASSES, NormedNet, Small, images, threads
from support.forkserver import script_ranks
from support.waiting import wait_until
from torch import Tensor

from paceline.core.errors import DataError, TrainingError
from paceline.data.batch import Batch, Ids
from paceline.data.split_loader import SplitLoader
from paceline.engine.evaluate import Evaluation, check_ledger, evaluate
from paceline.engine.run import EvaluationSet, Run

SCRIPT = Path(__file__).resolve().parent / "scripts" / "evaluation.py"
SIZE = 1003


def small(out: Path, **changes: Any) -> Small:
    common = Small(out, dtype=torch.float32, net=NormedNet, evaluation_size=SIZE, evaluation_batch=64)
    return replace(common, **changes)


def bits(evaluation: Evaluation) -> dict[str, Any]:
    return {name: value.hex() for name, value in evaluation.metrics.items()} | {
        name: table.tolist() for name, table in evaluation.tables.items()
    }


def with_cores(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(number)))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """The metrics of one process, and the folder with the rest."""
    folder = tmp_path_factory.mktemp("alone")
    return measure_all(ALONE, folder), folder


@pytest.mark.parametrize("world", [2, 3])
def test_processes_agree_with_one_to_the_bit(
    world: int, alone: tuple[list[dict[str, Any]], Path], tmp_path: Path
) -> None:
    done = script_ranks(world, SCRIPT, tmp_path, OMP_NUM_THREADS="1")
    assert [each.returncode for each in done] == [0] * world, done[0].stderr
    for rank in range(world):
        assert json.loads((tmp_path / f"rank-{rank}.json").read_text()) == json.loads(json.dumps(alone[0]))
    assert tables(tmp_path) == tables(alone[1])
    assert written_images(tmp_path) == written_images(alone[1])


def test_every_sample_has_its_row_and_some_are_drawn(alone: tuple[list[dict[str, Any]], Path]) -> None:
    metrics, folder = alone
    for (size, _), found, table, files in zip(SPLITS, metrics, tables(folder), written_images(folder), strict=True):
        lines = [line.decode().split(",") for line in table.splitlines()[1:]]
        assert [int(line[0]) for line in lines] == list(range(size))
        number = min(24, size)
        assert list(found["captions"]) == [size * index // number for index in range(number)]
        labels = images(size).fields["label"]
        for sample, caption in found["captions"].items():
            assert caption.startswith(f"{sample}: ")
            assert caption.endswith(f"class {labels[sample]}"), "alone, or behind a wrong prediction"
        worst = {f"val-{place:02d}.png" for place in range(1, min(12, size) + 1)}
        assert set(files) == {"val-confusion-00000000.png", "val-predictions-00000000.png", "val.json", *worst}


@pytest.mark.parametrize("batch", [1003, 256, 64, 7])
def test_lanes_change_no_bit(batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small(tmp_path, evaluation_batch=batch).run()
    found = []
    for cores in (1, 2, 5):
        with_cores(monkeypatch, cores)
        found.append(bits(evaluate(run, "val")))
    assert found[1:] == found[:1] * 2


def num_batches() -> int:
    return sum(type(each) is Batch for each in gc.get_objects())


class CallCounter(NormedNet):
    """Notes the batches that it and its replicas have seen."""

    _seen: ClassVar[list[int]] = []

    def forward(self, images: Tensor) -> Tensor:
        logits = super().forward(images)
        self._seen.append(len(images))
        return logits


def test_batches_that_wait_to_be_counted_hold_no_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_cores(monkeypatch, 2)
    run = small(tmp_path, net=CallCounter, evaluation_batch=64).run()
    total, before, held = -(-SIZE // 64), num_batches(), [10**9]

    def look(step: int, phase: str) -> None:
        """Called behind the first batch: all others are measured before it is counted."""
        if CallCounter._seen and len(held) == 1:
            wait_until(lambda: len(CallCounter._seen) == total, "all batches are measured")
            for _ in range(100):  # the last ones may still be at the metrics
                held.append(num_batches())
                if held[-1] <= before:
                    break
                time.sleep(0.02)

    monkeypatch.setattr(run.heartbeat, "beat", look)
    evaluate(run, "val")
    assert held[-1] <= before


class Summing(NormedNet):
    """Adds a sum over the whole batch, which torch adds up in another order with other numbers of threads."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) * (1 + images.sum() * 1e-3)


def test_the_threads_of_training_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small(tmp_path, net=Summing, evaluation_batch=SIZE).run()
    found = []
    for cores in (1, 2):
        with_cores(monkeypatch, cores)
        for number in (1, 2):
            with threads(number):
                found.append(bits(evaluate(run, "val")))
    assert found[1:] == found[:1] * 3


def test_lanes_have_the_threads_of_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread starts with torch's default number unless it is set."""
    run = small(tmp_path, net=Summing, evaluation_batch=502).run()
    with threads(2):
        with_cores(monkeypatch, 2)
        in_lanes = bits(evaluate(run, "val"))
        with_cores(monkeypatch, 1)
        assert bits(evaluate(run, "val")) == in_lanes


def test_workers_change_no_bit(tmp_path: Path) -> None:
    assert bits(evaluate(small(tmp_path, evaluation_workers=2).run(), "val")) == bits(
        evaluate(small(tmp_path).run(), "val")
    )


def test_metrics_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    run = small(tmp_path, dtype=torch.float64).run()
    evaluation = evaluate(run, "val")
    data = images(SIZE)
    run.model.eval()
    with torch.no_grad():
        logits = run.model(data.images)
    labels, predicted = data.fields["label"], logits.argmax(1)
    confusion = [
        [int(((labels == t) & (predicted == p)).sum()) for p in range(NUM_CLASSES)] for t in range(NUM_CLASSES)
    ]
    chosen = logits.log_softmax(1)[torch.arange(SIZE), labels]
    assert evaluation.tables["confusion"].tolist() == confusion
    assert evaluation.metrics["top1"] == int((predicted == labels).sum()) / SIZE
    assert evaluation.metrics["cross_entropy"] == pytest.approx(-chosen.mean().item(), rel=1e-12)
    assert evaluation.num_samples == SIZE


def test_evaluation_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    run = small(tmp_path).run()
    run.model.train()
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    with threads(2):
        evaluate(run, "val")
        assert torch.get_num_threads() == 2
    assert run.model.training
    assert all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())
    assert all(parameter.grad is None for parameter in run.model.parameters())


class Failing(NormedNet):
    """Cannot be evaluated."""

    seen: ClassVar[list[tuple[bool, int]]] = []

    def forward(self, images: Tensor) -> Tensor:
        self.seen.append((self.training, torch.get_num_threads()))
        raise ZeroDivisionError


def test_mode_and_threads_come_back_after_an_error(tmp_path: Path) -> None:
    run = small(tmp_path, net=Failing).run()
    assert isinstance(run.model, Failing)
    with threads(2):
        with pytest.raises(TrainingError, match="ZeroDivisionError"):
            evaluate(run, "val")
        assert run.model.seen[-1] == (False, 1)
        assert (run.model.training, torch.get_num_threads()) == (True, 2)


def test_nothing_is_drawn_where_no_images_are_wanted(tmp_path: Path) -> None:
    assert evaluate(small(tmp_path).run(), "val").drawn.panels == {}


class Changed(SplitLoader):
    """Gives other ids than it was asked for."""

    def __init__(self, wanted: int, given: int) -> None:
        super().__init__(images(SIZE, torch.float32), [], seed=0)
        self.wanted, self.given = wanted, given

    def fetch(self, epoch: int, ids: Ids) -> Batch:
        batch = super().fetch(epoch, ids)
        numbers: Tensor = batch.ids.clone()
        numbers[numbers == self.wanted] = self.given
        return Batch({**batch, "id": numbers})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (17, r"1 missing \[500\], 1 seen more than once \[17\]"),
        (SIZE, r"each of 1,003 samples once: 1 missing \[500\], 0 seen"),
    ],
)
def test_a_missing_or_doubled_sample_is_an_error(given: int, message: str, tmp_path: Path) -> None:
    run: Run = small(tmp_path).run(evaluations={"val": EvaluationSet(Changed(500, given), 64, 0, 1)})
    with pytest.raises(DataError, match=message):
        evaluate(run, "val")


@pytest.mark.parametrize(
    ("ids", "is_right"),
    [
        ([[0, 1], [2]], True),
        ([[2, 0, 1]], True),
        ([[0, 1]], False),
        ([[0, 1], [1, 2]], False),
        ([[0, 1, 1]], False),
        ([[0, 1, 2, 3]], False),
        ([], False),
    ],
)
def test_the_ledger_balances_only_if_each_id_comes_once(ids: list[list[int]], is_right: bool) -> None:
    tensors = [torch.tensor(part) for part in ids]
    if is_right:
        check_ledger(ALONE, tensors, 3)
    else:
        with pytest.raises(DataError, match="did not see each of 3 samples once"):
            check_ledger(ALONE, tensors, 3)
