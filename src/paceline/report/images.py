"""The images of a run as small data URIs."""

from __future__ import annotations

import base64
import re
import sys
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import PIL.Image

from paceline.core.regular_file import open_regular
from paceline.core.text import evenly_spaced

_NAME = re.compile(r"(?P<split>.+?)-(?P<name>[^-]+)-(?P<step>\d{8,18})\.png")
_MAX_STEPS = 6  # of an image that was drawn at every evaluation
_MAX_SIZE = (1100, 3300)  # pixels; grids of many samples are high
_MAX_PIXELS = 30_000_000  # a larger file is none of ours


class RunImage(NamedTuple):
    """An image that was drawn at a step; its place in the run directory, and its content as a data URI."""

    split: str
    name: str
    step: int
    width: int
    height: int
    uri: str


class ImageFolder:
    """The images in a folder; each file is encoded once, also when the page is written again and again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._encoded: dict[tuple[str, int], RunImage | None] = {}

    def read(self, max_bytes: int) -> list[RunImage]:
        """Some images of each kind, evenly spaced over the run and always the last; the newest if not all fit."""
        groups: dict[tuple[str, str], list[tuple[int, Path]]] = {}
        for path in sorted(self._folder.glob("*.png")):
            if found := _NAME.fullmatch(path.name):
                groups.setdefault((found["split"], found["name"]), []).append((int(found["step"]), path))
        chosen = []
        for key, files in groups.items():
            files.sort(key=lambda each: -each[0])
            chosen += [
                (place, *key, *files[index]) for place, index in enumerate(evenly_spaced(len(files), _MAX_STEPS))
            ]
        images, left = [], max_bytes
        for _, split, name, step, path in sorted(chosen):
            image = self._read(path, split, name, step)
            if image is not None and len(image.uri) <= left:
                images.append(image)
                left -= len(image.uri)
        return sorted(images)

    def _read(self, path: Path, split: str, name: str, step: int) -> RunImage | None:
        try:
            key = (path.name, path.stat().st_mtime_ns)
        except OSError:  # removed
            return None
        if key not in self._encoded:
            try:
                self._encoded[key] = RunImage(split, name, step, *_encode(path))
            except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
                print(f"{path}: left out of the report ({error})", file=sys.stderr, flush=True)
                self._encoded[key] = None
        return self._encoded[key]


def _encode(path: Path) -> tuple[int, int, str]:
    """Size and data URI of an image, reduced to what a screen shows."""
    with open_regular(path) as file, PIL.Image.open(file, formats=["PNG"]) as image:
        if image.width * image.height > _MAX_PIXELS:
            raise ValueError(f"more than {_MAX_PIXELS:,} pixels")
        pixels = image.convert("RGB")
    pixels.thumbnail(_MAX_SIZE, PIL.Image.Resampling.LANCZOS)
    content = BytesIO()
    pixels.save(content, format="WEBP", quality=80, method=2)
    return *pixels.size, f"data:image/webp;base64,{base64.b64encode(content.getvalue()).decode('ascii')}"
