"""A user's own loss that remembers something goes on where it was, after the command is killed or the run resumed."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from paceline.checkpoint.store import open_checkpoint

PLUGIN = '''
import os, signal
import torch
import torch.nn.functional as F
from paceline import register
from paceline.losses.term import Term


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
        return Term(F.cross_entropy(outputs / self.heat, batch["label"], reduction="sum"), float(batch.size))

    def state_dict(self):
        return {"heat": self.heat, "calls": self.calls}

    def load_state_dict(self, state):
        self.heat, self.calls = state["heat"].clone(), state["calls"]
'''


RECIPE = """
name: drifting
task: classification
model: {name: convnet, widths: [4]}
data: {batch: 64, train: {dataset: fashion_small, split: train}}
losses: [{name: drifting}]
optimizer: {name: sgd, lr: 0.1}
train: {steps: 12, threads: 1}
checkpoint: {every_steps: 3}
observe: {pictures: false}
"""


def train(folder: Path, out: str, die_at: str) -> int:
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "train", "recipe.yaml", "--use", "drifting", "--out", out],
        cwd=folder,
        env={**os.environ, "DIE_AT": die_at, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
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
