"""YOLO data sets as they are exported: a YAML file, folders of images and text files of boxes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image

from paceline.core.errors import ArgumentError, DataError
from paceline.data.datasets.yolo import Yolo

YAML = "path: .\ntrain: images/train\nval: images/val\nnames: {0: cat, 1: dog}\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two images of 40×20 to train on, the second without objects, and one to measure."""
    for name in ("train/a", "train/b", "val/c"):
        for folder in ("images", "labels"):
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 20)).save(tmp_path / f"images/{name}.png")
        (tmp_path / f"labels/{name}.txt").write_text(
            "" if name == "train/b" else "1 0.5 0.5 0.25 0.5\n\n0 0.5 0.5 1 1\n"
        )
    (tmp_path / "data.yaml").write_text(YAML)
    return tmp_path


def test_shares_become_pixels(root: Path) -> None:
    data = Yolo(root / "data.yaml")
    assert (data.classes, len(data), [data.path(k).name for k in range(2)]) == (["cat", "dog"], 2, ["a.png", "b.png"])
    sample = data.read(0)
    assert sample["boxes"].tolist() == [[15, 5, 25, 15], [0, 0, 40, 20]]
    assert (sample["classes"].tolist(), sample["area"].tolist()) == ([1, 0], [100, 800])
    assert (sample["image"].shape, sample["size"].tolist()) == ((20, 40, 3), [20, 40])
    assert data.read(1)["boxes"].shape == (0, 4)
    assert data.notes == []
    assert len(Yolo(root / "data.yaml", split="val")) == 1


@pytest.mark.parametrize(
    "text",
    [
        "train: images/train\nnames: [cat, dog]\n",
        "train: ../images/train\nval: ../images/val\nnc: 2\nnames: ['cat', 'dog']\n",
        "path: ../gone\ntrain: [images/train]\nnames: [cat, dog]\n",
        "train: list.txt\nnames: [cat, dog]\n",
    ],
)
def test_splits_are_written_in_several_ways(root: Path, text: str) -> None:
    (root / "data.yaml").write_text(text)
    (root / "list.txt").write_text("./images/train/a.png\nimages/train/b.png\n")
    data = Yolo(root / "data.yaml")
    assert ([data.path(k).name for k in range(len(data))], len(data.read(0)["boxes"])) == (["a.png", "b.png"], 2)


def test_files_may_begin_with_a_byte_order_mark(root: Path) -> None:
    (root / "data.yaml").write_text("train: list.txt\nnames: [cat, dog]\n", encoding="utf-8-sig")
    (root / "list.txt").write_text("images/train/a.png\n", encoding="utf-8-sig")
    (root / "labels/train/a.txt").write_text("1 0.5 0.5 1 1\n", encoding="utf-8-sig")
    data = Yolo(root / "data.yaml")
    assert (data.path(0).name, data.read(0)["classes"].tolist()) == ("a.png", [1])


def test_outlines_and_confidences(root: Path) -> None:
    (root / "labels/train/a.txt").write_text("0 0.25 0.5 0.75 0.5 0.5 1\n1 0.5 0.5 0.5 0.5 0.87\n")
    assert Yolo(root / "data.yaml").read(0)["boxes"].tolist() == [[10, 10, 30, 20], [10, 5, 30, 15]]


POSE_3D = "0 .5 .5 .2 .2 .45 .45 2 .55 .45 1 .45 .55 0 .55 .55 2"  # 4 keypoints: as many numbers as an outline has
POSE_2D = "0 .5 .5 .2 .2 .45 .45 .55 .45 .5 .55"
POSE_ODD = "0 .5 .5 .2 .2 .45 .45 1 .55 .45 1 .5 .55 0"
POSES = {
    3: ("1 .5 .5 .5 .5 .25 .5 2 .75 .25 1 0 0 0", [[10, 10, 2], [30, 5, 1], [0, 0, 0]]),
    2: ("1 .5 .5 .5 .5 .25 .5 .75 .25 -1 -1", [[10, 10, 2], [30, 5, 2], [0, 0, 0]]),
}
SHAPES = [(POSE_3D, [4, 3]), (POSE_2D, [3, 2]), (POSE_ODD, [3, 3])]


