"""What is predicted, written and drawn of instances: masks in the pixels of the image as it was read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from paceline.core.errors import DataError, RecipeError
from paceline.core.world import World
from paceline.data.batch import Batch, Sample
from paceline.data.datasets.instances import ImageInstances
from paceline.data.io.mask import decode_runs, pack_masks
from paceline.engine.predictions import GuardedWriters, file_writers
from paceline.metrics.instances import EncodedInstances
from paceline.models.detector import Instances, LossParts, Target
from paceline.models.fcos import FCOS
from paceline.models.mask_rcnn import MaskRCNN
from paceline.tasks.detection import Detection
from paceline.tasks.instance_segmentation import InstanceSegmentation, encode_instances
from paceline.visualize.colors import class_color

SIDE = 64


class Known(nn.Module):
    """Detects what it is given, in every image; in a mirrored one the mirror image of it."""

    loss_names: Sequence[str] = ()
    predicts_masks = True
    selection = {"score_thresh": 0.05, "nms_thresh": 0.5, "detections_per_img": 100}

    def __init__(self, found: Instances) -> None:
        super().__init__()
        self.found = found

    def forward(self, images: Tensor, targets: Sequence[Target] | None = None) -> LossParts | list[Instances]:
        return [self.found for _ in images]


class Files:
    classes = ["ant"]
    channels = 3

    def __len__(self) -> int:
        return 1

    def path(self, index: int) -> Path:
        return Path("/set/a.jpg")

    def read(self, index: int) -> Sample:
        raise AssertionError("names are known without reading a sample")


def instances(boxes: list[list[float]], masks: Tensor, in_boxes: bool = True) -> Instances:
    scores = 0.9 - 0.1 * torch.arange(len(boxes))
    return Instances(torch.tensor(boxes), scores, torch.arange(len(boxes)), masks, in_boxes)


def batch(matrix: list[list[float]] | None = None, size: tuple[int, int] = (SIDE, SIDE)) -> Batch:
    made = Batch(id=torch.arange(1), image=torch.zeros(1, 3, SIDE, SIDE))
    if matrix is not None:
        made |= {"matrix": torch.tensor([matrix]), "size": torch.tensor([size])}
    return Batch(made)


def decoded(found: EncodedInstances) -> NDArray[np.uint8]:
    return decode_runs(found.runs, *found.size)


def square(left: int, top: int, right: int, bottom: int, size: tuple[int, int] = (SIDE, SIDE)) -> NDArray[np.uint8]:
    mask = np.zeros(size, np.uint8)
    mask[top:bottom, left:right] = 1
    return mask


def test_a_full_mask_fills_its_box_to_the_pixel() -> None:
    found = instances([[10.0, 20, 30, 52], [-5.0, -5, 4, 4]], torch.ones(2, 28, 28))
    masks = decoded(encode_instances(found, batch(), 0))
    assert np.array_equal(masks, [square(10, 20, 30, 52), square(0, 0, 4, 4)])


def test_half_a_mask_is_half_a_box() -> None:
    left_half = (torch.arange(28) < 14).float().expand(1, 28, 28)
    masks = decoded(encode_instances(instances([[10.0, 20, 38, 48]], left_half), batch(), 0))
    assert np.array_equal(masks[0], square(10, 20, 24, 48))


def test_masks_between_pixels_are_interpolated() -> None:
    """Against a loop over the pixels of a disc, which is drawn in a box of another size."""
    places = (torch.arange(28) + 0.5) / 28 - 0.5
    disc = (0.5 + 28 * (0.4 - (places[:, None] ** 2 + places**2).sqrt())).clamp(0, 1)
    box = [7.3, 11.8, 51.6, 40.1]
    (mask,) = decoded(encode_instances(instances([box], disc[None]), batch(), 0))
    for y in range(SIDE):
        for x in range(SIDE):
            across, down = (x + 0.5 - box[0]) / (box[2] - box[0]), (y + 0.5 - box[1]) / (box[3] - box[1])
            distance = ((across - 0.5) ** 2 + (down - 0.5) ** 2) ** 0.5
            if abs(distance - 0.4) > 0.02:
                assert mask[y, x] == (distance < 0.4)


def test_masks_are_measured_in_the_image_as_it_was_read() -> None:
    """Twice as wide and three times as high as the model's image, and mirrored."""
    matrix, size = [[-2.0, 0.0, 2.0 * SIDE], [0.0, 3.0, 0.0]], (3 * SIDE, 2 * SIDE)
    found = instances([[10.0, 20, 30, 52]], torch.ones(1, 28, 28))
    made = encode_instances(found, batch(matrix, size), 0)
    assert made.boxes.tolist() == [[68, 60, 108, 156]]
    assert np.array_equal(decoded(made), [square(68, 60, 108, 156, size)])
    whole = torch.from_numpy(square(10, 20, 30, 52))[None].float()
    of_image = encode_instances(found._replace(masks=whole, in_boxes=False), batch(matrix, size), 0)
    assert (decoded(of_image) != decoded(made)).sum() <= 8, "corners are rounded where pixels are interpolated"


