"""The pages on saliency, segmentation and video: commands run, and no recipe, loss or metric is left out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from PIL import Image
from support.forkserver import paceline

from paceline.cli import main
from paceline.core.registry import register
from paceline.metrics.saliency import SALIENCY_VALUES
from paceline.recipe.load import load, shipped_recipes
from paceline.recipe.validate import validate

DOCS = Path(__file__).resolve().parent.parent / "docs"
TASKS = ["saliency", "segmentation", "video"]
PAGED = [*TASKS, "instance_segmentation", "keypoints"]
PAGES = {task: (DOCS / f"{task}.md").read_text(encoding="utf-8") for task in PAGED}


def blocks(task: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[task], flags=re.DOTALL)


@pytest.mark.parametrize("task", PAGED)
def test_recipes_that_are_named_ship(task: str) -> None:
    rows = [line for line in PAGES[task].split("## Recipes")[1].splitlines() if line.startswith("| `")]
    named = {name for row in rows if "SALIENCY_VALUES" not in row for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    shipped = shipped_recipes()
    assert named <= set(shipped)
    assert {name for name, path in shipped.items() if path.parent.name == task} <= set(
        re.findall(r"`(\w+)`", "".join(rows))
    )


@pytest.mark.parametrize("task", PAGED)
def test_what_the_page_says_is_reached_is_what_the_recipe_expects(task: str) -> None:
    expected = validate(load(f"{task}_sample")).recipe.expect
    assert expected
    for metric, value in expected.items():
        assert f"`{metric}` {value:g}" in PAGES[task]


@pytest.mark.parametrize("task", PAGED)
def test_images_are_there(task: str) -> None:
    images = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", PAGES[task])
    assert images == [f"images/{task}.png"]
    assert (DOCS / images[0]).stat().st_size <= 150_000
    assert min(Image.open(DOCS / images[0]).size) > 100


def test_every_loss_of_pixels_and_every_metric_is_documented() -> None:
    losses = [name for name in register.kind("loss").names() if name in ("cel",) or name.endswith("_loss")]
    losses += [name for name in register.kind("loss").names() if name.startswith(("pixel_", "ohem_"))]
    both = PAGES["saliency"] + PAGES["segmentation"]
    assert len(losses) >= 6
    assert [name for name in losses if f"`{name}`" not in both] == []
    assert [name for name in SALIENCY_VALUES if f"`{name}`" not in PAGES["saliency"]] == []


@pytest.mark.parametrize("task", TASKS)
def test_commands_run_in_order(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer samples and two steps of training."""
    monkeypatch.chdir(tmp_path)
    commands = [line[2:] for block in blocks(task, "console") for line in block.splitlines()]
    fewer = {"sample": ["--number", "4"], "train": ["train.epochs=null", "train.steps=2", "schedule={}"]}
    assert [command.split()[1] for command in commands] == ["sample", "train", "eval", "results"]
    for command in commands:
        words = command.removeprefix("paceline ").split()
        assert main([*words, *fewer.get(words[0], [])]) == 0, command
    assert (tmp_path / "results.csv").is_file()
    saved = sorted(path.name for path in (tmp_path / f"runs/{task}_sample/predictions/val").glob("*.png"))
    assert saved == ([] if task == "video" else ["image_0003.png"])


def test_what_sample_prints_last_trains_on_what_it_wrote(tmp_path: Path) -> None:
    """Also where the shipped recipe does not look for the set."""
    written = paceline(tmp_path, "sample", "saliency", "a: strange #name", "--number", "4").stdout
    assert yaml.safe_load(written)["task"] == "saliency"
    command = written.splitlines()[-1].removeprefix("#").strip().replace("paceline train", "paceline check", 1)
    done = subprocess.run(
        ["/bin/sh", "-c", f"{sys.executable} -m {command}"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "train: 3 samples" in done.stdout
