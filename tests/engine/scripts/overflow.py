"""One of two processes under DDP; in some updates the gradient of one overflows. Arguments: a folder, precisions.

Writes what each process decided, and its weights.
"""

from __future__ import annotations

import json
import math
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.engine.loss_accumulator import WeightedLoss
from paceline.engine.precision.mixed import make_precision
from paceline.optim.clipping import NoClip

SPOILED = {1: 1, 3: 0}  # update: the rank whose gradient overflows


def train(name: str, rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainable = optimizer.param_groups[0]["params"]
    precision = make_precision(name, torch.device("cpu"), loss_scale="dynamic")
    weights = precision.attach(model)
    shared = DistributedDataParallel(model)
    done, finite = [], []
    for step in range(5):
        with precision.compute():
            loss = shared(torch.randn(3, 4)).float().square().sum()
        factor = math.inf if SPOILED.get(step) == rank else 1.0
        precision.backward([WeightedLoss(loss, factor)])
        precision.unscale(trainable)
        norm = NoClip()(trainable)
        finite.append(math.isfinite(norm.item()))
        skipped = precision.update_loss_scale(norm)
        if not skipped:
            optimizer.step()
            precision.sync_weights()
        optimizer.zero_grad()
        done.append(not skipped)
    numbers = torch.cat([weight.detach().double().flatten() for weight in weights.parameters()]).tolist()
    return {"done": done, "finite": finite, "state": precision.state_dict(), "weights": numbers}


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    found = {name: train(name, rank) for name in sys.argv[2:]}
    (folder / f"rank-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # threads of gloo may still let go of tensors while the interpreter is taken down
