"""What goes wrong inside of a run: numbers that are not finite, processes that hang, steps that kill."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.forkserver import Done, Running, paceline, paceline_ranks
from support.waiting import wait_until

NETS = """
import os
import time
from pathlib import Path
import torch
from torch import nn
from paceline.core.registry import register

class Bright(nn.Module):
    '''Does something bad about the few images that are brighter than any other, or waits half-way in rank 1.'''

    def __init__(self, limit, what):
        super().__init__()
        self.limit, self.what, self.passes = limit, what, 0

    def forward(self, images):
        bright = images.flatten(1).sum(1) > self.limit
        if self.what == "die" and bright.any():
            os._exit(9)
        self.passes += 1
        while self.what == "wait" and self.passes == 60 and os.environ["RANK"] == "1" and not Path("go").exists():
            time.sleep(0.01)
        return images * torch.where(bright, torch.nan, 1.0)[:, None, None, None]

@register.model("delicate")
def delicate(num_classes, in_channels, limit: float = 1e9, what: str = "nan"):
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3, stride=4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
        nn.Linear(196, num_classes),
    ).insert(0, Bright(limit, what))
"""
RECIPE = {
    "name": "delicate",
    "task": "classification",
    "model": {"name": "delicate"},
    "data": {"batch_size": 50, "train": {"dataset": "fashion_small", "split": "train"}},
    "losses": [{"name": "cross_entropy"}],
    "optimizer": {"name": "sgd", "lr": 0.01},
    "train": {"steps": 24},
    "checkpoint": {"every_steps": 4},
    "logging": {"tensorboard": False, "images": False},
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("delicate")
    (folder / "nets.py").write_text(NETS)
    (folder / "recipe.json").write_text(json.dumps(RECIPE))
    return folder


@pytest.fixture(scope="module")
def brightness() -> torch.Tensor:
    """The sums of the images in the order in which a run sees them."""
    from paceline.data.datasets.idx import fashion_small
    from paceline.data.sampler import Permutation

    images = fashion_small("train").images.float().div(255)
    order = torch.from_numpy(Permutation(len(images), 0).at(0, 0, 24 * 50))
    return images[order].flatten(1).sum(1)


def run(project: Path, *words: str) -> Done:
    return paceline(project, *words, "--use", "nets")


def first_above(brightness: torch.Tensor, since: int) -> tuple[float, int]:
    """A limit that is passed first at or after a position, and that position."""
    limit = brightness[:since].max().item() + 1e-3
    return limit, int((brightness > limit).nonzero()[0])


def test_what_is_not_finite_is_traced_and_can_be_replayed(project: Path, brightness: torch.Tensor) -> None:
    limit, position = first_above(brightness, 300)
    done = run(project, "train", "recipe.json", f"model.limit={limit}", "--out", "stops", "--procs", "2")
    step = position // 50 + 1
    assert done.returncode == 1, done.stderr
    assert f"the gradient of step {step} is not finite" in done.stderr
    assert json.loads((project / "stops" / "status.json").read_text())["step"] == step
    assert "Traceback" not in done.stderr
    assert torch.isfinite(load_file(newest(project / "stops"))["2.running_mean"]).all()

    bundle = f"stops/replay/step-{step:08d}"
    rank = position % 50 // 25
    again = json.loads(run(project, "replay", bundle, "--rank", str(rank), "--json").stdout)
    assert again["step"] == step
    assert again["finding"].startswith("0 (Bright) gives what is not finite for sample")
    other = json.loads(run(project, "replay", bundle, "--rank", str(1 - rank), "--json").stdout)
    assert "Bright" not in other["finding"]


def test_updates_that_are_not_finite_can_be_left_out(project: Path, brightness: torch.Tensor) -> None:
    limit, position = first_above(brightness, 300)
    words = ("train", "recipe.json", f"model.limit={limit}", "train.on_nonfinite=skip", "--out", "skips")
    done = run(project, *words)
    assert done.returncode == 0, done.stderr
    assert f"the gradient of step {position // 50 + 1} is not finite" in done.stderr
    model = load_file(newest(project / "skips"))
    assert all(torch.isfinite(value).all() for value in model.values())
    skipped = len({int(place) // 50 for place in (brightness > limit).nonzero().flatten()})
    assert model["2.num_batches_tracked"].item() == 24 - skipped


def test_a_step_that_kills_three_times_ends_the_run_and_names_its_batch(
    project: Path, brightness: torch.Tensor
) -> None:
    limit, position = first_above(brightness, 300)
    words = ("train", "recipe.json", f"model.limit={limit}", "model.what=die", "--out", "dies", "--procs", "2")
    done = run(project, *words, "--restarts", "9")
    assert done.returncode == 1, done.stderr
    assert f"step {position // 50 + 1} failed 3 times; its samples are" in done.stderr
    assert done.stderr.count("; restarting") == 3


def test_a_rank_that_stands_still_is_named_and_the_run_goes_on(project: Path) -> None:
    words = ["train", "recipe.json", "train.steps=120", "train.threads=1", "checkpoint.every_steps=20", "--use", "nets"]
    whole = paceline_ranks(2, project, *words, "--out", "whole")
    assert [each.returncode for each in whole] == [0, 0], whole[0].stderr
    # It does not come to its end before it is stopped.
    hangs = ["train.hang_seconds=5", "model.what=wait", "--out", "hangs", "--procs", "2"]
    going = Running(project, ["paceline", *words, *hangs], os.environ)
    stopped = _stop_one_after_a_checkpoint(project / "hangs", going.pid)
    (project / "go").touch()
    done = going.end()
    assert done.returncode == 0, done.stderr
    assert "rank 1 is missing" in done.stderr
    assert re.search(r"last known collective: number [1-9]\d*", done.stderr)
    assert not Path(f"/proc/{stopped}").exists()
    assert newest(project / "hangs").read_bytes() == newest(project / "whole").read_bytes()


def newest(out: Path) -> Path:
    return max((out / "checkpoints").glob("step-*")) / "model.safetensors"


def _stop_one_after_a_checkpoint(out: Path, launcher: int) -> int:
    wait_until(lambda: any((out / "checkpoints").glob("step-*")), "a checkpoint comes")
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for child in map(int, children):
        if b"RANK=1" in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            os.kill(child, signal.SIGSTOP)
            return child
    raise AssertionError("rank 1 was not found")
