import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO

from paceline.core.errors import DataError
from paceline.data.datasets.coco import Coco
from paceline.data.fingerprint import fingerprint
from paceline.data.io.mask import decode_runs, encode_runs
from paceline.data.pack import PackedSamples, write_pack

HEIGHT, WIDTH = 30, 40
TRIANGLE = [[2.13, 3.7, 20.31, 3.7, 11.59, 25.02]]
RUNS = [100, 7, 20, 9, HEIGHT * WIDTH - 136]


def packed(counts: list[int]) -> str:
    size = [HEIGHT, WIDTH]
    text: bytes = coco_mask.frPyObjects({"size": size, "counts": counts}, HEIGHT, WIDTH)["counts"]
    return text.decode()


def annotation(number: int, image: int, category: int, bbox: list[float], **more: Any) -> dict[str, Any]:
    plain = {"id": number, "image_id": image, "category_id": category, "bbox": bbox, "iscrowd": 0, "area": 5.5}
    return plain | {"segmentation": TRIANGLE} | more


def content() -> dict[str, Any]:
    size = {"height": HEIGHT, "width": WIDTH}
    images = [{"id": number, "file_name": f"{number}.png", **size} for number in (12, 7, 30)]
    categories: list[dict[str, Any]] = [{"id": 90, "name": "ant"}, {"id": 3, "name": "person"}]
    categories[1] |= {"keypoints": ["nose", "left_eye", "right_eye"], "skeleton": [[1, 2], [1, 3]]}
    return {
        "images": images,
        "categories": categories,
        "annotations": [
            annotation(5, 12, 90, [1.5, 2, 10, 20.25], keypoints=[]),
            annotation(6, 7, 3, [0, 0, 40, 30], keypoints=[0, 0, 2, 39, 29, 1, 8, 8, 0]),
            annotation(7, 12, 3, [3, 3, 4, 5], segmentation={"size": [HEIGHT, WIDTH], "counts": RUNS}, iscrowd=1),
            annotation(8, 12, 3, [3, 3, 4, 5], segmentation={"size": [HEIGHT, WIDTH], "counts": packed(RUNS)}),
        ],
    }


def write(root: Path, whole: Any) -> Path:
    (root / "images").mkdir(exist_ok=True)
    for number in (7, 12, 30):
        Image.new("RGB", (WIDTH, HEIGHT), (number, 0, 0)).save(root / "images" / f"{number}.png")
    path = root / "instances.json"
    path.write_text(whole if isinstance(whole, str) else json.dumps(whole))
    return path


def test_images_boxes_and_classes(tmp_path: Path) -> None:
    write(tmp_path, content())
    dataset = Coco(tmp_path, "instances.json")
    assert dataset.classes == ["person", "ant"]  # by their ids
    assert dataset.category_ids == [3, 90]
    assert dataset.joints is None
    assert dataset.notes == []
    samples = [dataset.read(index) for index in range(len(dataset))]
    assert [sample["image_id"] for sample in samples] == [7, 12, 30]
    assert [sample["image"][0, 0, 0] for sample in samples] == [7, 12, 30]
    assert samples[1]["boxes"].tolist() == [[1.5, 2, 11.5, 22.25], [3, 3, 7, 8], [3, 3, 7, 8]]
    assert samples[1]["classes"].tolist() == [1, 0, 0]
    assert samples[1]["crowd"].tolist() == [False, True, False]
    assert samples[1]["area"].tolist() == [5.5, 5.5, 5.5]
    assert samples[2]["boxes"].shape == (0, 4)
    assert samples[0]["size"].tolist() == [HEIGHT, WIDTH]
    assert "masks" not in samples[0]
    assert dataset.open(1)["image"].height == HEIGHT
    assert dataset.path(0) == tmp_path / "images/7.png"


