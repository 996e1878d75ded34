import os
import shutil
from pathlib import Path

import pytest
from PIL import Image

from paceline.core.errors import DataError
from paceline.data.datasets.image_folder import ImageFolder
from paceline.data.io.image import Encoded


def paint(path: Path, value: int = 1, size: tuple[int, int] = (6, 4)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, value).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("train/a/1.png", "train/a/deep/2.png", "train/b/3.png"):
        paint(tmp_path / name, int(Path(name).stem))
    return tmp_path


def names(root: Path) -> list[str]:
    dataset = ImageFolder(root, "train")
    return [dataset.path(index).name for index in range(len(dataset))]


def test_images_stay_encoded_until_they_are_needed(root: Path) -> None:
    sample = ImageFolder(root, "train").open(1)
    assert isinstance(sample["image"], Encoded)
    assert (sample["image"].decode()[0, 0].tolist(), sample["label"]) == ([2, 2, 2], 0)


def test_files_that_are_no_images_are_counted(root: Path) -> None:
    (root / "train/b/notes.txt").touch()
    assert ImageFolder(root, "train").notes == []
    (root / "train/b/4.heic").touch()
    dataset = ImageFolder(root, "train")
    assert len(dataset) == 3
    assert dataset.notes[0].startswith("1 file is skipped: .heic 1; images are .jpg, .jpeg, .png, ")


def test_every_change_is_noticed(root: Path) -> None:
    for _ in range(2):
        assert names(root) == ["1.png", "2.png", "3.png"]
    paint(root / "train/a/deep/deeper/4.png")
    assert names(root) == ["1.png", "2.png", "4.png", "3.png"]
    paint(root / "train/a/deep/deeper/5.png")
    assert names(root) == ["1.png", "2.png", "4.png", "5.png", "3.png"]
    paint(root / "train/Aa/6.png")
    assert names(root) == ["6.png", "1.png", "2.png", "4.png", "5.png", "3.png"]
    shutil.rmtree(root / "train/a")
    assert names(root) == ["6.png", "3.png"]
    assert ImageFolder(root, "train").classes == ["Aa", "b"]
    (root / "train/b/3.png").unlink()
    with pytest.raises(DataError, match="b: no images in this class folder"):
        names(root)


def test_no_folder_is_read_again_that_has_not_changed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, _, _ in os.walk(root):
        os.utime(folder, (1, 1))
    assert len(names(root)) == 3
    folders: list[Path] = []
    scan = os.scandir

    def scanned(folder: Path) -> object:
        folders.append(folder)
        return scan(folder)

    monkeypatch.setattr(os, "scandir", scanned)
    assert len(names(root)) == 3
    assert folders == [root / "train"]  # for the layout; the classes are as they were


def test_a_folder_is_known_by_its_path(root: Path) -> None:
    assert len(ImageFolder(root, "train")) == 3
    moved = root.rename(root.with_name("moved"))
    paint(root / "train/c/9.png", 9)
    assert ImageFolder(moved, "train").read(2)["image"][0, 0, 0] == 3
    assert ImageFolder(root, "train").classes == ["c"]


def test_files_that_lead_out_are_refused(tmp_path: Path) -> None:
    (tmp_path / "set/cat").mkdir(parents=True)
    Image.new("L", (4, 4)).save(tmp_path / "0.png")
    (tmp_path / "set/cat/0.png").symlink_to(tmp_path / "0.png")
    found = rf"cat/0\.png: leads out of {tmp_path}/set, to {tmp_path}/0\.png; add `follow_links: true`"
    with pytest.raises(DataError, match=found):
        ImageFolder(tmp_path / "set")
    assert len(ImageFolder(tmp_path / "set", follow_links=True)) == 1
