"""Masks and noisy predictions that come out the same everywhere: from whole numbers and uniform draws alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

GrayImage = npt.NDArray[np.uint8]
NUM_REAL = 200


def synthetic_cases(seed: int = 7) -> dict[str, tuple[npt.NDArray[Any], GrayImage]]:
    """Predictions and masks by name: uint8 from 0 to 255, or for a few predictions float64 from 0 to 1."""
    draw = np.random.default_rng(seed)
    cases: dict[str, tuple[npt.NDArray[Any], GrayImage]] = {}
    for height, width in ((24, 24), (25, 31), (48, 33), (40, 64), (64, 64), (64, 47)):
        mask = blobs(height, width, draw)
        cases[f"noisy {height} x {width}"] = noisy(mask, draw), mask
    mask = blobs(32, 40, draw)
    one, gray = np.zeros((32, 40), np.uint8), (draw.random((32, 40)) * 256).astype(np.uint8)
    one[11, 30] = 255
    corner = np.zeros((32, 40), np.uint8)
    corner[-1, -1] = 255
    all_but_one = 255 - one
    empty, full = np.zeros_like(mask), np.full_like(mask, 255)
    masks = {"empty": empty, "full": full, "one pixel": one, "corner": corner, "all but one": all_but_one, "gray": gray}
    cases |= {f"noisy, {name} mask": (noisy(each, draw), each) for name, each in masks.items()}
    for level in (0, 77, 128, 255):
        flat = np.full_like(mask, level)
        cases |= {f"constant {level}, {name} mask": (flat, masks[name]) for name in ("empty", "full")}
        cases[f"constant {level}, mask of blobs"] = flat, mask
    cases |= {
        "perfect": (mask, mask),
        "inverted": (255 - mask, mask),
        "all noise": (gray, mask),
        "narrow range": ((gray // 8 + 100).astype(np.uint8), mask),
        "one row": (gray[:1], mask[15:16]),
        "one column": (gray[:, :1], mask[:, 20:21]),
        "real numbers": (draw.random((32, 40)), mask),
        "real numbers that fit": (0.1 + 0.6 * (noisy(mask, draw) / 255 + draw.random((32, 40))) / 2, mask),
    }
    return cases


def real_cases(masks: Sequence[Path], alter: bool) -> Iterator[tuple[GrayImage, GrayImage]]:
    """Noisy predictions of masks in files; with `alter`, of every ten masks one is emptied and one filled."""
    for number, path in enumerate(masks):
        mask = cv2.imread(str(path), cv2.IMREAD_GRAYSCALE)
        if mask is None:
            raise ValueError(f"{path} is no image that can be read")
        if alter and number % 10 == 3:
            mask = np.zeros_like(mask)
        if alter and number % 10 == 7:
            mask = np.full_like(mask, 255)
        yield noisy(mask, np.random.default_rng(number)), mask


def real_masks(folder: Path) -> list[Path]:
    """The files of the first masks of a folder, by name."""
    return sorted(folder.glob("*.png"))[:NUM_REAL]


def blobs(height: int, width: int, draw: np.random.Generator) -> GrayImage:
    """A mask of a few discs, never all of one kind."""
    rows, columns = np.mgrid[:height, :width]
    mask = np.zeros((height, width), np.bool_)
    for row, column, radius in draw.random((3, 3)):
        away = (rows - int(row * height)) ** 2 + (columns - int(column * width)) ** 2
        mask |= away <= int(2 + radius * min(height, width) / 4) ** 2
    return np.where(mask, 255, 0).astype(np.uint8)


def noisy(mask: GrayImage, draw: np.random.Generator) -> GrayImage:
    """The mask smoothed, with coarse and fine noise added: like what a model that is not quite right predicts."""
    height, width = mask.shape
    coarse = (draw.random((-(-height // 8), -(-width // 8))) * 256).astype(np.int64)
    coarse = np.repeat(np.repeat(coarse, 8, axis=0), 8, axis=1)[:height, :width]
    fine = (draw.random((height, width)) * 256).astype(np.int64)
    mixed = (6 * _smoothed(mask.astype(np.int64), 4) + 3 * coarse + fine) // 10
    # Most of what models predict is wholly one or the other.
    return np.asarray(np.clip((mixed - 64) * 2, 0, 255), np.uint8)


def fingerprint(prediction: npt.NDArray[Any], mask: GrayImage) -> str:
    """What tells whether the arrays are those that golden numbers were made from."""
    return hashlib.sha256(prediction.tobytes() + mask.tobytes()).hexdigest()[:16]


def _smoothed(values: npt.NDArray[np.int64], reach: int) -> npt.NDArray[np.int64]:
    for _ in range(2):
        padded = np.pad(values, ((reach + 1, reach), (0, 0)), mode="edge").cumsum(axis=0)
        values = ((padded[2 * reach + 1 :] - padded[: -2 * reach - 1]) // (2 * reach + 1)).T
    return values
