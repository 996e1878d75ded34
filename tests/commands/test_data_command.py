"""`paceline data` as a user runs it, on files made by hand: good ones, and every kind of bad one."""

from __future__ import annotations

import io
import json
import os
import signal
import struct
import subprocess
import sys
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from paceline.cli import main
from paceline.core.registry import register
from paceline.data.inspect import CELL
from paceline.visualize.colors import LEFT, RIGHT, class_color

PNG = b"\x89PNG\r\n\x1a\n"


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def jpeg(size: tuple[int, int] = (40, 32), shade: int = 90) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (shade, shade, shade)).save(file, "JPEG")
    return file.getvalue()


def write_recipe(folder: Path, train: dict[str, Any], **more: Any) -> str:
    path = folder / "recipe.json"
    path.write_text(json.dumps({"name": "mine", "data": {"train": train, **more}}))
    return str(path)


class Answer:
    """What a run of the command came to."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def train(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)["splits"]["train"]
        return found

    @property
    def bad(self) -> dict[str, str]:
        """The names of bad files and what is said of them."""
        return {Path(each["path"]).name: each["reason"] for each in self.train["bad"]}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Answer:
        code = main(["data", *words])
        answer = capsys.readouterr()
        assert "Traceback" not in answer.out + answer.err
        return Answer(code, answer.out, answer.err)

    return run


def make_photos(folder: Path) -> None:
    """Good ones of two classes: black and white ones, and one of 16 bits."""
    for name in ("ants", "bees"):
        (folder / name).mkdir(parents=True)
    (folder / "ants" / "black.png").write_bytes(b"")
    Image.new("RGB", (20, 10), "black").save(folder / "ants" / "black.png")
    Image.new("RGB", (20, 10), "white").save(folder / "bees" / "white.png")
    Image.fromarray(np.full((10, 20), 65535, np.uint16)).save(folder / "bees" / "sixteen.png")


def test_what_there_is_is_counted(tmp_path: Path, run: Any) -> None:
    make_photos(tmp_path / "photos")
    answer = run(write_recipe(tmp_path, {"dataset": "image_folder", "root": "photos"}), "--json")
    assert answer.code == 0, answer.err
    assert answer.train["samples"] == answer.train["examined"] == 3
    assert answer.train["labels"] == {"ants": 1, "bees": 2}
    assert answer.train["sizes"] == [{"height": 10, "width": 20, "samples": 3}]
    # One black and two white of equal size: p = 2/3.
    assert answer.train["mean"] == pytest.approx([2 / 3] * 3, abs=1e-15)
    assert answer.train["std"] == pytest.approx([(2 / 9) ** 0.5] * 3, abs=1e-15)
    assert answer.train["bad"] == []
    assert answer.train["samples_per_second"] > 0
    assert json.loads(answer.out)["sheet"] == "data-mine.png"
    assert Image.open(tmp_path / "data-mine.png").size[0] > 2 * CELL


def test_people_get_the_same(tmp_path: Path, run: Any) -> None:
    make_photos(tmp_path / "photos")
    answer = run(write_recipe(tmp_path, {"dataset": "image_folder", "root": "photos"}), "--sheet", "there/sheet.png")
    for text in ("3 samples", "ants 1, bees 2", "20×10: 3", "[0.6667, 0.6667, 0.6667]", "samples/s with"):
        assert text in answer.out
    assert answer.out.endswith("no unreadable files\n")
    assert (tmp_path / "there" / "sheet.png").is_file()


def test_every_bad_photo_is_named(tmp_path: Path, run: Any) -> None:
    folder = tmp_path / "photos" / "ants"
    make_photos(tmp_path / "photos")
    (folder / "cut.jpg").write_bytes(jpeg()[:-60])
    (folder / "text.jpg").write_text("no image at all")
    (folder / "empty.png").write_bytes(b"")
    header = PNG + chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0))
    (folder / "header.png").write_bytes(header)
    (folder / "huge.png").write_bytes(header + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b""))
    (folder / "renamed.png").write_bytes(jpeg())  # the content decides: nothing is wrong with this one
    recipe = write_recipe(tmp_path, {"dataset": "image_folder", "root": "photos"})
    answer = run(recipe, "--json")
    assert answer.code == 3
    assert set(answer.bad) == {"cut.jpg", "text.jpg", "empty.png", "header.png", "huge.png"}
    assert "truncated" in answer.bad["cut.jpg"]
    assert "not an image" in answer.bad["text.jpg"]
    assert "0 bytes" in answer.bad["empty.png"] or "empty" in answer.bad["empty.png"]
    assert "more than 178,956,970 pixels" in answer.bad["huge.png"]
    assert "not an image that can be read" in answer.bad["header.png"]
    assert answer.train["labels"] == {"ants": 2, "bees": 2}
    printed = run(recipe)
    assert printed.code == 3
    assert "unreadable: 5 files" in printed.out
    assert all(str(folder / name) in printed.out for name in answer.bad)


def test_splits_that_cannot_be_opened_are_no_files(tmp_path: Path, run: Any) -> None:
    answer = run(write_recipe(tmp_path, {"dataset": "image_folder", "root": "absent"}))
    assert answer.code == 3
    assert "cannot be opened: 1 split" in answer.out
    assert "data.train.root: absent does not exist" in answer.out
    assert "unreadable" not in answer.out


def test_masks_that_do_not_fit_are_named(tmp_path: Path, run: Any) -> None:
    for kind in ("images", "masks"):
        (tmp_path / kind).mkdir()
    mask = np.zeros((10, 20), np.uint8)
    mask[:, :5] = 1
    mask[:, 15:] = 255
    for name, ids in (("good", mask), ("small", mask[:5]), ("unknown", mask + 7)):
        Image.new("RGB", (20, 10), "gray").save(tmp_path / "images" / f"{name}.png")
        Image.fromarray(ids).save(tmp_path / "masks" / f"{name}.png")
    train = {"dataset": "image_mask", "root": ".", "classes": ["ground", "beetle", "leaf"], "ignore_index": 255}
    answer = run(write_recipe(tmp_path, train), "--json")
    assert answer.code == 3
    assert set(answer.bad) == {"small.png", "unknown.png"}
    assert "the mask is 20×5 pixels" in answer.bad["small.png"]
    assert "holds the ids 6, 7, 8" in answer.bad["unknown.png"]
    assert answer.train["mask_shares"] == {"ground": 0.5, "beetle": 0.25, "leaf": 0.0, "no class": 0.25}


def test_a_binary_mask_is_measured_by_its_shades(tmp_path: Path, run: Any) -> None:
    for kind in ("images", "masks"):
        (tmp_path / kind).mkdir()
    Image.new("RGB", (4, 1), "gray").save(tmp_path / "images" / "one.png")
    Image.fromarray(np.array([[0, 0, 255, 51]], np.uint8)).save(tmp_path / "masks" / "one.png")
    answer = run(write_recipe(tmp_path, {"dataset": "image_mask", "root": ".", "binary": True}), "--json")
    assert answer.train["mask_shares"] == {"foreground": pytest.approx(0.3)}


def test_missing_files_of_a_list_are_named_with_their_lines(tmp_path: Path, run: Any) -> None:
    (tmp_path / "there.jpg").write_bytes(jpeg())
    (tmp_path / "list.csv").write_text("image,label\ngone.jpg,ant\nthere.jpg,bee\nlost.jpg,bee\n")
    answer = run(write_recipe(tmp_path, {"dataset": "list_file", "file": "list.csv"}), "--json")
    assert answer.code == 3
    assert set(answer.bad) == {"gone.jpg", "lost.jpg"}
    assert "list.csv, line 2" in answer.bad["gone.jpg"]
    assert "no such file" in answer.bad["lost.jpg"]


def test_a_label_out_of_range_does_not_hide_the_other_split(tmp_path: Path, run: Any) -> None:
    (tmp_path / "there.jpg").write_bytes(jpeg())
    (tmp_path / "train.csv").write_text("there.jpg,0\nthere.jpg,7\n")
    (tmp_path / "val.csv").write_text("there.jpg,1\n")
    part = {"dataset": "list_file", "classes": ["ant", "bee"], "image": 0, "label": 1}
    recipe = write_recipe(tmp_path, part | {"file": "train.csv"}, val=part | {"file": "val.csv"})
    answer = run(recipe, "--json")
    assert answer.code == 3
    assert "the label 7 is out of range: expected 0 to 1" in answer.train["error"]
    assert "train.csv" in answer.train["error"]
    assert json.loads(answer.out)["splits"]["val"]["labels"] == {"ant": 0, "bee": 1}
    assert "the label 7 is out of range" in run(recipe).out


class WrongLabels:
    """A data set of somebody's own whose labels and masks do not fit."""

    classes = ["a", "b"]
    channels = 3

    def __len__(self) -> int:
        return 4

    def read(self, index: int) -> dict[str, Any]:
        if index == 1:
            raise ValueError("no idea")
        mask = np.zeros((5 if index == 2 else 8, 8), np.uint8)
        return {"image": np.zeros((8, 8, 3), np.uint8), "label": 2 if index == 0 else 1, "mask": mask}


