"""Images of another size."""

from __future__ import annotations

import cv2
import numpy as np
import torch

from paceline.data.sample_types import Image


def resize_image(image: Image, height: int, width: int) -> Image:
    """An image [H, W, C] or a clip [T, H, W, C] at that size: interpolated, and averaged along sides that shrink."""
    rows, columns = image.shape[-3:-1]
    if (rows, columns) == (height, width):
        return image
    if image.ndim > 4:  # several views of a video
        return np.stack([resize_image(view, height, width) for view in image])
    if image.ndim == 4 or height < rows or width < columns:
        return _averaged(image, height, width)
    grown: Image = cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)
    return grown if grown.ndim == 3 else grown[:, :, None]


def _averaged(image: Image, height: int, width: int) -> Image:
    """By torch's kernel, for bytes several times as fast as OpenCV's averaging, into the layout that it works in."""
    frames = torch.from_numpy(np.require(image, requirements=["C", "W"]))
    frames = (frames if image.ndim == 4 else frames.unsqueeze(0)).permute(0, 3, 1, 2)
    result = np.empty((*image.shape[:-3], height, width, image.shape[-1]), image.dtype)
    place = torch.from_numpy(result).view(len(frames), height, width, -1).permute(0, 3, 1, 2)
    torch.ops.aten._upsample_bilinear2d_aa.out(frames, [height, width], False, None, None, out=place)
    return result
