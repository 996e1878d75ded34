"""The images of a run as small data URIs, and its worst samples."""

from __future__ import annotations

import base64
import re
import sys
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import PIL.Image

from paceline.core.regular_file import open_regular, read_json
from paceline.core.text import evenly_spaced
from paceline.report.history import is_number

_NAME = re.compile(r"(?P<split>.+?)-(?P<name>[^-]+)-(?P<step>\d{8,18})\.png")
_MAX_STEPS = 6  # of an image that was drawn at every evaluation
_MAX_SIZE = (1100, 3300)  # pixels; grids of many samples are high
_MAX_WORST = 50  # samples of a split
_MAX_PIXELS = 30_000_000  # a larger file is none of ours


class Encoded(NamedTuple):
    """An image as a data URI."""

    width: int
    height: int
    uri: str


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
        self._encoded: dict[tuple[Path, int], Encoded | None] = {}

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
            image = self.encode(path)
            if image is not None and len(image.uri) <= left:
                images.append(RunImage(split, name, step, *image))
                left -= len(image.uri)
        return sorted(images)

    def encode(self, path: Path) -> Encoded | None:
        """The image in a file; None if there is none."""
        try:
            key = (path, path.stat().st_mtime_ns)
        except OSError:  # removed
            return None
        if key not in self._encoded:
            try:
                self._encoded[key] = _encode(path)
            except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
                print(f"{path}: left out of the report ({error})", file=sys.stderr, flush=True)
                self._encoded[key] = None
        return self._encoded[key]


def read_worst(folder: Path, images: ImageFolder, max_bytes: int) -> dict[str, Any]:
    """The worst samples of the last evaluation of each split, with their images as far as they fit."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        about = read_json(path)
        samples = about.get("samples") if isinstance(about, dict) else None
        if not isinstance(about, dict) or not isinstance(samples, list) or not is_number(about.get("step")):
            continue
        rows = []
        for number, each in enumerate(samples[:_MAX_WORST], 1):
            if not isinstance(each, dict):
                continue
            image = images.encode(folder / f"{path.stem}-{number:02d}.png") if each.get("image") else None
            image = image if image is not None and len(image.uri) <= max_bytes else None
            max_bytes -= len(image.uri) if image is not None else 0
            captions = each.get("captions")
            rows.append(
                {
                    "sample": str(each.get("sample")),
                    "path": str(each.get("path") or ""),
                    "error": each["error"] if is_number(each.get("error")) else None,
                    "captions": [str(text) for text in captions] if isinstance(captions, list) else [],
                    "image": image and image._asdict(),
                }
            )
        found[path.stem] = {"step": about["step"], "error": str(about.get("error") or "error"), "samples": rows}
    return found


def _encode(path: Path) -> Encoded:
    """Size and data URI of an image, reduced to what a screen shows."""
    with open_regular(path) as file, PIL.Image.open(file, formats=["PNG"]) as image:
        if image.width * image.height > _MAX_PIXELS:
            raise ValueError(f"more than {_MAX_PIXELS:,} pixels")
        pixels = image.convert("RGB")
    pixels.thumbnail(_MAX_SIZE, PIL.Image.Resampling.LANCZOS)
    content = BytesIO()
    pixels.save(content, format="WEBP", quality=80, method=2)
    return Encoded(*pixels.size, f"data:image/webp;base64,{base64.b64encode(content.getvalue()).decode('ascii')}")