def test_images_without_objects_can_be_left_out(tmp_path: Path) -> None:
    write(tmp_path, content())
    assert len(Coco(tmp_path, "instances.json", keep_empty=False)) == 2
    ants = Coco(tmp_path, "instances.json", classes=["ant"], keep_empty=False)
    assert [ants.read(index)["image_id"] for index in range(len(ants))] == [12]
    assert ants.read(0)["classes"].tolist() == [0]
    assert (ants.category_ids, ants.classes) == ([90], ["ant"])
    assert ants.notes == [f"{tmp_path / 'instances.json'}: 3 annotations of other classes are left out"]
    swapped = Coco(tmp_path, "instances.json", classes=["ant", "person"])
    assert (swapped.category_ids, swapped.read(1)["classes"].tolist()) == ([90, 3], [0, 1, 1])
    shares = {"train": 0.67, "val": 0.33}
    parts = [Coco(tmp_path, "instances.json", split=split, split_shares=shares) for split in shares]
    assert [len(part) for part in parts] == [2, 1]


def test_keypoints_lie_in_the_middle_of_their_pixels(tmp_path: Path) -> None:
    write(tmp_path, content())
    dataset = Coco(tmp_path, "instances.json", keypoints=True)
    assert dataset.joints == (["nose", "left_eye", "right_eye"], [(1, 2)], [(0, 1), (0, 2)])
    assert dataset.read(0)["keypoints"].tolist() == [[[0.5, 0.5, 2], [39.5, 29.5, 1], [0, 0, 0]]]
    assert dataset.read(1)["keypoints"].tolist() == np.zeros((3, 3, 3)).tolist()
    assert dataset.read(2)["keypoints"].shape == (0, 3, 3)


def test_agrees_with_pycocotools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, content())
    oracle = COCO(path)
    dataset = Coco(tmp_path, "instances.json", masks=True)
    for index in range(len(dataset)):
        sample = dataset.read(index)
        expected = oracle.loadAnns(oracle.getAnnIds(imgIds=[sample["image_id"]]))
        masks = [oracle.annToMask(each) for each in expected]
        assert sample["masks"].shape == (len(expected), HEIGHT, WIDTH)
        assert np.array_equal(sample["masks"], np.array(masks, np.uint8).reshape(sample["masks"].shape))
        assert [dataset.category_ids[k] for k in sample["classes"]] == [each["category_id"] for each in expected]
        corners = [[x, y, x + w, y + h] for x, y, w, h in (each["bbox"] for each in expected)]
        assert sample["boxes"].tolist() == corners
    capsys.readouterr()


def filled(outlines: list[Any]) -> np.ndarray[Any, Any]:
    return decode_runs([encode_runs(outline, HEIGHT, WIDTH) for outline in outlines], HEIGHT, WIDTH)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.tuples(st.integers(-500, 4500), st.integers(-500, 3500)), min_size=3, max_size=8), min_size=1),
    st.integers(0, 3),
)
def test_masks_of_polygons_are_those_of_pycocotools(points: list[list[tuple[int, int]]], digits: int) -> None:
    polygons = [[[value / 100 for point in part for value in point]] for part in points]
    polygons[0][0][0] = round(10 / 7, digits)
    found = filled(polygons)
    expected = [coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(each, HEIGHT, WIDTH))) for each in polygons]
    assert np.array_equal(found, expected)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_masks_of_run_lengths_are_those_of_pycocotools(seed: int, share: float) -> None:
    expected = (np.random.default_rng(seed).random((2, HEIGHT, WIDTH)) < share).astype(np.uint8)
    outlines = []
    for each in expected:
        runs = coco_mask.encode(np.asfortranarray(each))
        outlines.append({"size": [HEIGHT, WIDTH], "counts": runs["counts"].decode()})
    flat = expected[0].T.ravel()
    bounds = np.flatnonzero(np.diff(flat, prepend=0))
    outlines.append({"size": [HEIGHT, WIDTH], "counts": np.diff(bounds, prepend=0, append=len(flat)).tolist()})
    assert np.array_equal(filled(outlines), [*expected, expected[0]])


def test_bad_boxes_are_reported_with_their_annotation(tmp_path: Path) -> None:
    whole = content()
    whole["annotations"] += [annotation(20, 30, 90, [5, 5, 0, 3]), annotation(21, 30, 90, [35, 25, 10, 10])]
    path = write(tmp_path, whole)
    dataset = Coco(tmp_path, "instances.json", masks=True)
    assert dataset.notes == [
        "2 of 6 boxes are bad: 1 partly outside its image, 1 empty",
        f"{path}: annotation 20 (ant, 30.png), bbox 5 5 0 3: empty, left out",
        f"{path}: annotation 21 (ant, 30.png), bbox 35 25 10 10: partly outside its image, clipped",
    ]
    sample = dataset.read(2)
    assert sample["boxes"].tolist() == [[35, 25, 40, 30]]
    assert sample["masks"].shape == (1, HEIGHT, WIDTH)
    with pytest.raises(DataError, match=r"annotation 20 \(ant, 30.png\), bbox 5 5 0 3: empty"):
        Coco(tmp_path, "instances.json", bad_boxes="stop")


