import io
import os
import shutil
import stat
import subprocess
import sys
import time
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
    with pytest.raises(DataError, match=r"no cache folder: cannot write to .*PACELINE_CACHE"):
        names.open()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert names.open().path.parent == tmp_path / f"paceline-{os.getuid()}"


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
import sys
from pathlib import Path
from paceline.data.index.index import open_index
folder = Path(sys.argv[1])
def build(builder):
    builder.watch(folder)
    print("builds", flush=True)
    sys.stdin.readline()
    builder.append_texts("name", [b"from somebody"])
index = open_index(folder, "slow", {}, build)
print(list(index.rows("name").texts()), flush=True)
sys.stdin.readline()
index.__reduce__()[0](*index.__reduce__()[1])
print("same", flush=True)
"""


def test_one_process_builds_and_the_others_wait(names: Names, own_cache: Path) -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", BUILD, str(names.folder)]
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(3)]
    try:
        for process in processes:
            assert process.stdin is not None
            print("\n", file=process.stdin, flush=True)
        printed = [process.communicate(timeout=TIMEOUT)[0].split("\n") for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert sorted(lines[0] == "builds" for lines in printed) == [False, False, True]
    assert [lines[-3:] for lines in printed] == [["[b'from somebody']", "same", ""]] * 3
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


def test_long_work_is_reported(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = names.folder.parent / "said"
    monkeypatch.setattr(index_module, "_PATIENCE", 1.0)  # enough to be given a lock that nobody has
    monkeypatch.setattr(sys, "stderr", reported := Answered(printed))
    index = open_index(names.folder, "slower", {}, lambda builder: wait_until(printed.exists, "it is printed"))
    assert reported.getvalue() == f"indexing {names.folder}; this is done once and kept in {index.path}\n"
