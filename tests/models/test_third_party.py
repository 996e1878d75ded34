"""The table of names that ships is that of the pinned libraries."""

import json
import re
from importlib import metadata
from pathlib import Path

import pytest

from paceline.core.registry import register
from paceline.models import catalogue
from paceline.models.third_party import TABLE, collect, members_of, other_version_of
from paceline.models.torchvision_ops import import_torchvision

ROOT = Path(__file__).resolve().parent.parent.parent
LIBRARIES = ["timm", "torchvision"]


def listed(library: str) -> list[str]:
    torchvision = import_torchvision()
    if library == "torchvision":
        return sorted(torchvision.models.list_models())
    import timm

    return sorted(timm.list_models())


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_table_has_the_names_of_the_installed_library(library: str) -> None:
    table = json.loads(TABLE.read_text(encoding="utf-8"))[library]
    assert table["version"] == metadata.version(library).split("+")[0]
    assert table["names"] == listed(library)
    assert members_of(library)() == table["names"]
    assert not other_version_of(library)()


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_table_is_of_the_pinned_version(library: str) -> None:
    pins = dict(re.findall(r"^([a-z-]+)==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert json.loads(TABLE.read_text(encoding="utf-8"))[library]["version"] == pins[library]


def test_the_table_is_what_its_script_writes() -> None:
    assert json.loads(TABLE.read_text(encoding="utf-8")) == collect()


@pytest.mark.parametrize("library", LIBRARIES)
def test_with_another_version_other_names_may_exist(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{library}/not_yet_written"
    assert register.kind("model") is catalogue.models
    assert catalogue.models.find(name) is None
    monkeypatch.setattr(metadata, "version", lambda _: "99.0+cpu")
    assert other_version_of(library)()
    assert catalogue.models.find(name) is not None
