"""What a GPU decides on the device and what the host decides on a CPU is the same, step for step and bit for bit."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from small_runs import PlainNet, Small
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from paceline.checkpoint.reader import open_checkpoint
from paceline.cli import main
from paceline.core.errors import Stopped, TrainingError
from paceline.core.process import StopRequest
from paceline.core.registry import register
from paceline.data.datasets.idx import fashion_small
from paceline.data.sampler import Permutation
from paceline.engine import nonfinite
from paceline.engine.loop import train
from paceline.engine.nonfinite import FiniteCheck, OnNonFinite
from paceline.engine.run import Run
from paceline.engine.state import check_state
from paceline.loggers.events import Logger, LoggerGroup, Snapshot
from paceline.loggers.jsonl import metrics_of, read_records
from paceline.optim import clipping
from paceline.optim.clipping import NoClip, NoClipOnHost, Norm

KINDS: dict[str, tuple[float, bool | None]] = {
    ".": (1.5, None),
    "n": (math.nan, None),
    "i": (math.inf, None),
    "-": (0.0, False),
    "x": (math.inf, False),
    "o": (math.nan, True),
}
"""A norm, and whether the loss scale is to blame; None without a loss scale."""


def decisions(check: FiniteCheck, sequence: str) -> list[bool]:
    """Whether each step changes weights."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0, fused=True)
    check.attach(optimizer, torch.device("cpu"))
    found = []
    for kind in sequence:
        norm, overflowed = KINDS[kind]
        is_called = check.decide(torch.tensor(norm), None if overflowed is None else torch.tensor(overflowed))
        found.append(is_called and not check.found_inf)
        assert is_called or check.found_inf, "whoever restores buffers looks at it"
    return found


def expected(sequence: str, limit: int) -> list[bool]:
    """By the rule: a finite norm steps, unless more than `limit` steps before it in a row were to blame themselves."""
    found, in_a_row, has_ended = [], 0, False
    for kind in sequence:
        norm, overflowed = KINDS[kind]
        is_finite = math.isfinite(norm)
        in_a_row = 0 if is_finite else in_a_row + (not overflowed)
        has_ended = has_ended or in_a_row > limit
        found.append(is_finite and not has_ended)
    return found


@pytest.fixture(params=["host", "device"])
def decider(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who decides what steps are skipped."""
    monkeypatch.setattr(nonfinite, "decides_on_host", lambda optimizer, device: request.param == "host")


@pytest.mark.usefixtures("decider")
@pytest.mark.parametrize("kinds", [".ni", "-xo"])
@pytest.mark.parametrize(("policy", "limit"), [("stop", 10), ("skip", 0), ("skip", 1), ("skip", 2)])
def test_device_and_host_decide_alike(kinds: str, policy: OnNonFinite, limit: int) -> None:
    for sequence in product(kinds, repeat=5):
        text = "".join(sequence)
        right = expected(text, limit if policy == "skip" else 0)
        assert decisions(FiniteCheck(policy, limit), text) == right, text


@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_the_norm_of_the_host_is_that_of_the_device(bad: float | None) -> None:
    parameters = [nn.Parameter(torch.zeros(size)) for size in (3, 1000, 1, 7)]
    assert NoClipOnHost()(parameters) == NoClip()(parameters) == 0
    for number, each in enumerate(parameters[:-1]):
        each.grad = torch.randn(each.shape, generator=torch.Generator().manual_seed(number))
    if bad is not None:
        parameters[1].grad[5] = bad  # type: ignore[index]
    assert NoClipOnHost()(parameters) == pytest.approx(NoClip()(parameters).item(), rel=1e-6, nan_ok=True)


def test_a_norm_beyond_float16_is_finite_where_the_gradients_are() -> None:
    parameters = [nn.Parameter(torch.zeros(1, dtype=torch.float16)) for _ in range(2)]
    for each in parameters:
        each.grad = torch.full_like(each, 60000)
    assert NoClipOnHost()(parameters) == pytest.approx(NoClip()(parameters).item()) == pytest.approx(60000 * 2**0.5)


class NanNet(PlainNet):
    """Gives NaN for everything."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) * math.nan


class StopAt(Logger):
    """Asks a run to stop after a step."""

    def __init__(self, step: int) -> None:
        self.step, self.stop = step, StopRequest()

    def tick(self, snapshot: Snapshot) -> None:
        self.stop.requested = snapshot.step == self.step


@pytest.mark.parametrize("stopped_at", [None, 6, 9])
def test_a_run_of_nan_fails_at_step_11_interrupted_or_not(stopped_at: int | None, tmp_path: Path) -> None:
    small = Small(tmp_path, size=8, batch=4, micro_batch_size=4, steps=30, net=NanNet, every=(100, 100, 100))

    def make() -> Run:
        return small.run(finite_check=FiniteCheck("skip"), explain_nonfinite=lambda run, step_batch: "NaN")

    run = make()
    if stopped_at is not None:
        stopper = StopAt(stopped_at)
        run.logger, run.stop = LoggerGroup([stopper]), stopper.stop
        with pytest.raises(Stopped):
            train(run)
        assert run.progress.step == stopped_at + 1
        run = make()
        newest = run.store.newest(check_state)
        assert newest is not None
        run.restore(newest)
    with pytest.raises(TrainingError, match=r"step 11 .* 11 steps in a row"):
        train(run)
    assert run.progress.step == 11


@pytest.mark.usefixtures("decider")
@pytest.mark.parametrize(("policy", "state"), [("stop", {"in_a_row": 7}), ("skip", {"in_a_row": 99}), ("skip", {})])
def test_a_saved_count_alone_ends_no_run(policy: OnNonFinite, state: dict[str, int]) -> None:
    check, optimizer = FiniteCheck(policy), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0, fused=True)
    check.attach(optimizer, torch.device("cpu"))
    check.load_state_dict(state)
    assert check.decide(torch.tensor(1.0), None)
    assert not check.found_inf


