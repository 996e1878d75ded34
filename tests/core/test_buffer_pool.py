"""Memory is taken again when, and only when, nothing holds it."""

import gc
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from paceline.core import buffer_pool as recycling
from paceline.core.buffer_pool import recycled

SHAPE = (4, 3, 300, 400)  # 5.76 MB of floats


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    recycling._free.clear()
    yield
    recycling._free.clear()


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
    assert place(recycled(SHAPE, np.float32)) == taken  # of those that are free, the last one


def test_only_so_many_are_kept() -> None:
    held = [recycled(SHAPE, np.float32) for _ in range(20)]
    assert len({place(each) for each in held}) == 20
    held.clear()
    assert len(recycling._free) == 16
    other = recycled((2, 1000, 1000), np.uint8)
    taken = place(other)
    del other
    assert len(recycling._free) == 16
    assert place(recycled((2, 1000, 1000), np.uint8)) == taken


def test_small_arrays_are_plain_ones() -> None:
    assert recycled((3, 4), np.float32).base is None
    assert not recycling._free


@pytest.mark.parametrize("offset", [-2, 1])
def test_nothing_hangs_on_the_number_of_references(offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions of Python count differently: memory must be neither used twice nor never again."""
    count = sys.getrefcount
    monkeypatch.setattr(sys, "getrefcount", lambda thing: count(thing) + offset)
    first = recycled(SHAPE, np.float32)
    first[:] = 1
    tensor = torch.from_numpy(first)
    del first
    second = recycled(SHAPE, np.float32)
    second[:] = 2
    assert bool((tensor == 1).all())
    taken = place(second)
    del second
    assert place(recycled(SHAPE, np.float32)) == taken


def test_threads_never_share_memory() -> None:
    """Each fills what it was given and finds it unchanged, while others take and give back."""

    def fill(number: int) -> bool:
        for turn in range(50):
            array = recycled((512, 1024), np.int32)
            array[:] = 100 * number + turn
            held = torch.from_numpy(array)[::2]
            del array
            if not bool((held == 100 * number + turn).all()):
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(fill, range(4)))


def test_garbage_in_a_circle_gives_memory_back() -> None:
    """The collector may run while memory is being taken."""
    for _ in range(5):
        circle: list[Any] = [recycled(SHAPE, np.float32)]
        circle.append(circle)
        del circle
    gc.collect()
    assert len(recycling._free) >= 1
    assert recycled(SHAPE, np.float32).shape == SHAPE