FAR = [0, 0, 1e9, 0, 5, 5]
RUNS_SHORT = {"size": [HEIGHT, WIDTH], "counts": [5, 5]}


@pytest.mark.parametrize(
    ("outline", "expected"),
    [
        ([], "has a segmentation that is neither polygons nor run lengths"),
        ([[1, 2, 3, 4]], "has a polygon of fewer than three points"),
        ([[1, 2, 3, 4, 5]], "has a polygon of fewer than three points"),
        ([["1", 2, 3, 4, 5, 6]], "has a polygon that is not of numbers"),
        ([FAR], "has a polygon that is not of numbers, or reaches far out of its image"),
        ([[41, 2, 50, 2, 50, 9]], "has a mask that covers no pixel of its image"),
        ([[3, 3, 3, 3, 3, 3]], "has a mask that covers no pixel of its image"),
        (RUNS_SHORT, "has run lengths that do not cover its image exactly"),
        (RUNS_SHORT | {"counts": [1200]}, "has a mask that covers no pixel of its image"),
        ({"size": [3, 4], "counts": [12]}, "has run lengths of another size than its image"),
        (RUNS_SHORT | {"counts": [-5, 1205]}, "has run lengths that are neither a text nor whole"),
        (RUNS_SHORT | {"counts": [0, 10**30]}, "has run lengths that do not cover its image"),
        (RUNS_SHORT | {"counts": [0, 1201]}, "has run lengths that do not cover its image"),
        (RUNS_SHORT | {"counts": packed([9])}, "has run lengths that do not cover its image"),
        (RUNS_SHORT | {"counts": "\u00e9\u007f"}, "has run lengths that do not cover its image"),
        (RUNS_SHORT | {"counts": "o" * 20}, "has run lengths that do not cover its image"),
    ],
)
def test_bad_masks_follow_the_policy_of_bad_boxes(tmp_path: Path, outline: Any, expected: str) -> None:
    whole = content()
    whole["annotations"][1]["segmentation"] = outline
    path = write(tmp_path, whole)
    named = f"{path}: annotation 6 ("
    with pytest.raises(DataError, match=expected) as caught:
        Coco(tmp_path, "instances.json", masks=True, bad_boxes="stop")
    assert named in str(caught.value)
    for policy in ("drop", "clip"):
        dataset = Coco(tmp_path, "instances.json", masks=True, bad_boxes=policy)
        counts, line = dataset.notes
        assert counts == "1 of 4 boxes is bad: 1 with a bad mask"
        assert line.startswith(named)
        assert expected in line
        assert line.endswith(", left out")
        assert sum(len(dataset.read(index)["masks"]) for index in range(len(dataset))) == 3
    assert Coco(tmp_path, "instances.json").notes == []


def test_a_polygon_that_reaches_outside_is_cut_where_boxes_are(tmp_path: Path) -> None:
    whole = content()
    whole["annotations"][1]["segmentation"] = [[30, 5, 45, 5, 45, 15, 30, 15]]
    path = write(tmp_path, whole)
    dataset = Coco(tmp_path, "instances.json", masks=True)
    assert dataset.notes[1].endswith("partly outside its image, clipped")
    assert sum(len(dataset.read(index)["masks"]) for index in range(len(dataset))) == 4
    assert "partly outside its image, left out" in Coco(tmp_path, path.name, masks=True, bad_boxes="drop").notes[1]