def test_both_directions_of_an_image_are_merged_with_their_masks() -> None:
    left_half = (torch.arange(28) < 14).float().expand(1, 28, 28)
    model = Known(instances([[4.0, 4, 24, 24]], left_half))
    task = InstanceSegmentation(model, ["a"], flip=True)
    (found,) = task.predict(model, batch())
    assert np.array_equal(decoded(found), [square(4, 4, 14, 24), square(50, 4, 60, 24)])


def test_what_is_written_can_be_read_as_a_data_set(tmp_path: Path) -> None:
    """The most certain is on top; what is below 0.3, or hidden, is left out."""
    boxes = [[10.0, 10, 30, 30], [20.0, 10, 50, 30], [12.0, 12, 20, 20], [0.0, 40, 20, 60]]
    found = instances(boxes, torch.ones(4, 7, 7))._replace(labels=torch.tensor([0, 1, 1, 1]))
    found = found._replace(scores=torch.tensor([0.9, 0.8, 0.7, 0.2]))
    task = InstanceSegmentation(Known(found), ["ant", "bee"])
    ((ids, left_out),) = task.instance_maps(task.predict(Known(found), batch()))
    assert left_out == 0  # what is hidden is in no map
    assert ids.dtype == np.uint16
    assert np.unique(ids).tolist() == [0, 1001, 2001]
    for folder, pixels in (("images", np.zeros((SIDE, SIDE, 3), np.uint8)), ("masks", ids)):
        (tmp_path / folder).mkdir()
        Image.fromarray(pixels).save(tmp_path / folder / "a.png")
    sample = ImageInstances(tmp_path, ["ant", "bee"]).read(0)
    assert sample["classes"].tolist() == [0, 1]
    assert np.array_equal(sample["masks"], [square(10, 10, 30, 30), square(30, 10, 50, 30)])


def test_masks_are_drawn_in_the_colors_of_their_classes() -> None:
    found = instances([[4.0, 4, 24, 24], [34.0, 34, 60, 60]], torch.ones(2, 7, 7))
    task, model = InstanceSegmentation(Known(found), ["ant", "bee"]), Known(found)
    fields: dict[str, Any] = {"boxes": [found.boxes[:1]], "classes": [torch.tensor([0])]}
    samples = Batch(batch() | fields | {"masks": [torch.from_numpy(square(4, 4, 24, 24))[None]]})
    truth, predicted = task.draw(samples, task.predict(model, samples), 0)
    for panel, expected in ((truth, [0]), (predicted, [0, 1])):
        scale = panel.image.shape[0] // SIDE
        for label, (x, y) in enumerate([(14, 18), (48, 52)]):
            color = panel.image[y * scale, x * scale].astype(int)
            is_tinted = np.abs(color - 0.55 * np.array(class_color(label))).max() <= 1
            assert is_tinted == (label in expected)
        assert [entry.order for entry in panel.legend] == expected


def test_errors_count_masks() -> None:
    found = instances([[4.0, 4, 24, 24]], torch.ones(1, 7, 7))
    task = InstanceSegmentation(Known(found), ["ant"])
    fields: dict[str, Any] = {"boxes": [found.boxes], "classes": [torch.tensor([0])], "crowd": [torch.tensor([False])]}
    fields["area"] = [torch.tensor([400.0])]
    for mask, expected in ((square(4, 4, 24, 24), 0), (square(4, 4, 24, 9), 2)):
        samples = Batch(batch() | fields | {"masks": [torch.from_numpy(mask)[None]]})
        assert task.sample_errors(task.predict(Known(found), samples), samples).tolist() == [expected]


