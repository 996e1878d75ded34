"""Memory is taken again when, and only when, nothing holds it."""

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from paceline.core import recycling
from paceline.core.recycling import recycled

SHAPE = (4, 3, 300, 400)  # 5.76 MB of floats


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    recycling._kept.clear()
    yield
    recycling._kept.clear()


def place(array: npt.NDArray[Any]) -> int:
    return int(array.ctypes.data)


def test_memory_is_used_again() -> None:
    places = {place(recycled(SHAPE, np.float32)) for _ in range(10)}
    assert len(places) == 1
    assert place(recycled((4, 300, 400, 3), np.uint8).view()) not in places
    assert place(recycled((300, 400, 12), np.int32)) in places
    assert recycled(SHAPE, np.float32).dtype == np.float32


@pytest.mark.parametrize(
    "hold",
    [
        lambda array: array,
        lambda array: array[1, :, ::2],
        lambda array: array[0, 0].reshape(-1).view(np.uint8),
        torch.from_numpy,
        lambda array: torch.from_numpy(array)[2:].permute(0, 2, 3, 1),
        lambda array: torch.from_numpy(array).untyped_storage(),
        memoryview,
        lambda array: (torch.ones(SHAPE, requires_grad=True) * torch.from_numpy(array)).grad_fn,
    ],
)
def test_what_is_held_in_any_way_stays(hold: object) -> None:
    assert callable(hold)
    array = recycled(SHAPE, np.float32)
    taken = place(array)
    held = hold(array)
    del array
    assert place(recycled(SHAPE, np.float32)) != taken
    del held
    gc.collect()
    assert place(recycled(SHAPE, np.float32)) == taken  # of those that are free, the first one


def test_only_so_many_are_kept() -> None:
    held = [recycled(SHAPE, np.float32) for _ in range(20)]
    assert len({place(each) for each in held}) == 20
    assert len(recycling._kept) == 16
    held.clear()
    other = recycled((2, 1000, 1000), np.uint8)
    assert len(recycling._kept) == 16
    assert any(each is other.base for each in recycling._kept)


def test_small_arrays_are_plain_ones() -> None:
    assert recycled((3, 4), np.float32).base is None
    assert recycling._kept == []