def test_a_polygon_that_crosses_itself_is_filled_as_pycocotools_fills_it(tmp_path: Path) -> None:
    crossing = [[5.0, 5.0, 30.0, 25.0, 30.0, 5.0, 5.0, 25.0]]
    expected = coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(crossing, HEIGHT, WIDTH)))
    assert 0 < expected.sum() < 25 * 20
    assert np.array_equal(filled([crossing])[0], expected)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"image_id": 99}, "has a image_id that no image has: 6 (99)"),
        ({"image_id": "x"}, "has a wrong 'image_id', Input should be a valid integer, unable to parse"),
        ({"category_id": 4}, "has a category_id that no category has: 6 (4)"),
        (
            {"bbox": [1, 2, 3]},
            "has a wrong 'bbox', List should have at least 4 items after validation, not 3: 6 ([1, 2, 3])",
        ),
        ({"bbox": [1, 2, 3, float("nan")]}, "has a wrong 'bbox', Input should be a finite number: 6 ([1, 2, 3, nan])"),
        ({"bbox": [1, 2, 3, 10**400]}, "has a wrong 'bbox', Input should be a"),
        ({"bbox": None}, "has a wrong 'bbox', Input should be a valid list: 6 (None)"),
        ({"area": "big"}, "has a wrong 'area', Input should be a valid number: 6 ('big')"),
        ({"iscrowd": 2}, "has a wrong 'iscrowd', Input should be 0 or 1: 6 (2)"),
        (
            {"keypoints": [1, 2, 2]},
            "has keypoints that are not 3 times x, y and a visibility of 0, 1 or 2: 6",
        ),
        ({"keypoints": [1, 2, 5, 0, 0, 0, 0, 0, 0]}, "has keypoints that are not 3 times x, y and a visibility"),
        ({"id": 5}, "has the same id as another: 5"),
    ],
)
def test_wrong_annotations_are_named(tmp_path: Path, change: dict[str, Any], expected: str) -> None:
    whole = content()
    whole["annotations"][1] |= change
    path = write(tmp_path, whole)
    with pytest.raises(DataError) as caught:
        Coco(tmp_path, "instances.json", masks=True, keypoints=True)
    assert str(caught.value).startswith(f"{path}: 1 problem; annotation ")
    assert expected in str(caught.value)


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    whole = content()
    del whole["annotations"][0]["id"], whole["annotations"][2]["id"], whole["images"][1]["width"]
    whole["annotations"][3]["category_id"] = 77
    with pytest.raises(DataError) as caught:
        Coco(tmp_path, write(tmp_path, whole).name)
    assert str(caught.value).split("; ")[:-1] == [
        f"{tmp_path / 'instances.json'}: 4 problems",
        "image has no 'width': 7",
        "annotation has no 'id': number 1 of the list, number 3 of the list",
        "annotation has a category_id that no category has: 8 (77)",
    ]


def test_annotations_without_any_id_are_numbered(tmp_path: Path) -> None:
    whole = content()
    for entry in whole["annotations"]:
        del entry["id"]
    write(tmp_path, whole)
    dataset = Coco(tmp_path, "instances.json")
    assert len(dataset.read(1)["boxes"]) == 3
    assert dataset.notes == ["annotations have no 'id'; they are numbered in the order of the file"]


def test_a_panoptic_file_is_named(tmp_path: Path) -> None:
    panoptic = {"segments_info": [{"id": 3, "category_id": 3}], "file_name": "7.png", "image_id": 7}
    write(tmp_path, content() | {"annotations": [panoptic]})
    with pytest.raises(DataError, match=r"instances\.json: a panoptic file: .*'segments_info' and no 'bbox'"):
        Coco(tmp_path, "instances.json")


