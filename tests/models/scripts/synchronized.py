"""One of several processes that share BatchNorm layers. Arguments: a folder with cases.pt, and the rank.

Runs the cases in a world of two, which the third process waits out, and then in one of three.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from paceline.models.norm import convert_sync_batchnorm


def results(layer: nn.Module, steps: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """What comes of some steps, in order: inputs and gradients of the outputs are given."""
    found: dict[str, Any] = {"outputs": [], "input_gradients": []}
    for values, gradient in steps:
        values = values.detach().requires_grad_()  # noqa: PLW2901
        output = layer(values)
        output.backward(gradient)
        found["outputs"].append(output.detach())
        found["input_gradients"].append(values.grad)
    found["gradients"] = {name: parameter.grad for name, parameter in layer.named_parameters()}
    found["buffers"] = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    return found


def own_part(case: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    layer = case["layer"]
    assert convert_sync_batchnorm(layer) == 1
    sizes = case["sizes"][world]
    return results(layer, [(x.split(sizes)[rank], g.split(sizes)[rank]) for x, g in case["steps"]])


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    for world in (2, 3):
        if rank < world:
            store = f"file://{folder}/store-{world}"
            dist.init_process_group("gloo", store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
            cases = torch.load(folder / "cases.pt", weights_only=False)  # written by the test itself
            found = {name: own_part(case, rank, world) for name, case in cases.items()}
            torch.save(found, folder / f"found-{world}-{rank}.pt")
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # threads of gloo may still let go of tensors while the interpreter is taken down
