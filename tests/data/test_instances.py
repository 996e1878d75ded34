"""Masks of objects from outlines in label files, and from images of instance ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from pycocotools import mask as coco_mask

from paceline.core.errors import DataError
from paceline.data.datasets.instances import ImageInstances, fill_outlines
from paceline.data.datasets.yolo import Yolo

HEIGHT, WIDTH = 30, 40


def save(path: Path, pixels: NDArray[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def write_yolo(root: Path, *lines: str) -> None:
    save(root / "images" / "a.jpg", np.zeros((HEIGHT, WIDTH, 3), np.uint8))
    (root / "labels").mkdir()
    (root / "labels" / "a.txt").write_text("\n".join(lines))
    (root / "data.yaml").write_text("path: .\ntrain: images\nval: images\nnames: [ant, bee]\n")


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.floats(-0.5, 1.5), st.floats(-0.5, 1.5)), min_size=3, max_size=9))
def test_outlines_are_filled_as_pycocotools_fills_them(points: list[tuple[float, float]]) -> None:
    shares = np.array(points)
    polygon = (shares * [WIDTH, HEIGHT]).ravel().tolist()
    expected = coco_mask.decode(coco_mask.frPyObjects([polygon], HEIGHT, WIDTH))[..., 0]
    assert np.array_equal(fill_outlines([shares.ravel()], HEIGHT, WIDTH)[0], expected)


def test_outlines_of_label_files_become_masks(tmp_path: Path) -> None:
    write_yolo(tmp_path, "1 0.25 0.2 0.75 0.2 0.75 0.6 0.25 0.6", "0 0.1 0.1 0.3 0.1 0.2 0.5")
    sample = Yolo(tmp_path / "data.yaml", masks=True, kpt_shape=[0, 0]).read(0)
    assert sample["masks"].shape == (2, HEIGHT, WIDTH)
    expected = np.zeros((HEIGHT, WIDTH), np.uint8)
    expected[6:18, 10:30] = 1
    assert np.array_equal(sample["masks"][0], expected)
    assert sample["area"].tolist() == sample["masks"].sum((1, 2)).tolist()
    np.testing.assert_allclose(sample["boxes"][0], [10, 6, 30, 18], atol=1e-4)
    assert "masks" not in Yolo(tmp_path / "data.yaml", kpt_shape=[0, 0]).read(0)


def test_a_box_among_outlines_has_no_mask(tmp_path: Path) -> None:
    write_yolo(tmp_path, "1 0.5 0.5 0.2 0.2", "0 0.1 0.1 0.3 0.1 0.2 0.5")
    dataset = Yolo(tmp_path / "data.yaml", masks=True, kpt_shape=[0, 0])
    assert dataset.notes[0] == "1 of 2 boxes is bad: 1 with a bad mask"
    assert dataset.notes[1].endswith("a.txt line 1 (bee): a box, where `masks: true` needs an outline, left out")
    assert dataset.read(0)["classes"].tolist() == [0]
    with pytest.raises(DataError, match=r"a.txt line 1 \(bee\): a box, where"):
        Yolo(tmp_path / "data.yaml", masks=True, kpt_shape=[0, 0], bad_boxes="stop")


def ids() -> NDArray[np.uint16]:
    """Two ants, a bee, a crowd of bees, and a class of another kind."""
    found = np.zeros((HEIGHT, WIDTH), np.uint16)
    found[2:8, 3:9], found[10:20, 3:9], found[2:8, 20:30], found[20:28, 20:30] = 1000, 1007, 2000, 2
    found[0, 0] = 7
    return found


def write_ids(root: Path, found: NDArray[Any], name: str = "a") -> None:
    save(root / "images" / f"{name}.jpg", np.zeros((HEIGHT, WIDTH, 3), np.uint8))
    save(root / "masks" / f"{name}.png", found)


def test_ids_say_class_and_instance(tmp_path: Path) -> None:
    write_ids(tmp_path, ids())
    write_ids(tmp_path, np.zeros((HEIGHT, WIDTH), np.uint8), "empty")
    dataset = ImageInstances(tmp_path, ["ant", "bee"])
    assert dataset.notes == []
    first, empty = dataset.read(0), dataset.read(1)
    assert first["classes"].tolist() == [1, 0, 0, 1]
    assert first["crowd"].tolist() == [True, False, False, False]
    assert first["boxes"].tolist() == [[20, 20, 30, 28], [3, 2, 9, 8], [3, 10, 9, 20], [20, 2, 30, 8]]
    expected = np.stack([ids() == number for number in (2, 1000, 1007, 2000)])
    assert np.array_equal(first["masks"], expected)
    assert first["area"].tolist() == [80, 36, 60, 60]
    assert empty["masks"].shape == (0, HEIGHT, WIDTH)
    assert empty["boxes"].shape == (0, 4)


def test_classes_may_have_numbers_of_their_own(tmp_path: Path) -> None:
    write_ids(tmp_path, np.where(ids() >= 1000, ids() + 23000, 0).astype(np.uint16))
    dataset = ImageInstances(tmp_path, {"ant": 24, "bee": 25})
    assert dataset.read(0)["classes"].tolist() == [0, 0, 1]


def test_masks_of_classes_beside_those_of_instances(tmp_path: Path) -> None:
    found = np.zeros((HEIGHT, WIDTH), np.uint8)
    found[2:8, 3:9], found[10:20, 3:9], found[9, 3:9] = 1, 2, 255
    kinds = np.where(found == 2, 2, np.where(found == 1, 1, 0)).astype(np.uint8)
    write_ids(tmp_path, found)
    save(tmp_path / "kinds" / "a.png", kinds)
    sample = ImageInstances(tmp_path, ["ant", "bee"], class_masks="kinds", ignore_index=255).read(0)
    assert sample["classes"].tolist() == [0, 1]
    assert np.array_equal(sample["masks"], np.stack([found == 1, found == 2]))


def test_one_class_needs_no_numbers_of_classes(tmp_path: Path) -> None:
    found = np.zeros((HEIGHT, WIDTH), np.uint8)
    found[2:8, 3:9], found[10:20, 3:9] = 1, 2
    write_ids(tmp_path, found)
    sample = ImageInstances(tmp_path, ["person"], divisor=None).read(0)
    assert sample["classes"].tolist() == [0, 0]
    with pytest.raises(DataError, match="`divisor: null` is for one class"):
        ImageInstances(tmp_path, ["a", "b"], divisor=None)


def test_bad_ids_and_masks_are_named_and_left_out(tmp_path: Path) -> None:
    write_ids(tmp_path, np.where(ids() == 2000, 9001, ids()).astype(np.uint16))
    write_ids(tmp_path, np.zeros((5, 5), np.uint8), "small")
    write_ids(tmp_path, ids(), "sound")
    (tmp_path / "masks" / "torn.png").write_bytes((tmp_path / "masks" / "a.png").read_bytes()[:60])
    save(tmp_path / "images" / "torn.jpg", np.zeros((HEIGHT, WIDTH, 3), np.uint8))
    dataset = ImageInstances(tmp_path, ["ant", "bee"])
    small, torn, counts, above = dataset.notes
    assert f"{tmp_path}/masks/small.png: the mask is 5×5 pixels, but its image" in small
    assert small.endswith("40×30; the image is left out")
    assert torn.startswith(f"{tmp_path}/masks/torn.png: damaged")
    assert counts == "1 of 8 boxes is bad: 1 with a bad mask"
    assert above == f"{tmp_path}/masks/a.png: id 9001: has the class 9, which is none of 1 ant, 2 bee, left out"
    assert [dataset.path(index).name for index in range(len(dataset))] == ["a.jpg", "sound.jpg"]
    assert [len(dataset.read(index)["masks"]) for index in range(2)] == [3, 4]
    with pytest.raises(DataError, match=r"small.png: the mask is 5×5 .*torn.png"):
        ImageInstances(tmp_path, ["ant", "bee"], bad_boxes="stop")
    for name in ("small", "torn"):
        (tmp_path / "masks" / f"{name}.png").unlink()
        (tmp_path / "images" / f"{name}.jpg").unlink()
    with pytest.raises(DataError, match="id 9001: has the class 9"):
        ImageInstances(tmp_path, ["ant", "bee"], bad_boxes="stop")


def test_ids_in_colors_are_refused_with_advice_that_the_data_set_takes(tmp_path: Path) -> None:
    write_ids(tmp_path, np.full((HEIGHT, WIDTH, 3), [200, 10, 10], np.uint8))
    with pytest.raises(DataError, match=r"masks/a.png: pixel \(0, 0\) has the color .*one id a pixel") as caught:
        ImageInstances(tmp_path, ["ant"])
    assert "`colors`" not in str(caught.value)


def test_a_number_of_two_classes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"`classes` gives person and car the number 24; give each its own"):
        ImageInstances(tmp_path, {"person": 24, "bus": 25, "car": 24})


@pytest.mark.parametrize(
    ("classes", "advice"), [(["ant"], "set `divisor: null`"), (["ant", "bee"], "set the `divisor` of these masks, or")]
)
def test_masks_without_the_id_of_an_instance_are_bad(tmp_path: Path, classes: list[str], advice: str) -> None:
    found = np.zeros((HEIGHT, WIDTH), np.uint8)
    found[2:8, 3:9], found[10:20, 3:9], found[20:28, 3:9], found[0] = 1, 2, 3, 255
    write_ids(tmp_path, found)
    dataset = ImageInstances(tmp_path, classes, ignore_index=255)
    assert len(dataset.read(0)["masks"]) == 0
    counts, *lines = dataset.notes
    assert counts == "3 of 3 boxes are bad: 3 with a bad mask"
    assert [line.split(": ")[1] for line in lines] == ["id 1", "id 2", "id 3"]
    assert all(line.startswith(f"{tmp_path}/masks/a.png: ") and advice in line for line in lines)
    with pytest.raises(DataError, match=r"a.png: id 1: is below `divisor: 1000`"):
        ImageInstances(tmp_path, classes, ignore_index=255, bad_boxes="stop")
