"""Several processes that a test works in at once, with collectives among them."""

from __future__ import annotations

import json
import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from paceline.core.errors import PacelineError
from paceline.core.world import World
from support.waiting import TIMEOUT

FORK = multiprocessing.get_context("fork")
WORLD = 3


def in_processes(folder: Path, work: Callable[[World], Any]) -> list[Any]:
    """What the work gives in each of three processes: a value that JSON can hold, or exit code and message."""
    folder.mkdir(exist_ok=True)
    processes = [FORK.Process(target=_work, args=(folder, rank, work)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT)
        process.kill()
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(WORLD)]


def _work(folder: Path, rank: int, work: Callable[[World], Any]) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=limit)
    world = World(rank, WORLD, rank, torch.device("cpu"))
    try:
        found = work(world)
    except PacelineError as error:
        found = [error.exit_code, str(error)]
    except BaseException:  # noqa: BLE001 - the test that waits for this process would not see it
        traceback.print_exc()
        os._exit(1)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    world.barrier()
    os._exit(0)
