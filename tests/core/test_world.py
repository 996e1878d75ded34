"""Processes and what they say to each other: a world of one here, and two real processes."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.errors import UsageError
from paceline.core.world import World, choose_device, join

SCRIPT = Path(__file__).resolve().parent.parent / "engine" / "scripts" / "collectives.py"
ALONE = World(0, 1, 0, torch.device("cpu"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes got."""
    folder = tmp_path_factory.mktemp("pair")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, SCRIPT, folder], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode()
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def test_two_processes_take_their_places(pair: list[dict[str, Any]]) -> None:
    assert [found["place"] for found in pair] == [[0, 2, 0, "cpu", True], [1, 2, 1, "cpu", False]]


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("numbers", [0.1 + 1.1, 2.0**60, 2e-30]),
        ("no_numbers", []),
        ("sum", [3.0, 10.0]),
        ("rows", [[], [[0, 1], [2, 3], [4, 5]]]),
        ("row_shapes", [[0, 2], [3, 2]]),
        ("last_empty", [[0, 1], []]),
        ("all_empty", [[0, 3], [0, 3]]),
        ("bytes", [[255, 0], [255, 1]]),
        ("broadcast", [0, 1, 2]),
        ("strided", [[[0, 2], [4, 6]], [[0, 2], [4, 6], [8, 10], [12, 14]]]),
        ("waited", True),
    ],
)
def test_both_of_two_processes_get_the_same(what: str, expected: object, pair: list[dict[str, Any]]) -> None:
    assert [found[what] for found in pair] == [expected, expected]


def test_alone_everything_is_ones_own() -> None:
    tensor = torch.arange(6.0).view(3, 2)
    assert ALONE.start_sum([1.5, 2.5])() == [1.5, 2.5]
    assert torch.equal(ALONE.sum(tensor.clone()), tensor)
    assert [part.tolist() for part in ALONE.gather(tensor)] == [tensor.tolist()]
    ALONE.barrier()
    ALONE.leave()
    assert ALONE.is_main


def test_without_a_launcher_a_process_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert join("cpu") == ALONE


def test_the_same_key_restarts_the_generators() -> None:
    ALONE.seed(2**62 + 1)

    def draws() -> list[list[float]]:
        return [torch.rand(4).tolist(), np.random.randn(4).tolist(), [random.random() for _ in range(4)]]

    first = draws()
    draws()
    ALONE.seed(2**62 + 1)
    assert draws() == first
    ALONE.seed(2**62 + 2)
    assert all(one != other for one, other in zip(draws(), first, strict=True))


def test_cpu_is_a_device_everywhere() -> None:
    assert choose_device("cpu", local_rank=3) == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA devices")
def test_auto_without_cuda_is_the_cpu_and_cuda_is_refused() -> None:
    assert choose_device("auto", local_rank=0) == torch.device("cpu")
    with pytest.raises(UsageError, match=r"^train\.device: cuda:2 does not exist: .*no CUDA device.*use auto or cpu"):
        choose_device("cuda", local_rank=2)


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has MPS")
def test_mps_is_refused_where_there_is_none() -> None:
    with pytest.raises(UsageError, match="mps does not exist"):
        choose_device("mps", local_rank=0)