def test_crowds_are_not_learned_from() -> None:
    class Seen(Known):
        loss_names = ("one",)

        def forward(self, images: Tensor, targets: Sequence[Target] | None = None) -> LossParts | list[Instances]:
            self.targets = targets
            return {"one": (torch.zeros(()), torch.ones(()))}

    model = Seen(instances([], torch.ones(0, 7, 7)))
    boxes, masks = torch.tensor([[0.0, 0, 9, 9], [9, 9, 20, 20]]), torch.from_numpy(np.stack([square(0, 0, 9, 9)] * 2))
    fields = {"boxes": [boxes], "classes": [torch.tensor([0, 0])], "crowd": [torch.tensor([True, False])]}
    samples = Batch(batch() | fields | {"masks": [masks]})
    InstanceSegmentation(model, ["ant"]).losses(model, samples)
    assert model.targets is not None
    (target,) = model.targets
    assert [len(each) for each in (target["boxes"], target["labels"], target["masks"])] == [1, 1, 1]
    assert target["boxes"].tolist() == [[9, 9, 20, 20]]


def test_models_and_samples_without_masks_are_refused() -> None:
    boxes_only = FCOS(2, backbone="timm/lcnet_035", width=8)
    with pytest.raises(RecipeError, match="FCOS predicts no masks of objects; use mask_rcnn"):
        InstanceSegmentation(boxes_only, ["a", "b"])
    with_masks = MaskRCNN(2, backbone="timm/lcnet_035", width=8, box_width=8)
    with pytest.raises(RecipeError, match="MaskRCNN learns from masks; use task: instance_segmentation"):
        Detection(with_masks, ["a", "b"])
    task, samples = InstanceSegmentation(with_masks, ["a", "b"]), batch()
    with pytest.raises(DataError, match="set `masks: true` of coco or yolo"):
        task.losses(with_masks, samples)


def test_masks_survive_packing() -> None:
    masks = np.stack([square(0, 0, 1, 1), square(3, 4, 50, 60), square(0, 0, 0, 0)])
    assert np.array_equal(decode_runs(pack_masks(masks), SIDE, SIDE), masks)


@pytest.mark.parametrize(("num_classes", "divisor"), [(64, 1000), (65, 256), (80, 256), (255, 256), (1203, 54)])
def test_ids_of_many_classes_are_read_again(tmp_path: Path, num_classes: int, divisor: int) -> None:
    labels = torch.tensor([0, num_classes - 1, num_classes - 1])
    found = instances([[0.0, 0, 9, 9], [20.0, 0, 29, 9], [40.0, 0, 49, 9]], torch.ones(3, 7, 7))._replace(labels=labels)
    classes = [f"c{number}" for number in range(num_classes)]
    task = InstanceSegmentation(Known(found), classes)
    (folder,) = [each for each in file_writers(task, Files(), tmp_path / "masks", tmp_path) if not each.metrics]
    folder.save(batch(), task.predict(Known(found), batch()))
    assert folder.note == ""
    (tmp_path / "images").mkdir()
    Image.new("RGB", (SIDE, SIDE)).save(tmp_path / "images" / "a.png")
    sample = ImageInstances(tmp_path, classes, divisor=divisor).read(0)
    assert sample["classes"].tolist() == labels.tolist()
    assert np.array_equal(sample["masks"], [square(left, 0, left + 9, 9) for left in (0, 20, 40)])


def test_instances_beyond_the_ids_are_reported(tmp_path: Path) -> None:
    boxes = [
        [2.0 * (number % 32), 2.0 * (number // 32), 2 * (number % 32) + 1.0, 2 * (number // 32) + 1.0]
        for number in range(260)
    ]
    found = instances(boxes, torch.ones(260, 7, 7))._replace(
        labels=torch.full((260,), 79), scores=torch.full((260,), 0.9)
    )
    task = InstanceSegmentation(Known(found), [f"c{number}" for number in range(80)])
    writers = file_writers(task, Files(), tmp_path, tmp_path / "a.json")
    guarded = GuardedWriters([each for each in writers if not each.metrics], World(0, 1, 0, torch.device("cpu")))
    guarded.save(batch(), task.predict(Known(found), batch()))
    assert guarded.finish([]) is None
    ids = np.array(Image.open(tmp_path / "a.png"))
    assert np.unique(ids).tolist() == [0, *range(80 * 256 + 1, 81 * 256)]
    assert guarded.note.startswith(f"{tmp_path}/a.png: 5 instances left out: more of a class than ids")
