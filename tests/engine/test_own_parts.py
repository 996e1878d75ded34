"""A user's own loss that remembers something: of every micro-batch once, and after a kill where it was."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import PlainNet, Remembering, Small, one_thread  # noqa: F401
from support.forkserver import paceline
from torch import Tensor

from paceline.checkpoint.reader import open_checkpoint
from paceline.engine.evaluate import evaluate
from paceline.engine.nonfinite import FiniteCheck
from paceline.engine.replay import explain_nonfinite
from paceline.engine.run import Run
from paceline.engine.step import train_step

PLUGIN = '''
import os, signal
import torch
import torch.nn.functional as F
from paceline import register
from paceline.losses.loss_term import LossTerm


@register.loss("drifting")
class Drifting:
    """Cross entropy, sharpened by a temperature that remembers all batches so far."""

    def __init__(self) -> None:
        self.heat = torch.ones(())
        self.calls = 0

    def count(self, batch):
        return float(batch.size)

    def __call__(self, outputs, batch):
        if torch.is_grad_enabled():
            self.heat = 0.9 * self.heat + 0.1 * outputs.detach().abs().mean()
            self.calls += 1
            if os.environ.get("DIE_AT") == str(self.calls):
                os.kill(os.getpid(), signal.SIGKILL)
        return LossTerm(F.cross_entropy(outputs / self.heat, batch["label"], reduction="sum"), float(batch.size))

    def state_dict(self):
        return {"heat": self.heat, "calls": self.calls}

    def load_state_dict(self, state):
        self.heat, self.calls = state["heat"].clone(), state["calls"]
'''


RECIPE = """
name: drifting
task: classification
model: {name: convnet, widths: [4]}
data: {batch_size: 64, train: {dataset: fashion_small, split: train}}
losses: [{name: drifting}]
optimizer: {name: sgd, lr: 0.1}
train: {steps: 12, threads: 1}
checkpoint: {every_steps: 3}
logging: {images: false}
"""


def train(folder: Path, out: str, die_at: str) -> int:
    done = paceline(folder, "train", "recipe.yaml", "--use", "drifting", "--out", out, DIE_AT=die_at)
    print(done.stderr)
    return done.returncode


def test_what_a_loss_remembers_is_saved_and_resumed(tmp_path: Path) -> None:
    (tmp_path / "drifting.py").write_text(PLUGIN)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    assert train(tmp_path, "whole", die_at="") == 0
    assert train(tmp_path, "killed", die_at="8") == -9
    assert train(tmp_path, "killed", die_at="") == 0
    ends = [open_checkpoint(tmp_path / out / "checkpoints" / "step-00000012") for out in ("whole", "killed")]
    parts = [end.state["parts"]["loss drifting"] for end in ends]
    assert torch.equal(parts[0]["heat"], parts[1]["heat"])
    assert parts[0]["calls"] == parts[1]["calls"] == 12
    assert all(torch.equal(ends[0].model[name], ends[1].model[name]) for name in ends[0].model)


class Bursting(PlainNet):
    """Gives what is not finite in its pass of number `at`."""

    at, passes = -1, 0

    def forward(self, images: Tensor) -> Tensor:
        self.passes += self.training
        return super().forward(images) * (torch.inf if self.passes == self.at else 1)


def remembering(out: Path, **fields: Any) -> tuple[Run, Remembering]:
    """A run of one epoch whose loss has a first pass, with four micro-batches a step."""
    loss = Remembering(48)
    losses = {"remembering": (loss, 1.0)}
    small = Small(out, size=48, batch=16, micro_batch_size=4, steps=3, losses=losses, net=Bursting, evaluation_size=20)
    return small.run(parts={"loss remembering": loss}, **fields), loss


@pytest.mark.usefixtures("one_thread")
def test_every_micro_batch_is_remembered_once_whatever_other_passes_there_are(tmp_path: Path) -> None:
    run, loss = remembering(tmp_path)
    for step_batch in run.batches:
        train_step(run, step_batch)
        before = loss.seen.clone(), loss.heat.clone()
        evaluate(run, "val")
        explain_nonfinite(run, step_batch)
        assert torch.equal(loss.seen, before[0])
        assert torch.equal(loss.heat, before[1])
    assert loss.seen.tolist() == [1] * 48


@pytest.mark.usefixtures("one_thread")
def test_an_update_that_is_left_out_is_not_remembered(tmp_path: Path) -> None:
    run, loss = remembering(
        tmp_path, finite_check=FiniteCheck("skip"), explain_nonfinite=lambda run, step_batch: "burst"
    )
    assert isinstance(run.model, Bursting)
    run.model.at = 14  # four first passes and four that count a step: this one counts, in the second
    skipped = [train_step(run, step_batch).skipped for step_batch in run.batches]
    assert skipped == [False, True, False]
    assert loss.seen.sum() == 32
    assert loss.heat.isfinite()