def test_data_sets_of_ones_own_are_checked_too(tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(register.kind("dataset"), "_entries", dict(register.kind("dataset")._entries))
    register.dataset("wrong_labels")(WrongLabels)
    answer = run(write_recipe(tmp_path, {"dataset": "wrong_labels"}), "--json")
    assert answer.code == 3
    assert {each["sample"]: each["reason"] for each in answer.train["bad"]} == {
        0: "WrongLabels: the label is 2, but there are 2 classes, counted from 0",
        1: "ValueError: no idea",
        2: "WrongLabels: the mask is 8×5 pixels, but its image 8×8",
    }


def write_video(path: Path, shades: list[int]) -> None:
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=25)
        stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
        for shade in shades:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.full((32, 48, 3), shade, np.uint8), "rgb24")))
        container.mux(stream.encode(None))


def test_videos_are_decoded_whole_and_bad_ones_named(tmp_path: Path, run: Any) -> None:
    folder = tmp_path / "videos" / "calm"
    folder.mkdir(parents=True)
    write_video(folder / "good.mp4", [60] * 12)
    write_video(folder / "short.mp4", [200] * 3)
    (folder / "empty.mp4").write_bytes(b"")
    (folder / "text.mp4").write_text("no video")
    with av.open(str(folder / "none.avi"), "w") as container:
        stream: Any = container.add_stream("mpeg4", rate=25)
        stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
        container.start_encoding()
    clip = {"name": "clip", "num_frames": 4, "short": "last"}
    answer = run(write_recipe(tmp_path, {"dataset": "video_folder", "root": "videos", "transforms": [clip]}), "--json")
    assert answer.code == 3
    assert set(answer.bad) == {"empty.mp4", "text.mp4", "none.avi"}
    assert "without frames" in answer.bad["none.avi"]
    assert answer.train["frames"] == [{"frames": 3, "samples": 1}, {"frames": 12, "samples": 1}]
    assert answer.train["mean"] == pytest.approx([(12 * 60 + 3 * 200) / 15 / 255] * 3, abs=0.02)
    assert answer.train["sizes"] == [{"height": 32, "width": 48, "samples": 2}]


