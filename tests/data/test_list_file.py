import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError
from support.registered import arguments_of

from paceline.core.errors import DataError
from paceline.data.datasets.list_file import ListFile
from paceline.data.io.image import Encoded
from paceline.data.skip_list import SkipList
from paceline.data.split_loader import SplitLoader


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with three images, each of one gray: a.png 1, b/b.png 2, b/c d.png 3."""
    (tmp_path / "b").mkdir()
    for value, name in enumerate(("a.png", "b/b.png", "b/c d.png"), 1):
        Image.new("L", (3, 2), value).save(tmp_path / name)
    return tmp_path


def write(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.write_text(text, encoding="utf-8")
    return path


def pairs(dataset: ListFile) -> list[tuple[int, object]]:
    samples = [dataset.read(index) for index in range(len(dataset))]
    return [(int(sample["image"][0, 0, 0]), sample.get("label")) for sample in samples]


LINES = "a.png,bee\nb/b.png,ant\na.png,ant\n"


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("list.csv", LINES, {}),
        ("list.csv", "image,label\n" + LINES, {}),
        ("list.csv", "\ufeffimage,label\r\n\r\n" + LINES.replace("\n", "\r\n"), {}),
        ("list.csv", "label,more,image\n" + "bee,1,a.png\nant,2,b/b.png\nant,,a.png", {}),
        ("list.csv", "sort,datei\n" + "bee,a.png\nant,b/b.png\nant,a.png\n", {"image": "datei", "label": "sort"}),
        ("list.csv", "sort,datei\n" + "bee,a.png\nant,b/b.png\nant,a.png\n", {"image": "datei", "label": 0}),
        ("list.csv", "bee,a.png\nant,b/b.png\nant,a.png\n", {"image": 1, "label": 0}),
        ("list.tsv", LINES.replace(",", "\t"), {}),
        ("list.txt", LINES.replace(",", "   "), {}),
        ("list", LINES, {"format": "csv"}),
        ("list.jsonl", "".join(json.dumps({"image": i, "label": k}) + "\n" for i, k in (
            ("a.png", "bee"), ("b/b.png", "ant"), ("a.png", "ant"))), {}),
        ("list.ndjson", "".join(json.dumps({"f": i, "k": k, "image": 0}) + "\n\n" for i, k in (
            ("a.png", "bee"), ("b/b.png", "ant"), ("a.png", "ant"))), {"image": "f", "label": "k"}),
    ],
)  # fmt: skip
def test_lists_of_all_formats(root: Path, name: str, text: str, arguments: dict[str, object]) -> None:
    file = write(root, name, text)
    dataset = ListFile(**arguments_of("dataset", "list_file")(file=str(file), **arguments).model_dump())
    assert dataset.classes == ["ant", "bee"]
    assert pairs(dataset) == [(1, 1), (2, 0), (1, 0)]
    assert type(dataset.read(0)["label"]) is int
    assert dataset.path(1) == root / "b/b.png"
    again = pickle.loads(pickle.dumps(dataset))
    assert pairs(again) == pairs(dataset)


def test_images_stay_encoded_until_they_are_needed(root: Path) -> None:
    sample = ListFile(write(root, "list.csv", LINES)).open(1)
    assert isinstance(sample["image"], Encoded)
    assert (sample["image"].decode()[0, 0].tolist(), sample["label"]) == ([2, 2, 2], 0)


def test_names_are_relative_to_the_root(root: Path) -> None:
    (root / "lists").mkdir()
    file = write(root, "lists/list.csv", "b/b.png,x\n")
    assert ListFile(Path("lists/list.csv"), root).path(0) == root / "b/b.png"
    assert ListFile(file, root).read(0)["image"][0, 0, 0] == 2
    assert ListFile(file).path(0) == root / "lists/b/b.png"
    assert ListFile(Path("list.csv"), root / "lists").path(0) == root / "lists/b/b.png"


def test_names_may_be_quoted_and_hold_anything(root: Path) -> None:
    file = write(root, "list.csv", '"b/c d.png","an ""ant"", small"\na.png,"one\nline"\nb/b.png,x\n')
    dataset = ListFile(file)
    assert dataset.classes == ['an "ant", small', "one\nline", "x"]
    assert [label for _, label in pairs(dataset)] == [0, 1, 2]
    raw = root / "raw.csv"
    raw.write_bytes(b"\xff\xfe.png,x\n")  # not UTF-8, but a name on Linux
    (root / "a.png").rename(root.joinpath(b"\xff\xfe.png".decode(errors="surrogateescape")))
    assert ListFile(raw).read(0)["image"][0, 0, 0] == 1


# --- labels -------------------------------------------------------------------------------------------------


def labels_of(dataset: ListFile) -> list[object]:
    return [dataset.open(index)["label"] for index in range(len(dataset))]


def test_whole_numbers_are_numbers_of_classes(root: Path) -> None:
    file = write(root, "list.csv", "a.png,2\na.png, 0\na.png,10\n")
    dataset = ListFile(file)
    assert dataset.classes == [str(number) for number in range(11)]
    assert labels_of(dataset) == [2, 0, 10]
    names = [f"class {number}" for number in range(12)]
    dataset = ListFile(file, classes=names)
    assert (dataset.classes, labels_of(dataset)) == (names, [2, 0, 10])
    dataset = ListFile(file, classes=["10", "2", "0"])  # these are names
    assert (dataset.classes, labels_of(dataset)) == (["10", "2", "0"], [1, 2, 0])


def test_given_classes_keep_their_order(root: Path) -> None:
    dataset = ListFile(write(root, "list.csv", LINES), classes=["wasp", "bee", "ant"])
    assert (dataset.classes, labels_of(dataset)) == (["wasp", "bee", "ant"], [1, 2, 2])


def test_a_list_without_labels(root: Path) -> None:
    for name, text in (("a.txt", "a.png\nb/b.png\n"), ("b.csv", "image\na.png\n"), ("c.jsonl", '{"image": "a.png"}\n')):
        dataset = ListFile(write(root, name, text))
        assert set(dataset.read(0)) == {"image"}
        assert dataset.classes == []


def test_a_table_without_labels(root: Path) -> None:
    dataset = ListFile(write(root, "list.csv", "image,width\na.png,3\nb/b.png,3\n"))
    assert pairs(dataset) == [(1, None), (2, None)]
    found = "list.csv, line 2: no label beside 'a.png'; no column 'label' in the first line, which has image, width"
    assert dataset.notes == [dataset.why_no_labels]
    assert f"{found}; give its column as `label`" in dataset.why_no_labels
    numbered = ListFile(write(root, "list.txt", "7 a.png\n8 b/b.png\n"), image=1)
    assert pairs(numbered) == [(1, None), (2, None)]
    assert "no column 'label' in the first line, which has 7, a.png; give its column" in numbered.why_no_labels


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("test.csv", "path,width\na.png,3\nb/b.png,3\n", {"image": "path", "label": "species"}),
        ("test.csv", "path\na.png\nb/b.png\n", {"image": "path", "label": "species"}),
        ("test.csv", "a.png\nb/b.png\n", {"image": 0, "label": 1}),
        ("test.csv", "a.png\nb/b.png\n", {"label": "species"}),
        ("test.jsonl", '{"path": "a.png"}\n{"path": "b/b.png"}\n', {"image": "path", "label": "species"}),
    ],
)
def test_a_test_list_may_lack_the_column_of_labels(
    root: Path, name: str, text: str, arguments: dict[str, object]
) -> None:
    dataset = ListFile(write(root, name, text), **arguments, classes=["ant", "bee"])  # type: ignore[arg-type]
    assert pairs(dataset) == [(1, None), (2, None)]
    assert dataset.classes == ["ant", "bee"]
    assert str(arguments["label"]) in dataset.why_no_labels


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("Image,Label\na,bee\nb,ant\n", {}),
        ("image,label\na,bee\nb,ant\n", {"image": 0, "label": 1}),
        ("species,file\nbee,a\nant,b\n", {"image": "file", "label": "species"}),
        ("species,file,part\nbee,a,x\nant,b,x\n", {"image": 1, "label": 0, "split_column": "part", "split": "x"}),
    ],
)
def test_a_header_is_known_by_the_words_that_are_asked_for(root: Path, text: str, arguments: dict[str, object]) -> None:
    """Though the names of files have no extensions, and columns are numbers."""
    dataset = ListFile(write(root, "list.csv", text), **arguments)  # type: ignore[arg-type]
    assert [dataset.path(index).name for index in range(len(dataset))] == ["a", "b"]
    assert (dataset.classes, dataset.notes) == (["ant", "bee"], [])


def test_a_class_may_be_called_like_a_column(root: Path) -> None:
    dataset = ListFile(write(root, "list.csv", "a.png,image\nb/b.png,label\n"))
    assert (len(dataset), dataset.classes, dataset.notes) == (2, ["image", "label"], [])


def test_a_first_line_that_may_be_a_sample(root: Path) -> None:
    assert len(ListFile(write(root, "list.csv", "one,bee\ntwo,ant\n"))) == 2


def test_whitespace_around_cells(root: Path) -> None:
    text = 'label, image\ncat , a.png \ndog, "b/b.png"\n   \ndog,\t"b/c d.png"\n'
    dataset = ListFile(write(root, "list.csv", text.replace("\t", " ")))
    assert (pairs(dataset), dataset.classes) == ([(1, 0), (2, 1), (3, 1)], ["cat", "dog"])


def test_a_list_of_the_same_size_and_time_is_read_again(root: Path) -> None:
    texts = ("a.png,x\n", "a.png,y\n")
    for name, text in zip(("one.csv", "two.csv"), texts, strict=True):
        os.utime(write(root, name, text), ns=(10**18 + 1, 10**18 + 1))
    link = root / "list.csv"
    for name, classes in (("one.csv", ["x"]), ("two.csv", ["y"]), ("one.csv", ["x"])):
        link.unlink(missing_ok=True)
        link.symlink_to(name)
        assert ListFile(link).classes == classes
    shutil.copy2(root / "two.csv", root / "one.csv")
    assert ListFile(link).classes == ["y"]


def test_several_labels_become_a_vector(root: Path) -> None:
    dataset = ListFile(write(root, "list.csv", "a.png,sun;sea\na.png,\na.png, sea ;\n"), label_separator=";")
    assert dataset.classes == ["sea", "sun"]
    vectors = labels_of(dataset)
    assert [vector.tolist() for vector in vectors if isinstance(vector, np.ndarray)] == [[1, 1], [0, 0], [1, 0]]
    sample = dataset.read(0)
    assert sample["label"].dtype == np.float32
    lines = ('{"image": "a.png", "label": [2, 0]}', '{"image": "a.png", "label": []}')
    numbered = ListFile(write(root, "list.jsonl", "\n".join(lines)))
    assert numbered.classes == ["0", "1", "2"]
    assert [list(numbered.read(index)["label"]) for index in range(2)] == [[1, 0, 1], [0, 0, 0]]
    batch = SplitLoader(numbered, [], 0).fetch(0, np.array([1, 0]))
    assert torch.equal(batch["label"], torch.tensor([[0.0, 0, 0], [1, 0, 1]]))


@settings(max_examples=30, deadline=None)
@given(labels=st.lists(st.text("abcäß€ 7", min_size=1, max_size=3).filter(str.strip), min_size=1, max_size=60))
def test_labels_are_what_was_written(tmp_path_factory: pytest.TempPathFactory, labels: list[str]) -> None:
    folder = tmp_path_factory.mktemp("list")
    lines = [json.dumps({"image": f"{number}.png", "label": label}) for number, label in enumerate(labels)]
    dataset = ListFile(write(folder, "list.jsonl", "\n".join(lines)))
    stripped = [label.strip() for label in labels]
    if not all(label.isdigit() for label in stripped):
        assert dataset.classes == sorted(set(stripped))
    Image.new("L", (1, 1)).save(folder / "0.png")
    for number, label in enumerate(stripped):
        assert dataset.path(number) == folder / f"{number}.png"
        found = dataset.classes[dataset._label(number)["label"]]
        assert found == label or int(found) == int(label)


# --- splits -------------------------------------------------------------------------------------------------


def test_a_list_is_split_at_random(root: Path) -> None:
    names = [f"{number}.png" for number in range(50)]
    file = write(root, "list.csv", "".join(f"{name},{name}\n" for name in names))
    shares = {"train": 0.7, "val": 0.3}
    train, val = (ListFile(file, split=split, split_shares=shares, split_seed=5) for split in ("train", "val"))
    assert (len(train), len(val)) == (35, 15)
    found = [dataset.path(index).name for dataset in (train, val) for index in range(len(dataset))]
    assert sorted(found) == sorted(names)
    assert train.classes == val.classes == sorted(names)
    with pytest.raises(DataError, match=rf"list\.csv, line {1 + int(val.path(3).stem)}: {val.path(3)}: no such file"):
        val.read(3)


# --- what is wrong with lists -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "arguments", "message"),
    [
        ("list.csv", "", {}, "list.csv: the list is empty"),
        ("list.csv", "\n\n", {}, "list.csv: the list is empty"),
        ("list.jsonl", "\n", {}, "list.jsonl: the list is empty"),
        ("list.csv", "image,label\n", {}, "list.csv: the list has no samples"),
        ("list.csv", "a.png,x\n\na.png\n", {}, "list.csv, line 3: 1 column, expected at least 2"),
        ("list.csv", "a.png,x\n,x\n", {}, "list.csv, line 2: column 0 is '', expected the name"),
        ("list.csv", "a.png,x\na.png, \n", {}, "list.csv, line 2: the label is empty"),
        ("list.csv", 'a.png,x\na.png,"x\n', {}, "list.csv, line 2: not CSV"),
        ("list.csv", "a.png,x\n", {"image": "file"}, "no column 'file' in its first line, which has a.png"),
        ("list.csv", "file,label\na.png,x\n", {"image": "img"}, "no column 'img' in its first line, which has file"),
        ("list.csv", "x" * 2_000_000, {}, "line 1: not CSV (field larger than field limit"),
        ("list.dat", "a.png,x\n", {}, "its extension is none of .csv, .tsv, .json, .jsonl, .ndjson, .txt, .lst"),
        ("list.csv", "i,label\na.png,1\na.png,3\n", {"image": "i", "classes": ["x", "y"]},
            "list.csv, line 3: the label 3 is out of range: expected 0 to 1, as `classes` has names"),
        ("list.csv", "a.png,1\na.png,-1\n", {}, "list.csv, line 2: the label -1 is out of range"),
        ("list.csv", "a.png,1\na.png,99999999\n", {}, "list.csv, line 2: the label 99999999 is out of range"),
        ("list.csv", "a.png,1\na.png,999999\n", {}, "line 2: the label 999999 is out of range: expected 0 to 99999, of"
            " 2 samples: is it the column of labels?"),
        ("list.csv", "a.png,x\na.png,wasp\n", {"classes": ["x", "y"]},
            "list.csv, line 2: the label 'wasp' is no class; expected one of the 2 classes: x, y"),
        ("list.jsonl", '{"image": "a.png"}\n[1]', {}, "line 2: expected an object"),
        ("list.jsonl", '{"image": "a.png"\n', {}, "line 1: not JSON (Expecting ',' delimiter at column 18)"),
        ("list.jsonl", '{"image": "a.png", "label": 1}\n{"image": "a.png", "label": null}', {},
            "line 2: has no 'label', which all need"),
        ("list.jsonl", '{"image": "a.png", "label": 1, "s": null}', {"split_column": "s", "split": "train"},
            "line 1: has no 's', which all need"),
        ("list.jsonl", "[" * 100_000, {}, "line 1: not JSON"),
        ("list.jsonl", '{"image": 3}', {}, "line 1: column 'image' is 3, expected the name"),
        ("list.jsonl", '{"file": "a.png"}', {}, "no column 'image' in its first object, which has file; name"),
        ("list.jsonl", '{"image": "a.png", "label": 1}\n{"image": "a.png"}', {}, "line 2: has no 'label', which"),
        ("list.jsonl", '{"image": "a.png", "label": 1.5}', {}, "the label is 1.5, expected a name or a whole number"),
        ("list.jsonl", '{"image": "a.png", "label": true}', {}, "the label is True, expected a name"),
        ("list.jsonl", '{"image": "a.png", "label": [1]}\n{"image": "a.png", "label": 1}', {}, "expected a list"),
        ("list.jsonl", '{"image": "\\ud800.png"}', {}, "line 1: '\\ud800.png' cannot be the name of a file"),
        ("list.jsonl", '{"image": "a.png"}', {"image": 0}, "columns of JSON have names, not numbers"),
    ],
)  # fmt: skip
def test_lists_that_are_wrong(root: Path, name: str, text: str, arguments: dict[str, object], message: str) -> None:
    file = write(root, name, text)
    with pytest.raises(DataError) as caught:
        ListFile(file, **arguments)  # type: ignore[arg-type]
    assert str(caught.value).startswith(str(file))
    assert message in str(caught.value)


def test_a_list_that_is_not_there(tmp_path: Path) -> None:
    for path, found in ((tmp_path / "absent.csv", "no such file"), (tmp_path, "a directory, not a file")):
        with pytest.raises(DataError, match=f"{found}; expected a list with a line for each image"):
            ListFile(path)


def test_files_that_are_wrong_are_named_with_their_line(root: Path) -> None:
    (root / "empty.png").touch()
    (root / "text.jpg").write_text("not an image at all")
    (root / "png.jpg").write_bytes((root / "b/b.png").read_bytes())
    (root / "folder.png").mkdir()
    names = ["absent.png", "empty.png", "text.jpg", "png.jpg", "folder.png", "a.png"]
    dataset = ListFile(write(root, "list.csv", "image,label\n\n" + "".join(f"{name},x\n" for name in names)))
    reasons = ["no such file", r"the file is empty \(0 bytes\)", "not an image that can be read", None, "a directory"]
    for number, (name, reason) in enumerate(zip(names, reasons, strict=False)):
        if reason is None:  # the content counts, not the extension
            assert dataset.read(number)["image"][0, 0, 0] == 2
            continue
        for read in (dataset.read, dataset.open):
            with pytest.raises(DataError, match=rf"list\.csv, line {number + 3}: .*{name}: .*{reason}"):
                read(number)
    skips = SkipList("train", 4)
    batch = SplitLoader(dataset, [], 0, skips).fetch(0, np.arange(6))
    assert batch.ids.tolist() == [3, 5]
    assert "line 3" in batch.skipped[0].reason


def test_names_that_lead_out_of_the_root(root: Path) -> None:
    outside = root.parent / f"{root.name}-outside"
    outside.mkdir()
    Image.new("L", (3, 2), 9).save(outside / "z.png")
    (root / "link.png").symlink_to(outside / "z.png")
    (root / "linked").symlink_to(outside)
    (root / "inner.png").symlink_to(root / "b/b.png")
    names = [f"../{outside.name}/z.png", str(outside / "z.png"), "link.png", "linked/z.png", "inner.png", "b/../a.png"]
    file = write(root, "list.txt", "".join(f"{name} x\n" for name in names))
    dataset = ListFile(file)
    for number in range(4):
        with pytest.raises(DataError, match=rf"list\.txt, line {number + 1}: .* leads out of {root}, .*follow_links"):
            dataset.read(number)
    assert [int(dataset.read(number)["image"][0, 0, 0]) for number in (4, 5)] == [2, 1]
    assert [value for value, _ in pairs(ListFile(file, follow_links=True))] == [9, 9, 9, 9, 2, 1]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"file": "x", "split": "train"},
        {"file": "x", "image": -1},
        {"file": "x", "format": "xml"},
        {"file": "x", "classes": ["a", "b", "a"]},
        {"file": "x", "label_separator": ""},
        {"file": "x", "delimiter": ""},
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        arguments_of("dataset", "list_file").model_validate(arguments)


def test_a_delimiter_is_one_character() -> None:
    for wrong in ("; ", "", "\n", '"'):
        with pytest.raises(ValidationError, match="delimiter"):
            arguments_of("dataset", "list_file")(file="x", delimiter=wrong)
    assert arguments_of("dataset", "list_file")(file="x", delimiter="\t").delimiter == "\t"


@pytest.mark.real_data
def test_a_list_of_ants_and_bees(real_data: Path, tmp_path: Path) -> None:
    root = real_data / "hymenoptera_256"
    paths = [path.relative_to(root) for path in sorted((root / "train").glob("*/*.jpg"))]
    file = write(tmp_path, "train.csv", "".join(f"{path},{path.parent.name}\n" for path in paths))
    dataset = ListFile(file, root)
    assert (len(dataset), dataset.classes) == (244, ["ants", "bees"])
    assert [dataset.read(index)["label"] for index in (0, 243)] == [0, 1]
