"""Depth from one image: a task, a loss, a metric and a data set of your own, in one file.

python depth.py scenes                                     # draws a small data set
paceline train depth.yaml --use depth.py --procs 2
paceline eval runs/depth
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline import Task, register
from paceline.data.batch import Batch
from paceline.visualize.grid import Panel
from paceline.visualize.image import draw_map, fit, to_image

register.loss("l1")(nn.L1Loss)  # a loss of torch is one line


@register.dataset("depth_folder")
class DepthFolder(Dataset[tuple[Image.Image, Tensor]]):
    """Images root/split/*.png, each with its depth in meters beside it, float32 [H, W] in a .npy file; 0 is unknown."""

    def __init__(self, root: Path, split: str) -> None:
        self.files = sorted((Path(root) / split).glob("*.png"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Image.Image, Tensor]:
        file = self.files[index]
        return Image.open(file), torch.from_numpy(np.load(file.with_suffix(".npy")))

    def path(self, index: int) -> Path:
        """The file that messages name; optional."""
        return self.files[index]


@register.loss("silog")
def silog(output: Tensor, target: Tensor, variance_focus: float = 0.85) -> Tensor:
    """The scale-invariant error of log depth: of each image, then averaged over images."""
    known = (target > 0).float()
    error = (output.clamp(min=1e-3).log() - target.clamp(min=1e-3).log()) * known
    pixels = known.flatten(1).sum(1).clamp(min=1)
    squares, means = error.square().flatten(1).sum(1) / pixels, error.flatten(1).sum(1) / pixels
    return (squares - variance_focus * means.square()).mean()


@register.metric("depth_errors")
class DepthErrors:
    """The mean relative error and the share of pixels within 25 % of the truth, of pixels whose depth is known."""

    higher_is_better = {"abs_rel": False, "delta1": True}
    sums = ("relative", "close", "pixels")  # only these are kept; without the line, all predictions are

    def __init__(self) -> None:
        self.relative, self.close, self.pixels = 0.0, 0, 0

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch."""
        found, truth = preds[target > 0].double(), target[target > 0].double()
        self.relative += ((found - truth).abs() / truth).sum().item()
        self.close += int((torch.maximum(found / truth, truth / found) < 1.25).sum())
        self.pixels += truth.numel()

    def compute(self) -> dict[str, float]:
        """The values over everything that was added."""
        return {"abs_rel": self.relative / self.pixels, "delta1": self.close / self.pixels}


@register.task("depth")
class Depth(Task):
    """Tells how far away each pixel is, up to `max_depth` meters."""

    main_metric = "abs_rel"

    def __init__(self, max_depth: float = 10.0, **parts: Any) -> None:
        super().__init__(**parts)
        self.max_depth = max_depth

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Depth in meters, [N, 1, H, W], which losses, metrics and `draw` are given."""
        return super().forward(model, batch).sigmoid() * self.max_depth

    def draw(self, batch: Batch, predictions: Tensor | None, index: int) -> Sequence[Panel]:
        """Draw the image, its depth and, if there is one, the prediction."""
        panels = [Panel(to_image(batch["image"][index]), "image")]
        truth = batch.target[index] if batch.has_target else None
        if truth is not None:
            panels.append(Panel(draw_map(truth, 0, self.max_depth), "truth"))
        if predictions is not None:
            error = "" if truth is None else f", ±{(predictions[index, 0] - truth)[truth > 0].abs().mean():.2f} m"
            panels.append(Panel(draw_map(predictions[index], 0, self.max_depth), f"prediction{error}"))
        return [Panel(fit(panel.image, 160), panel.caption) for panel in panels]


def draw_scene(generator: np.random.Generator, height: int = 48, width: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """A tilted floor with balls on it: the image, uint8 [H, W, 3], and its depth, float32 [H, W]."""
    rows, columns = np.mgrid[:height, :width]
    depth = 9.0 - generator.uniform(4, 7) * rows / height + generator.uniform(-1, 1) * columns / width
    color = np.broadcast_to(generator.uniform(60, 200, 3), (height, width, 3)).copy()
    for _ in range(generator.integers(2, 5)):
        distance = generator.uniform(1.5, 6)
        row, column = generator.uniform(0, height), generator.uniform(0, width)
        inside = 1 - ((rows - row) ** 2 + (columns - column) ** 2) * (distance / generator.uniform(20, 40)) ** 2
        near = distance - 0.3 * np.sqrt(inside.clip(0))
        shown = (inside > 0) & (near < depth)
        depth[shown], color[shown] = near[shown], generator.uniform(40, 255, 3)
    lit = color * (1.15 - 0.09 * depth[..., None]) + generator.normal(0, 6, (height, width, 3))
    depth[rows == 0] = 0  # a sensor has gaps
    return lit.clip(0, 255).astype(np.uint8), depth.astype(np.float32)


def main(root: Path) -> None:
    """Write scenes to train and to measure on."""
    for seed, (split, number) in enumerate({"train": 96, "val": 25}.items()):
        generator, folder = np.random.default_rng(seed), root / split
        folder.mkdir(parents=True, exist_ok=True)
        for index in range(number):
            image, depth = draw_scene(generator)
            Image.fromarray(image).save(folder / f"{index:03d}.png")
            np.save(folder / f"{index:03d}.npy", depth)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
