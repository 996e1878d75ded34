from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.core.errors import DataError
from paceline.data.datasets import voc as voc_xml
from paceline.data.datasets.voc import Voc

CAT = ("cat", (1, 1, 40, 30))


def xml(*objects: tuple[str, tuple[float, ...]], size: tuple[int, int] | None = (40, 30), difficult: int = 0) -> str:
    parts = [f"<size><width>{size[0]}</width><height>{size[1]}</height></size>"] if size else []
    for name, box in objects:
        corners = "".join(f"<{tag}>{v}</{tag}>" for tag, v in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True))
        part = "<part><name>head</name><bndbox><xmin>7</xmin></bndbox></part>"
        parts.append(
            f"<object><name>{name}</name><difficult>{difficult}</difficult>{part}<bndbox>{corners}</bndbox></object>"
        )
    return f"<annotation><filename>of another time.jpg</filename>{''.join(parts)}</annotation>"


def add(root: Path, name: str, text: str, size: tuple[int, int] = (40, 30), suffix: str = ".jpg") -> Path:
    for folder in ("Annotations", "JPEGImages"):
        (root / folder).mkdir(exist_ok=True)
    Image.new("RGB", size, (9, 9, 9)).save(root / "JPEGImages" / f"{name}{suffix}")
    path = root / "Annotations" / f"{name}.xml"
    path.write_text(text)
    return path


def add_list(root: Path, split: str, text: str, folder: str = "ImageSets/Main") -> Path:
    (root / folder).mkdir(parents=True, exist_ok=True)
    path = root / folder / f"{split}.txt"
    path.write_text(text)
    return path


def message(root: Path, **arguments: object) -> str:
    with pytest.raises(DataError) as caught:
        Voc(root, **arguments)  # type: ignore[arg-type]
    return str(caught.value)


def test_corners_become_continuous_coordinates(tmp_path: Path) -> None:
    add(tmp_path, "a", xml(CAT, ("dog", (3, 5, 3.5, 30))))
    dataset = Voc(tmp_path)
    sample = dataset.read(0)
    assert sample["boxes"].tolist() == [[0, 0, 40, 30], [2, 4, 3.5, 30]]  # the first one is the whole image
    assert sample["area"].tolist() == [1200, 39]
    assert sample["classes"].tolist() == [0, 1]
    assert sample["image"].shape == (30, 40, 3)
    assert sample["size"].tolist() == [30, 40]
    assert dataset.notes == []
    assert dataset.channels == 3
    assert not sample["crowd"].any()


def test_splits_share_their_classes_and_keep_the_order_of_their_list(tmp_path: Path) -> None:
    add(tmp_path, "a", xml(CAT))
    add(tmp_path, "b", xml(("zebra", (1, 1, 9, 9))), suffix=".PNG")
    add(tmp_path, "c", xml(("ant", (1, 1, 9, 9)), difficult=1))
    add(tmp_path, "d", xml())
    add_list(tmp_path, "train", "d\n\nb.png\n")
    add_list(tmp_path, "mine", "c\n", ".")
    train = Voc(tmp_path, "train")
    assert train.classes == ["ant", "cat", "zebra"]
    assert [train.path(index).name for index in range(len(train))] == ["d.jpg", "b.PNG"]
    assert train.read(0)["boxes"].shape == (0, 4)
    assert train.read(1)["classes"].tolist() == [2]
    mine = Voc(tmp_path, "mine")
    assert mine.read(0)["crowd"].tolist() == [True]
    assert len(Voc(tmp_path)) == 4
    assert Voc(tmp_path, "mine", classes=["dog", "ant"]).read(0)["classes"].tolist() == [1]
    shares = {"train": 0.5, "val": 0.5}
    parts = [Voc(tmp_path, split, shares) for split in shares]
    assert sorted(part.path(index).name for part in parts for index in range(2)) == ["a.jpg", "b.PNG", "c.jpg", "d.jpg"]


def test_an_encoded_image_has_the_same_objects(tmp_path: Path) -> None:
    add(tmp_path, "a", xml(CAT))
    opened, read = Voc(tmp_path).open(0), Voc(tmp_path).read(0)
    assert np.array_equal(opened["image"].decode(), read["image"])
    assert opened["boxes"].tolist() == read["boxes"].tolist()


