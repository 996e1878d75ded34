"""The pages on predicting, exporting and learning: their commands and code run for real, on a run that is made here."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from support.pages import ROOT, blocks, commands

from paceline.cli import main
from paceline.core.registry import register

RECIPE = """
extends: image_folder
name: flowers
model: {name: convnet, widths: [2]}
data:
  train: {root: flowers}
  val: {root: flowers}
schedule: {warmup: none, warmup_epochs: null}
train: {epochs: null, steps: 1, threads: 1, channels_last: false}
logging: {images: false, tensorboard: false}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained run, photos, and a list of one."""
    folder = tmp_path_factory.mktemp("flowers")
    generator = np.random.default_rng(0)
    for place in ("flowers/daisy/1.jpg", "flowers/rose/1.jpg", "photos/1.jpg", "a.jpg", "b.jpg", "c.jpg"):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(folder / place), generator.integers(0, 255, (60, 70, 3), dtype=np.uint8))
    (folder / "list.csv").write_text("c.jpg\n")
    (folder / "flowers.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "flowers.yaml"]) == 0
    return folder


def written(page: str, language: str) -> list[str]:
    return [block.text for block in blocks(ROOT / "docs" / page) if block.language == language]


def run(page: str, number: int) -> None:
    """Run one command of a page, on one process."""
    found = [words for block in blocks(ROOT / "docs" / page) for words in commands(block)]
    words = found[number][1:]
    if "--procs" in words:
        del words[words.index("--procs") : words.index("--procs") + 2]
    assert main(words) == 0, words


def test_predictions(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder)
    run("predict.md", 0)
    assert len((folder / "predictions/predictions.csv").read_text().splitlines()) == 1 + 1
    run("predict.md", 1)
    assert len((folder / "predictions/predictions.csv").read_text().splitlines()) == 1 + 3
    (code,) = written("predict.md", "python")
    capsys.readouterr()
    exec(code, {})
    first, second = capsys.readouterr().out.splitlines()
    assert {first.split()[0], second.split()[0]} <= {"daisy", "rose"}


def test_exported_files_are_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    run("export.md", 0)
    monkeypatch.chdir(folder / "runs/flowers")
    for code in written("export.md", "python"):
        names: dict[str, object] = {}
        exec(code, names)
        assert tuple(names["logits"].shape) == (5, 2)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("own_names")
def test_a_layer_map_of_ones_own() -> None:
    (code,) = written("learning.md", "python")
    names: dict[str, object] = {"__name__": "page", "register": register}
    exec(code, names)
    entry = register.kind("layer_map").find("mine")
    assert entry is not None
    layer_of = entry.resolve()(None)
    assert (layer_of("stem.conv.weight"), layer_of("head.weight")) == (0, None)
