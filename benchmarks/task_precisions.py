"""Whether bf16 learns as well as float32 in detection, keypoints and masked pretraining, and the memory of a step."""

from __future__ import annotations

from benchmarks.precisions import compare
from benchmarks.report import Section


def measure(is_quick: bool) -> Section:
    """Each task in both precisions."""
    method = (
        "detection_sample (24 epochs) and keypoints_sample (40 epochs) on 64 drawn images each, mae_fashion on the"
        " embedded data set (3 epochs)"
    )
    names = ["detection", "keypoints", "masked_autoencoder"]
    return compare("Precisions of detection, keypoints and masked pretraining", method, names, is_quick)
