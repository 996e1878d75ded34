"""Objects in images as COCO keeps them: one JSON file with boxes, masks and keypoints, and a folder of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.arguments import Count, CountOrZero, KeyOf, Requires
from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.data.argument_types import ClassNames, Name, SplitShares
from paceline.data.batch import KeypointNames, Sample
from paceline.data.datasets.coco_file import CocoFile
from paceline.data.datasets.detection import BadBoxes, DetectionDataset
from paceline.data.index.index import IndexBuilder, open_index
from paceline.data.io.mask import decode_runs


@register.dataset(
    "coco",
    checks=[
        KeyOf("split", "split_shares"),
        Requires("split", "split_shares"),
        Requires("per_object", "keypoints"),
        Requires("min_keypoints", "keypoints"),
    ],
)
class Coco(DetectionDataset):
    """The images of a COCO JSON file, in the order of their ids, with boxes and, if wanted, masks and keypoints.

    Classes are numbered in the order of their category ids, or as `classes` names them, which leaves out all others;
    class k has the id `category_ids[k]`. Boxes keep their coordinates, as x1 y1 x2 y2. A keypoint is the number of a
    pixel in these files, so it lies half a pixel further, in that pixel's middle. Masks are those of pycocotools.
    With `per_object`, each object with labeled keypoints is a sample of its own, as pose networks take them; crowds are
    left out. With `keep_empty: false`, images without any object are left out; with `min_keypoints`, images of fewer
    labeled keypoints. With `split_shares` the split is drawn.
    """

    def __init__(
        self,
        root: Path,
        annotations: Name,
        images: Name = "images",
        split: Name | None = None,
        split_shares: SplitShares | None = None,
        split_seed: CountOrZero = 0,
        classes: ClassNames | None = None,
        masks: bool = False,
        keypoints: bool = False,
        per_object: bool = False,
        min_keypoints: Count | None = None,
        keep_empty: bool = True,
        bad_boxes: BadBoxes = "clip",
        follow_links: bool = False,
    ) -> None:
        root = Path(root)
        file = root / annotations

        def build(builder: IndexBuilder) -> None:
            builder.watch(file)
            content = CocoFile(file, masks, keypoints)
            content.write(builder, content.choose(classes), keep_empty, bad_boxes)

        arguments: dict[str, Any] = {
            "file": str(file.absolute()),
            "classes": classes and list(classes),
            "bad_boxes": bad_boxes,
        }
        arguments |= {"masks": masks, "keypoints": keypoints, "keep_empty": keep_empty}
        index = open_index(root, "coco", arguments, build)
        inside = None if follow_links else root
        super().__init__(index, root / images, inside, file, split, split_shares, split_seed)
        self.category_ids: list[int] = index.facts["category_ids"]
        self.joints = KeypointNames.from_json(index.facts["keypoint_names"]) if keypoints else None
        self._masks = index.rows("mask") if masks else None
        if min_keypoints:
            self._part = self._images_with(min_keypoints)
        if per_object:
            self._divide_by_object()

    def open(self, index: int) -> Sample:
        """The image, not decoded yet, its size and id, and the boxes, classes and so on of its objects."""
        sample, row = super().open(index), int(self._part[index])
        (height, width), number = self._index["sizes"][row].tolist(), int(self._index["image_ids"][row])
        image = sample["image"]
        if (image.height, image.width) != (height, width):
            says = f"{self.annotations} says {width}×{height} of image {number}"
            raise DataError(f"{self._files.path(row)}: is {image.width}×{image.height}, but {says}; repair either")
        which = self._span(index)
        if self._masks is not None:
            runs = [self._masks[place].tobytes() for place in range(which.start, which.stop)]
            sample["masks"] = decode_runs(runs, height, width)
        if self.joints is not None:
            sample["keypoints"] = self._index["keypoints"][which].copy()
        return {**sample, "image_id": number}

    def image_sizes(self) -> NDArray[np.int64]:
        """The height and width of each image, [N, 2], as the file says."""
        sizes: NDArray[np.int64] = self._index["sizes"][np.asarray(self._part)]
        return sizes

    def _images_with(self, min_keypoints: int) -> NDArray[np.int64]:
        """The images whose objects have so many labeled keypoints together."""
        labeled = (self._index["keypoints"][..., 2] > 0).sum(1)
        before, starts = np.concatenate([[0], labeled.cumsum()]), self._index["starts"].astype(np.int64)
        rows = np.asarray(self._part)
        chosen: NDArray[np.int64] = rows[before[starts[rows + 1]] - before[starts[rows]] >= min_keypoints]
        return chosen
