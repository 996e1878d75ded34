"""The types that data sets and transforms may give samples in, and what these become.

Images are uint8, from 0 to 255, or of floats, which reach the model as they are, as float32. Other whole numbers are
refused: whether 16 bits mean 0 to 1 or 0 to 65,535 is for the data set to say. Tensors become arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import DataError
from paceline.data.batch import Sample

Image = NDArray[Any]
"""Of uint8 or float32: [H, W, C], or [T, H, W, C] of a clip."""

_PIXELS, _FLOATS = np.dtype(np.uint8), np.dtype(np.float32)
_EXPECTED = "expected uint8, from 0 to 255, or float32, which the model gets as it is (float16 and float64 become it)"


def as_arrays(sample: Any) -> Sample:
    """The sample with arrays of these types; an image that is still encoded stays so.

    Anything that cannot be an image is a DataError that says what was found.
    """
    if not isinstance(sample, dict) or "image" not in sample:
        found = f"the fields {', '.join(map(str, sample))}" if isinstance(sample, dict) else type(sample).__name__
        raise DataError(f'expected a dict with "image" in it, found {found}')
    changed = {name: new for name, value in sample.items() if (new := _as_array(value)) is not value}
    image = changed.get("image", sample["image"])
    if isinstance(image, np.ndarray):
        image = as_image(image)
    elif not hasattr(image, "decode"):
        raise DataError(f"the image is a {type(image).__name__}, expected a NumPy array or a torch tensor")
    return {**sample, **changed, "image": image} if changed or image is not sample["image"] else sample


def as_image(image: NDArray[Any]) -> Image:
    """An image [H, W, C], or frames of one, in a type that everything behind can work with."""
    if image.ndim < 3:
        raise DataError(f"the image has the shape {list(image.shape)}, expected [height, width, channels]")
    if image.dtype in (_PIXELS, _FLOATS):
        return image
    if image.dtype.kind == "f":
        return image.astype(np.float32)
    raise DataError(_refusal(image.dtype.name))


def as_images(images: Tensor, float_type: torch.dtype = torch.float32) -> Tensor:
    """The same of images of whole batches, [N, C, H, W] or more."""
    if images.dtype == torch.uint8:
        return images
    if images.is_floating_point():
        return images.to(float_type)
    raise DataError(_refusal(str(images.dtype).removeprefix("torch.")))


def _refusal(found: str) -> str:
    return f"the image is of {found}; {_EXPECTED}; convert it in the data set, as with image.astype(np.float32)"


def _as_array(value: Any) -> Any:
    if isinstance(value, Tensor):
        host = value.detach().cpu()
        host = host.float() if host.dtype == torch.bfloat16 else host
        return host.item() if host.ndim == 0 and not host.is_floating_point() else host.numpy()
    return int(value) if isinstance(value, np.integer) else value
