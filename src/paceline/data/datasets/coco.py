"""Objects in photos as COCO keeps them: one json file with boxes, outlines and keypoints, and a folder of images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.core.arguments import Count, CountOrZero, KeyOf, Requires
from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.data.argument_types import ClassNames, Name, SplitShares
from paceline.data.batch import KeypointNames, Sample
from paceline.data.datasets.coco_json import (
    Category,
    CocoImages,
    CocoObjects,
    read_categories,
    read_images,
    read_objects,
    read_parts,
)
from paceline.data.datasets.segments import Segments
from paceline.data.index.index import Arrays, Watch, as_bytes, from_bytes, kept_arrays
from paceline.data.io.image import MAX_PIXELS, ImageFiles, packed_names
from paceline.data.keypoint_names import mirrored_pairs
from paceline.data.objects import BadBoxes, Objects, check_boxes, drawn_part

if TYPE_CHECKING:
    from paceline.data.fingerprint import DataDigest


@register.dataset("coco", checks=[KeyOf("split", "split_shares"), Requires("split", "split_shares")])
class Coco:
    """The images of a COCO json file, in the order of their ids, with boxes and, if wanted, masks and keypoints.

    Classes are numbered in the order of their category ids, or as `classes` names them, which leaves out all others;
    class k has the id `category_ids[k]`. Boxes keep their coordinates, as x1 y1 x2 y2. A keypoint is the number of a
    pixel in these files, so it lies half a pixel further, in that pixel's middle. Masks are those of pycocotools.
    With `keep_empty: false`, images without any object are left out; with `split_shares` the split is drawn.
    """

    channels = 3

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
        keep_empty: bool = True,
        bad_boxes: BadBoxes = "clip",
        follow_links: bool = False,
        max_pixels: Count = MAX_PIXELS,
    ) -> None:
        root = Path(root)
        self.annotations = root / annotations
        made = {"annotations": str(self.annotations.absolute()), "classes": classes and list(classes), "masks": masks}
        made |= {"keypoints": keypoints, "keep_empty": keep_empty, "bad_boxes": bad_boxes}

        def make(watch: Watch) -> Arrays:
            watch(self.annotations)
            return _arrays(self.annotations, classes, masks, keypoints, keep_empty, bad_boxes)

        arrays = kept_arrays(root, "coco", made, make)
        facts = from_bytes(arrays["facts"])
        self.classes: list[str] = facts["classes"]
        self.category_ids: list[int] = facts["category_ids"]
        self.notes: list[str] = facts["notes"]
        self.joints = (
            _joints(self.annotations, [Category(*each) for each in facts["categories"]]) if keypoints else None
        )
        self.image_ids = arrays["image_ids"]
        self._sizes = arrays["sizes"]
        self._rows = arrays["rows"][drawn_part(len(arrays["rows"]), split, split_shares, split_seed)]
        self._objects = Objects(arrays)
        self._segments = Segments(arrays) if masks else None
        self._outlines, self._keypoints = arrays["outlines"], arrays["keypoints"]
        names = arrays["names"], arrays["name_ends"]
        self._files = ImageFiles(root, root / images, *names, follow_links, max_pixels)

    def __len__(self) -> int:
        return len(self._rows)

    def path(self, index: int) -> Path:
        """The file of image `index`."""
        return self._files.path(int(self._rows[index]))

    def update_digest(self, digest: DataDigest) -> None:
        """Add the names and sizes of the images to a fingerprint, and what the annotations hold."""
        digest.content(self.annotations)
        digest.files(self._files.folder, self._files.names(self._rows), "images")

    def open(self, index: int) -> Sample:
        """The image, not decoded yet, its size and id, and the boxes, classes and so on of its objects."""
        row = int(self._rows[index])
        image = self._files.open(row)
        height, width = self._sizes[row].tolist()
        if (image.height, image.width) != (height, width):
            says = f"{self.annotations} says {width}×{height} of image {self.image_ids[row]}"
            raise DataError(f"{self._files.path(row)}: is {image.width}×{image.height}, but {says}; repair either")
        sample: Sample = {"image": image, **self._objects.fields(row)}
        which = self._objects.of(row)
        if self._segments is not None:
            sample["masks"] = self._segments.masks(self._outlines[which], height, width)
        if self.joints is not None:
            sample["keypoints"] = self._keypoints[which].copy()
        return {**sample, "size": self._sizes[row].astype(np.int64), "image_id": int(self.image_ids[row])}

    def read(self, index: int) -> Sample:
        """The same with the image decoded, uint8 [H, W, 3]."""
        sample = self.open(index)
        return {**sample, "image": sample["image"].decode()}


def _arrays(
    path: Path,
    classes: Sequence[str] | None,
    with_masks: bool,
    with_keypoints: bool,
    keep_empty: bool,
    bad_boxes: BadBoxes,
) -> Arrays:
    """All that is taken from the file, checked."""
    category_entries, image_entries, entries = read_parts(path)
    categories = read_categories(path, category_entries)
    chosen = _chosen(path, categories, classes)
    ids = [category.number for category in chosen]
    num_joints = len(_joints(path, chosen).names) if with_keypoints else 0
    images = read_images(path, image_entries)
    objects, outlines = read_objects(path, entries, images, categories, ids, num_joints, with_masks)
    arrays, kept, notes = _checked(path, chosen, images, objects, bad_boxes)
    num_others = len(entries) - len(objects.numbers)
    if num_others:
        notes.append(f"{path}: {num_others:,} annotations of other classes are left out")
    has_any = np.diff(arrays["starts"]) > 0
    rows = np.arange(len(images.numbers)) if keep_empty else np.flatnonzero(has_any)
    if not len(rows):
        raise DataError(f"{path}: no image has an object of the classes {', '.join(each.name for each in chosen)}")
    names, name_ends = packed_names(path, images.names)
    facts = {"classes": [each.name for each in chosen], "category_ids": ids, "categories": chosen, "notes": notes}
    arrays |= {"outlines": objects.outlines[kept], "keypoints": _placed(objects.keypoints[kept]), **outlines}
    arrays |= {"image_ids": images.numbers, "sizes": images.sizes, "rows": rows, "names": names, "name_ends": name_ends}
    return arrays | {"facts": as_bytes(facts)}


def _checked(
    path: Path, categories: list[Category], images: CocoImages, objects: CocoObjects, bad_boxes: BadBoxes
) -> tuple[Arrays, NDArray[np.bool_], list[str]]:
    classes = {category.number: place for place, category in enumerate(categories)}

    def place(box: int) -> str:
        shown = " ".join(f"{value:g}" for value in objects.boxes[box])
        name = categories[classes[int(objects.categories[box])]].name
        file = images.names[objects.images[box]]
        return f"{path}: annotation {objects.numbers[box]} ({name}, {file}), bbox {shown}"

    corners = objects.boxes.copy()
    corners[:, 2:] += corners[:, :2]
    sizes = images.sizes[objects.images]
    boxes, kept, notes = check_boxes(corners, objects.boxes[:, 2:], sizes, bad_boxes, place)
    arrays = Objects.arrays(
        len(images.numbers),
        objects.images[kept],
        boxes,
        np.array([classes[number] for number in objects.categories[kept].tolist()], np.int64),
        objects.crowd[kept],
        objects.area[kept].astype(np.float32),
    )
    return arrays, kept, notes


def _chosen(path: Path, categories: list[Category], classes: Sequence[str] | None) -> list[Category]:
    by_name = {category.name: category for category in categories}
    if not categories:
        raise DataError(f"{path}: the list 'categories' is empty")
    if len(by_name) < len(categories):
        twice = next(category.name for category in categories if by_name[category.name] is not category)
        raise DataError(f"{path}: two categories are called {twice!r}; rename one of them")
    unknown = [name for name in classes or () if name not in by_name]
    if unknown:
        raise DataError(f"{path}: has no category {unknown[0]!r}; it has {', '.join(by_name)}")
    return [by_name[name] for name in classes] if classes else categories


def _joints(path: Path, categories: list[Category]) -> KeypointNames:
    """The keypoints of the categories, which those that have any must have in common."""
    named = [category for category in categories if category.keypoints]
    if not named:
        raise DataError(
            f"{path}: none of the categories has keypoints; take the file with keypoints, or leave them out"
        )
    first = named[0]
    for other in named[1:]:
        if other.keypoints != first.keypoints:
            advice = "choose one of them by `classes`"
            raise DataError(f"{path}: {first.name} and {other.name} have different keypoints; {advice}")
    limbs = [(start - 1, end - 1) for start, end in first.skeleton]
    return KeypointNames(list(first.keypoints), mirrored_pairs(first.keypoints), limbs)


def _placed(keypoints: NDArray[np.float32]) -> NDArray[np.float32]:
    """Keypoints [M, J, 3] with pixels' numbers made into their middles, and zeros where none is labeled."""
    is_labelled = keypoints[..., 2:] > 0
    positions = np.where(is_labelled, keypoints[..., :2] + np.float32(0.5), np.float32(0))
    return np.concatenate([positions, keypoints[..., 2:]], axis=2)
