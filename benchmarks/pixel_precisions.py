"""Whether every precision learns as well as float32 in segmentation and saliency, and what memory a step takes."""

from __future__ import annotations

from benchmarks.precisions import compare
from benchmarks.report import Section


def measure(is_quick: bool) -> Section:
    """Both tasks in each precision."""
    method = "segmentation_sample at 48×64 and saliency_sample at 48×48 with a narrow U-Net, batch size 8, 12 epochs"
    return compare("Precisions of segmentation and saliency", method, ["segmentation", "saliency"], is_quick)
