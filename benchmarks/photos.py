"""JPEG files of 500×375 pixels to load: real photos where they are at hand, else images that compress like photos."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import cv2
import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from paceline.core.torchvision_ops import import_torchvision

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
SIZE = 224
_WIDTH, _HEIGHT, _QUALITY, _COUNT = 500, 375, 90, 960
_CLASSES = ("ants", "bees")
Pixels = npt.NDArray[np.uint8]


class Photos:
    """A folder of photos, a folder a class, that is removed when this is no longer needed."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="paceline-photos-")
        self.root = Path(self._folder.name)
        found = _real_photos()
        self.origin = "hymenoptera photos, scaled up" if found else "made images"
        for number, pixels in zip(range(_COUNT), _scaled_up(found) if found else _made(), strict=False):
            path = self.root / _CLASSES[number % 2] / f"{number:04}.jpg"
            path.parent.mkdir(exist_ok=True)
            cv2.imwrite(str(path), pixels, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])

    @property
    def described(self) -> str:
        """What they are, for the page of results."""
        files = list(self.root.rglob("*.jpg"))
        kilobytes = sum(path.stat().st_size for path in files) / len(files) / 1000
        return f"{len(files)} JPEG files of {_WIDTH}×{_HEIGHT} pixels ({self.origin}; {kilobytes:.0f} kB on average)"


def _real_photos() -> list[Path]:
    named = os.environ.get("PACELINE_DATA")
    for folder in (Path(named) if named else None, Path(__file__).parents[2] / "shared" / "data"):
        if folder is not None and (folder / "hymenoptera_256").is_dir():
            return sorted((folder / "hymenoptera_256").rglob("*.jpg"))
    return []


def _scaled_up(paths: list[Path]) -> Iterator[Pixels]:
    for number in range(_COUNT):
        photo = cv2.imread(str(paths[number % len(paths)]))
        assert photo is not None
        yield np.asarray(cv2.resize(photo, (_WIDTH, _HEIGHT), interpolation=cv2.INTER_CUBIC), np.uint8)


def _made() -> Iterator[Pixels]:
    """Noise of all scales, the fainter the finer, as in photos."""
    generator = np.random.default_rng(0)
    for _ in range(_COUNT):
        photo = np.full((_HEIGHT, _WIDTH, 3), 128, np.float32)
        for cells in (2, 4, 8, 16, 32, 64, 128, 256):
            noise = generator.normal(0, 60 / cells**0.7, (cells, cells, 3)).astype(np.float32)
            photo += cv2.resize(noise, (_WIDTH, _HEIGHT), interpolation=cv2.INTER_CUBIC)
        yield photo.clip(0, 255).astype(np.uint8)


class PillowPhotos(Dataset[tuple[Tensor, int]]):
    """The photos as torchvision's documentation has them loaded: by Pillow, changed by its transforms."""

    def __init__(self, root: Path, number: int | None = None) -> None:
        self.paths = sorted(root.rglob("*.jpg"))[:number]
        self.transform = _torchvision_transform()

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        path = self.paths[index]
        with Image.open(path) as opened:
            return self.transform(opened.convert("RGB")), _CLASSES.index(path.parent.name)


def pillow_loader(root: Path, batch: int, workers: int, number: int | None = None) -> DataLoader[tuple[Tensor, int]]:
    """Torch's loader over all or a number of them, its workers kept alive."""
    return DataLoader(PillowPhotos(root, number), batch, shuffle=True, num_workers=workers, persistent_workers=True)


def _torchvision_transform() -> Callable[..., Tensor]:
    import_torchvision()
    import torch
    from torchvision.transforms import v2

    composed: Callable[..., Tensor] = v2.Compose(
        [
            v2.RandomResizedCrop(SIZE),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )
    return composed
