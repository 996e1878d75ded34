"""Bad masks and recipes of saliency and segmentation, through the commands: named, and skipped where that is asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from spoiled import NORMALIZE, RESIZE, Spoiled, copy_of

from paceline.cli import main

CLASSES = ["background", "disc", "square", "triangle"]
KINDS = ["saliency", "segmentation"]
_DATA = {
    "saliency": {"dataset": "image_mask", "root": "DATA", "binary": True},
    "segmentation": {"dataset": "image_mask", "root": "DATA", "classes": CLASSES, "ignore_index": 255},
}


def recipe(kind: str) -> dict[str, Any]:
    return {
        "task": kind,
        "model": {"name": "fpn", "backbone": "timm/test_resnet", "width": 16},
        "losses": ["pixel_bce" if kind == "saliency" else "pixel_cross_entropy"],
        "data": {
            "train": {**_DATA[kind], "list_file": "train.txt", "transforms": [RESIZE, NORMALIZE]},
            "val": {**_DATA[kind], "list_file": "val.txt", "transforms": [RESIZE, NORMALIZE]},
        },
        "evaluate": {"original_size": True},
    }


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("dense")
    for kind in KINDS:
        assert main(["sample", kind, str(folder / kind), "--number", "10"]) == 0
    return {kind: folder / kind for kind in KINDS}


@pytest.fixture
def make(samples: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[str], Spoiled]:
    return lambda kind: copy_of(samples[kind], tmp_path / kind, recipe(kind), capsys)


def mask(spoiled: Spoiled, split: str = "train", line: int = 2) -> Path:
    """The mask that a line of a list names, counted from 1."""
    name = (spoiled.data / f"{split}.txt").read_text().split()[line - 1]
    return spoiled.data / "masks" / f"{Path(name).stem}.png"


def write(path: Path, value: int | list[int], kind: type = np.uint8) -> None:
    """One value, or color, for all pixels of a mask."""
    width, height = Image.open(path).size
    Image.fromarray(np.full((height, width, *np.shape(value)), value, kind)).save(path)


def write_palette(path: Path) -> None:
    width, height = Image.open(path).size
    image = Image.fromarray(np.ones((height, width), np.uint8)).convert("P")
    image.putpalette([0, 0, 0, 128, 0, 0])
    image.save(path)


def change_ids(spoiled: Spoiled, split: str, before: int, after: int) -> None:
    for line in range(1, 1 + len((spoiled.data / f"{split}.txt").read_text().split())):
        path = mask(spoiled, split, line)
        ids = np.array(Image.open(path))
        Image.fromarray(np.where(ids == before, after, ids).astype(np.uint8)).save(path)


Spoil = Callable[[Path], Any]
UNREADABLE: list[tuple[str, Spoil, list[str]]] = [
    ("empty", lambda path: path.write_bytes(b""), ["the file is empty"]),
    ("truncated", lambda path: path.write_bytes(path.read_bytes()[:-40]), ["damaged or truncated"]),
    ("no image", lambda path: path.write_text("a mask, believe me"), ["image"]),
    ("size", lambda path: Image.new("L", (7, 5)).save(path), ["the mask is 7×5 pixels, but its image", "save it at"]),
]
OF_KIND: list[tuple[str, Spoil, list[str]]] = [
    ("segmentation", lambda path: write(path, 9), ["holds the ids 9; expected 0 to 3", "255, `ignore_index`"]),
    ("segmentation", lambda path: write(path, 300, np.uint16), ["300", "0 to 255"]),
    ("segmentation", lambda path: write(path, [9, 0, 0]), ["pixel (0, 0) has the color [9, 0, 0]", "as `colors`"]),
    ("saliency", lambda path: write(path, 0, np.uint16), ["16 bits or more a channel", "save masks with 8 bits"]),
    ("saliency", lambda path: write(path, [200, 0, 0]), ["pixel (0, 0) has the color [200, 0, 0]", "is gray"]),
    ("saliency", write_palette, ["has the color [128, 0, 0]; a binary mask is gray"]),
    (
        "saliency",
        lambda path: write(path, 1),
        ["binary", "255"],
    ),
    ("saliency", lambda path: write(path, 11), ["11", "`classes`"]),
]
BAD = [(kind, *case[1:]) for kind in KINDS for case in UNREADABLE] + OF_KIND


@pytest.mark.parametrize(("kind", "spoil", "parts"), BAD)
def test_a_bad_mask_is_named_with_its_line(
    make: Callable[[str], Spoiled], kind: str, spoil: Spoil, parts: list[str]
) -> None:
    spoiled = make(kind)
    path = mask(spoiled)
    spoil(path)
    answer = spoiled.tell("check")
    assert answer.code == 3
    assert [part for part in ["train.txt, line 2: ", str(path), *parts] if part not in answer.last] == []
    found = spoiled.tell("data")
    assert found.code == 3
    (bad,) = found.json["splits"]["train"]["bad"]
    assert bad["sample"] == 1
    assert bad["reason"] == answer.last
    assert found.json["splits"]["val"]["bad"] == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_mask_ends_a_run_or_is_left_out(make: Callable[[str], Spoiled], kind: str) -> None:
    spoiled = make(kind)
    path = mask(spoiled)
    path.write_bytes(b"")
    answer = spoiled.tell("train")
    assert (answer.code, answer.last) == (3, f"{spoiled.data}/train.txt, line 2: {path}: the file is empty (0 bytes)")
    found = spoiled.skipped("train", 1, "train.txt, line 2", path.name)
    assert (found["num_samples"], found["num_skipped"]) == (2, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_without_a_bad_mask_are_those_of_the_others(make: Callable[[str], Spoiled], kind: str) -> None:
    """The same model measured on a list that lacks the sample has bit-identical metrics."""
    spoiled = make(kind)
    Image.new("L", (7, 5)).save(mask(spoiled, "val", 1))
    found = spoiled.skipped("val", 0, "val.txt, line 1", "the mask is 7×5 pixels")
    assert (found["num_samples"], found["num_skipped"]) == (1, 1)
    names = (spoiled.data / "val.txt").read_text().split()
    (spoiled.data / "val.txt").write_text(f"{names[1]}\n")
    alone = spoiled.tell("eval").json
    assert (alone["num_samples"], alone["num_skipped"]) == (1, 0)
    assert alone["metrics"] == found["metrics"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_mask_is_named_before_anything_is_made(make: Callable[[str], Spoiled], kind: str) -> None:
    spoiled = make(kind)
    mask(spoiled).unlink()
    parts = ["data.train", "train.txt: no mask in", "for 1 of 8 names", "(line 2)"]
    assert spoiled.refused(*parts) == 3
    spoiled.recipe["data"]["on_error"] = "skip"  # the list is wrong, not a file
    assert spoiled.refused(*parts) == 3


@pytest.mark.parametrize("value", [0, 255])
def test_masks_that_are_all_empty_or_all_full_are_fine(make: Callable[[str], Spoiled], value: int) -> None:
    spoiled = make("saliency")
    for path in (spoiled.data / "masks").iterdir():
        write(path, value)
    assert spoiled.tell("train").code == 0
    found = spoiled.tell("eval").json["metrics"]
    assert all(np.isfinite(metric) for metric in found.values())
    assert found["mae"] > 0


def test_a_mask_that_is_ignored_altogether_changes_nothing_else(make: Callable[[str], Spoiled]) -> None:
    spoiled = make("segmentation")
    write(mask(spoiled), 255)
    write(mask(spoiled, "val", 1), 255)
    assert spoiled.tell("train").code == 0
    found = spoiled.tell("eval").json["metrics"]
    names = (spoiled.data / "val.txt").read_text().split()
    (spoiled.data / "val.txt").write_text(f"{names[1]}\n")
    assert spoiled.tell("eval").json["metrics"] == pytest.approx(found, rel=1e-6)


def test_without_any_label_there_are_no_metrics_but_the_names(make: Callable[[str], Spoiled]) -> None:
    spoiled = make("segmentation")
    for path in (spoiled.data / "masks").iterdir():
        write(path, 255)
    assert spoiled.tell("train").code == 0
    assert spoiled.tell("eval").json["metrics"] == {"unseen_classes": 4} | {f"absent.{name}": 1 for name in CLASSES}


def test_a_class_that_no_mask_holds_is_named_and_spoils_no_mean(make: Callable[[str], Spoiled]) -> None:
    spoiled = make("segmentation")
    for split in ("train", "val"):
        change_ids(spoiled, split, 3, 0)
        change_ids(spoiled, split, 1, 0)
    answer = spoiled.tell("train")
    assert answer.code == 0
    assert "absent.triangle 1" in answer.err
    found = spoiled.tell("eval").json["metrics"]
    assert {name for name in found if name.startswith("absent.")} == {"absent.disc", "absent.triangle"}
    shares = [value for name, value in found.items() if name.startswith("iou.")]
    assert found["miou"] == pytest.approx(sum(shares) / len(shares))
    assert len(shares) == 4 - found["unseen_classes"]
    assert found.get("iou.triangle", 0) == 0  # predicted, or not there
    pixels = spoiled.tell("data").json["splits"]["train"]["mask_shares"]
    assert pixels["triangle"] == 0 < pixels["background"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_of_one_pixel_is_as_good_as_any(make: Callable[[str], Spoiled], kind: str) -> None:
    spoiled = make(kind)
    for path in (mask(spoiled), mask(spoiled, "val", 1)):
        Image.new("L", (1, 1)).save(path)
        Image.new("RGB", (1, 1), (90, 90, 90)).save(spoiled.data / "images" / f"{path.stem}.jpg")
    assert spoiled.tell("train").code == 0
    found = spoiled.tell("eval").json["metrics"]
    assert all(np.isfinite(metric) for metric in found.values())


def test_what_a_model_cannot_take_is_reported_with_what_to_change(make: Callable[[str], Spoiled]) -> None:
    spoiled = make("segmentation")
    spoiled.recipe["data"]["batch_size"] = 1
    parts = ["model: cannot take 1 image of 32×32 pixels: Expected more than 1 value per channel", "data.drop_last"]
    assert spoiled.refused(*parts, is_made=True) == 2


@pytest.mark.parametrize("size", [[33, 47], [40, 7]])
@pytest.mark.parametrize("model", ["fpn", "unet"])
def test_sizes_that_no_stride_divides_are_taken(make: Callable[[str], Spoiled], model: str, size: list[int]) -> None:
    spoiled = make("segmentation")
    spoiled.recipe["model"] = {"name": model, "backbone": "timm/test_resnet"}
    for split in ("train", "val"):
        spoiled.recipe["data"][split]["transforms"][-2] = {"name": "resize", "size": size}
    assert spoiled.tell("check").code == 0


def test_one_size_of_several_is_that_size(make: Callable[[str], Spoiled]) -> None:
    spoiled = make("segmentation")
    spoiled.recipe["data"]["train"]["transforms"].append({"name": "multi_scale", "sizes": [48]})
    assert spoiled.tell("check").json["data"]["train"]["image"] == [3, 48, 48]
    spoiled.recipe["data"]["train"]["transforms"][-1]["sizes"] = []
    assert spoiled.refused("data.train.transforms.2.sizes: expected a list of at least 1 item") == 2


def test_recipes_that_do_not_fit_their_masks_are_refused_before_anything_is_made(
    make: Callable[[str], Spoiled],
) -> None:
    spoiled = make("segmentation")
    spoiled.recipe["model"]["num_classes"] = 7
    assert spoiled.refused("model.num_classes: expected 4, the number of classes in data.train, got 7") == 2
    del spoiled.recipe["model"]["num_classes"]
    spoiled.recipe |= {"task": "saliency", "losses": ["pixel_bce"]}
    assert spoiled.refused("task: saliency: the masks have 4 classes, expected one; set binary: true in data") == 3
    binary = make("saliency")
    binary.recipe |= {"task": "segmentation", "losses": ["pixel_cross_entropy"]}
    assert binary.refused("task: segmentation: the masks have 1 class, expected two or more", "use task: saliency") == 3


def test_masks_of_classes_are_no_binary_masks(make: Callable[[str], Spoiled]) -> None:
    spoiled = make("segmentation")
    for split in ("train", "val"):
        change_ids(spoiled, split, 255, 0)
        part = spoiled.recipe["data"][split]
        del part["classes"], part["ignore_index"]
        part["binary"] = True
    spoiled.recipe |= {"task": "saliency", "losses": ["pixel_bce"]}
    answer = spoiled.tell("check")
    assert answer.code == 3
    assert ".txt, line 1: " in answer.last
    assert "`label_map: {foreground: " in answer.last


@pytest.mark.parametrize(
    ("change", "code", "message", "is_made"),
    [
        ({"losses": ["cross_entropy"]}, 3, "cross_entropy needs labels", False),
        ({"model": {"name": "timm/test_resnet"}}, 2, "model: got outputs of shape [4, 4], expected", True),
    ],
)
def test_parts_of_other_tasks_are_named(
    make: Callable[[str], Spoiled], change: dict[str, Any], code: int, message: str, is_made: bool
) -> None:
    spoiled = make("segmentation")
    spoiled.recipe |= change
    assert spoiled.refused(message, is_made=is_made) == code


def test_an_ignored_class_is_named_and_in_no_metric(make: Callable[[str], Spoiled]) -> None:
    spoiled = make("segmentation")
    for split in ("train", "val"):
        change_ids(spoiled, split, 255, 0)
        spoiled.recipe["data"][split]["ignore_index"] = 2
    answer = spoiled.tell("train")
    assert answer.code == 0
    assert "data.train: ignore_index 2 is the id of 'square', which is left out of all metrics" in answer.err
    metrics = spoiled.tell("eval").json["metrics"]
    assert "miou" in metrics
    assert not [name for name in metrics if name.endswith(".square")]
