"""Devices without float64 (mps): nothing of a batch transform computes in it, and draws stay below 1."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scenes import rectangles
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import paceline
from paceline.core.process import num_cores
from paceline.data.batch import Batch, collate
from paceline.data.datasets.idx import MemoryImages
from paceline.data.rng import as_float32
from paceline.data.split_loader import SplitLoader
from paceline.data.transforms.batch import CutMix, MixUp, MixUpOrCutMix, MultiScale, Normalize, RandomErasing
from paceline.data.transforms.geometric import RandomCrop, RandomHorizontalFlip


class NoFloat64(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails where an operator gives float64, as a device without it does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64]
        assert not found, func
        return result


def batch(*names: str) -> Batch:
    samples = [rectangles(12, 16, [(1, 2, 9, 8), (5, 4, 15, 11)]) for _ in range(3)]
    for sample in samples:
        sample["matrix"] = np.eye(2, 3, dtype=np.float32)
    return collate(range(3), [{name: sample[name] for name in names or sample} for sample in samples])


OTHERS = [
    RandomCrop(8, padding=2),
    RandomHorizontalFlip(pairs=[(0, 1)]),
    RandomErasing(),
    Normalize([0.5], [0.2]),
    MultiScale([8, 20]),
]
MIXED = [MixUp(num_classes=5), CutMix(num_classes=5), MixUpOrCutMix(num_classes=5)]


@pytest.mark.parametrize("transform", [*OTHERS, *MIXED], ids=lambda each: type(each).__name__)
def test_batch_transforms_compute_in_float32(transform: Any) -> None:
    fields = batch("image", "mask") if hasattr(transform, "on_sample") else batch()
    fields = batch("image", "label") if transform in MIXED else fields
    draws = torch.rand(1 if isinstance(transform, MultiScale) else 3, transform.draws)
    with NoFloat64():  # type: ignore[no-untyped-call]
        changed = transform(fields, draws)
    assert changed["image"].dtype != torch.float64


def test_float32_draws_stay_below_one() -> None:
    numbers = np.array([0.0, 0.5, np.nextafter(1.0, 0.0)])
    assert as_float32(numbers).dtype == np.float32
    assert as_float32(numbers).max() < 1
    assert as_float32(numbers)[:2].tolist() == [0.0, 0.5]


@pytest.mark.parametrize(("device", "dtype"), [("mps", torch.float32), ("cuda", torch.float64)])
def test_draws_for_mps_are_float32(device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    images = MemoryImages(torch.zeros(3, 1, 4, 4, dtype=torch.uint8), {}, [])
    loader, moved = SplitLoader(images, [RandomHorizontalFlip()], seed=0), []

    def move(tensor: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
        moved.append((tensor.dtype, device.type))
        return tensor

    monkeypatch.setattr(torch.Tensor, "to", move)  # neither device is there
    loader._draw(Batch(id=torch.arange(3)), 0, torch.device(device))
    assert moved == [(dtype, device)]


def test_cores_are_counted_where_there_is_no_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert num_cores() == os.cpu_count()


def test_only_one_place_asks_for_the_affinity() -> None:
    root = Path(paceline.__file__).parent
    found = [path for path in root.rglob("*.py") if re.search("sched_getaffinity", path.read_text(encoding="utf-8"))]
    assert found == [root / "core" / "process.py"]