class Spoiled(nn.Module):
    """A small net that gives NaN for images that are too bright."""

    def __init__(self, num_classes: int, in_channels: int, limit: float = math.inf) -> None:
        super().__init__()
        self.limit = limit
        self.layers = nn.Sequential(
            nn.Conv2d(in_channels, 4, 3, stride=4), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(196, num_classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        bright = images.flatten(1).sum(1) > self.limit
        logits: Tensor = self.layers(images)
        return logits * torch.where(bright, math.nan, 1.0)[:, None]


def limit_of(num_bad: int) -> float:
    """So bright are images in this many of six steps."""
    images = fashion_small("train").images
    order = torch.from_numpy(Permutation(len(images), 0).at(0, 0, 6 * 20))
    brightest = images[order].float().div(255).flatten(1).sum(1).view(6, 20).amax(1).sort(descending=True).values
    return float(brightest[num_bad - 1] + brightest[num_bad]) / 2


RECIPE = {
    "name": "spoiled",
    "task": "classification",
    "model": {"name": "spoiled"},
    "data": {"batch_size": 20, "train": {"dataset": "fashion_small", "split": "train"}},
    "losses": [{"name": "cross_entropy"}],
    "optimizer": {"name": "adamw", "lr": 0.01},
    "train": {"steps": 6, "threads": 1},
    "checkpoint": {"every_steps": 2},
    "logging": {"every_steps": 3, "tensorboard": False, "images": False},
}
CASES = {
    "skipped": ["train.on_nonfinite=skip"],
    "skipped, else clipped": ["train.on_nonfinite=skip", "train.clip_grad_norm=0.5"],
    "overflow of fp16": ["train.precision=fp16", "losses.0.weight=40"],
    "stop": [],
}


class Trained(NamedTuple):
    """What a command leaves."""

    code: int
    model: dict[str, Tensor]
    state: Any
    records: list[Any]


def train_command(folder: Path, words: list[str]) -> Trained:
    folder.mkdir()
    (folder / "recipe.json").write_text(json.dumps(RECIPE))
    code = main(["train", str(folder / "recipe.json"), *words, "--out", str(folder / "out")])
    last = open_checkpoint(folder / "out")
    records = read_records(folder / "out" / "metrics.jsonl")
    return Trained(code, last.model, last.state, records)


@pytest.mark.usefixtures("own_names")
@pytest.mark.parametrize("case", CASES)
def test_what_a_gpu_does_leaves_the_same_bits(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole command, on the host as on any CPU, and with the decisions and skipped steps of a GPU."""
    register.model("spoiled")(Spoiled)
    num_bad = 2 if "skipped" in case else int(case == "stop")
    words = [*CASES[case], *([f"model.limit={limit_of(num_bad)}"] if num_bad else [])]
    host = train_command(tmp_path / "host", words)
    messages = capsys.readouterr().err
    decided, decide = [], FiniteCheck.decide

    def watched(check: FiniteCheck, norm: Norm, overflowed: Tensor | None) -> bool:
        is_called = decide(check, norm, overflowed)
        decided.append(is_called and not check.found_inf)
        return is_called

    monkeypatch.setattr(FiniteCheck, "decide", watched)
    monkeypatch.setattr(nonfinite, "decides_on_host", lambda optimizer, device: False)
    monkeypatch.setattr(clipping, "NoClipOnHost", NoClip)
    device = train_command(tmp_path / "device", words)
    assert not all(decided)
    assert host.code == device.code == (1 if case == "stop" else 0)
    warnings = [
        [line for line in text.replace("device", "host").splitlines() if "not finite" in line]
        for text in (messages, capsys.readouterr().err)
    ]
    assert warnings[0] == warnings[1]
    assert bool(warnings[0]) == ("fp16" not in case)

    assert all(value.isfinite().all() for value in host.model.values())
    for name, value in host.model.items():
        assert torch.equal(device.model[name], value), name
    for key in ("optimizer", "precision", "progress"):
        assert_same(device.state[key], host.state[key])
    for one, other in zip(device.records, host.records, strict=True):
        assert metrics_of(one) == pytest.approx(metrics_of(other), rel=1e-6)  # norms are float64 on the host
        assert one["cross_entropy"] == other["cross_entropy"]
    if "skipped" in case:
        assert host.model["layers.1.num_batches_tracked"] == sum(decided) == 4


def assert_same(one: Any, other: Any) -> None:
    leaves, structure = tree_flatten(one)
    others, of_other = tree_flatten(other)
    assert structure == of_other
    for each, same in zip(leaves, others, strict=True):
        assert torch.equal(each, same) if isinstance(each, Tensor) else each == same
