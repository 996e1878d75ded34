"""The mask as it was read, kept beside the one that is resized with its image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.data.batch import Sample


@register.transform("keep_truth")
@dataclass(frozen=True)
class KeepTruth:
    """Keep the mask of this moment as "truth", uint8 [H, W], which no later transform changes.

    "matrix" then leads from the image that later transforms make back to the truth: predictions are measured and saved
    at the size that the mask had here. A batch holds truths as a list, since images differ in size.
    """

    draws: ClassVar[int] = 0
    is_batch: ClassVar[bool] = False
    reads_encoded: ClassVar[bool] = True

    def __call__(self, sample: Sample, draws: NDArray[np.float64]) -> Sample:
        """The sample with its truth."""
        if "mask" not in sample:
            raise DataError("keep_truth keeps masks, and these samples have none: leave it out, or use image_mask")
        return {**sample, "truth": sample["mask"], "matrix": np.eye(2, 3, dtype=np.float32)}
