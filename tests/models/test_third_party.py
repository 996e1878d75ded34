"""The names of timm and torchvision in the table."""

from importlib import metadata

import pytest

from paceline.core.registry import register
from paceline.models.zoo import timm_models, torchvision_models

LIBRARIES = {"timm": timm_models, "torchvision": torchvision_models}


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_names_are_those_of_the_installed_library(library: str) -> None:
    family = next(each for each in register.kind("model").families if each.prefix == f"{library}/")
    assert family.names() == [f"{library}/{name}" for name in LIBRARIES[library]()]
    assert len(family.names()) > 100


@pytest.mark.parametrize("library", LIBRARIES)
def test_with_another_version_other_names_may_exist(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models, name = register.kind("model"), f"{library}/not_yet_written"
    assert models.find(name) is None
    monkeypatch.setattr(metadata, "version", lambda _: "99.0+cpu")
    assert models.find(name) is not None
