"""Names of files that lists hold in several columns, as those of Kinetics do."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from support.registered import arguments_of
from video_files import write_video

from paceline.core.errors import DataError
from paceline.data.datasets.list_file import ListFile
from paceline.data.datasets.video import VideoList
from paceline.data.index.list_file import NamePattern

KINETICS = "{youtube_id}_{time_start:06}_{time_end:06}.mp4"
LIST = """label,youtube_id,time_start,time_end,split
testifying,---QUuC4vJs,84,94,val
"petting animal (not cat)",0wR5jVB-WPk,0,10,val
testifying,_0123456789,1234567,1234577,val
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A list as Kinetics has it, and the videos that it names."""
    names = ["---QUuC4vJs_000084_000094.mp4", "0wR5jVB-WPk_000000_000010.mp4", "_0123456789_1234567_1234577.mp4"]
    made = write_video(tmp_path / names[0], num_frames=5)
    for name in names[1:]:
        shutil.copy(made, tmp_path / name)
    (tmp_path / "validate.csv").write_text(LIST)
    return tmp_path


def test_kinetics(root: Path) -> None:
    arguments = arguments_of("dataset", "video_list")(file=str(root / "validate.csv"), video=KINETICS)
    videos = VideoList(**arguments.model_dump() | {"file": root / "validate.csv"})
    assert videos.classes == ["petting animal (not cat)", "testifying"]
    assert [videos.open(index)["label"] for index in range(3)] == [1, 0, 1]
    assert [videos.open(index)["image"].num_frames for index in range(3)] == [5, 5, 5]


def test_classes_as_folders_and_a_root(root: Path) -> None:
    (root / "videos/testifying").mkdir(parents=True)
    shutil.move(root / "---QUuC4vJs_000084_000094.mp4", root / "videos/testifying")
    (root / "one.csv").write_text("".join(LIST.splitlines(keepends=True)[:2]))
    videos = VideoList(root / "one.csv", root=root, video=f"videos/{{label}}/{KINETICS}")
    assert videos.path(0) == root / "videos/testifying/---QUuC4vJs_000084_000094.mp4"
    assert videos.open(0)["image"].num_frames == 5


def test_a_video_that_is_missing_is_named_with_its_line(root: Path) -> None:
    (root / "0wR5jVB-WPk_000000_000010.mp4").unlink()
    videos = VideoList(root / "validate.csv", video=KINETICS)
    with pytest.raises(DataError, match=r"validate\.csv, line 3: .*0wR5jVB-WPk_000000_000010\.mp4: no such file"):
        videos.open(1)


def test_images_too(tmp_path: Path) -> None:
    (tmp_path / "list.tsv").write_text("id\tlabel\n a1 \tcat\nb2\tdog\n")
    images = ListFile(tmp_path / "list.tsv", image="{id}.jpg")
    assert [images.path(index).name for index in range(2)] == ["a1.jpg", "b2.jpg"]


@pytest.mark.parametrize(
    ("pattern", "rows", "message"),
    [
        (KINETICS, "a,b,1.5,2,val\n", "list.csv, line 2: column 'time_start' is '1.5', expected a whole number"),
        ("{youtube_id}.mp4", "a, ,1,2,val\n", "line 2: column 'youtube_id' is '', expected something"),
        (KINETICS, "a,b,1\n", "line 2: 3 columns, expected at least 4"),
        ("{id}.mp4", "a,b,1,2,val\n", "no column 'id' in its first line, which has label, youtube_id"),
        ("{youtube_id.mp4", "a,b,1,2,val\n", "is no pattern"),
        ("{youtube_id!r}.mp4", "a,b,1,2,val\n", "no column 'youtube_id!r'"),
    ],
)
def test_what_makes_no_name_is_reported(tmp_path: Path, pattern: str, rows: str, message: str) -> None:
    (tmp_path / "list.csv").write_text(LIST.splitlines(keepends=True)[0] + rows)
    with pytest.raises(DataError, match=re.escape(message)):
        VideoList(tmp_path / "list.csv", video=pattern)


def test_text_and_fields_take_turns() -> None:
    pattern = NamePattern(Path("list.csv"), "a{x}{y:03}b{x:02}")
    assert pattern.columns == ["x", "y", "x"]
    assert pattern.name(1, ["7", "12", "7"]) == "a7012b07"
    assert pattern.name(1, ["7", "1234", "7"]) == "a71234b07"
