"""Single samples: decoded when somebody needs pixels, and mixed with others that depend on their own key alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import cv2
import numpy as np
import numpy.typing as npt
import pytest
import torch

from paceline.data.batch import Sample
from paceline.data.io.image import Encoded
from paceline.data.rng import uniforms
from paceline.data.split_loader import SplitLoader

Draws = npt.NDArray[np.float64]
CPU = torch.device("cpu")


@dataclass
class Files:
    """Image files; `seen` tells how each was asked for."""

    folder: Path
    seen: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=lambda: ["all"])
    channels: int = 3

    def __len__(self) -> int:
        return 6

    def read(self, index: int) -> Sample:
        self.seen.append("read")
        return {"image": Encoded.read(self.folder / f"{index}.png").decode(), "label": index}

    def open(self, index: int) -> Sample:
        self.seen.append("open")
        return {"image": Encoded.read(self.folder / f"{index}.png"), "label": index}


@pytest.fixture
def files(tmp_path: Path) -> Files:
    for index in range(6):
        assert cv2.imwrite(str(tmp_path / f"{index}.png"), np.full((4, 5, 3), 10 * index, np.uint8))
    return Files(tmp_path)


@dataclass(frozen=True)
class Look:
    """Notes the kind of image it gets, and gives it on."""

    seen: list[str]
    reads_encoded: bool
    draws: ClassVar[int] = 0
    is_batch: ClassVar[bool] = False

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        self.seen.append(type(sample["image"]).__name__)
        return sample


@pytest.mark.parametrize(
    ("wishes", "expected"),
    [
        ([], ["read"]),
        ([False, True], ["read", "ndarray", "ndarray"]),
        ([True], ["open", "Encoded"]),
        ([True, True, False, True], ["open", "Encoded", "Encoded", "ndarray", "ndarray"]),
    ],
)
def test_images_are_decoded_before_the_first_who_needs_pixels(
    files: Files, wishes: list[bool], expected: list[str]
) -> None:
    source = SplitLoader(files, [Look(files.seen, wish) for wish in wishes], seed=0)
    batch = source.fetch(0, np.array([3]))
    assert files.seen == expected
    assert batch["image"].unique().tolist() == [30]


@dataclass(frozen=True)
class Shift:
    """Adds up to 9 to the image."""

    draws: ClassVar[int] = 1
    is_batch: ClassVar[bool] = False

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        return {**sample, "image": sample["image"] + np.uint8(10 * draws[0])}


@dataclass(frozen=True)
class Multiply:
    """The same for all that a step computes."""

    draws: ClassVar[int] = 2
    is_batch: ClassVar[bool] = True
    per_step: ClassVar[bool] = True

    def __call__(self, batch: dict[str, Any], draws: torch.Tensor) -> dict[str, Any]:
        assert draws.shape == (1, 2)
        return {**batch, "image": draws.expand(len(batch["image"]), 2)}


def test_draws_of_a_step_depend_on_the_step_alone(files: Files) -> None:
    source = SplitLoader(files, [Shift(), Multiply()], 7)
    drawn: Callable[[int, int, int], list[float]] = lambda epoch, step, index: source.transform_batch(  # noqa: E731
        source.fetch(epoch, np.array([index])), epoch, CPU, step
    )["image"][0].tolist()
    assert drawn(0, 3, 1) == drawn(0, 3, 5) == uniforms(7, 0, np.array([-4]), 1, 2)[0].tolist()
    assert drawn(0, 3, 1) != drawn(0, 4, 1)
