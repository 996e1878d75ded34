"""Locks on files, held by real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.core import file_lock
from paceline.core.file_lock import is_at, is_seen_everywhere, lock_file, try_lock

HOLD = """
import sys, time
from pathlib import Path
from paceline.core.file_lock import lock_file
lock_file(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
{then}
"""


@contextmanager
def holder(path: Path, then: str = "") -> Iterator[subprocess.Popen[str]]:
    """Another process that has the file locked until it reads a line."""
    command = [sys.executable, "-c", HOLD.format(then=then), str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_one_holds_it_and_the_kernel_releases_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path) as first:
        with pytest.raises(BlockingIOError, match="lock"):
            lock_file(path, patience=0)
        descriptor = os.open(path, os.O_RDONLY)
        assert try_lock(descriptor, shared=True) is False
        os.close(descriptor)
        first.send_signal(signal.SIGKILL)
        os.close(lock_file(path, patience=60))


@pytest.mark.parametrize("then", ["Path(sys.argv[1]).rename('moved')", "Path(sys.argv[1]).unlink()"])
def test_who_waits_for_a_file_that_goes_begins_again(tmp_path: Path, then: str) -> None:
    path = tmp_path / "lock"
    with holder(path, then.replace("moved", str(tmp_path / "moved"))) as first:
        assert first.stdin is not None
        first.stdin.write("\n")
        first.stdin.flush()
        descriptor = lock_file(path, patience=60)
    assert is_at(descriptor, path)
    path.unlink()
    assert not is_at(descriptor, path)
    os.close(descriptor)


def test_links_and_pipes_are_no_locks(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="link"):
        lock_file(tmp_path / "link")
    assert not (tmp_path / "target").exists()


MOUNTS = r"""
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
28 27 0:40 / /net rw - nfs4 server:/home rw,local_lock=none
29 27 0:41 / /net/old rw - nfs server:/old rw,nolock,local_lock=all
30 27 0:42 / /net/a\040b rw shared:1 - lustre mds:/fs rw,flock
31 27 0:43 / /scratch rw - lustre mds:/fs rw
32 27 0:44 / /win rw - 9p c rw
33 27 0:45 / /win rw - tmpfs x rw
34 27 0:46 / /mnt rw - beegfs x rw
35 27 0:47 / /fuse rw - fuse.sshfs x rw
"""


def test_whose_locks_other_machines_see(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written = tmp_path / "mountinfo"
    written.write_text(MOUNTS.lstrip())
    monkeypatch.setattr(file_lock, "_MOUNTS", written)
    expected = {
        "/home/x": True,
        "/net/home": True,
        "/network": True,
        "/net/old/x": False,
        "/net/a b/x": True,
        "/scratch": False,
        "/win/x": True,
        "/mnt/x": False,
        "/fuse": False,
    }
    assert {path: is_seen_everywhere(Path(path)) for path in expected} == expected
    monkeypatch.setattr(file_lock, "_MOUNTS", tmp_path / "absent")
    assert not is_seen_everywhere(tmp_path)
