import io
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.waiting import TIMEOUT, wait_until

from paceline.core.errors import DataError
from paceline.data.index import index as index_module
from paceline.data.index.index import IndexBuilder, open_index
from paceline.data.mapped_arrays import MappedArrays

LONG_AGO = 1_000_000_000_000_000_001


def age(*paths: Path) -> None:
    """As if these had been changed long ago."""
    for path in paths:
        os.utime(path, ns=(LONG_AGO, LONG_AGO))


class Names:
    """Indexes the names in a folder, and counts how often."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, 0

    def __call__(self, builder: IndexBuilder) -> None:
        self.calls += 1
        builder.watch(self.folder)
        names = sorted(path.name for path in self.folder.iterdir() if not path.name.startswith("."))
        builder.append_texts("name", [os.fsencode(name) for name in names])
        builder.append("length", np.array([len(name) for name in names], np.int64))

    def open(self, **arguments: object) -> MappedArrays:
        return open_index(self.folder, "names", arguments, self)


@pytest.fixture
def names(tmp_path: Path, own_cache: Path) -> Names:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("b.jpg", "ä a.jpg"):
        (folder / name).touch()
    age(folder)
    return Names(folder)


def texts(index: MappedArrays, name: str = "name") -> list[bytes]:
    return list(index.rows(name).texts())


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("index-*"))


# --- kept and made again ------------------------------------------------------------------------------------


def test_an_index_is_made_once_and_not_beside_the_data(names: Names, own_cache: Path) -> None:
    for _ in range(3):
        index = names.open()
        assert texts(index) == [b"b.jpg", "ä a.jpg".encode()]
        assert index["length"].tolist() == [5, 7]
    assert names.calls == 1
    assert kept(own_cache) == [index.path]
    assert len(list(names.folder.iterdir())) == 2


def test_other_arguments_are_another_index(names: Names) -> None:
    paths = {names.open(size=size).path for size in (1, 2, 1)}
    assert names.calls == len(paths) == 2


def test_a_change_is_noticed(names: Names, own_cache: Path) -> None:
    names.open()
    (names.folder / "c.jpg").touch()
    assert texts(names.open())[1] == b"c.jpg"
    age(names.folder)
    names.open()
    assert names.calls == 3
    assert len(kept(own_cache)) == 1


def test_a_change_at_the_same_time_is_noticed(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "_TICK", 60 * 10**9)  # whatever the machine may do between two lines
    now = time.time_ns()
    os.utime(names.folder, ns=(now, now))
    names.open()
    (names.folder / "c.jpg").touch()
    os.utime(names.folder, ns=(now, now))  # as coarse clocks may have it
    assert len(texts(names.open())) == 3


def test_a_watched_file_is_known_by_size_and_time(tmp_path: Path) -> None:
    path, calls = tmp_path / "list.txt", []

    def build(builder: IndexBuilder) -> None:
        calls.append(path)
        builder.watch(path)
        builder.append_texts("content", [path.read_bytes()])

    for content, time_of_change in ((b"one", LONG_AGO), (b"two!", LONG_AGO), (b"six!", LONG_AGO + 1)):
        path.write_bytes(content)
        os.utime(path, ns=(time_of_change, time_of_change))
        for _ in range(2):
            assert texts(open_index(tmp_path, "content", {}, build), "content") == [content]
    assert len(calls) == 3


def test_a_file_may_be_known_by_its_content(tmp_path: Path) -> None:
    path, calls = tmp_path / "list.txt", []

    def build(builder: IndexBuilder) -> None:
        calls.append(path)
        builder.watch(path, by_content=True)
        builder.append_texts("content", [path.read_bytes()])

    for content in (b"one", b"two", b"one"):
        path.write_bytes(content)
        age(path)
        for _ in range(2):
            assert texts(open_index(tmp_path, "content", {}, build), "content") == [content]
    assert len(calls) == 3
    path.rename(tmp_path / "old.txt")  # a copy as it is, with its index
    shutil.copy2(tmp_path / "old.txt", path)
    open_index(tmp_path, "content", {}, build)
    assert len(calls) == 3


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "other", "folder's", "text"])
def test_what_is_damaged_or_foreign_is_made_again(names: Names, damage: str) -> None:
    path = names.open(size=1).path
    whole = path.read_bytes()
    other = names.open(size=2).path.read_bytes()
    flipped = whole.replace(b"b.jpg", b"c.jpg")
    foreign = {"empty": b"", "cut": whole[:-70], "flipped": flipped, "other": other, "text": b"hello " * 100}
    path.write_bytes(foreign.get(damage, b""))
    if damage == "folder's":
        path.unlink()
        path.symlink_to(names.folder)
    assert texts(names.open(size=1)) == [b"b.jpg", "ä a.jpg".encode()]
    assert names.calls == 3
    assert len(path.read_bytes()) == len(whole)


def test_each_folder_has_its_own(names: Names, own_cache: Path) -> None:
    elsewhere = names.folder.parent / "elsewhere"
    elsewhere.mkdir()
    assert texts(open_index(elsewhere, "names", {}, Names(elsewhere))) == []
    assert len(texts(names.open())) == 2
    assert len(kept(own_cache)) == 2
    linked = names.folder.parent / "link"
    linked.symlink_to(names.folder)
    assert len(texts(open_index(linked, "names", {}, names))) == 2
    assert names.calls == 1


def test_where_indexes_are_kept(names: Names, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert names.open().path.parent == own_cache
    monkeypatch.delenv("PACELINE_CACHE")
    assert names.open().path.parent == tmp_path / "xdg/paceline"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert names.open().path.parent == tmp_path / "home/.cache/paceline"
    assert stat.S_IMODE((tmp_path / "home/.cache/paceline").stat().st_mode) == 0o700


def test_without_any_place_it_says_so(names: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"no place for its index.*PACELINE_CACHE"):
        names.open()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert names.open().path.parent == tmp_path / f"paceline-{os.getuid()}"


def test_what_is_not_used_for_long_is_removed(names: Names, own_cache: Path) -> None:
    paths = [names.open(size=size).path for size in range(3)]
    left_over = own_cache / "index-names-0-0.partial"
    left_over.touch()
    age(*paths, left_over)
    names.open(size=0)  # used again
    assert kept(own_cache) == sorted([*paths, left_over]), "nothing is removed unless something is written"
    last = names.open(size=3).path
    assert kept(own_cache) == sorted([paths[0], last])


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to others")
def test_an_index_of_somebody_else_is_not_used(names: Names) -> None:
    path = names.open().path
    os.chown(path, 12345, -1)
    names.open()
    assert names.calls == 2
    assert path.stat().st_uid == 0


def test_pipes_in_the_place_of_an_index_or_a_list_are_not_waited_for(names: Names) -> None:
    path = names.open().path
    path.unlink()
    os.mkfifo(path)
    assert len(texts(names.open())) == 2
    os.mkfifo(names.folder / "list.txt")
    with pytest.raises(DataError, match="a pipe, not a file"):
        open_index(names.folder, "x", {}, lambda builder: builder.watch(names.folder / "list.txt", by_content=True))


def test_what_building_raises_is_raised_and_nothing_is_left(names: Names, own_cache: Path) -> None:
    def build(builder: IndexBuilder) -> None:
        builder.append_texts("name", [b"x"])
        raise DataError("line 3 is wrong")

    with pytest.raises(DataError, match="line 3"):
        open_index(names.folder, "names", {}, build)
    with pytest.raises(DataError, match=r"absent: cannot be read \(No such file"):
        open_index(names.folder, "names", {}, lambda builder: builder.watch(names.folder / "absent"))
    assert list(own_cache.iterdir()) == []


# --- other processes ----------------------------------------------------------------------------------------


BUILD = """
import os, sys, time
from pathlib import Path
from paceline.data.index import index
index._PATIENCE = 600
folder = Path(sys.argv[1])
def build(builder):
    builder.watch(folder)
    with (folder.parent / "calls").open("a") as file:
        print(os.getpid(), file=file, flush=True)
    deadline = time.monotonic() + float(sys.argv[2])
    while not (folder.parent / "go").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    builder.append_texts("name", [b"from somebody"])