@pytest.mark.parametrize(
    ("whole", "expected"),
    [
        ("{", "not JSON, or damaged"),
        ("[" * 100_000, "not JSON, or damaged"),
        ("[]", "has no list 'categories', 'images', 'annotations'; expected an object with the lists"),
        (content() | {"images": {}}, "has no list 'images'"),
        (content() | {"images": []}, "the list 'images' is empty"),
        (content() | {"categories": []}, "the list 'categories' is empty"),
        (content() | {"images": content()["images"] * 2}, "image has the same id as another: 7, 12, 30"),
        (
            content() | {"categories": [{"id": 3, "name": "a"}, {"id": 90, "name": "a"}]},
            "two categories are called 'a'",
        ),
        (content() | {"annotations": [7]}, "annotation is no object with named values: number 1 of the list (7)"),
        (content() | {"annotations": [{}, {"id": 1}]}, "annotation has no 'id': number 1 of the list"),
        (
            content() | {"images": [{"id": 1, "file_name": ""}]},
            "image has a wrong 'file_name', expected a text: 1 ('')",
        ),
        (
            content() | {"images": [{"id": 1, "file_name": "a", "height": 1 << 16, "width": 1 << 16}]},
            "image has an impossible width and height, 65536×65536: 1",
        ),
        (
            content() | {"categories": [{"id": 3, "name": "a", "keypoints": ["x", "y"], "skeleton": [[1, 3]]}]},
            "category has a skeleton that is no list of pairs from 1 to 2: 3",
        ),
        (
            content() | {"images": [{"id": 1, "file_name": "a", "height": 0, "width": 5}]},
            "image has a wrong 'height', Input should be greater than or equal to 1: 1 (0)",
        ),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, whole: Any, expected: str) -> None:
    path = write(tmp_path, whole)
    with pytest.raises(DataError) as caught:
        Coco(tmp_path, "instances.json")
    assert str(caught.value).startswith(f"{path}: ")
    assert expected in str(caught.value)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, content())
    with pytest.raises(DataError, match=r"absent.json: cannot be read \(No such file or directory\)"):
        Coco(tmp_path, "absent.json")
    with pytest.raises(DataError, match=r"has no category 'dog'; it has person, ant"):
        Coco(tmp_path, "instances.json", classes=["dog"])
    with pytest.raises(DataError, match="none of the categories has keypoints"):
        Coco(tmp_path, "instances.json", classes=["ant"], keypoints=True)
    Image.new("RGB", (9, 9)).save(tmp_path / "images/7.png")
    with pytest.raises(DataError, match=rf"7.png: is 9×9, but {path} says 40×30 of image 7"):
        Coco(tmp_path, "instances.json").read(0)
    whole = content()
    whole["images"][0]["file_name"] = "../../outside.png"
    write(tmp_path, whole)
    with pytest.raises(DataError, match="leads out of"):
        Coco(tmp_path, "instances.json").read(1)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_large_file_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    path = write(tmp_path, content())
    expected = [Coco(tmp_path, "instances.json", masks=True, keypoints=True).read(row) for row in range(3)]
    monkeypatch.setattr("paceline.data.io.json_file._BLOCK", 50)
    path.write_text(json.dumps(content(), indent=1), encoding=encoding)
    dataset = Coco(tmp_path, "instances.json", masks=True, keypoints=True)
    for row in range(3):
        sample = dataset.read(row)
        for name in ("image_id", "boxes", "classes", "crowd", "area", "masks", "keypoints"):
            assert np.array_equal(sample[name], expected[row][name]), name


def test_an_annotation_far_behind_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.data.io.json_file._BLOCK", 50)
    whole = content()
    whole["annotations"] += [annotation(number, 7, 3, [1, 1, 5, 5]) for number in range(20, 90)]
    del whole["annotations"][55]["id"]
    whole["annotations"][70]["area"] = "big"
    path = write(tmp_path, whole)
    with pytest.raises(DataError) as caught:
        Coco(tmp_path, "instances.json")
    assert str(caught.value).split("; ")[:-1] == [
        f"{path}: 2 problems",
        "annotation has a wrong 'area', Input should be a valid number: 86 ('big')",
        "annotation has no 'id': number 56 of the list",
    ]


def test_a_file_beyond_the_memory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(data: bytes, **_: Any) -> str:
        raise MemoryError

    path = write(tmp_path, content())
    monkeypatch.setattr(json, "loads", fail)
    with pytest.raises(DataError, match=f"{re.escape(str(path))}: .* memory"):
        Coco(tmp_path, "instances.json")


def test_a_changed_file_is_read_anew(tmp_path: Path) -> None:
    write(tmp_path, content())
    assert len(Coco(tmp_path, "instances.json")) == 3
    whole = content()
    whole["images"].pop()
    write(tmp_path, whole)
    assert len(Coco(tmp_path, "instances.json")) == 2


def test_a_pack_keeps_category_ids(tmp_path: Path) -> None:
    dataset = Coco(write(tmp_path, content()).parent, "instances.json")
    write_pack(dataset, tmp_path / "coco.pack", None)
    kept = PackedSamples(tmp_path / "coco.pack")
    assert fingerprint(kept).category_ids == dataset.category_ids != [1, 2]
