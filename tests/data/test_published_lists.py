"""Lists as published sets have them, and as tables are saved elsewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.registered import arguments_of

from paceline.core.errors import ArgumentError, DataError
from paceline.data.datasets.list_file import ListFile
from paceline.data.datasets.video import VideoList
from paceline.data.index.folders import hint_on_missing


def names(dataset: ListFile) -> list[str]:
    return [str(dataset.path(index).relative_to(dataset.root)) for index in range(len(dataset))]


def labels(dataset: ListFile) -> list[str]:
    return [dataset.classes[dataset._label(index)["label"]] for index in range(len(dataset))]


def video_list(path: Path, text: str, **arguments: object) -> VideoList:
    path.write_text(text)
    return VideoList(**arguments_of("dataset", "video_list")(file=str(path), **arguments).model_dump() | {"file": path})


# --- Kinetics -----------------------------------------------------------------------------------------------

KINETICS = "testifying,---QUuC4vJs,84.0,94.0,val\npetting cat,0wR5jVB-WPk,0,10,val\n"


def test_kinetics_without_a_first_line_of_names(tmp_path: Path) -> None:
    videos = video_list(tmp_path / "a.csv", KINETICS, video="train/{1}_{2:06}_{3:06}.mp4", label=0)
    assert names(videos) == ["train/---QUuC4vJs_000084_000094.mp4", "train/0wR5jVB-WPk_000000_000010.mp4"]
    assert labels(videos) == ["testifying", "petting cat"]


def test_numbers_in_a_pattern_with_a_first_line_of_names(tmp_path: Path) -> None:
    text = "label,youtube_id,time_start,time_end,split\n" + KINETICS
    for label in (None, "label"):
        videos = video_list(tmp_path / "a.csv", text, video="{1}_{2:06}.mp4", label=label)
        assert names(videos) == ["---QUuC4vJs_000084.mp4", "0wR5jVB-WPk_000000.mp4"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"video": "{youtube_id}_{time_start:06}.mp4"},
            "no column 'youtube_id' in its first line, which has testifying, ---QUuC4vJs, 84.0, 94.0, val; it looks"
            ' like a sample, not like a header: give columns by number from 0, as in `video: "{0}_{1:06}.mp4"` and'
            " `label: 1`"),
        ({"video": "{1:06}.mp4", "label": 0}, "line 1: column 1 is '---QUuC4vJs', expected a whole number"),
        ({"video": "{1}_{7}.mp4", "label": 0}, "line 1: 5 columns, expected at least 8"),
    ],
)  # fmt: skip
def test_columns_that_the_list_does_not_have(tmp_path: Path, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        video_list(tmp_path / "a.csv", KINETICS, **arguments)


def test_a_label_that_is_not_asked_for_is_reported(tmp_path: Path) -> None:
    videos = video_list(tmp_path / "a.csv", KINETICS, video="{1}.mp4")
    assert "no column 'label' in the first line" in videos.why_no_labels


# --- Something-Something ------------------------------------------------------------------------------------

SOMETHING = [{"id": "78687", "template": "Holding [something]"}, {"id": 42326, "template": "Covering [something]"}]


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_of_objects(tmp_path: Path, indent: int | None) -> None:
    text = "\ufeff \n" + json.dumps(SOMETHING, indent=indent) + " \n\n"
    videos = video_list(tmp_path / "train.json", text, video="videos/{id}.webm", label="template")
    assert names(videos) == ["videos/78687.webm", "videos/42326.webm"]
    assert labels(videos) == ["Holding [something]", "Covering [something]"]
    assert videos.place(1).endswith("train.json, item 2")


def test_lines_of_objects_take_patterns_too(tmp_path: Path) -> None:
    text = "# comment\n" + "\n".join(map(json.dumps, SOMETHING))
    videos = video_list(tmp_path / "train.jsonl", text, video="{id:08}.webm", label="template")
    assert names(videos) == ["00078687.webm", "00042326.webm"]
    assert videos.place(1).endswith("line 3")


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("[]", {}, "the list is empty"),
        ('[{"id": 1}\n{"id": 2}]', {"video": "{id}.webm"}, "not JSON (Expecting ',' delimiter: line 2 column 1"),
        ('[{"id": 1},\n{"id": null}]', {"video": "{id}.webm"}, "item 2: column 'id' is '', expected something"),
        ('[{"id": 1},\n7]', {"video": "{id}.webm"}, "item 2: expected an object, got 7"),
        ('[{"id": "1"}]', {}, "no column 'video' in its first object, which has id; name its column"),
        ('[{"id": 1}\n]\n\n[{"id": 2}]', {"video": "{id}.webm"}, "not JSON (Extra data: line 4"),
        ('{\n"a": 1}', {}, "item 1: not JSON"),
    ],
)  # fmt: skip
def test_arrays_that_are_wrong(tmp_path: Path, text: str, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        video_list(tmp_path / "train.json", text, **arguments)


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_other_delimiters(tmp_path: Path, delimiter: str) -> None:
    text = "id;template\n78687;Holding, slowly\n42326;Covering\n".replace(";", delimiter)
    given = {} if delimiter != "|" else {"delimiter": "|"}
    videos = video_list(tmp_path / "v1.csv", text, video="{id}.webm", label="template", **given)
    assert names(videos) == ["78687.webm", "42326.webm"]
    assert labels(videos) == ["Holding, slowly", "Covering"]
    text = text.split("\n", 1)[1]
    videos = video_list(tmp_path / "v1.txt", text, delimiter=delimiter)
    assert (names(videos), labels(videos)) == (["78687", "42326"], ["Holding, slowly", "Covering"])


def test_a_delimiter_that_is_not_the_usual_one_is_reported(tmp_path: Path) -> None:
    advice = re.escape("the line holds ';'; if that separates columns, add `delimiter: \";\"`")
    with pytest.raises(DataError, match=f"line 2: 1 column, expected at least 2; {advice}"):
        video_list(tmp_path / "a.csv", "a.mp4,run\nb.mp4;sit\n")
    with pytest.raises(DataError, match=f"no column 'id' in its first line, .*; {advice}"):
        video_list(tmp_path / "a.txt", "id;label\n1;sit\n", video="{id}.mp4")
    assert advice.replace("\\", "") in video_list(tmp_path / "b.txt", "a.mp4;sit\n").why_no_labels.replace("\\", "")


# --- UCF101 -------------------------------------------------------------------------------------------------


def test_a_list_without_labels_says_so(tmp_path: Path) -> None:
    videos = video_list(tmp_path / "testlist01.txt", "\nApplyEyeMakeup/v_x.avi\nArchery/v_y.avi\n")
    assert videos.notes == [videos.why_no_labels]
    expected = "testlist01.txt, line 2: no label beside 'ApplyEyeMakeup/v_x.avi'; give a list that has labels, or"
    assert f"{expected} `label_from: folder` if a folder is a class" in videos.why_no_labels


def test_labels_are_folders_if_asked_for(tmp_path: Path) -> None:
    test = video_list(tmp_path / "test.txt", "ApplyEyeMakeup/v_x.avi\nv/Archery/v_y.avi\n", label_from="folder")
    assert labels(test) == test.classes == ["ApplyEyeMakeup", "Archery"]
    assert (test.notes, test.why_no_labels) == ([], "")
    train = video_list(tmp_path / "train.csv", "video,quality\n2/x.avi,5\n10/y.avi,6\n", label_from="folder")
    assert (labels(train), train.classes) == (["2", "10"], ["10", "2"])
    with pytest.raises(DataError, match=r"line 2: 'y\.avi' has no folder before it; `label_from: folder` takes"):
        video_list(tmp_path / "bad.txt", "a/x.avi\ny.avi\n", label_from="folder")


def test_labels_that_begin_at_1(tmp_path: Path) -> None:
    text = "".join(f"{number}.avi {number}\n" for number in range(1, 4))
    counted = video_list(tmp_path / "a.txt", text)
    assert counted.notes == ["no sample of 1 class: 0"]
    with pytest.raises(DataError, match=r"line 3: the label 3 is out of range: expected 0 to 2, .*; labels go from 1"):
        video_list(tmp_path / "a.txt", text, classes=["x", "y", "z"])
    named = video_list(tmp_path / "a.txt", text, classes=["x", "y", "z"], first_label=1)
    assert (labels(named), named.notes) == (["x", "y", "z"], [])
    counted = video_list(tmp_path / "a.txt", text, first_label=1)
    assert (labels(counted), counted.classes, counted.notes) == (["1", "2", "3"], ["1", "2", "3"], [])
    with pytest.raises(DataError, match="line 1: the label 1 is out of range: expected 2 to 4, as"):
        video_list(tmp_path / "a.txt", text, classes=["x", "y", "z"], first_label=2)


def test_a_list_is_looked_for_in_its_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "videos").mkdir()
    (tmp_path / "list.txt").write_text("a.avi 0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"videos/list\.txt: no such file; .*; with `root`, `file` is"):
        VideoList(Path("list.txt"), root=tmp_path / "videos")


# --- a column of splits -------------------------------------------------------------------------------------


def test_a_column_tells_the_split(tmp_path: Path, own_cache: Path) -> None:
    text = "image,label,set\na.png,ant,train\nb.png,bee,val\nc.png,cat, train\nd.png,ant,test\n"
    path = tmp_path / "all.csv"
    path.write_text(text)
    parts = {split: ListFile(path, split=split, split_column="set") for split in ("train", "val", "test")}
    assert {split: names(part) for split, part in parts.items()} == {
        "train": ["a.png", "c.png"],
        "val": ["b.png"],
        "test": ["d.png"],
    }
    assert [part.classes for part in parts.values()] == [["ant", "bee", "cat"]] * 3
    assert parts["val"].place(0) == f"{path}, line 3"
    assert labels(parts["train"]) == ["ant", "cat"]
    assert len(list(own_cache.iterdir())) == 1, "one index for all"
    found = r"no line is of the split 'valid'; the column 'set' has train \(2\), val \(1\), test \(1\); give one of"
    with pytest.raises(DataError, match=found):
        ListFile(path, split="valid", split_column="set")
    with pytest.raises(DataError, match=r"no column 'split' in its first line, .*; .*`split_column: \w+`"):
        ListFile(path, split="val", split_column="split")


def test_a_column_of_splits_by_number_and_in_json(tmp_path: Path) -> None:
    part = video_list(tmp_path / "a.csv", KINETICS, video="{1}.mp4", label=0, split_column=4, split="val")
    assert len(part) == 2
    text = "".join(json.dumps({"video": f"{k}.mp4", "label": 0, "part": k % 2}) + "\n" for k in range(5))
    part = video_list(tmp_path / "a.jsonl", text, split_column="part", split="1")
    assert names(part) == ["1.mp4", "3.mp4"]
    with pytest.raises(DataError, match="the column of splits or folds has more than 100 different words: 0, 1, "):
        video_list(tmp_path / "b.txt", "".join(f"{k}.mp4 0 {k}\n" for k in range(101)), split_column=2, split="1")


def test_columns_by_name_and_by_number_together(tmp_path: Path) -> None:
    text = "path,label,part\na.mp4,x,0\nb.mp4,y,1\nc.mp4,x,0\n"
    part = video_list(tmp_path / "a.csv", text, video=0, label="label", split_column=2, split="0")
    assert names(part) == ["a.mp4", "c.mp4"]
    assert names(video_list(tmp_path / "a.csv", text, video=0, fold=1, fold_column=2, split="train")) == names(part)
    lines = '{"video": "a.mp4", "part": 1}\n{"video": "b.mp4"}\n'
    with pytest.raises(DataError, match="line 2: has no 'part', which all need"):
        video_list(tmp_path / "a.jsonl", lines, split_column="part", split="1")


def test_splits_come_from_one_place() -> None:
    with pytest.raises(ValueError, match="either split_column or split_shares"):
        arguments_of("dataset", "list_file")(file="x", split="a", split_column=2, split_shares={"a": 0.5, "b": 0.5})
    with pytest.raises(ValueError, match="split needs split_column or fold or split_shares"):
        arguments_of("dataset", "list_file")(file="x", split="a")
    with pytest.raises(ValueError, match="either fold or split_shares"):
        arguments_of("dataset", "list_file")(file="x", split="train", fold=0, split_shares={"train": 0.5, "val": 0.5})
    with pytest.raises(ArgumentError, match=r"split: with fold, expected train .*, got a"):
        ListFile(Path("x"), split="a", fold=0)


def test_images_have_folds_too(tmp_path: Path) -> None:
    path = tmp_path / "list.csv"
    path.write_text("image,label,part\na.png,ant,0\nb.png,bee,1\nc.png,ant,0\n")
    asked = [
        arguments_of("dataset", "list_file")(file=str(path), fold=0, fold_column="part", split=split)
        for split in ("train", "val")
    ]
    parts = [ListFile(**each.model_dump()) for each in asked]
    assert [names(part) for part in parts] == [["b.png"], ["a.png", "c.png"]]


# --- comments, encodings and names that are nearly right ----------------------------------------------------


def test_comments(tmp_path: Path) -> None:
    text = "# a list, of two\n# more\na.mp4 run\n./#1.mp4 run\n#2.mp4 run\n#tag b.mp4\nb.mp4 sit\n# end\n"
    videos = video_list(tmp_path / "list.txt", text)
    assert names(videos) == ["a.mp4", "#1.mp4", "b.mp4"]
    assert videos.place(2).endswith("line 7")
    assert names(video_list(tmp_path / "list.csv", 'a.mp4,run\n"#1.mp4",run\n')) == ["a.mp4", "#1.mp4"]
    with pytest.raises(DataError, match="the list is empty"):
        video_list(tmp_path / "list.csv", "# nothing\n#\n")
    assert names(video_list(tmp_path / "list.csv", "# a;b\n\nvideo,label\na.mp4,x;y\n")) == ["a.mp4"]


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("a.txt", "#made by a.mp4 in May\n# a.mp4 run sit\na.mp4 run\n# b.mp4 run\nb.mp4 sit\n", {}),
        ("a.csv", "run,a.mp4\n# run,b.mp4\n#1,none\nsit,b.mp4\n", {"video": 1, "label": 0}),
        ("a.csv", '#,about\n# an "open, "quote\nvideo,label\na.mp4,run\n#a.mp4,run\n # b, "x\nb.mp4,sit\n', {}),
        ("a.tsv", "#\tvideo\tlabel\na.mp4\trun\nb.mp4\tsit\n", {}),
    ],
)
def test_lines_that_are_comments(tmp_path: Path, name: str, text: str, arguments: dict[str, object]) -> None:
    for each in ("a.mp4", "b.mp4"):
        (tmp_path / each).touch()
    videos = video_list(tmp_path / name, text, **arguments)
    assert (names(videos), [label[:3] for label in labels(videos)]) == (["a.mp4", "b.mp4"], ["run", "sit"])


def test_comments_before_a_list_do_not_tell_its_columns(tmp_path: Path) -> None:
    videos = video_list(tmp_path / "a.txt", "# one two\na.mp4\nb.mp4\n")
    assert (names(videos), videos.classes) == (["a.mp4", "b.mp4"], [])


def test_lists_that_are_not_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "list.csv"
    for encoding in ("utf-16", "utf-16-le"):
        path.write_text("a.png,käfer\n", encoding=encoding)
        with pytest.raises(DataError, match=r"list\.csv: not UTF-8, it has bytes of 0; if it is UTF-16, save it as"):
            ListFile(path)
    path.write_text("a.png,käfer\n", encoding="latin-1")
    with pytest.raises(DataError, match=r"line 1: the label b'k\\xe4fer' is not UTF-8; save the list as UTF-8"):
        ListFile(path)
    path.write_text("käfer.png,x\n", encoding="latin-1")
    with pytest.raises(DataError, match="no such file; the name is not UTF-8: is the list in another encoding"):
        ListFile(path).open(0)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("a\\one.mp4", "; paths are written with /, as in 'a/one.mp4'"),
        ("a/ONE.mp4", "; did you mean 'a/one.mp4'?"),
        ("A/one.mp4", ""),
        ("a/one.avi", "; did you mean 'a/one.mp4'?"),
        ("a/one", "; did you mean 'a/one.mp4'?"),
        ("a/v1.0_x", "; did you mean 'a/v1.0_x.mp4'?"),
        ("a/two.mp4", ""),
        ("b/one.mp4", ""),
        ("../x", ""),
    ],
)
def test_names_that_are_nearly_right(tmp_path: Path, name: str, hint: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/one.mp4").touch()
    (tmp_path / "a/v1.0_x.mp4").touch()
    videos = video_list(tmp_path / "list.csv", f"{name},x\n", follow_links=True)
    with pytest.raises(DataError, match=re.escape(f": no such file{hint}") + "$"):
        videos.open(0)


def test_names_that_no_file_can_have(tmp_path: Path) -> None:
    assert hint_on_missing(tmp_path, "b" * 300 + "/x") == hint_on_missing(tmp_path, "a\0/b\0") == ""