@pytest.mark.parametrize(("line", "shape"), SHAPES)
@pytest.mark.parametrize("is_key", [True, False])
def test_the_box_before_keypoints_is_read(root: Path, line: str, shape: list[int], is_key: bool) -> None:
    (root / "labels/train/a.txt").write_text(f"{line}\n1 .5 .5 1 1\n")
    (root / "data.yaml").write_text(YAML + ("" if is_key else f"kpt_shape: {shape}\n"))
    data = Yolo(root / "data.yaml", kpt_shape=shape if is_key else None)
    assert data.read(0)["boxes"].round(3).tolist() == [[16, 8, 24, 12], [0, 0, 40, 20]]
    number = 5 + (shape[0] + 1) * shape[1]
    with pytest.raises(DataError, match=rf"{number} numbers .*kpt_shape.*labels/train/a\.txt line 1"):
        Yolo(root / "data.yaml", kpt_shape=[shape[0] + 1, shape[1]])


@pytest.mark.parametrize("columns", POSES)
def test_keypoints_become_pixels(root: Path, columns: int) -> None:
    line, expected = POSES[columns]
    (root / "labels/train/a.txt").write_text(f"{line}\n0 .5 .5 0 0 {line[13:]}\n0 .5 .5 1 1\n{line}\n")
    (root / "data.yaml").write_text(YAML + f"kpt_shape: [3, {columns}]\nflip_idx: [1, 0, 2]\n")
    data = Yolo(root / "data.yaml", keypoints=True)
    assert data.joints == (["0", "1", "2"], [(0, 1)], [])
    assert data.read(0)["keypoints"].tolist() == [expected, [[0] * 3] * 3, expected]  # the empty box is left out
    assert data.read(1)["keypoints"].shape == (0, 3, 3)
    alone = Yolo(root / "data.yaml", keypoints=True, per_object=True)
    assert [alone.path(row).name for row in range(len(alone))] == ["a.png", "a.png"]
    assert alone.read(1)["keypoints"].tolist() == [expected]
    assert alone.read(1)["boxes"].tolist() == [[10, 5, 30, 15]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kpt_shape: [17, 3]", ("nose", [(1, 2), (3, 4)], 19)),
        (
            "kpt_shape: [2, 3]\nkpt_names: {0: [left_ear, right_ear], 1: [left_ear, right_ear]}",
            ("left_ear", [(0, 1)], 0),
        ),
        ("kpt_shape: [2, 3]\nkpt_names: [a, b]\nflip_idx: [0, 1]", ("a", [], 0)),
        ("kpt_shape: [2, 3]\nkpt_names: {0: [a, b], 1: [b, a]}", "`kpt_names` is .*, expected 2 names"),
        ("kpt_shape: [2, 3]\nflip_idx: [1, 2]", "`flip_idx` is .*, expected each number from 0 to 1 once"),
        ("kpt_shape: [0, 0]", "has no keypoints; set `kpt_shape"),
        ("", "has no keypoints; set `kpt_shape"),
    ],
)
def test_the_names_of_keypoints(root: Path, text: str, expected: str | tuple[str, list[tuple[int, int]], int]) -> None:
    (root / "labels/train/a.txt").write_text("")
    (root / "data.yaml").write_text(YAML + text)
    if isinstance(expected, str):
        with pytest.raises(DataError, match=rf"data\.yaml: {expected}"):
            Yolo(root / "data.yaml", keypoints=True)
        return
    joints = Yolo(root / "data.yaml", keypoints=True).joints
    assert joints is not None
    assert (joints.names[0], joints.pairs[:2], len(joints.limbs)) == expected


