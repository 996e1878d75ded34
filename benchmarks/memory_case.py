"""One case of the memory benchmark, in a process of its own: a few steps, then figures as JSON."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.engine.live_bytes import LiveBytes, own_training_state
from paceline.engine.remat import Blocks, NoRemat, Remat, Selective, apply_remat
from paceline.models.minet import minet_light

_BATCH, _SIZE = 4, 320
_WAYS: dict[str, Remat] = {"none": NoRemat(), "blocks": Blocks(), "selective": Selective()}


class Trainee:
    """The model, its optimizer and one batch."""

    def __init__(self, checkpointing: str, is_bf16: bool) -> None:
        torch.manual_seed(0)
        self.model = minet_light()
        apply_remat(self.model, _WAYS[checkpointing])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.images = torch.rand(_BATCH, 3, _SIZE, _SIZE)
        self.masks = (torch.rand(_BATCH, 1, _SIZE, _SIZE) > 0.5).float()
        self.is_bf16 = is_bf16

    def step(self) -> None:
        """Forward, loss, backward, update."""
        loss_of(self.model, self.images, self.masks, self.is_bf16).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()


def loss_of(model: nn.Module, images: Tensor, masks: Tensor, is_bf16: bool) -> Tensor:
    """BCE with logits and the consistency-enhanced loss, the two of them added."""
    with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
        outputs = model(images)
    logits: Tensor = outputs.float()
    found = logits.sigmoid()
    both = (found * masks).sum()
    total = found.sum() + masks.sum()
    return F.binary_cross_entropy_with_logits(logits, masks) + (total - 2 * both) / (total + 1e-6)


def most_resident() -> int:
    """The most memory that this process ever had, in bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(r"VmHWM:\s*(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


def main() -> None:
    """Measure what the options say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpointing", choices=list(_WAYS), default="none")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--count", action="store_true", help="count tensors, not the process")
    options = parser.parse_args()
    trainee = Trainee(options.checkpointing, options.bf16)
    before = most_resident()
    trainee.step()  # makes the optimizer's state
    print(json.dumps(counted(trainee) if options.count else grown(trainee, before)))


def counted(trainee: Trainee) -> dict[str, float]:
    """Bytes at their peak within a step."""
    live = LiveBytes()
    own_training_state(live, trainee.model, trainee.optimizer)
    with live:
        trainee.step()
    return {"activations": live.peak_other, "total": live.peak_total}


def grown(trainee: Trainee, before: int) -> dict[str, float]:
    """How much the process has grown by the end of a second step."""
    trainee.step()
    return {"resident": most_resident() - before}


if __name__ == "__main__":
    main()
