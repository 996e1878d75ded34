import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from paceline.core.errors import DataError
from paceline.data.datasets.keypoints import Keypoints, known_keypoints

NAMES = ["left_hand", "right_hand", "chin"]
POSITIONS = np.array(
    [
        [[10, 5, 1], [20, 5, 1], [99, 99, 0]],
        [[5, 5, 1], [5, 15, 1], [6, 9, 1]],
        [[1, 1, 0], [2, 2, 0], [7, 7, 1]],
        [[-5, 2, 1], [8, 28, 1], [45, 9, 1]],
    ],
    np.float32,
)


def write(root: Path, positions: Any = POSITIONS, count: int = 4) -> Path:
    (root / "images").mkdir(exist_ok=True)
    for number in range(count):
        Image.new("RGB", (40, 30), (number, 0, 0)).save(root / "images" / f"im{number}.png")
    np.save(root / "joints.npy", positions)
    return root / "joints.npy"


def message(root: Path, **arguments: Any) -> str:
    with pytest.raises(DataError) as caught:
        Keypoints(root, **arguments)
    return str(caught.value)


def test_boxes_hold_the_labelled_joints_and_a_margin(tmp_path: Path) -> None:
    path = write(tmp_path)
    dataset = Keypoints(tmp_path, names=NAMES, margin=0.2, skeleton=[[0, 2]])
    assert (dataset.classes, dataset.channels, len(dataset)) == (["person"], 3, 4)
    assert dataset.joints == (NAMES, [(0, 1)], [(0, 2)])
    first, second, third, fourth = (dataset.read(index) for index in range(4))
    assert first["boxes"].tolist() == [[8, 3, 22, 7]]  # 10 wide, so 2 on each side
    assert first["keypoints"].tolist() == [[[10, 5, 2], [20, 5, 2], [0, 0, 0]]]
    assert first["area"].tolist() == [14 * 4]
    assert second["boxes"].tolist() == [[3, 3, 8, 17]]
    assert fourth["boxes"].tolist() == [[0, 0, 40, 30]]  # cut at the border
    assert fourth["keypoints"][0, :, 0].tolist() == [-5, 8, 45]
    assert third["boxes"].shape == (0, 4)  # a single joint has no extent
    assert third["keypoints"].shape == (0, 3, 3)
    assert third["classes"].shape == third["crowd"].shape == third["area"].shape == (0,)
    assert dataset.notes == [f"{path}: im2.png has no two keypoints that are labeled and apart, so no person"]
    assert [sample["image"][0, 0, 0] for sample in (first, second, third, fourth)] == [0, 1, 2, 3]
    assert dataset.open(1)["image"].width == 40
    assert dataset.path(3) == tmp_path / "images/im3.png"
    assert first["size"].tolist() == [30, 40]


def test_visibility_in_three_steps(tmp_path: Path) -> None:
    positions = POSITIONS.copy()
    positions[0, 0, 2] = 2
    write(tmp_path, positions)
    assert Keypoints(tmp_path, names=NAMES).read(0)["keypoints"][0, :, 2].tolist() == [2, 1, 0]


def test_without_visibility_what_is_no_number_is_not_labelled(tmp_path: Path) -> None:
    positions = POSITIONS[..., :2].copy()
    positions[0, 2] = np.nan
    write(tmp_path, positions)
    assert Keypoints(tmp_path, names=NAMES).read(0)["keypoints"].tolist() == [[[10, 5, 2], [20, 5, 2], [0, 0, 0]]]


def test_a_json_file_names_images_and_joints(tmp_path: Path) -> None:
    write(tmp_path)
    joints = {"im3.png": POSITIONS[1].tolist(), "im1.png": POSITIONS[0].tolist()}
    whole = {"joints": joints, "joint_names": NAMES, "flip_pairs": [[1, 0]]}
    (tmp_path / "joints.json").write_text(json.dumps(whole))
    dataset = Keypoints(tmp_path, file="joints.json")
    assert [dataset.path(index).name for index in range(len(dataset))] == ["im1.png", "im3.png"]
    assert dataset.joints == (NAMES, [(1, 0)], [])
    assert dataset.read(1)["keypoints"].tolist() == [[[5, 5, 2], [5, 15, 2], [6, 9, 2]]]
    (tmp_path / "plain.json").write_text(json.dumps(joints))
    assert Keypoints(tmp_path, file="plain.json", names=NAMES).joints.pairs == [(0, 1)]


def test_splits_are_drawn_or_named(tmp_path: Path) -> None:
    write(tmp_path)
    shares = {"train": 0.75, "test": 0.25}
    parts = [Keypoints(tmp_path, names=NAMES, split=split, split_shares=shares) for split in shares]
    assert [len(part) for part in parts] == [3, 1]
    assert len({part.path(index) for part in parts for index in range(len(part))}) == 4
    (tmp_path / "mine.txt").write_text("im3.png\n\nim1\n")
    mine = Keypoints(tmp_path, names=NAMES, split="mine")
    assert [mine.path(index).name for index in range(2)] == ["im3.png", "im1.png"]
    assert mine.read(1)["keypoints"][0, 0].tolist() == [5, 5, 2]
    (tmp_path / "mine.txt").write_text("im9\n")
    assert "names that have no annotation: im9 (line 1)" in message(tmp_path, names=NAMES, split="mine")
    assert "give `split_shares`" in message(tmp_path, names=NAMES, split="val")


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        (np.zeros((3, 14, 4)), "holds 3 × 14 × 4 of float64, expected [images, keypoints, 3] as x, y and visibility"),
        (np.zeros((4, 14)), "holds 4 × 14 of float64, expected"),
        (np.zeros((0, 14, 3)), "holds 0 × 14 × 3 of float64, expected"),
        (np.array([[["a"] * 3]]), "holds 1 × 1 × 3 of <U1, expected"),
        (np.full((4, 3, 3), 5.0), "has 5.0 as a visibility, expected 0 and 1, or 0, 1 and 2"),
        (np.full((4, 3, 3), [np.nan, 0, 1]), "a keypoint that is labeled lies at a place that is no number"),
        (np.zeros((5, 3, 3)), "has keypoints for 5 images, but"),
        (np.zeros((4, 5, 3)), "has 5 keypoints, but `names` has 3"),
    ],
)
def test_arrays_of_another_shape_are_named(tmp_path: Path, positions: NDArray[Any], expected: str) -> None:
    path = write(tmp_path, positions)
    assert message(tmp_path, names=NAMES).startswith(f"{path}: ")
    assert expected in message(tmp_path, names=NAMES)


