"""Processes that are killed before the first step: what others say of lost connections is no mistake of a user's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from launching import environment
from support.forkserver import Running
from torch import distributed as dist

from paceline.core.errors import RecipeError
from paceline.core.world import World
from paceline.models.model_errors import call_model
from paceline.recipe.build_context import BuildContext
from paceline.recipe.load import load
from paceline.recipe.validate import validate

# Each start but the last loses a process while another is in a collective: of the data, and of the model.
_FRAGILE = """
import os, signal
from torch import nn
import paceline
from paceline.data.datasets.idx import fashion_small
from paceline.launch.environment import restart_count

def die(rank, start):
    if (int(os.environ["RANK"]), restart_count()) == (rank, start):
        os.kill(os.getpid(), signal.SIGKILL)

class Samples:
    def __init__(self, base):
        self.base, self.classes = base, base.classes

    def __len__(self):
        return 64

    def read(self, index):
        return self.base.read(index)

@paceline.register.dataset("fragile")
def data():
    die(1, 0)
    return Samples(fashion_small("train"))

@paceline.register.model("fragile")
def net(num_classes, in_channels):
    die(0, 1)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, num_classes))
"""
_RECIPE = {
    "name": "fragile",
    "task": "classification",
    "model": {"name": "fragile"},
    "data": {"batch_size": 16, "train": {"dataset": "fragile"}, "num_workers": 0},
    "losses": [{"name": "cross_entropy"}],
    "optimizer": {"name": "sgd", "lr": 0.01},
    "train": {"steps": 2},
    "logging": {"tensorboard": False, "images": False},
}


def test_a_rank_that_is_killed_in_set_up_comes_back_with_all_others(tmp_path: Path) -> None:
    (tmp_path / "fragile.py").write_text(_FRAGILE)
    (tmp_path / "recipe.json").write_text(json.dumps(_RECIPE))
    words = ["train", "recipe.json", "--use", "fragile", "--procs", "2", "--out", "run", "--restarts", "2"]
    done = Running(tmp_path, ["paceline", *words], environment()).end()
    assert done.returncode == 0, done.stderr
    again = [line for line in done.stderr.splitlines() if "; restarting" in line]
    assert [line[: line.index(";")] for line in again] == [f"process {rank} was killed by SIGKILL" for rank in (1, 0)]
    assert json.loads((tmp_path / "run" / "status.json").read_text())["step"] == 2


_CLOSED = "[/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer: size 3"


@pytest.mark.parametrize(
    ("error", "seen_as"),
    [
        (RuntimeError(_CLOSED), RuntimeError),
        (dist.DistBackendError("NCCL error: size"), dist.DistBackendError),
        (dist.DistStoreError("Timed out; size"), dist.DistStoreError),
        (RuntimeError("wrong size"), RecipeError),
        (ValueError("wrong size"), RecipeError),
    ],
)
def test_only_what_is_no_error_of_communication_is_the_recipes(error: Exception, seen_as: type[Exception]) -> None:
    class Failing(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            raise error

    context = BuildContext(validate(load("quickstart")), World(0, 1, 0, torch.device("cpu")))
    with pytest.raises(seen_as) as raised, context.error_context("train.strategy"):
        raise error
    assert type(raised.value) is seen_as
    with pytest.raises(seen_as) as raised:
        call_model(Failing(), torch.zeros(1, 3, 4, 4))
    assert type(raised.value) is seen_as
