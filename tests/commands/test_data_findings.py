"""`paceline data`: equal problems together, exact duplicates, what the model gets; the cache is cleared by it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.cli import main
from paceline.commands.data_report import group_problems
from paceline.data.skip_list import Skipped

NORMALIZE = "transforms: [{name: normalize, mean: [0.5, 0.5, 0.5], std: [0.29, 0.29, 0.29]}]"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two classes in two splits: one image is in train twice, and another in both splits."""
    random = np.random.default_rng(0)
    for split, number in (("train", 4), ("val", 3)):
        for name in "ab":
            folder = tmp_path / f"photos/{split}/{name}"
            folder.mkdir(parents=True)
            for k in range(number):
                Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / f"{k}.png")
    shutil.copy(tmp_path / "photos/train/a/0.png", tmp_path / "photos/train/b/again.png")
    Image.open(tmp_path / "photos/train/a/1.png").save(tmp_path / "photos/val/a/leak.bmp")
    data = "".join(
        f"  {split}: {{dataset: image_folder, root: photos, split: {split}, {NORMALIZE}}}\n"
        for split in ("train", "val")
    )
    (tmp_path / "recipe.yaml").write_text(f"name: twice\ndata:\n{data}")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "recipe.yaml"


def test_exact_duplicates_are_found_within_and_across_splits(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", str(recipe)]) == 0
    text = capsys.readouterr().out
    photos = recipe.parent / "photos"
    same = f"train: 1 exact duplicate within the split, such as {photos}/train/a/0.png = {photos}/train/b/again.png"
    assert same in text
    shared = f"val: 1 image also in train, such as {photos}/train/a/1.png = {photos}/val/a/leak.bmp"
    assert shared in text, "by its pixels"
    assert "warning" not in text


def test_what_the_model_gets_is_printed_and_warned_about(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", str(recipe), "--json", "data.val.transforms=[]"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["splits"]["train"]["input"]["is_normalized"]
    np.testing.assert_allclose(found["splits"]["train"]["input"]["std"], [1, 1, 1], atol=0.1)
    assert len(found["warnings"]) == 1
    assert "data.val: images are not normalized" in found["warnings"][0]
    assert len(found["duplicates"]) == 2


def test_check_prints_the_same_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "quickstart", "train.epochs=1", "train.threads=1"]) == 0
    captured = capsys.readouterr()
    assert "not normalized" not in captured.err
    assert main(["data", "quickstart", "--sheet", str(tmp_path / "sheet.png")]) == 0
    same, found = (re.findall(r"input .*(mean .*), as", out) for out in (captured.out, capsys.readouterr().out))
    assert (len(same), same) == (2, found)


def test_check_says_why_there_are_no_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "quickstart", "train.epochs=1", "train.threads=1", "data.val=null"]) == 0
    assert "\nmetrics     none: the recipe has no data.val\n" in capsys.readouterr().out


def test_equal_problems_are_one_line(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("x", "y", "z"):
        (recipe.parent / f"photos/train/a/{name}.png").write_bytes(b"")
    (recipe.parent / "photos/val/b/text.png").write_text("no image")
    assert main(["data", str(recipe)]) == 3
    text = capsys.readouterr().out
    assert "unreadable: 4 files" in text
    names = ", ".join(str(recipe.parent / f"photos/train/a/{name}.png") for name in "xyz")
    assert f"  train: 3 files, {names}: the file is empty (0 bytes)" in text.splitlines()
    assert sum("0 bytes" in line for line in text.splitlines()) == 1


def test_reasons_that_differ_in_paths_and_numbers_alone_are_equal() -> None:
    reason = "leads out of /data/set, to /far/{}.jpg; add `follow_links: true` if that is meant"
    bad = [("train", Skipped(k, f"{k}.jpg", reason.format(k))) for k in range(200)]
    bad += [("val", Skipped(0, "v.jpg", reason.format(0))), ("train", Skipped(200, "t.jpg", "the file is empty"))]
    assert [(split, len(group)) for split, group in group_problems(bad)] == [("train", 200), ("val", 1), ("train", 1)]


def test_indexes_are_kept_in_the_cache(recipe: Path, own_cache: Path) -> None:
    assert main(["data", str(recipe), "--limit", "1"]) == 0
    assert len(list(own_cache.glob("index-*"))) == 2
    assert not list(recipe.parent.rglob(".paceline")), "nothing is written beside the data"