print(list(index.open_index(folder, "slow", {}, build).rows("name").texts()))
"""
Start = Callable[[], subprocess.Popen[str]]


@pytest.fixture
def start(names: Names) -> Iterator[Start]:
    """Starts a process that indexes the folder; one that builds goes on until the file `go` lies beside the folder."""
    started: list[subprocess.Popen[str]] = []

    def begin() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", BUILD, str(names.folder), str(TIMEOUT)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def builders(names: Names) -> list[int]:
    """The processes that have begun to build."""
    calls = names.folder.parent / "calls"
    return [int(line) for line in calls.read_text().splitlines()] if calls.exists() else []


def is_waiting(process: int) -> bool:
    return any(f" {process} " in line and "->" in line for line in Path("/proc/locks").read_text().splitlines())


def test_one_process_builds_and_the_others_wait(names: Names, own_cache: Path, start: Start) -> None:
    processes = [start() for _ in range(3)]
    wait_until(lambda: sum(is_waiting(process.pid) for process in processes) == 2, "two wait for the third")
    (names.folder.parent / "go").touch()
    for process in processes:
        output, errors = process.communicate(timeout=TIMEOUT)
        assert (output, errors) == ("[b'from somebody']\n", "")
    assert len(builders(names)) == 1
    assert len(list(own_cache.iterdir())) == 1


def test_a_builder_that_dies_is_followed_by_another(names: Names, own_cache: Path, start: Start) -> None:
    first = start()
    wait_until(lambda: builders(names) == [first.pid], "the first builds")
    second = start()
    wait_until(lambda: is_waiting(second.pid), "the second waits")
    first.kill()
    first.wait()
    (names.folder.parent / "go").touch()
    output, _ = second.communicate(timeout=TIMEOUT)
    assert output == "[b'from somebody']\n"
    assert builders(names) == [first.pid, second.pid]
    assert len(list(own_cache.iterdir())) == 1


class Answered(io.StringIO):
    """Standard error that has a file made as soon as a line is said."""

    def __init__(self, answer: Path) -> None:
        super().__init__()
        self.answer = answer

    def write(self, text: str) -> int:
        written = super().write(text)
        if text.endswith("\n"):
            self.answer.touch()
        return written


def test_a_long_wait_is_reported(names: Names, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    first = start()
    wait_until(lambda: builders(names) == [first.pid], "the other process builds")
    monkeypatch.setattr(index_module, "_PATIENCE", 0.05)
    monkeypatch.setattr(sys, "stderr", reported := Answered(names.folder.parent / "go"))
    open_index(names.folder, "slow", {}, names)
    first.communicate(timeout=TIMEOUT)
    assert reported.getvalue() == f"waiting for another process to index {names.folder}\n"
    assert names.calls == 0


def test_long_work_is_reported(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = names.folder.parent / "said"
    monkeypatch.setattr(index_module, "_PATIENCE", 1.0)  # enough to be given a lock that nobody has
    monkeypatch.setattr(sys, "stderr", reported := Answered(printed))
    index = open_index(names.folder, "slower", {}, lambda builder: wait_until(printed.exists, "it is printed"))
    assert reported.getvalue() == f"indexing {names.folder}; this is done once and kept in {index.path}\n"
