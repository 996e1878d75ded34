"""What lies where a save writes is moved aside: nothing is lost, nothing is followed, and saving goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.checkpoint.reader import open_checkpoint
from paceline.checkpoint.shards import SaveRank
from paceline.checkpoint.store import Store


def make_folder(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("other")


KINDS: dict[str, Callable[[Path, Path], object]] = {
    "a link": lambda path, mine: path.symlink_to(mine),
    "a link to a folder": lambda path, mine: path.symlink_to(mine.parent),
    "a link that leads nowhere": lambda path, mine: path.symlink_to("nowhere"),
    "a file": lambda path, mine: path.write_text("other"),
    "a pipe": lambda path, mine: os.mkfifo(path),
    "a folder of somebody's": lambda path, mine: make_folder(path),
}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "name", ["checkpoints/.step-00000002.partial", "checkpoints/.step-00000001.removed", ".best.partial"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_saving_goes_on(kind: str, name: str, world: int, tmp_path: Path) -> None:
    run, mine = tmp_path / "run", tmp_path / "home" / "precious"
    mine.parent.mkdir()
    mine.write_text("kept")
    (run / "checkpoints").mkdir(parents=True)
    KINDS[kind](run / name, mine)
    store = Store(run / "checkpoints", keep_last=9, best="top1")
    for rank in reversed(range(world)):
        if world > 1:
            store._clean_up(before=2)  # as a save before this one has done
        store.save(2, {"weight": torch.ones(3)}, {}, {"top1": 0.5}, SaveRank(rank, world, "a"))
    assert open_checkpoint(run / "best").step == 2
    assert [path.name for path in mine.parent.iterdir()] == ["precious"]
    assert mine.read_text() == "kept"
