"""One of several processes: uses every collective of the mesh and writes what it got. Argument: a folder."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from paceline.core.world import World, join


def results(world: World) -> dict[str, Any]:
    rank = world.rank
    summed = world.sum(torch.tensor([rank + 1.0, 10.0 * rank], dtype=torch.float64))
    rows = torch.arange(rank * 6, dtype=torch.float32).view(rank * 3, 2)  # none on rank 0, three on rank 1
    return {
        "place": [world.rank, world.size, world.local_rank, world.device.type, world.is_main],
        "numbers": world.start_sum([0.1 + rank, 2.0**60 * rank, 1e-30])(),
        "no_numbers": world.start_sum([])(),
        "sum": summed.tolist(),
        "rows": [part.tolist() for part in world.gather(rows)],
        "row_shapes": [list(part.shape) for part in world.gather(rows)],
        "last_empty": [part.tolist() for part in world.gather(torch.arange(2 - 2 * rank))],
        "all_empty": [list(part.shape) for part in world.gather(torch.empty(0, 3))],
        "bytes": [part.tolist() for part in world.gather(torch.tensor([255, rank], dtype=torch.uint8))],
        "broadcast": world.broadcast(torch.arange(3 - 2 * rank)).tolist(),
        "strided": [part.tolist() for part in world.gather(torch.arange(8 + 8 * rank).view(-1, 4)[:, ::2])],
    }


def main() -> None:
    folder = Path(sys.argv[1])
    world = join("cpu")
    try:
        found = results(world)
        (folder / f"before-{world.rank}").touch()
        world.barrier()
        found["waited"] = all((folder / f"before-{rank}").exists() for rank in range(world.size))
        (folder / f"rank-{world.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    finally:
        world.leave()


if __name__ == "__main__":
    main()
    # Threads of gloo may still let go of tensors while the interpreter is taken down, which aborts the process.
    os._exit(0)
