from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError
from support.registered import arguments_of

from paceline.core.errors import DataError
from paceline.data.datasets.image_folder import ImageFolder
from paceline.data.datasets.list_file import ListFile
from paceline.data.index.index import draw_parts


@given(
    size=st.integers(1, 3000),
    weights=st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 100), min_size=1),
    seed=st.integers(0, 2**40),
)
def test_parts_are_disjoint_and_complete_and_have_their_shares(size: int, weights: dict[str, int], seed: int) -> None:
    shares = {name: weight / sum(weights.values()) for name, weight in weights.items()}
    parts = draw_parts(size, shares, seed)
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(size))
    for name, members in parts.items():
        assert (np.diff(members.astype(np.int64)) > 0).all()
        assert abs(len(members) - size * shares[name]) <= 1
    backwards = draw_parts(size, dict(reversed(shares.items())), seed)
    assert all(np.array_equal(parts[name], backwards[name]) for name in parts)


@given(
    labels=st.lists(st.integers(0, 6), min_size=1, max_size=400),
    weights=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 100), min_size=2),
    seed=st.integers(0, 2**40),
)
def test_classes_have_their_shares_and_splits_their_sizes(
    labels: list[int], weights: dict[str, int], seed: int
) -> None:
    shares = {name: weight / sum(weights.values()) for name, weight in weights.items()}
    classes = np.array(labels, np.int32)
    parts, plain = draw_parts(len(labels), shares, seed, classes), draw_parts(len(labels), shares, seed)
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(len(labels)))
    for name, members in parts.items():
        assert len(members) == len(plain[name])
        assert (np.diff(members.astype(np.int64)) > 0).all()
        off = np.bincount(classes[members], minlength=7) - np.bincount(classes, minlength=7) * shares[name]
        assert abs(off).max() < (1 if len(shares) == 2 else 2)
    renamed = draw_parts(len(labels), shares, seed, 9 - classes)
    assert all(np.array_equal(parts[name], renamed[name]) for name in parts), "what a class is called does not matter"


def test_largest_remainders() -> None:
    """Of 15, 9 and 6 samples a quarter is 3.75, 2.25 and 1.5: 4, 2 and 1 or 2, of 8 in all."""
    labels = np.repeat([0, 1, 2], [15, 9, 6])
    for seed in range(20):
        val = draw_parts(30, {"train": 0.75, "val": 0.25}, seed, labels)["val"]
        assert np.bincount(labels[val], minlength=3).tolist() == [4, 2, 2]
    rare = np.repeat(np.arange(1000), 3)  # of each, three tenths of a sample
    parts = draw_parts(3000, {"train": 0.9, "val": 0.1}, 0, rare)
    assert np.unique(np.bincount(rare[parts["val"]], minlength=1000), return_counts=True)[1].tolist() == [700, 300]


def test_a_split_by_class_is_as_it_was_and_depends_on_its_seed() -> None:
    labels = np.arange(20) % 3
    assert draw_parts(20, {"train": 0.75, "val": 0.25}, 0, labels)["val"].tolist() == [1, 3, 4, 9, 11]
    assert draw_parts(20, {"train": 0.75, "val": 0.25}, 1, labels)["val"].tolist() == [0, 3, 10, 11, 16]


def test_a_split_is_as_it_was_and_depends_on_its_seed() -> None:
    # Written down once: another draw would move samples between the splits of runs that exist.
    assert draw_parts(20, {"train": 0.75, "val": 0.25}, 0)["val"].tolist() == [1, 3, 5, 9, 11]
    assert draw_parts(20, {"train": 0.75, "val": 0.25}, 1)["val"].tolist() == [0, 3, 11, 15, 16]


def test_a_split_is_a_fair_sample() -> None:
    members = draw_parts(200_000, {"train": 0.9, "val": 0.1}, 3)["val"].astype(np.int64)
    assert len(members) == 20_000
    tenths = np.bincount(members // 20_000, minlength=10)
    assert abs(tenths - 2000).max() < 6 * np.sqrt(2000 * 0.9)
    assert abs(np.bincount(members % 7) - 20_000 / 7).max() < 6 * np.sqrt(20_000 / 7)


def folder_of(root: Path, count: int) -> Path:
    for number in range(count):
        path = root / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("L", (2, 2), number).save(path)
    return root


def test_image_folder_is_split_at_random(tmp_path: Path, own_cache: Path) -> None:
    root = folder_of(tmp_path, 20)
    shares = {"train": 0.8, "val": 0.2}
    train, val = (ImageFolder(root, split, split_shares=shares) for split in ("train", "val"))
    assert (len(train), len(val)) == (16, 4)
    assert train.classes == val.classes == ["a", "b"]
    paths = [dataset.path(index) for dataset in (train, val) for index in range(len(dataset))]
    assert sorted(paths) == sorted(root.glob("*/*.png"))
    for index in range(4):
        sample = val.read(index)
        number = int(val.path(index).stem)
        assert (sample["image"][0, 0, 0], sample["label"]) == (number, number % 2)
    assert len(list(own_cache.iterdir())) == 1
    other = ImageFolder(root, "val", split_shares=shares, split_seed=1)
    assert {val.path(index) for index in range(4)} != {other.path(index) for index in range(4)}


def test_folders_and_lists_are_split_by_class_unless_told_otherwise(tmp_path: Path) -> None:
    lines = []
    for number in range(40):
        path = tmp_path / "images" / ("rare" if number < 8 else "usual") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (2, 2)).save(path)
        lines.append(f"images/{path.parent.name}/{path.name},{path.parent.name}\n")
    (tmp_path / "list.csv").write_text("".join(lines))
    shares = {"train": 0.75, "val": 0.25}

    def members(data: ImageFolder | ListFile) -> list[int]:
        return sorted(int(data.path(index).stem) for index in range(len(data)))

    for seed in range(4):
        listed: dict[str, Any] = {"split": "val", "split_shares": shares, "split_seed": seed}
        for data in (ImageFolder(tmp_path / "images", **listed), ListFile(tmp_path / "list.csv", **listed)):
            by_class = members(data)
            assert (len(by_class), sum(each < 8 for each in by_class)) == (10, 2)
        plain = draw_parts(40, shares, seed)["val"].tolist()
        assert members(ListFile(tmp_path / "list.csv", stratify=False, **listed)) == plain
        several = ListFile(tmp_path / "list.csv", label_separator=";", **listed)
        assert members(several) == plain, "of several labels none is the class"


def test_a_part_that_is_empty_or_unknown(tmp_path: Path) -> None:
    root = folder_of(tmp_path, 4)
    with pytest.raises(DataError, match=r"the split val has no samples: its share is 0\.1 of 4"):
        ImageFolder(root, "val", split_shares={"train": 0.9, "val": 0.1})
    with pytest.raises(DataError, match="'test' is none of split_shares, which are train, val"):
        ImageFolder(root, "test", split_shares={"train": 0.5, "val": 0.5})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "train", "split_shares": {"train": 0.8, "val": 0.1}}, "add up to 1, got 0.9"),
        (
            {"split": "test", "split_shares": {"train": 0.8, "val": 0.2}},
            r"one of split_shares \(train, val\), got test",
        ),
        ({"split_shares": {"train": 0.8, "val": 0.2}}, "got None"),
        ({"split": "train", "split_shares": {"train": 0.999999999}}, "at least 2"),
        ({"split": "train", "split_shares": {"train": 1.0, "val": 0.0}}, "greater than 0"),
    ],
)
def test_shares_that_make_no_sense(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        arguments_of("dataset", "image_folder").model_validate({"root": "x", **arguments})