def make_voc(root: Path) -> None:
    """One gray image of 120×80 with a box over its columns 30 to 59 and rows 20 to 39."""
    for name in ("Annotations", "JPEGImages"):
        (root / name).mkdir(parents=True)
    Image.new("RGB", (120, 80), (90, 90, 90)).save(root / "JPEGImages" / "one.png")
    box = "<bndbox><xmin>31</xmin><ymin>21</ymin><xmax>60</xmax><ymax>40</ymax></bndbox>"
    size = "<size><width>120</width><height>80</height><depth>3</depth></size>"
    content = f"<filename>one.png</filename>{size}<object><name>cell</name>{box}</object>"
    (root / "Annotations" / "one.xml").write_text(f"<annotation>{content}</annotation>")


def test_the_sheet_shows_boxes_where_the_transforms_bring_them(tmp_path: Path, run: Any) -> None:
    """Mirrored, columns 30 to 59 become 60 to 89; the sheet shows the image twice as large."""
    make_voc(tmp_path / "voc")
    transforms = [{"name": "random_horizontal_flip", "p": 1}, {"name": "normalize", "mean": [0.4], "std": [0.2]}]
    recipe = write_recipe(tmp_path, {"dataset": "voc", "root": "voc", "transforms": transforms})
    assert run(recipe).code == 0
    sheet = np.array(Image.open(tmp_path / "data-mine.png"))
    color = np.all(sheet == class_color(0), axis=-1)
    color[-40:] = False  # the legend below the grid
    rows, columns = np.flatnonzero(color.any(1)), np.flatnonzero(color.any(0))
    assert (rows[-1] - rows[0] + 1, columns[-1] - columns[0] + 1) == (40, 60)
    inside = sheet[rows[0] + 2 : rows[-1] - 1, columns[0] + 2 : columns[-1] - 1]
    assert np.all(inside == 90), "normalization is undone"
    gray = np.flatnonzero(np.all(sheet == 90, axis=-1).any(0))
    assert columns[0] - gray[0] == 120, "the box begins at column 60 of the image"


