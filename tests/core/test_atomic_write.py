"""Files that are replaced: whole, on the disk, and never through a link that somebody laid in the way."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.full_disk import files_limited_to

from paceline.checkpoint.files import write_file
from paceline.core.atomic_write import create_file, is_partial, partial_path, remove_partial_files, replace_file
from paceline.loggers.events import Started
from paceline.loggers.files import StatusFile
from paceline.visualize.image import save_png

IMAGE = np.zeros((2, 2, 3), np.uint8)
WRITERS: dict[str, Callable[[Path], object]] = {
    "status.json": lambda path: StatusFile(path, 1).handle(Started("x", path, "cpu", 1, 1, 1)),
    "image.png": lambda path: save_png(IMAGE, path),
    "recipe.yaml": lambda path: replace_file(path, b"name: x\n"),
    "model.safetensors": lambda path: write_file(path, [memoryview(b"tensors")]),
}


@pytest.mark.parametrize("name", WRITERS)
def test_no_link_is_followed(tmp_path: Path, name: str) -> None:
    """Neither in place of the file nor of the one that is written aside, of any name that could be guessed."""
    victim, folder = tmp_path / "victim", tmp_path / "run"
    victim.write_text("precious")
    folder.mkdir()
    links = [folder / name, folder / f".{name}.partial", folder / f".{Path(name).stem}.partial"]
    for link in links:
        link.symlink_to(victim)
    WRITERS[name](folder / name)
    assert victim.read_text() == "precious"
    assert (folder / name).is_file()
    assert not (folder / name).is_symlink()
    assert {path.name for path in folder.iterdir()} == {link.name for link in links}


def test_a_file_that_cannot_be_written_stays_and_is_named(tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    replace_file(path, b"old")
    with files_limited_to(2), pytest.raises(OSError, match=r"index\.json"):
        replace_file(path, b"a new one")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match="absent/index"):
        replace_file(tmp_path / "absent" / "index.json", b"")


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    script = (
        "from paceline.core.atomic_write import *; import sys;create_file(partial_path(Path(sys.argv[1]))); os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "x")], check=False, timeout=60)
    (left,) = tmp_path.iterdir()
    assert is_partial(left.name)
    kept = {"x", ".x.partial", ".0123.partial", "0123456789abcdef.partial"}
    for name in kept:
        (tmp_path / name).touch()
    remove_partial_files(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == kept
    remove_partial_files(tmp_path / "absent")


def test_two_that_write_one_file_do_not_meet(tmp_path: Path) -> None:
    first, second = partial_path(tmp_path / "x"), partial_path(tmp_path / "x")
    assert first != second
    assert len(os.fsencode(partial_path(tmp_path / ("x" * 255)).name)) < 255
    os.close(create_file(first))
    with pytest.raises(IsADirectoryError):
        create_file(tmp_path)
