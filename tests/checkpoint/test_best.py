"""`best` leads to the best checkpoint with and without links, and copies of a run lose nothing."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint.best import best_step, resolve_best
from paceline.checkpoint.reader import open_checkpoint
from paceline.checkpoint.store import Store
from paceline.checkpoint.weights import read_weights
from paceline.core.errors import CheckpointError


def save(run: Path, step: int, top1: float) -> Store:
    store = Store(run / "checkpoints", keep_last=1, best="top1")
    store.save(step, {"weight": torch.full((3,), float(step))}, {"step": step}, {"top1": top1})
    return store


def steps(run: Path) -> list[int]:
    return [int(path.name[5:]) for path in sorted((run / "checkpoints").glob("step-*"))]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save(tmp_path / "first", 1, 0.9)
    save(tmp_path / "first", 2, 0.5)
    return tmp_path / "first"


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the file systems of memory sticks and some servers answer."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "symlink", refuse)


def test_where_links_cannot_be_made_a_file_names_the_best(tmp_path: Path, no_links: None) -> None:
    run = tmp_path / "run"
    for step, top1 in ((1, 0.1), (2, 0.9), (3, 0.5), (4, 0.4)):
        save(run, step, top1)
    assert (run / "best").read_text() == "checkpoints/step-00000002\n"
    assert steps(run) == [2, 4]
    assert open_checkpoint(run / "best").step == best_step(run) == 2
    assert resolve_best(run / "best") == (run / "checkpoints/step-00000002").resolve()
    assert read_weights(run / "best")["weight"].tolist() == [2, 2, 2]
    assert [path.name for path in run.iterdir() if "partial" in path.name] == []
    run.rename(tmp_path / "moved")
    assert open_checkpoint(tmp_path / "moved/best").step == 2
    shutil.rmtree(tmp_path / "moved/checkpoints/step-00000002")
    assert resolve_best(tmp_path / "moved/best") is None
    with pytest.raises(CheckpointError, match=r"best: names .*step-00000002, which does not exist"):
        open_checkpoint(tmp_path / "moved/best")


def test_the_file_becomes_a_link_where_links_can_be_made_again(run: Path) -> None:
    (run / "best").unlink()
    (run / "best").write_text("checkpoints/step-00000001\n")
    save(run, 3, 0.95)
    assert (run / "best").readlink() == Path("checkpoints/step-00000003")
    assert steps(run) == [3]


def test_a_copy_without_links_goes_on(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))  # follows links, as cp -rL and rsync -L do
    assert not (copy / "best").is_symlink()
    assert open_checkpoint(copy / "best").step == best_step(copy) == 1
    save(copy, 3, 0.7)
    assert (copy / "best").readlink() == Path("checkpoints/step-00000001")
    assert steps(copy) == [1, 3]
    assert open_checkpoint(copy / "best").model["weight"].tolist() == [1, 1, 1]
    assert sorted(path.name for path in copy.iterdir()) == ["best", "best~1", "checkpoints"]
    assert open_checkpoint(copy / "best~1").step == 1


def other_checkpoint(best: Path) -> None:
    save(best.parent.parent / "other", 1, 0.2)
    shutil.copytree(best.parent.parent / "other/checkpoints/step-00000001", best)
    (best / "model.safetensors").write_bytes((best / "state.safetensors").read_bytes())


def whole_other_checkpoint(best: Path) -> None:
    store = Store(best.parent.parent / "other/checkpoints")
    store.save(1, {"weight": torch.zeros(3)}, {}, {})
    shutil.copytree(store.path_of(1), best)


def notes(best: Path) -> None:
    best.mkdir()
    (best / "notes.txt").write_text("mine")


@pytest.mark.parametrize(
    "make", [other_checkpoint, whole_other_checkpoint, notes, lambda best: best.write_text("my best recipe")]
)
def test_anything_else_is_moved_aside_and_saving_goes_on(run: Path, make: Any) -> None:
    best = run / "best"
    best.unlink()
    make(best)
    content = {path.name: path.read_bytes() for path in [best, *best.rglob("*")] if path.is_file()}
    save(run, 3, 0.7)
    assert best.readlink() == Path("checkpoints/step-00000001")
    assert open_checkpoint(best).step == 1
    aside = run / "best~1"
    found = {path.name: path.read_bytes() for path in [aside, *aside.rglob("*")] if path.is_file()}
    assert list(found.values()) == list(content.values())
    assert steps(run) == [1, 3]


def test_a_run_that_keeps_no_best_leaves_it_alone(run: Path) -> None:
    (run / "best").unlink()
    (run / "best").write_text("mine")
    Store(run / "checkpoints").save(3, {"weight": torch.zeros(3)}, {}, {})
    assert (run / "best").read_text() == "mine"


@pytest.mark.parametrize("text", ["", "checkpoints", "../../etc/passwd", "/step-00000001", "a/step-00000001\nb", "\0"])
def test_a_file_that_names_no_checkpoint(tmp_path: Path, text: str) -> None:
    (tmp_path / "best").write_text(text)
    assert (best_step(tmp_path), resolve_best(tmp_path / "best")) == (None, None)
    with pytest.raises(CheckpointError, match="best: is a file"):
        open_checkpoint(tmp_path / "best")