def test_the_recipes_own_policy_and_task_do_not_matter(tmp_path: Path, run: Any) -> None:
    """Only the name and the data are looked at; what is wrong there is reported with its place."""
    make_photos(tmp_path / "photos")
    text = (
        "name: mine\ntask: not_yet_invented\nmodel: {name: nothing}\ntrain: {seed: 3}\n"
        "data:\n  train:\n    dataset: image_folder\n    root: photos\n    transforms:\n"
        "      - {name: resize, size: 8, sede: 1}\n"
    )
    (tmp_path / "own.yaml").write_text(text)
    answer = run("own.yaml")
    assert answer.code == 2
    assert answer.err.startswith("own.yaml:10:33: data.train.transforms.0.sede: ")
    (tmp_path / "own.yaml").write_text(text.replace(", sede: 1", ""))
    assert run("own.yaml").code == 0
    assert run("own.yaml", "data.train.root=photos/ants").code == 3
    assert run("own.yaml", "--split", "val").code == 2
    assert run("own.yaml", "--size", "8").code == 2
    assert run("own.yaml", "--limit", "0").code == 2


def test_images_that_cannot_be_a_batch_are_logged(tmp_path: Path, run: Any) -> None:
    make_photos(tmp_path / "photos")
    Image.new("RGB", (30, 10), "white").save(tmp_path / "photos" / "bees" / "wide.png")
    answer = run(write_recipe(tmp_path, {"dataset": "image_folder", "root": "photos"}), "--json")
    assert answer.code == 0
    assert "cannot be stacked; add a transform that gives one size" in answer.train["notes"][0]
    assert (tmp_path / "data-mine.png").is_file()


def test_a_limit_spreads_over_all_classes(tmp_path: Path, run: Any) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(4):
            (tmp_path / "photos" / name / f"{number}.jpg").write_bytes(jpeg())
    answer = run(write_recipe(tmp_path, {"dataset": "image_folder", "root": "photos"}), "--json", "--limit", "6")
    assert answer.train["labels"] == {"a": 2, "b": 2, "c": 2}
    assert (answer.train["samples"], answer.train["examined"]) == (12, 6)