def test_bad_boxes_are_reported_with_file_and_number(tmp_path: Path) -> None:
    path = add(tmp_path, "a", xml(CAT, ("dog", (7, 7, 7, 7)), ("dog", (0, 1, 41, 9)), ("dog", (9, 9, 3, 12))))
    dataset = Voc(tmp_path)
    assert dataset.notes == [
        "3 of 4 boxes are bad: 1 partly outside its image, 1 empty, 1 inverted",
        f"{path}: object 2 (dog), 7 7 7 7: empty, left out",
        f"{path}: object 3 (dog), 0 1 41 9: partly outside its image, clipped",
        f"{path}: object 4 (dog), 9 9 3 12: inverted, left out",
    ]
    assert dataset.read(0)["boxes"].tolist() == [[0, 0, 40, 30], [0, 0, 40, 9]]
    assert len(Voc(tmp_path, bad_boxes="drop").read(0)["boxes"]) == 1
    assert f"{path}: object 2 (dog), 7 7 7 7: empty" in message(tmp_path, bad_boxes="stop")


def test_the_size_of_the_image_counts_not_that_of_the_annotation(tmp_path: Path) -> None:
    add(tmp_path, "a", xml(("cat", (1, 1, 40, 30)), size=(80, 60)), size=(20, 10))
    add(tmp_path, "b", xml(CAT, size=None))
    dataset = Voc(tmp_path)
    assert dataset.read(0)["boxes"].tolist() == [[0, 0, 20, 10]]
    assert dataset.read(1)["boxes"].tolist() == [[0, 0, 40, 30]]
    assert len(dataset.notes) == 2


def test_an_image_that_cannot_be_read_is_reported_when_it_is_read(tmp_path: Path) -> None:
    add(tmp_path, "a", xml(CAT))
    add(tmp_path, "b", xml(CAT))
    (tmp_path / "JPEGImages/a.jpg").write_bytes(b"")
    (tmp_path / "JPEGImages/b.jpg").unlink()
    dataset = Voc(tmp_path)
    for index, reason in enumerate(["the file is empty", "no such file"]):
        with pytest.raises(DataError, match=reason) as caught:
            dataset.read(index)
        assert str(caught.value).startswith(str(dataset.path(index)))


def test_links_may_not_lead_out(tmp_path: Path) -> None:
    root = tmp_path / "data"
    root.mkdir()
    add(root, "a", xml(CAT))
    (root / "JPEGImages/a.jpg").rename(tmp_path / "elsewhere.jpg")
    (root / "JPEGImages/a.jpg").symlink_to(tmp_path / "elsewhere.jpg")
    with pytest.raises(DataError, match=r"leads out of .*add `follow_links: true`"):
        Voc(root).read(0)
    assert len(Voc(root, follow_links=True).read(0)["boxes"]) == 1


def test_changes_are_seen(tmp_path: Path) -> None:
    path = add(tmp_path, "a", xml(CAT))
    assert Voc(tmp_path).classes == ["cat"]
    path.write_text(xml(("horse", (1, 1, 5, 5))))
    assert Voc(tmp_path).classes == ["horse"]
    add(tmp_path, "b", xml(CAT))
    assert Voc(tmp_path).classes == ["cat", "horse"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "the file is empty"),
        ("<annotation><object>", "not well-formed xml (no element found: line 1"),
        ("<html/>", "the outermost element is <html>, expected <annotation>"),
        (
            "<annotation><object><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax></bndbox></object></annotation>",
            "no <name>: a.xml object 1",
        ),
        (
            "<annotation><object><name>a</name><bndbox><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax></bndbox></object></annotation>",
            "no number as <xmin> of a <bndbox>: a.xml object 1",
        ),
        (xml(CAT, ("cat", (1, 1, 2, float("nan")))), "no number as <ymax> of a <bndbox>: a.xml object 2 ('nan')"),
        (xml(CAT).replace("<xmax>40", "<xmax>wide"), "no number as <xmax> of a <bndbox>: a.xml object 1 ('wide')"),
        ('<?xml version="1.0" encoding="klingon"?><annotation/>', "not well-formed xml"),
        ('<!DOCTYPE annotation [<!ENTITY a "aaaa">]><annotation>&a;</annotation>', "has a DOCTYPE, which is not read"),
        ('<!DOCTYPE annotation SYSTEM "/etc/hostname"><annotation/>', "has a DOCTYPE, which is not read"),
    ],
)
def test_damaged_annotations_are_named(tmp_path: Path, text: str, expected: str) -> None:
    path = add(tmp_path, "a", text)
    assert message(tmp_path).startswith(f"{path.parent}: 1 problem")
    assert "a.xml" in message(tmp_path)
    assert expected in message(tmp_path)


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    for name in "abc":
        add(tmp_path, name, "<annotation><object><name>x</name></object></annotation>")
    add(tmp_path, "d", "<html/>")
    found = message(tmp_path)
    assert "13 problems" in found
    for corner in ("xmin", "ymin", "xmax", "ymax"):
        assert f"no number as <{corner}> of a <bndbox>: a.xml object 1, b.xml object 1, c.xml object 1" in found
    assert "not a VOC annotation: d.xml: the outermost element is <html>" in found


