"""Boxes in CSV files, as they are passed around."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from paceline.core.errors import DataError
from paceline.data.datasets.box_list import BoxList


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "photos").mkdir()
    for name in "abc":
        Image.new("RGB", (40, 20)).save(tmp_path / f"photos/{name}.png")
    return tmp_path


def boxes(root: Path, text: str, **arguments: Any) -> BoxList:
    (root / "boxes.csv").write_text(text)
    return BoxList(root / "boxes.csv", **arguments)


LINES = "photos/b.png,1,2,30,12,dog\nphotos/a.png,0,0,40,20,cat\nphotos/b.png,5,5,9,9,cat\nphotos/c.png,,,,,\n"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (LINES, {}),
        ("image,xmin,ymin,xmax,ymax,label\n" + LINES, {}),
        ("filename,x1,y1,x2,y2,class\n" + LINES, {}),
        ("f;l;t;r;b;k\n" + LINES.replace(",", ";"), {"image": "f", "box": ["l", "t", "r", "b"], "label": "k"}),
        ("id," + "image,xmin,ymin,xmax,ymax,label\n" + "".join(f"7,{line}\n" for line in LINES.splitlines()), {}),
    ],
)
def test_columns_by_name_and_number(root: Path, text: str, arguments: dict[str, Any]) -> None:
    data = boxes(root, text, **arguments)
    assert data.classes == ["cat", "dog"]
    assert [data.path(k).name for k in range(len(data))] == ["b.png", "a.png", "c.png"]
    assert data.read(0)["boxes"].tolist() == [[1, 2, 30, 12], [5, 5, 9, 9]]
    assert [data.read(k)["classes"].tolist() for k in range(3)] == [[1, 0], [0], []]
    assert data.notes == []


def test_other_box_formats_and_the_order_of_a_tensorflow_file(root: Path) -> None:
    corner = boxes(root, "image,x,y,width,height,label\nphotos/a.png,10,5,20,10,cat\n", box_format="xywh")
    assert corner.read(0)["boxes"].tolist() == [[10, 5, 30, 15]]
    center = boxes(root, "image,cx,cy,w,h,label\nphotos/a.png,20,10,20,10,cat\n", box_format="cxcywh")
    assert center.read(0)["boxes"].tolist() == [[10, 5, 30, 15]]
    text = "filename,width,height,class,xmin,ymin,xmax,ymax\nphotos/a.png,40,20,cat,10,5,30,15\n"
    assert boxes(root, text).read(0)["boxes"].tolist() == [[10, 5, 30, 15]]


def test_a_root_a_split_and_classes(root: Path) -> None:
    (root / "photos/boxes.csv").write_text(LINES.replace("photos/", ""))
    assert len(BoxList(Path("boxes.csv"), root=root / "photos").read(0)["boxes"]) == 2
    shares = {"train": 0.67, "val": 0.33}
    parts = [boxes(root, LINES, split=split, split_shares=shares) for split in shares]
    assert [len(part) for part in parts] == [2, 1]
    assert boxes(root, LINES, classes=["dog", "cat"]).read(0)["classes"].tolist() == [0, 1]


def test_problems_are_reported_at_once_and_bad_boxes_too(root: Path) -> None:
    text = "image,xmin,ymin,xmax,ymax,label\na.png,1,2,x,4,cat\n,1,2,3,4,cat\na.png,1,2,3,4,\na.png,1\n"
    with pytest.raises(DataError) as caught:
        boxes(root, text)
    for part in (
        "boxes.csv: 4 problems",
        "boxes that are not four numbers: line 2 (1, 2, x, 4)",
        "lines without the name of an image: line 3",
        "boxes without a label: line 4",
        "lines of fewer than 6 columns: line 5",
    ):
        assert part in str(caught.value)
    data = boxes(root, "photos/a.png,30,5,50,15,cat\nphotos/a.png,3,3,3,9,cat\n")
    assert data.notes[0] == "2 of 2 boxes are bad: 1 partly outside its image, 1 empty"
    assert data.notes[1].endswith("boxes.csv, line 1 (cat), 30 5 50 15: partly outside its image, clipped")
    assert data.read(0)["boxes"].tolist() == [[30, 5, 40, 15]]


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("", {}, "the list is empty"),
        ("image,xmin,ymin,xmax,ymax,label\n", {}, "the list has no boxes"),
        ("image,left,top\na.png,1,2\n", {}, "no column 'xmax' in its first line, which has image, left, top; give the"),
        (LINES, {"classes": ["cat"]}, "the class 'dog' is not in `classes`: line 1; `classes` has cat"),
        ("photos/c.png,,,,,\n", {}, "no annotation has an object"),
    ],
)
def test_lists_that_are_wrong(root: Path, text: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        boxes(root, text, **arguments)
    with pytest.raises(DataError, match=r"gone\.csv: no such file; expected a CSV file with a box per line"):
        BoxList(root / "gone.csv")
