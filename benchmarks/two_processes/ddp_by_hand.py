"""What a good engineer writes for torchrun and this one case: no logging, no checks, no checkpoints."""

import gzip
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.models.convnet import ConvNet

FOLDER = Path(paceline.__file__).parent / "data" / "embedded" / "fashion"


def read(name: str, header: int) -> Tensor:
    """All of a packed IDX file behind its header."""
    with gzip.open(FOLDER / name) as file:
        return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)[header:]


def train(case: dict[str, Any]) -> Iterator[None]:
    """One update each time it is resumed."""
    rank, share = dist.get_rank(), case["batch"] // dist.get_world_size()
    torch.manual_seed(0)
    splits = {}
    for split in ("train", "t10k"):
        images = read(f"{split}-images-idx3-ubyte.gz", 16).view(-1, 1, 28, 28)
        splits[split] = images, read(f"{split}-labels-idx1-ubyte.gz", 8).long()
    images, labels = splits["train"]
    model = ConvNet(num_classes=10, in_channels=1, widths=case["widths"])
    # Of DDP's settings those that are fastest here: buffers stay each process's own, gradients are not copied.
    network = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=case["lr"], weight_decay=case["weight_decay"], fused=True)
    per_epoch = len(images) // case["batch"]
    for step in range(case["steps"]):
        if step % per_epoch == 0:
            order = torch.randperm(len(images))
        start = step % per_epoch * case["batch"] + rank * share
        ids = order[start : start + share]
        batch = images.index_select(0, ids).float().mul_(1 / (255 * case["std"])).add_(-case["mean"] / case["std"])
        loss = F.cross_entropy(network(batch), labels.index_select(0, ids))
        loss.backward()  # type: ignore[no-untyped-call]
        for group in optimizer.param_groups:
            group["lr"] = case["lr"] * 0.5 * (1 + math.cos(math.pi * step / case["steps"]))
        optimizer.step()
        optimizer.zero_grad()
        yield


if __name__ == "__main__":
    import noting  # type: ignore[import-not-found]  # noqa: F401 - notes when steps end

    dist.init_process_group("gloo")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.use_deterministic_algorithms(True)
    for _ in train(json.loads(sys.argv[1])):
        pass
