import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError
from support.registered import arguments_of

from paceline.core.errors import ArgumentError, DataError
from paceline.data.datasets.image_mask import ImageMask
from paceline.data.io.image import Encoded
from paceline.data.skip_list import SkipList
from paceline.data.split_loader import SplitLoader

CLASSES = ["road", "tree"]


def paint(path: Path, value: int, size: tuple[int, int] = (6, 4), mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Images a, b and deep/c, of grays 10, 20 and 30, with masks of the ids 0, 1 and 255."""
    for name, gray, number in (("a", 10, 0), ("b", 20, 1), ("deep/c", 30, 255)):
        paint(tmp_path / f"images/{name}.bmp", gray)
        paint(tmp_path / f"masks/{name}.png", number)
    return tmp_path


def contents(dataset: ImageMask) -> list[tuple[int, int]]:
    samples = [dataset.read(index) for index in range(len(dataset))]
    return [(int(sample["image"][0, 0, 0]), int(sample["mask"][0, 0])) for sample in samples]


def test_folders_are_matched_by_name(root: Path) -> None:
    dataset = ImageMask(root, classes=CLASSES, ignore_index=255)
    assert contents(dataset) == [(10, 0), (20, 1), (30, 255)]
    assert (dataset.classes, dataset.channels, dataset.notes) == (CLASSES, 3, [])
    sample = dataset.read(1)
    assert (sample["image"].shape, sample["mask"].shape, sample["mask"].dtype) == ((4, 6, 3), (4, 6), np.uint8)
    assert (dataset.path(2), dataset.mask_path(2)) == (root / "images/deep/c.bmp", root / "masks/deep/c.png")
    assert isinstance(dataset.open(0)["image"], Encoded)
    assert contents(pickle.loads(pickle.dumps(dataset))) == contents(dataset)
    batch = SplitLoader(dataset, [], 0).fetch(0, np.array([1, 0]))
    assert batch["mask"].tolist() == [[[1] * 6] * 4, [[0] * 6] * 4]


def test_folders_have_any_name_and_may_be_one(root: Path, tmp_path: Path) -> None:
    (root / "images").rename(root / "train")
    (root / "masks").rename(root / "trainannot")
    dataset = ImageMask(root, "train", "trainannot", classes=CLASSES, ignore_index=255)
    assert contents(dataset) == [(10, 0), (20, 1), (30, 255)]
    for name in ("x", "y"):
        paint(root / f"both/{name}.jpg", 128, (8, 8))
        paint(root / f"both/{name}.png", 255, (8, 8))
    assert contents(ImageMask(root, "both", "both", binary=True)) == [(128, 255)] * 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("some.txt", "b\ndeep/c\n"),
        ("some.txt", "b.jpg\n\ndeep/c.jpg"),
        ("some.csv", "images/b.bmp,masks/b.png\nimages/deep/c.bmp,masks/deep/c.png\n"),
        ("some.txt", "images/b.bmp masks/b.png\nimages/deep/c.bmp masks/deep/c.png\n"),
        ("some.tsv", "mask\timage\nmasks/b.png\timages/b.bmp\nmasks/deep/c.png\timages/deep/c.bmp"),
        ("some.jsonl", '{"image": "images/b.bmp", "mask": "masks/b.png"}\n'
            '{"image": "images/deep/c.bmp", "mask": "masks/deep/c.png"}\n'),
    ],
)  # fmt: skip
def test_lists_name_those_to_use(root: Path, name: str, text: str) -> None:
    (root / name).write_text(text)
    paint(root / "images/unlabeled.png", 1)
    dataset = ImageMask(root, list_file=name, classes=CLASSES, ignore_index=255)
    assert contents(dataset) == [(20, 1), (30, 255)]


def test_names_with_dots_are_taken_as_they_are(tmp_path: Path) -> None:
    for name in ("a.1", "a.2"):
        paint(tmp_path / f"images/{name}.png", 7)
        paint(tmp_path / f"masks/{name}.png", int(name[2:]) - 1)
    (tmp_path / "list.txt").write_text("a.2\na.1\n")
    assert contents(ImageMask(tmp_path, list_file="list.txt", classes=CLASSES)) == [(7, 1), (7, 0)]


def test_binary_masks_stay_grey(tmp_path: Path) -> None:
    paint(tmp_path / "images/a.png", 1)
    paint(tmp_path / "images/b.png", 2)
    paint(tmp_path / "masks/a.png", 77)
    paint(tmp_path / "masks/b.png", 1)
    dataset = ImageMask(tmp_path, binary=True)
    assert dataset.classes == ["foreground"]
    assert dataset.read(0)["mask"].tolist() == [[77] * 6] * 4
    with pytest.raises(DataError, match=r"masks/b\.png: its largest value is 1, .* `label_map: {foreground: 1-1}`"):
        dataset.read(1)
    mapped = ImageMask(tmp_path, binary=True, label_map={"foreground": "1-255"})
    assert mapped.classes == ["foreground"]
    assert [int(mapped.read(index)["mask"].max()) for index in range(2)] == [255, 255]
    paint(tmp_path / "masks/b.png", 0)
    assert not dataset.read(1)["mask"].any()


def test_masks_may_be_painted(tmp_path: Path) -> None:
    for name, color in (("a", (0, 0, 0)), ("b", (255, 0, 0)), ("c", (9, 9, 9))):
        paint(tmp_path / f"images/{name}.png", 7)
        (tmp_path / "masks").mkdir(exist_ok=True)
        Image.new("RGB", (6, 4), color).save(tmp_path / f"masks/{name}.png")
    colors = [[0, 0, 0], [255, 0, 0]]
    assert contents(ImageMask(tmp_path, classes=CLASSES, colors=colors, ignore_index=255)) == [
        (7, 0),
        (7, 1),
        (7, 255),
    ]
    with pytest.raises(DataError, match=r"c\.png: has \[9, 9, 9\] \(100 % of the pixels\), of none of `colors`"):
        ImageMask(tmp_path, classes=CLASSES, colors=colors).read(2)


def test_pairs_are_split_at_random(tmp_path: Path) -> None:
    for number in range(10):
        paint(tmp_path / f"images/{number}.png", number)
        paint(tmp_path / f"masks/{number}.png", number)
    shares = {"train": 0.5, "test": 0.5}
    halves = [ImageMask(tmp_path, binary=True, split=split, split_shares=shares, split_seed=2) for split in shares]
    assert [len(half) for half in halves] == [5, 5]
    found = [int(half.path(index).stem) for half in halves for index in range(5)]
    assert sorted(found) == list(range(10))
    assert all(half.path(index).name == half.mask_path(index).name for half in halves for index in range(5))


# --- what is wrong ------------------------------------------------------------------------------------------


def test_a_mask_of_another_size(root: Path) -> None:
    paint(root / "masks/b.png", 1, (4, 6))
    dataset = ImageMask(root, classes=CLASSES, ignore_index=255)
    expected = rf"{root}/masks/b\.png: the mask is 4×6 pixels, but its image {root}/images/b\.bmp 6×4"
    with pytest.raises(DataError, match=expected):
        dataset.read(1)
    batch = SplitLoader(dataset, [], 0, SkipList("train", 2)).fetch(0, np.arange(3))
    assert (batch.ids.tolist(), [each.sample for each in batch.skipped]) == ([0, 2], [1])


@pytest.mark.parametrize(("orientation", "suffix"), [(6, "jpg"), (8, "png"), (5, "tif")])
def test_a_mask_that_does_not_lie_as_its_image(tmp_path: Path, orientation: int, suffix: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    (tmp_path / "images").mkdir()
    Image.new("RGB", (60, 40)).save(tmp_path / f"images/a.{suffix}", exif=exif)
    paint(tmp_path / "masks/a.png", 255, (60, 40))
    reported = (
        f"the image carries the Exif orientation {orientation} and is turned upright when it is read, the mask is not"
    )
    with pytest.raises(DataError, match=f"the mask is 60×40 pixels, but its image .* 40×60; {reported}: turn the mask"):
        ImageMask(tmp_path, binary=True).read(0)
    paint(tmp_path / "masks/a.png", 255, (40, 60))
    assert ImageMask(tmp_path, binary=True).read(0)["image"].shape == (60, 40, 3)


def test_ids_that_are_no_class(root: Path) -> None:
    mask = Image.new("L", (6, 4), 1)
    for place, value in enumerate((2, 9, 255, 0)):
        mask.putpixel((place, 0), value)
    mask.save(root / "masks/b.png")
    with pytest.raises(DataError, match=r"b\.png: holds the ids 2, 9, 255; expected 0 to 1, as `classes` has names"):
        ImageMask(root, classes=CLASSES).read(1)
    with pytest.raises(DataError, match=r"b\.png: holds the ids 2, 9; expected"):
        ImageMask(root, classes=CLASSES, ignore_index=255).read(1)


def test_images_without_a_mask_are_named(root: Path) -> None:
    for number in range(7):
        paint(root / f"images/z{number}.png", 1)
    names = ", ".join(f"z{number}.png" for number in range(5))
    with pytest.raises(DataError, match=f"^no mask in {root}/masks for 7 of 10 images: {names} and 2 more; add them"):
        ImageMask(root, classes=CLASSES)


def test_masks_without_an_image_are_reported(root: Path) -> None:
    (root / "images/b.bmp").unlink()
    dataset = ImageMask(root, classes=CLASSES, ignore_index=255)
    assert dataset.notes == [f"1 mask without an image in {root}/images, not used: masks/b.png"]
    assert contents(dataset) == [(10, 0), (30, 255)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\nx\nb\ny\n", r"list\.txt: no image in .*images for 2 of 4 names: x \(line 2\), y \(line 4\)"),
        ("a\nspare\n", r"list\.txt: no mask in .*masks for 1 of 2 names: spare \(line 2\)"),
        ("", r"list\.txt: the list is empty"),
        ("a.bmp a.png\nb.bmp\n", r"list\.txt, line 2: 1 column, expected at least 2"),
    ],
)
def test_lists_that_are_wrong(root: Path, text: str, message: str) -> None:
    paint(root / "images/spare.png", 1)
    (root / "list.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        ImageMask(root, list_file="list.txt", classes=CLASSES)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("list.list", "a\n", r"list\.list: its extension is none of \.csv, .*; rename it$"),
        (
            "list.txt",
            "images/a.bmp,masks/a.png\n",
            "the line holds ','; if that separates columns, name the list .csv$",
        ),
        (
            "list.json",
            '[{"file": "a"}]',
            "no column 'image' in its first object, which has file; call the columns image and mask$",
        ),
        ("list.json", "[1]", "item 1: expected an object, got 1"),
        ("list.csv", "img,mask\na,b\n", "no column 'image' in its first line, .*; call the columns image and mask$"),
    ],
)
def test_lists_that_are_wrong_are_to_be_changed(root: Path, name: str, text: str, message: str) -> None:
    (root / name).write_text(text)
    with pytest.raises(DataError, match=message):
        ImageMask(root, list_file=name, classes=CLASSES)


def test_comments_and_a_first_line_of_names_in_a_list_of_pairs(root: Path) -> None:
    for text in ("# a\n#a\nb\na\n", "#about a list\nb.bmp\n#\na.bmp\n"):
        (root / "list.txt").write_text(text)
        assert contents(ImageMask(root, list_file="list.txt", classes=CLASSES)) == [(20, 1), (10, 0)]
    (root / "list.csv").write_text("image,mask\n# b,c\n#images/a.bmp,x\nimages/b.bmp,masks/b.png\n")
    dataset = ImageMask(root, list_file="list.csv", classes=CLASSES)
    assert contents(dataset) == [(20, 1)]
    assert dataset.notes == []


def test_files_of_two_columns_that_are_not_there_are_reported_at_once(root: Path) -> None:
    lines = ["images/a.bmp,masks/a.png", "", "images/b.bmp,masks/x.png", "images/y.bmp,nowhere/y.png"]
    (root / "list.csv").write_text("\n".join(lines))
    named = r"masks/x\.png \(line 3\), images/y\.bmp \(line 4\), nowhere/y\.png \(line 4\); add them"
    with pytest.raises(DataError, match=rf"^{root}/list\.csv: 3 of the 6 files .* are not in {root}: {named}"):
        ImageMask(root, list_file="list.csv", classes=CLASSES)
    (root / "list.csv").write_text("\n".join(f"images/{number}.bmp,masks/a.png" for number in range(9)))
    with pytest.raises(DataError, match=r"9 of the 18 files .*, images/4\.bmp \(line 5\) and 4 more; add them"):
        ImageMask(root, list_file="list.csv", classes=CLASSES)


def test_a_file_of_two_columns_that_is_removed_later_is_reported_at_the_next_start(root: Path) -> None:
    (root / "list.csv").write_text("images/a.bmp,masks/a.png\nimages/b.bmp,masks/b.png")
    assert contents(ImageMask(root, list_file="list.csv", classes=CLASSES)) == [(10, 0), (20, 1)]
    (root / "masks/b.png").unlink()
    with pytest.raises(DataError, match=r"masks/b\.png \(line 2\)"):
        ImageMask(root, list_file="list.csv", classes=CLASSES)
    paint(root / "masks/b.png", 1)
    assert contents(ImageMask(root, list_file="list.csv", classes=CLASSES)) == [(10, 0), (20, 1)]


def test_files_of_a_list_that_lie_outside(root: Path) -> None:
    outside = root.parent / f"{root.name}-outside"
    paint(outside / "z.png", 1)
    lines = [f"images/a.bmp,../{outside.name}/z.png", f"../{outside.name}/z.png,masks/a.png"]
    (root / "list.csv").write_text("\n".join(lines))
    dataset = ImageMask(root, list_file="list.csv", classes=CLASSES)
    for number in (0, 1):
        with pytest.raises(DataError, match=rf"list\.csv, line {number + 1}: .*leads out of {root}"):
            dataset.read(number)
    followed = ImageMask(root, list_file="list.csv", classes=CLASSES, follow_links=True)
    assert followed.read(0)["mask"][0, 0] == 1


def test_folders_that_are_not_as_expected(root: Path) -> None:
    with pytest.raises(DataError, match=r"absent: no such folder; expected one with the folders images and masks"):
        ImageMask(root / "absent", classes=CLASSES)
    with pytest.raises(DataError, match=r"labels: no such folder; give the folders of images and masks"):
        ImageMask(root, masks="labels", classes=CLASSES)
    with pytest.raises(DataError, match=r"absent\.txt: no such file; `list_file` is looked for in `root`"):
        ImageMask(root, list_file="absent.txt", classes=CLASSES)
    with pytest.raises(DataError, match=r"images: no images in this folder; expected files with the extensions \.webp"):
        ImageMask(root, extensions=[".webp"], classes=CLASSES)
    paint(root / "images/a.png", 1)
    with pytest.raises(DataError, match="have the same name but for their extensions"):
        ImageMask(root, classes=CLASSES)
    with pytest.raises(DataError, match="leads out of"):
        ImageMask(root / "masks", images="../images", masks=".", classes=CLASSES)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"binary": True, "classes": ["a"]},
        {"binary": True, "ignore_index": 3},
        {"classes": ["a"], "ignore_index": 256},
        {"classes": [str(number) for number in range(257)]},
        {"classes": ["a"], "split": "train"},
        {"classes": ["a", "b"], "colors": [[1, 2, 3]]},
        {"classes": ["a", "b"], "colors": [[1, 2, 3], [1, 2, 3]]},
        {"classes": ["a"], "colors": [[1, 2, 256]]},
        {"classes": ["a"], "colors": [[1, 2, 3]], "label_map": {"a": 1}},
        {"label_map": {"a": -1}},
        {"label_map": {"a": "1 to 3"}},
        {"label_map": {}},
        {"binary": True, "colors": [[1, 2, 3]]},
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        arguments_of("dataset", "image_mask").model_validate({"root": "x", **arguments})


def test_a_spare_mask_whose_name_is_not_utf_8(root: Path) -> None:
    paint(root / "masks/spare.png", 1)
    (root / "masks/spare.png").rename(os.fsdecode(os.fsencode(root) + b"/masks/sp\xe4r.png"))
    dataset = ImageMask(root, classes=CLASSES, ignore_index=255)
    assert dataset.notes == [
        f"1 mask without an image in {root}/images, not used: masks/sp\N{REPLACEMENT CHARACTER}r.png"
    ]


# --- patterns of names --------------------------------------------------------------------------------------


def test_masks_are_named_by_a_pattern(root: Path) -> None:
    for name in ("a", "b", "deep/c"):
        (root / f"masks/{name}.png").rename(root / f"masks/{name}_mask.png")
    dataset = ImageMask(root, masks="masks/{stem}_mask.png", classes=CLASSES, ignore_index=255)
    assert contents(dataset) == [(10, 0), (20, 1), (30, 255)]
    assert dataset.mask_path(2) == root / "masks/deep/c_mask.png"
    assert contents(ImageMask(root, masks="masks/{stem}_mask", classes=CLASSES, ignore_index=255)) == contents(dataset)
    (root / "some.txt").write_text("b\n")
    chosen = ImageMask(root, masks="masks/{stem}_mask.png", list_file="some.txt", classes=CLASSES)
    assert contents(chosen) == [(20, 1)]


def test_masks_may_lie_beside_the_images_and_images_have_a_pattern_too(tmp_path: Path) -> None:
    for name in ("x", "y"):
        paint(tmp_path / f"both/{name}.png", 128)
        paint(tmp_path / f"both/{name}_mask.png", 1)
        paint(tmp_path / f"left/city/{name}_left.png", 7)
        paint(tmp_path / f"fine/city/{name}_ids.png", 1)
        paint(tmp_path / f"fine/city/{name}_color.png", 99)
    assert contents(ImageMask(tmp_path, "both", "{stem}_mask.png", classes=CLASSES)) == [(128, 1)] * 2
    city = ImageMask(tmp_path, "left/{stem}_left.png", "fine/{stem}_ids.png", classes=CLASSES)
    assert contents(city) == [(7, 1)] * 2
    assert city.mask_path(1) == tmp_path / "fine/city/y_ids.png"


@pytest.mark.parametrize("pattern", ["masks/{name}.png", "{stem}/mask.png", "{stem}_{stem}.png", "masks/{stem"])
def test_patterns_that_make_no_sense(root: Path, pattern: str) -> None:
    with pytest.raises(ArgumentError, match="masks: expected a folder, or a pattern"):
        ImageMask(root, masks=pattern, classes=CLASSES)


def test_without_any_mask_the_pattern_that_would_match_is_reported(root: Path) -> None:
    for name in ("a", "b", "deep/c"):
        (root / f"masks/{name}.png").rename(root / f"masks/{name}_mask.png")
    found = r"no mask in .*/masks for 3 of 3 images: images are called a\.bmp, b\.bmp and 1 more, masks a_mask\.png, "
    with pytest.raises(DataError, match=found + r'b_mask\.png and 1 more; add `masks: "masks/{stem}_mask\.png"`$'):
        ImageMask(root, classes=CLASSES)
    (root / "all.txt").write_text("a\nb\n")
    with pytest.raises(DataError, match=r'all\.txt: no mask .* 2 of 2 .*add `masks: "masks/{stem}_mask\.png"`$'):
        ImageMask(root, list_file="all.txt", classes=CLASSES)
    with pytest.raises(DataError, match=r"for 3 of 3 .*; name masks after their images, or give a pattern"):
        ImageMask(root, images="masks", masks="images", classes=CLASSES)
    paint(root / "other/x.png", 1)
    (root / "empty").mkdir()
    with pytest.raises(DataError, match=r"for 1 of 1 .*masks none; name masks after their images, or give a pattern"):
        ImageMask(root, images="other", masks="empty", classes=CLASSES)


# --- ids that are merged or mapped --------------------------------------------------------------------------


def test_instances_become_classes(tmp_path: Path) -> None:
    for name, ids in (("a", (0, 1, 2)), ("b", (0, 7, 200))):
        paint(tmp_path / f"images/{name}.png", 5, (3, 1))
        (tmp_path / "masks").mkdir(exist_ok=True)
        mask = Image.new("L", (3, 1))
        mask.putdata(ids)
        mask.save(tmp_path / f"masks/{name}.png")
    people = ImageMask(tmp_path, label_map={"person": "1-255"})
    assert people.classes == ["background", "person"]
    assert [people.read(index)["mask"].tolist() for index in range(2)] == [[[0, 1, 1]]] * 2
    named = ImageMask(tmp_path, classes=["person", "ground"], label_map={"ground": 0, "person": [1, "2-199", 200]})
    assert named.read(1)["mask"].tolist() == [[1, 0, 0]]
    few: dict[str, Any] = {"cat": 1, "dog": [2, 7]}
    with pytest.raises(DataError, match=r"b\.png: holds the ids 200, which are not in `label_map`; add them"):
        ImageMask(tmp_path, label_map=few).read(1)
    ignored = ImageMask(tmp_path, label_map=few, ignore_index=255)
    assert (ignored.classes, ignored.read(1)["mask"].tolist()) == (["background", "cat", "dog"], [[0, 2, 255]])
    with pytest.raises(DataError, match=r"holds the ids 2; .*merge ids, as with `label_map: {tree: 1-2}`"):
        ImageMask(tmp_path, classes=CLASSES).read(0)


def test_ids_of_16_bits_are_mapped(tmp_path: Path) -> None:
    paint(tmp_path / "images/a.png", 5, (3, 1))
    (tmp_path / "masks").mkdir()
    Image.fromarray(np.array([[7, 26_001, 26_017]], np.uint16)).save(tmp_path / "masks/a.png")
    city = ImageMask(tmp_path, label_map={"road": 7, "car": "26000-26999"})
    assert city.read(0)["mask"].tolist() == [[1, 2, 2]]
    assert city.read(0)["mask"].dtype == np.uint8


@pytest.mark.parametrize(
    ("label_map", "message"),
    [
        ({"wolf": 1}, "'wolf' is no class; the classes are road, tree"),
        ({"tree": "9-3"}, "expected a range of ids from 0 to 65535, got 9-3"),
        ({"tree": "1-9", "road": 5}, "the id 5 belongs to two classes"),
    ],
)
def test_label_maps_that_make_no_sense(root: Path, label_map: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ImageMask(root, classes=CLASSES, label_map=label_map)


# --- real data ----------------------------------------------------------------------------------------------


@pytest.mark.real_data
def test_ecssd(real_data: Path) -> None:
    arguments = arguments_of("dataset", "image_mask")(
        root=str(real_data / "ecssd"), masks="ground_truth_mask", binary=True
    ).model_dump()
    train, test = (ImageMask(**arguments | {"list_file": name}) for name in ("train.txt", "test.txt"))
    assert (len(train), len(test), len(ImageMask(**arguments))) == (700, 300, 1000)
    assert {train.path(index) for index in range(700)}.isdisjoint({test.path(index) for index in range(300)})
    sample = test.read(0)
    assert sample["image"].shape[:2] == sample["mask"].shape
    assert (sample["mask"].min(), sample["mask"].max()) == (0, 255)


@pytest.mark.real_data
def test_camvid(real_data: Path) -> None:
    classes = ["Sky", "Building", "Pole", "Road", "Pavement", "Tree"]
    classes += ["SignSymbol", "Fence", "Car", "Pedestrian", "Bicyclist"]
    counts = {"train": 367, "val": 101, "test": 233}
    for split, count in counts.items():
        dataset = ImageMask(real_data / "camvid_jpg", split, f"{split}annot", classes=classes, ignore_index=11)
        assert len(dataset) == count
        for index in range(0, count, 25):
            sample = dataset.read(index)
            assert sample["image"].shape == (360, 480, 3)
            assert sample["mask"].shape == (360, 480)
    with pytest.raises(DataError, match="holds the ids 11; expected 0 to 10"):
        ImageMask(real_data / "camvid_jpg", "train", "trainannot", classes=classes).read(0)
