"""One turn of the saliency benchmark: `saliency_turn.py paceline|pysodmetrics` prints its milliseconds an image.

It is a process of its own because PySODMetrics has an environment of its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "metrics"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "metrics" / "golden"))

from saliency_cases import GrayImage, blobs, noisy

NUM_IMAGES, HEIGHT, WIDTH = 50, 300, 400


def main(contestant: str) -> None:
    """Measure all images twice, and the second time how long that takes this process."""
    cv2.setNumThreads(1)
    draw = np.random.default_rng(0)
    masks = [blobs(HEIGHT, WIDTH, draw) for _ in range(NUM_IMAGES)]
    cases = [(noisy(mask, draw), mask) for mask in masks]
    judge = _paceline() if contestant == "paceline" else _pysodmetrics()
    for prediction, mask in cases:
        judge(prediction, mask)
    begin = time.process_time()
    for prediction, mask in cases:
        judge(prediction, mask)
    print((time.process_time() - begin) / NUM_IMAGES * 1e3)


def _paceline() -> Callable[[GrayImage, GrayImage], object]:
    import torch

    from paceline.core.process import keep_freed_memory
    from paceline.data.batch import Batch
    from paceline.metrics.saliency import Saliency

    keep_freed_memory()  # as every run does
    metric = Saliency()

    def judge(prediction: GrayImage, mask: GrayImage) -> object:
        batch = Batch(id=torch.tensor([0]), mask=torch.from_numpy(mask)[None])
        return metric.update(torch.from_numpy(prediction)[None], batch)

    return judge


def _pysodmetrics() -> Callable[[GrayImage, GrayImage], object]:
    from make_saliency_golden import Judge

    reference = Judge()
    return lambda prediction, mask: reference.step(prediction, mask, stretch=True)


if __name__ == "__main__":
    main(sys.argv[1])
