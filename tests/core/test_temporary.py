"""Temporary folders: gone in the end, and those of killed processes with the next one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from paceline.core.temporary import temporary_folder

_KILLED = """
import os, signal
from paceline.core.temporary import temporary_folder
with temporary_folder() as folder:
    (folder / "note").touch()
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def abandoned(place: Path) -> Path:
    """The folder of a process that was killed."""
    done = subprocess.run(
        [sys.executable, "-c", _KILLED], env={**os.environ, "TMPDIR": str(place)}, stdout=subprocess.PIPE, text=True
    )
    return Path(done.stdout.strip())


def test_a_folder_is_gone_in_the_end(place: Path) -> None:
    with temporary_folder() as folder:
        (folder / "inner").mkdir()
        assert folder.parent == place
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(place.iterdir()) == []


def test_what_a_killed_process_left_is_removed_by_the_next(place: Path) -> None:
    left = abandoned(place)
    assert (left / "note").exists()
    with temporary_folder():
        assert not left.exists()


def test_nothing_else_is_removed(place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with temporary_folder() as living:
        others = [abandoned(tmp_path_factory.mktemp("elsewhere")) for _ in range(2)]
        theirs, linked = (place / f"paceline-{name * 8}" for name in "ab")
        theirs.mkdir()  # somebody else's, without a lock
        linked.symlink_to(others[0])
        other_machine = others[1].rename(place / others[1].name)
        (other_machine / ".lock").write_text("another machine")
        with temporary_folder():
            assert [path.exists() for path in (living, theirs, linked, others[0] / "note", other_machine)] == [True] * 5
