"""One case of the memory benchmark, in processes of its own: three steps, then metrics as JSON."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.world import World, join
from paceline.engine.activation_checkpointing.checkpointing import Blocks, NoActivationCheckpointing
from paceline.engine.precision.mixed import make_precision
from paceline.engine.strategies.ddp import ddp
from paceline.launch.environment import take_place
from paceline.launch.launcher import launch
from paceline.launch.machines import Launch
from paceline.models.minet import MINet, minet_light, minet_resnet50
from paceline.plan.memory import MemoryTracker

_BATCH, _SIZE = 4, 320
_MODELS: dict[str, Callable[[], MINet]] = {"light": minet_light, "resnet50": minet_resnet50}
_WAYS: dict[str, Blocks | NoActivationCheckpointing] = {"none": NoActivationCheckpointing(), "blocks": Blocks()}


class Trainee:
    """The model, its optimizer and what this process gets of one batch."""

    def __init__(self, world: World, model: str, checkpointing: str, is_bf16: bool) -> None:
        torch.manual_seed(0)
        self.model = _MODELS[model]()
        _WAYS[checkpointing].apply(self.model)
        self.network = ddp(self.model, world, is_exact=False).network
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        own_images = _BATCH // world.size
        self.images = torch.rand(own_images, 3, _SIZE, _SIZE)
        self.masks = (torch.rand(own_images, 1, _SIZE, _SIZE) > 0.5).float()
        self.is_bf16 = is_bf16

    def step(self) -> None:
        """Forward, loss, backward, update."""
        self.backward()
        self.update()

    def backward(self) -> None:
        """Have gradients, those of all processes together."""
        loss_of(self.network, self.images, self.masks, self.is_bf16).backward()  # type: ignore[no-untyped-call]

    def update(self) -> None:
        """Use the gradients, and let them go."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def loss_of(model: nn.Module, images: Tensor, masks: Tensor, is_bf16: bool) -> Tensor:
    """BCE with logits and the consistency-enhanced loss, the two of them added."""
    with make_precision("bf16" if is_bf16 else "fp32", torch.device("cpu")).compute():
        outputs = model(images)
    logits: Tensor = outputs.float()
    found = logits.sigmoid()
    both = (found * masks).sum()
    total = found.sum() + masks.sum()
    return F.binary_cross_entropy_with_logits(logits, masks) + (total - 2 * both) / (total + 1e-6)


def main() -> int:
    """Measure what the options say; with several processes, give the metrics of the one that holds most."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=list(_MODELS), default="light")
    parser.add_argument("--processes", type=int, choices=(1, 2), default=1, help="that share the batch")
    parser.add_argument("--checkpointing", choices=list(_WAYS), default="none")
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    if options.processes > 1 and take_place() is None:
        command = [sys.executable, "-m", "benchmarks.memory_case", *sys.argv[1:]]
        return launch(command, Launch(options.processes, restarts=0))
    world = join("cpu")
    with world.together():
        metrics = measured(Trainee(world, options.model, options.checkpointing, options.bf16))
        most = torch.stack(world.gather(torch.tensor([list(metrics.values())]))).amax(0)[0].tolist()
    if world.is_main:
        print(json.dumps(dict(zip(metrics, most, strict=True))), flush=True)
    return 0


def measured(trainee: Trainee) -> dict[str, int]:
    """Bytes that the process grew by in two steps, of training state, and of tensors at their peak within a third."""
    before = _resident("VmRSS")
    trainee.step()  # makes the optimizer's state; replicas arrange what they exchange after it
    trainee.backward()
    tracker = MemoryTracker()
    # Replicas keep the memory of their gradients when the gradients are let go.
    tracker.add((each.grad for each in trainee.model.parameters()), "gradients")
    with tracker.watch(trainee.model, trainee.optimizer):
        state = tracker.live
        trainee.update()
        grown = _resident("VmHWM") - before
        with tracker:
            trainee.step()
    return {
        "activations": tracker.peak_passing, "total": tracker.peak.total, "state": state, "resident": grown,
    }  # fmt: skip


def _resident(which: str) -> int:
    """The memory that this process has (VmRSS), or the most that it ever had (VmHWM), in bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"{which}:\s*(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


if __name__ == "__main__":
    sys.exit(main())