def test_a_huge_annotation_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voc_xml, "MAX_BYTES", 50)
    path = add(tmp_path, "a", xml(CAT))
    assert f"{path.name}: {path.stat().st_size} bytes; an annotation has at most 50" in message(tmp_path)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    assert message(tmp_path).startswith(f"{tmp_path / 'Annotations'}: cannot be listed (No such file or directory)")
    path = add(tmp_path, "a", xml(CAT))
    add_list(tmp_path, "train", "a\n")
    named = add_list(tmp_path, "val", "a\nb\n")
    assert f"{named}: 1 problem; names that have no annotation: b (line 2)" in message(tmp_path, split="val")
    assert message(tmp_path, split="test").endswith("the lists are train, val")
    unknown = message(tmp_path, classes=["dog", "ant"])
    assert "the class 'cat' is not in `classes`: a.xml object 1; `classes` has dog, ant" in unknown
    path.write_text(xml())
    assert "no annotation has an object, so the classes are not known" in message(tmp_path)


def test_folders_have_any_name_and_lists_are_not_needed(tmp_path: Path) -> None:
    for name in "ab":
        add(tmp_path, name, xml(CAT))
    (tmp_path / "JPEGImages").rename(tmp_path / "photos")
    assert "name it as `annotations`, and that of images as `images`" in message(tmp_path, annotations="labels")
    assert "JPEGImages: cannot be listed" in message(tmp_path)
    both = Voc(tmp_path, images="photos")
    assert [both.path(index).name for index in range(2)] == ["a.jpg", "b.jpg"]
    for file in (tmp_path / "Annotations").iterdir():
        file.rename(tmp_path / "photos" / file.name)
    assert len(Voc(tmp_path, images="photos", annotations="photos").read(1)["boxes"]) == 1
    found = message(tmp_path, split="train", images="photos", annotations="photos")
    assert found.endswith("there are no lists: leave `split` out, or give `split_shares`")
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets/train.txt").write_text("b\n")
    assert len(Voc(tmp_path, "train", images="photos", annotations="photos", image_sets="sets")) == 1


@pytest.mark.real_data
def test_blood_cells(real_data: Path, tmp_path: Path) -> None:
    for folder in ("Annotations", "JPEGImages", "ImageSets"):
        (tmp_path / folder).symlink_to(real_data / "bccd" / folder)
    sets = {split: Voc(tmp_path, split, follow_links=True) for split in ("train", "val", "test")}
    assert {split: len(each) for split, each in sets.items()} == {"train": 205, "val": 87, "test": 72}
    assert all(each.classes == ["Platelets", "RBC", "WBC"] for each in sets.values())
    bad = [note for each in sets.values() for note in each.notes if note.endswith("empty, left out")]
    assert [note.rpartition("/")[2] for note in bad] == [
        "BloodImage_00343.xml: object 4 (RBC), 181 329 181 329: empty, left out",
        "BloodImage_00338.xml: object 13 (RBC), 504 337 504 337: empty, left out",
    ]
    opened = [each.open(index) for each in sets.values() for index in range(len(each))]
    counts = np.bincount(np.concatenate([sample["classes"] for sample in opened]))
    assert counts.tolist() == [361, 4155 - 2, 372]
    assert all((sample["image"].height, sample["image"].width) == (480, 640) for sample in opened)
    assert sets["test"].read(0)["image"].shape == (480, 640, 3)
