"""Checkpoints with right checksums and wrong content are refused in a sentence, and the one before is used."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.reader import open_checkpoint
from paceline.checkpoint.store import Store
from paceline.core.errors import CheckpointError

ROOT = Path(__file__).resolve().parent.parent.parent

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT))
    hostile: Any = importlib.import_module("chaos.hostile_files.checkpoint_contents")

CASES = [(1, name) for name in hostile.ONE_PROCESS] + [(2, name) for name in hostile.TWO_PROCESSES]


def test_there_are_many() -> None:
    assert len(CASES) >= 60


@pytest.mark.parametrize(("world", "name"), CASES)
def test_it_is_refused_and_the_one_before_is_used(world: int, name: str, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    hostile.save_sound(root, 1, world)
    folder = hostile.save_sound(root, 2, world)
    assert open_checkpoint(folder).step == 2
    (hostile.ONE_PROCESS | hostile.TWO_PROCESSES)[name](folder)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    message = str(caught.value)
    assert message.startswith(str(folder))
    assert "\n" not in message
    assert len(message) < 1000
    store = Store(root, best="top1")
    newest = store.newest()
    assert newest is not None
    assert (newest.step, len(store.rejected)) == (1, 1)
    assert store.index()[0]["step"] == 1
    assert hostile.save_sound(root, 3, world).is_dir()