def test_classes_without_names_are_numbered(root: Path) -> None:
    (root / "data.yaml").write_text("train: images/train\nnc: 3\n")
    assert Yolo(root / "data.yaml").classes == ["class_0", "class_1", "class_2"]


@pytest.mark.parametrize(
    "lines",
    [
        [POSE_3D],  # a visibility of 2 is no place in an image
        [POSE_ODD],  # outlines have pairs of numbers
        [POSE_2D],  # could be either
        [POSE_3D.replace("2 ", "1 ").replace(" 2", " 1"), "0 .5 .5 .2 .2"],
        ["0 .5 .5 .75 .5 .5 1", POSE_3D],
    ],
)
def test_what_may_be_keypoints_is_never_guessed(root: Path, lines: list[str]) -> None:
    (root / "labels/train/a.txt").write_text("\n".join(lines))
    number = next(number for number, line in enumerate(lines, 1) if len(line.split()) > 7)
    with pytest.raises(DataError, match=rf"kpt_shape.*labels/train/a\.txt line {number}"):
        Yolo(root / "data.yaml")


def test_outlines_are_known_by_their_lengths_or_by_what_they_say(root: Path) -> None:
    (root / "labels/train/a.txt").write_text(f"{POSE_2D}\n0 .5 .5 .75 .5 .5 1\n")
    assert Yolo(root / "data.yaml").read(0)["boxes"].round(3).tolist() == [[8, 4, 22, 11], [20, 10, 30, 20]]
    (root / "labels/train/a.txt").write_text(f"{POSE_2D}\n0 .5 .5 1.2 .5 .5 1\n")
    with pytest.raises(DataError, match=r"kpt_shape.*a\.txt line 2"):
        Yolo(root / "data.yaml")
    assert Yolo(root / "data.yaml", kpt_shape=[0, 0]).read(0)["boxes"].tolist()[1] == [20, 10, 40, 20]


@pytest.mark.parametrize("shape", [17, [17, 4], [17, 1], [0, 3], [17, 3, 1]])
def test_keypoints_have_two_or_three_numbers(root: Path, shape: object) -> None:
    (root / "data.yaml").write_text(YAML + f"kpt_shape: {shape}\n")
    with pytest.raises(DataError, match=rf"data\.yaml: `kpt_shape` is {re.escape(str(shape))}; .*2 or 3"):
        Yolo(root / "data.yaml")
    if isinstance(shape, list):
        with pytest.raises(ArgumentError) as refusal:
            Yolo(root / "data.yaml", kpt_shape=shape)
        assert refusal.value.argument == "kpt_shape"


@pytest.mark.parametrize("deep", ["marks", "marks/train", "marks/images/train"])
def test_labels_lie_in_a_folder_of_their_own(root: Path, deep: str) -> None:
    (root / deep).mkdir(parents=True)
    for name in "ab":
        (root / f"labels/train/{name}.txt").rename(root / deep / f"{name}.txt")
    with pytest.raises(DataError, match=r"images/train/a\.png needs .*labels/train/a\.txt.*`labels`"):
        Yolo(root / "data.yaml")
    data = Yolo(root / "data.yaml", labels="marks" if "images" in deep else deep)
    assert [len(data.read(k)["boxes"]) for k in range(2)] == [2, 0]
    (root / deep / "b.txt").unlink()
    data = Yolo(root / "data.yaml", labels="marks")
    assert data.notes == ["1 of 2 images have no label file: b.png"]
    (root / deep / "b.txt").write_text("0 .5 .5 1 1\n")
    assert len(Yolo(root / "data.yaml", labels="marks").read(1)["boxes"]) == 1, "a new label file is seen"