def test_a_pack_is_written_and_can_be_used(tmp_path: Path, run: Any) -> None:
    make_photos(tmp_path / "photos")
    part = {"dataset": "image_folder", "root": "photos"}
    recipe = write_recipe(tmp_path, part, val=part)
    answer = run(recipe, "--pack", "packs/photos.pack", "--size", "5")
    assert answer.code == 0, answer.err
    file = tmp_path / "packs" / "photos-train.pack"
    assert f"  train: {{dataset: packed, file: {file}}}" in answer.out
    packed = run(recipe, "data.train.dataset=packed", f"data.train.file={file}", "--split", "train", "--json")
    assert packed.train["sizes"] == [{"height": 5, "width": 10, "samples": 3}]
    assert packed.train["labels"] == {"ants": 1, "bees": 2}
    alone = json.loads(run(recipe, "--pack", "val.pack", "--split", "val", "--json").out)
    assert alone["packs"]["val"]["samples"] == 3
    assert (tmp_path / "val.pack").is_file()
    assert run(recipe, "--pack", "x.pack", "--size", "5x").code == 2


def test_a_pack_of_bad_files_is_refused_unless_they_may_be_left_out(tmp_path: Path, run: Any) -> None:
    make_photos(tmp_path / "photos")
    (tmp_path / "photos" / "ants" / "cut.jpg").write_bytes(jpeg()[:-60])
    recipe = write_recipe(tmp_path, {"dataset": "image_folder", "root": "photos"})
    answer = run(recipe, "--pack", "photos.pack")
    assert answer.code == 3
    assert "cut.jpg" in answer.err
    assert not (tmp_path / "photos.pack").exists()
    answer = run(recipe, "--pack", "photos.pack", "data.on_error=skip")
    assert answer.code == 0
    assert "skipped: sample 1" in answer.out
    assert "cut.jpg" in answer.out


SLOW = """
import time, numpy
from paceline import register
@register.dataset("slow")
class Slow:
    classes, channels = ["a"], 3
    def __len__(self): return 100_000
    def read(self, index):
        time.sleep(0.002)
        if index == 5: raise ValueError("number five")
        if index == 1000: print("now", flush=True)
        return {"image": numpy.zeros((4, 4, 3), numpy.uint8), "label": 0}
"""


def test_an_interrupt_tells_what_was_found_so_far(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    recipe = write_recipe(tmp_path, {"dataset": "slow"})
    command = [sys.executable, "-m", "paceline", "data", recipe, "--use", "slow"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "now\n"
            out = None
            while out is None:  # Python loses an interrupt that comes while a destructor or a callback runs
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    out, err = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "interrupted" in out
    assert "number five" in out
    assert "Traceback" not in err


def test_outlines_and_keypoints_of_coco_are_counted_and_drawn(tmp_path: Path, run: Any) -> None:
    (tmp_path / "images").mkdir()
    Image.new("RGB", (60, 40), (90, 90, 90)).save(tmp_path / "images" / "one.png")
    square = [10, 10, 30, 10, 30, 30, 10, 30]
    person = {"id": 1, "name": "person", "keypoints": ["left_eye", "right_eye"], "skeleton": [[1, 2]]}
    objects = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [10, 10, 20, 20], "area": 400, "iscrowd": 0}
    objects |= {"segmentation": [square], "keypoints": [14, 14, 2, 25, 14, 1], "num_keypoints": 2}
    image = {"id": 1, "file_name": "one.png", "width": 60, "height": 40}
    content = {"images": [image], "categories": [person], "annotations": [objects]}
    (tmp_path / "all.json").write_text(json.dumps(content))
    train = {"dataset": "coco", "root": ".", "annotations": "all.json", "masks": True, "keypoints": True}
    answer = run(write_recipe(tmp_path, train), "--json")
    assert answer.code == 0, answer.err
    assert answer.train["objects"] == {"person": 1}
    assert answer.train["joints"] == {
        "left_eye": {"unlabeled": 0, "hidden": 0, "visible": 1},
        "right_eye": {"unlabeled": 0, "hidden": 1, "visible": 0},
    }
    sheet = np.array(Image.open(tmp_path / "data-mine.png"))
    colors = {tuple(pixel) for pixel in sheet.reshape(-1, 3).tolist()}
    assert {class_color(0), LEFT, RIGHT} <= colors
    blended = 0.45 * 90 + 0.55 * np.array(class_color(0))
    assert np.abs(sheet - blended).max(-1).min() <= 1
