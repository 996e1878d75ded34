"""One of several processes: trains with and without checkpointing under DDP and FSDP2, and writes what differs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from paceline.engine.activation_checkpointing.blocks import find_blocks
from paceline.engine.activation_checkpointing.checkpointing import Blocks, NoActivationCheckpointing
from paceline.models.convnet import ConvNet


def flat() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 4), (4, 4), (4, 6), (6, 6)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Dropout(0.3), nn.Flatten(), nn.Linear(6 * 64, 3))


def sharded(model: nn.Module) -> nn.Module:
    for block in find_blocks(model):
        fully_shard(block.modules())
    fully_shard(model)
    return model


STRATEGIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "static": lambda model: DistributedDataParallel(model, static_graph=True),
    "fsdp": sharded,
}
NETS: dict[str, Callable[[], nn.Module]] = {"convnet": lambda: ConvNet(3, widths=[4, 6], depth=2), "flat": flat}


def trained(make: Callable[[], nn.Module], how: Blocks | NoActivationCheckpointing, strategy: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = make().train()
    how.apply(model)
    model = STRATEGIES[strategy](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    images = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    for step in range(3):
        torch.manual_seed(100 + step)
        model(images).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: getattr(each, "full_tensor", each.clone)() for name, each in model.state_dict().items()}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    differing = {}
    for strategy in STRATEGIES:
        for name, make in NETS.items():
            plain = trained(make, NoActivationCheckpointing(), strategy)
            other = trained(make, Blocks(), strategy)
            differing[f"{strategy} {name}"] = [key for key in plain if not torch.equal(plain[key], other[key])]
    dist.barrier()
    Path(sys.argv[1], f"rank-{dist.get_rank()}.json").write_text(json.dumps(differing), encoding="utf-8")
    os._exit(0)


if __name__ == "__main__":
    main()