@pytest.mark.parametrize(
    ("whole", "expected"),
    [
        ([], 'expected {"joints"'),
        ({"joints": {}}, 'expected {"joints"'),
        ({"a.png": 5}, "joints a.png is 5: Input should be a valid list; expected"),
        (
            {"a.png": [[1, 2, 1]], "b.png": [[1, 2, 1]] * 2},
            "b.png has keypoints [[1.0, 2.0, 1.0], [1.0, 2.0, 1.0]]; expected the same number",
        ),
        ({"a.png": [["1", 2, 1]]}, "joints a.png 0 0 is '1': Input should be a valid number; expected"),
        ({"a.png": [[1, 2, 1]], "b.png": [[1, 2]]}, "b.png has keypoints [[1.0, 2.0]]; expected the same number"),
        ({"joints": {"a.png": [[1, 2, 1]]}, "joint_names": "x"}, "joint_names is 'x': Input should be a valid list"),
    ],
)
def test_json_of_another_shape_is_named(tmp_path: Path, whole: Any, expected: str) -> None:
    path = tmp_path / "joints.json"
    path.write_text(json.dumps(whole))
    assert message(tmp_path, file="joints.json", names=NAMES).startswith(f"{path}: ")
    assert expected in message(tmp_path, file="joints.json", names=NAMES)


def test_pairs_of_the_file_are_checked(tmp_path: Path) -> None:
    whole = {"joints": {"a.png": [[1, 2, 1]] * 3}, "flip_pairs": [[0, 3]], "joint_names": ["a"] * 3}
    (tmp_path / "joints.json").write_text(json.dumps(whole))
    assert "3 keypoints, numbered from 0, but `flip_pairs` has [0, 3]" in message(tmp_path, file="joints.json")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    assert message(tmp_path) == f"{tmp_path / 'joints.npy'}: no such file"
    assert "its extension is .mat, expected .npy or .json" in message(tmp_path, file="joints.mat")
    path = write(tmp_path)
    assert "their names are not known: give them as `names`" in message(tmp_path)
    assert "numbered from 0, but `flip_pairs` has [0, 3]" in message(tmp_path, names=NAMES, flip_pairs=[[0, 3]])
    path.write_bytes(path.read_bytes()[:-9])
    assert message(tmp_path).startswith(f"{path}: cannot be read as an array")
    np.save(path, np.array([{}]), allow_pickle=True)
    assert message(tmp_path).startswith(f"{path}: cannot be read as an array")
    far = POSITIONS.copy()
    far[0, :2, :2] = [[100, 100], [120, 120]]
    write(tmp_path, far)
    with pytest.raises(DataError, match=r"im0\.png: all of its keypoints lie outside the image, which is 40×30"):
        Keypoints(tmp_path, names=NAMES).read(0)


@pytest.mark.parametrize("count", [14, 17])
def test_known_joints_are_flipped_in_pairs(count: int) -> None:
    known = known_keypoints(count)
    assert known is not None
    assert len(known.names) == len(set(known.names)) == count
    assert [known.names[left].split("_")[1] for left, _ in known.pairs] == [
        known.names[right].split("_")[1] for _, right in known.pairs
    ]
    assert (
        sum("left" in name for name in known.names) == sum("right" in name for name in known.names) == len(known.pairs)
    )
    flip = {end: other for pair in known.pairs for end, other in (pair, pair[::-1])}
    limbs = {frozenset(limb) for limb in known.limbs}
    assert {frozenset(flip.get(end, end) for end in limb) for limb in limbs} == limbs  # people are symmetric
    assert {end for limb in limbs for end in limb} == set(range(count))
    assert known_keypoints(5) is None


@pytest.mark.real_data
def test_sports_poses(real_data: Path) -> None:
    root = real_data / "lspet_1000"
    dataset = Keypoints(root)
    assert len(dataset) == 1000
    assert dataset.joints.names[12:] == ["neck", "head_top"]
    assert dataset.joints.pairs == [(0, 5), (1, 4), (2, 3), (6, 11), (7, 10), (8, 9)]
    assert dataset.notes == []
    samples = [dataset.open(index) for index in range(0, 1000, 20)]
    for sample in samples:
        (x1, y1, x2, y2), (keypoints,) = sample["boxes"][0], sample["keypoints"]
        assert keypoints.shape == (14, 3)
        assert 0 <= x1 < x2 <= sample["image"].width
        assert 0 <= y1 < y2 <= sample["image"].height
    named = Keypoints(root, file="joints.json")
    assert named.joints == dataset.joints
    assert abs(named._index["keypoints"] - dataset._index["keypoints"]).max() < 0.051  # written with one digit
    assert [named.path(index) for index in (0, 999)] == [dataset.path(index) for index in (0, 999)]
    parts = [Keypoints(root, split=split, split_shares={"train": 0.8, "test": 0.2}) for split in ("train", "test")]
    assert [len(part) for part in parts] == [800, 200]