def test_a_folder_of_labels_that_does_not_fit(root: Path) -> None:
    with pytest.raises(DataError, match=r"data\.yaml: .*/nowhere is no folder.*`labels`"):
        Yolo(root / "data.yaml", labels="nowhere")
    (root / "marks").mkdir()
    (root / "marks/frame_1.txt").touch()
    with pytest.raises(DataError, match=r"images/train/a\.png needs .*marks/a\.txt; .*marks has frame_1\.txt"):
        Yolo(root / "data.yaml", labels="marks")
    (root / "images/train/more").mkdir()
    (root / "images/train/b.png").rename(root / "images/train/more/a.png")
    (root / "marks/a.txt").write_text("0 .5 .5 1 1\n")
    with pytest.raises(DataError, match=r"marks/a\.txt: is the label file of .*train/a\.png and of .*more/a\.png"):
        Yolo(root / "data.yaml", labels="marks")
    (root / "marks/more").mkdir()
    (root / "marks/more/a.txt").touch()
    data = Yolo(root / "data.yaml", labels="marks")
    assert [len(data.read(k)["boxes"]) for k in range(2)] == [1, 0]


def test_images_without_a_label_file_are_reported(root: Path) -> None:
    (root / "labels/train/b.txt").unlink()
    assert Yolo(root / "data.yaml").notes == ["1 of 2 images have no label file: b.png"]
    (root / "labels/train/b.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    assert len(Yolo(root / "data.yaml").read(1)["boxes"]) == 1, "a new label file is seen"
    for name in "ab":
        (root / f"labels/train/{name}.txt").unlink()
    with pytest.raises(
        DataError, match=r"no image has a label file: .*images/train/a\.png needs .*labels/train/a\.txt"
    ):
        Yolo(root / "data.yaml")


def test_all_problems_are_reported_at_once(root: Path) -> None:
    (root / "labels/train/a.txt").write_text("0 0.5 0.5\ncat 0.5 0.5 1 1\n7 0.5 0.5 1 1\n")
    (root / "labels/train/b.txt").write_text("0 120 80 40 30\n")
    with pytest.raises(DataError) as caught:
        Yolo(root / "data.yaml")
    for part in (
        "data.yaml: 4 problems",
        "lines that are no label: labels/train/a.txt line 1 ('0 0.5 0.5'), labels/train/a.txt line 2",
        "classes that are not 0 to 1: labels/train/a.txt line 3 (7)",
        "boxes in pixels, not as shares of the image: labels/train/b.txt line 1",
    ):
        assert part in str(caught.value)


def test_bad_boxes_are_reported(root: Path) -> None:
    (root / "labels/train/a.txt").write_text("0 0.9 0.5 0.4 0.5\n1 0.5 0.5 0 0.5\n")
    data = Yolo(root / "data.yaml")
    assert data.notes[0] == "2 of 2 boxes are bad: 1 partly outside its image, 1 empty"
    assert "labels/train/a.txt line 1 (cat): partly outside its image, clipped" in data.notes[1]
    assert data.read(0)["boxes"].round(3).tolist() == [[28, 5, 40, 15]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1", "not YAML, or damaged"),
        ("- a\n", "expected keys such as path, train, val and names"),
        ("train: images/train\n", "`names` is None, expected a list of class names"),
        ("train: images/train\nnames: {1: a, 2: b}\n", "`names` is"),
        ("val: images/val\nnames: [a]\n", "has no split 'train'; it has val"),
        ("train: nowhere\nnames: [a]\n", "nowhere is neither .*give the folder of the data as `root`"),
    ],
)
def test_files_that_are_wrong_are_named(root: Path, text: str, message: str) -> None:
    (root / "data.yaml").write_text(text)
    with pytest.raises(DataError, match=rf"data\.yaml: .*{message}" if "damaged" not in message else message):
        Yolo(root / "data.yaml")


def test_what_leads_out_is_refused(root: Path) -> None:
    (root / "set").mkdir()
    (root / "set/data.yaml").write_text(f"path: {root}\ntrain: images/train\nnames: [cat, dog]\n")
    with pytest.raises(DataError, match="leads out of"):
        Yolo(root / "set/data.yaml")
    assert len(Yolo(root / "set/data.yaml", follow_links=True)) == 2
    assert len(Yolo(Path("set/data.yaml"), root=root)) == 2
