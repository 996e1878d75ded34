"""The package is written in the field's words: its former private vocabulary does not come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.vocabulary import count, is_private_word, private_prose

ROOT = Path(__file__).resolve().parent.parent


def test_no_private_word_is_left_in_the_package() -> None:
    rooms = count(ROOT, "src")
    assert {"core", "data", "engine", "recipe"} <= rooms.keys()
    package = {room: counts for room, counts in rooms.items() if room != "documentation"}
    assert sum(counts["files"] for counts in package.values()) == len(list((ROOT / "src").rglob("*.py")))
    assert {room: counts for room, counts in package.items() if counts["names"] or counts["prose"]} == {}


@pytest.mark.parametrize("name", ["ghost", "_figures_of", "DataMesh", "Term", "_Update", "shownNames"])
def test_private_words_are_found_in_names(name: str) -> None:
    assert is_private_word(name)


@pytest.mark.parametrize(
    "name", ["LossTerm", "configure", "update", "total", "mosaic", "init_device_mesh", "DeviceMesh"]
)
def test_other_names_are_free(name: str) -> None:
    assert not is_private_word(name)


def test_private_words_are_found_in_what_people_read(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("The figures, `figures` and\n```\nfigures\n```\nthe colour of pictures.\n")
    (tmp_path / "module.py").write_text('"""The same bits."""\n\nfigures = 1  # told\nprint(f"{figures} endings")\n')
    assert private_prose(tmp_path / "page.md") == ["figures", "colour", "pictures"]
    assert private_prose(tmp_path / "module.py") == ["same bits", "told", "figures", "endings"]
