"""Folders of images with links that lead elsewhere."""

from __future__ import annotations

from pathlib import Path

from chaos.hostile_files.case import Cases
from chaos.hostile_files.commands import check_image
from chaos.hostile_files.images import png

case = Cases()


@case("an image that is a link out of its folder", 3)
def _() -> list[str]:
    command = check_image()
    Path("secret.png").write_bytes(png(8, 8))
    Path("photos/one/photo.png").symlink_to(Path("secret.png").absolute())
    return command


@case("a class that is a link out of its folder", 3)
def _() -> list[str]:
    command = check_image(png(8, 8))
    Path("photos/two").symlink_to("/etc")
    return command


@case("a link that leads back", 3)
def _() -> list[str]:
    command = check_image(png(8, 8))
    Path("photos/one/again").symlink_to("..")
    return command


@case("a split that leads up", 3)
def _() -> list[str]:
    Path("elsewhere/one").mkdir(parents=True)
    Path("elsewhere/one/photo.png").write_bytes(png(8, 8))
    return check_image(png(8, 8), split="../elsewhere")


@case("a data folder with a NUL in its name", 3)
def _() -> list[str]:
    return check_image(png(8, 8), root="photos\0")
