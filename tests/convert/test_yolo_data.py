"""The YAML file of a YOLO data set becomes a recipe that trains on it where it lies."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from PIL import Image
from support.pages import ROOT, blocks

from paceline.cli import main
from paceline.convert.convert_config import convert_config
from paceline.core.errors import RecipeError
from paceline.recipe.load import load
from paceline.recipe.validate import validate

BLOCKS = blocks(ROOT / "docs/coming-from/ultralytics.md")
SMALL = "{name: resize, size: [32, 32]}, {name: normalize, mean: [0.5, 0.5, 0.5], std: [0.2, 0.2, 0.2]}"
BACKBONE = "weights: null, backbone: timm/resnet10t, backbone_args: {stem_width: 8, channels: [8, 8, 8, 8]}"
SHORT = ["data.batch_size=2", "train.epochs=1", "logging.images=false"]


def write_data(folder: Path, line: str) -> None:
    """Two images in each split, with one object in each."""
    for name in ("train/a", "train/b", "val/c", "val/d"):
        for kind in ("images", "labels"):
            (folder / kind / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (48, 40), (99, 9, 9)).save(folder / f"images/{name}.jpg")
        (folder / f"labels/{name}.txt").write_text(line)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_file_of_the_page_becomes_the_recipe_of_the_page_and_trains(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_data(here / "coco8", "1 .5 .5 .5 .5\n2 .1 .1 .4 .1 .3 .4\n")
    yaml = [block for block in BLOCKS if block.language == "yaml"]
    assert yaml[0].file == "coco8.yml"
    Path("coco8.yml").write_text(yaml[0].text)
    Path("theirs.yaml").write_text(yaml[-1].text)
    commands = [line.split()[2:] for block in BLOCKS if block.language == "console" for line in block.text.splitlines()]
    assert main(commands[0]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == [*next(block.text for block in BLOCKS if block.language == "text").splitlines(), printed[-1]]
    assert validate(load("coco8.yaml")).resolved() == validate(load("theirs.yaml")).resolved()
    small = [f"data.{split}.transforms=[{SMALL}]" for split in ("train", "val")]
    model = f"model={{name: fcos, width: 8, {BACKBONE}}}"
    assert main([*commands[1], *small, model, *SHORT]) == 0
    assert (here / "runs/coco8/best").exists()


def test_data_with_keypoints_becomes_a_recipe_for_keypoints(here: Path) -> None:
    write_data(here / "elsewhere/pose", "0 .5 .5 .5 .5 .3 .3 2 .7 .3 1 0 0 0\n")
    (here / "lists").mkdir()
    shape = "kpt_shape: [3, 3]\nflip_idx: [1, 0, 2]\nnc: 1\n"
    Path("lists/data.yaml").write_text(f"path: ../elsewhere/pose\ntrain: images/train\nval: images/val\n{shape}")
    recipe, remarks = convert_config(Path("lists/data.yaml"))
    assert (recipe["name"], recipe["task"]) == ("lists", {"name": "keypoints"})
    assert [remark.split(":")[:4] for remark in remarks] == [["lists/data.yaml", "4", "1", " kpt_shape"]]
    Path("pose.json").write_text(json.dumps(recipe))
    crop = "{name: pose_crop, size: [32, 32]}, {name: normalize, mean: [0.5, 0.5, 0.5], std: [0.2, 0.2, 0.2]}"
    small = [f"data.{split}.transforms=[{crop}]" for split in ("train", "val")]
    model = f"model={{name: simple_baseline, widths: [8], {BACKBONE}}}"
    assert main(["train", "pose.json", *small, model, *SHORT]) == 0


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("", {"file": "data/set.yaml"}),
        ("path: .\n", {"file": "data/set.yaml"}),
        ("path: inner\n", {"file": "data/set.yaml"}),
        ("path: ../other\n", {"file": "{here}/data/set.yaml", "root": "other"}),
        ("path: {here}/other\n", {"file": "{here}/data/set.yaml", "root": "{here}/other"}),
        ("path: absent\n", {"file": "data/set.yaml"}),
    ],
)
def test_where_the_data_lies(here: Path, path: str, expected: dict[str, str]) -> None:
    for name in ("data/inner", "other"):
        (here / name).mkdir(parents=True)
    written = path.replace("{here}", str(here)) + "train: [a, b]\nval: c.txt\ntest: d\nnames: [x]\n"
    Path("data/set.yaml").write_text(written)
    recipe, remarks = convert_config(Path("data/set.yaml"))
    for split in ("train", "val", "test"):
        found = {key: recipe["data"][split][key] for key in ("file", "root") if key in recipe["data"][split]}
        assert found == {key: value.replace("{here}", str(here)) for key, value in expected.items()}
    assert bool(re.search("path: not found from here", " ".join(remarks))) == ("absent" in path)


def test_a_wrong_value_is_named_with_its_line(here: Path) -> None:
    Path("data.yaml").write_text("names: {0: a}\ntrain: a\nval: 7\n")
    with pytest.raises(RecipeError, match=r"data\.yaml:3:6: val"):
        convert_config(Path("data.yaml"))
