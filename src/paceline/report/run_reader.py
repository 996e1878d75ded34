"""What a run directory tells about its run, as plain values for the page."""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

import PIL.Image

from paceline.core.errors import DataError, UsageError
from paceline.core.regular_file import open_regular, read_json
from paceline.core.text import doubled_loss, evenly_spaced
from paceline.data.skip_list import parse_skipped
from paceline.loggers.files import read_confusion, read_starts
from paceline.loggers.jsonl import iterate_records
from paceline.loggers.results import read_main_metric, read_state
from paceline.report.history import History, Json, Point, expectations, is_number, judge, thinned
from paceline.report.run_folders import data_of, is_run, read_recipe

_ORIGIN = re.compile(r"(?P<text>.*?\S) {2,}# (?P<origin>[^\"]*)")
_MAX_SKIPPED, _MAX_STARTS, _MAX_CLASSES = 200, 100, 1000
_MAX_SKIPPED_BYTES = 1 << 22
_IMAGE_NAME = re.compile(r"(?P<split>.+?)-(?P<name>[^-]+)-(?P<step>\d{8,18})\.png")
_MAX_IMAGE_STEPS = 6  # of an image that was drawn at every evaluation
_MAX_IMAGE_SIZE = (1100, 3300)  # pixels; grids of many samples are high
_MAX_WORST = 50  # samples of a split
_MAX_PIXELS = 30_000_000  # a larger file is none of ours


def read_run(folder: Path, max_image_bytes: int) -> Json:
    """All that the page shows of a run."""
    if not is_run(folder):
        what = "is not a run directory" if folder.is_dir() else "is not a folder"
        raise UsageError(f"{folder} {what}: expected a folder that `paceline train` wrote, with recipe.yaml")
    history = History()
    for record in iterate_records(folder / "metrics.jsonl"):
        history.add(record)
    about, tree = read_recipe(folder)
    starts = read_starts(folder / "logs" / "starts.jsonl")
    main = judge(history, read_main_metric(folder), tree)
    higher = next((each["higher_is_better"] for each in reversed(starts) if "higher_is_better" in each), None)
    return {
        **about._asdict(),
        "folder": str(folder),
        **_read_status(folder),
        **_curves(history),
        **main,
        "data": data_of(tree, main["main"]["split"]),
        "expect": _expectations(history, tree.get("expect"), higher, main["main"]),
        **_tables(history, {main["best"]["step"]} if main["best"] else set()),
        "confusion": read_confusion(folder / "tables"),
        "images": _read_images(folder / "images", max_image_bytes * 3 // 4),
        "worst": _read_worst(folder / "worst", max_image_bytes // 4),
        "recipe": list(_recipe_lines(folder / "recipe.yaml")),
        "starts": starts[-_MAX_STARTS:],
        "skipped": _read_skipped(folder / "skipped.jsonl"),
    }


def _expectations(history: History, expect: Any, higher: Any, main: Json) -> list[Json]:
    known = {main["metric"]: main["is_higher_better"]} | (higher if isinstance(higher, dict) else {})
    metrics = {split: each["metrics"] for split, each in history.last().items()}
    return expectations(expect if isinstance(expect, dict) else {}, metrics, known)


def _curves(history: History) -> Json:
    series = [
        {"split": split, "metric": metric, **_columns(each.points())}
        for (split, metric), each in history.series.items()
    ]
    return {
        "series": series,
        "times": _columns(history.times.points(), digits=13),
        "steps_per_epoch": history.steps_per_epoch,
    }


def _tables(history: History, kept_steps: set[int]) -> Json:
    last = history.last()
    hidden = {doubled_loss({n: v or 0.0 for n, v in each["metrics"].items()}) for each in last.values()}
    hidden = hidden if len(hidden) == 1 else set()
    evaluations, classes = [], {}
    for split, own in history.evaluations.items():
        for each in thinned(own, kept_steps):
            metrics = {n: _rounded(v) for n, v in each["metrics"].items() if "." not in n and n not in hidden}
            evaluations.append({**each, "metrics": metrics})
        dotted = [(n, _rounded(v)) for n, v in own[-1]["metrics"].items() if "." in n]
        if dotted:
            classes[split] = dict(dotted[:_MAX_CLASSES])
    return {"evaluations": evaluations, "classes": classes}


def _read_images(folder: Path, left: int) -> list[Json]:
    """Some images of each kind, evenly spaced over the run and always the last; the newest if not all fit."""
    groups: dict[tuple[str, str], list[tuple[int, Path]]] = {}
    for path in folder.glob("*.png"):
        if found := _IMAGE_NAME.fullmatch(path.name):
            groups.setdefault((found["split"], found["name"]), []).append((int(found["step"]), path))
    chosen = []
    for (split, name), files in groups.items():
        newest_first = sorted(files, reverse=True)
        places = evenly_spaced(len(files), _MAX_IMAGE_STEPS)
        chosen += [(rank, split, name, *newest_first[place]) for rank, place in enumerate(places)]
    images = []
    for _, split, name, step, path in sorted(chosen):
        image = _encode(path, left)
        if image is not None:
            images.append({"split": split, "name": name, "step": step, **image})
            left -= len(image["uri"])
    return sorted(images, key=lambda image: (image["split"], image["name"], image["step"]))


def _read_worst(folder: Path, left: int) -> Json:
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
            file = path.with_name(f"{path.stem}-{number:02d}.png")
            image = _encode(file, left) if each.get("image") else None
            left -= 0 if image is None else len(image["uri"])
            captions = each.get("captions")
            rows.append(
                {
                    "sample": str(each.get("sample")),
                    "path": str(each.get("path") or ""),
                    "error": each["error"] if is_number(each.get("error")) else None,
                    "captions": [str(text) for text in captions] if isinstance(captions, list) else [],
                    "image": image,
                }
            )
        found[path.stem] = {"step": about["step"], "error": str(about.get("error") or "error"), "samples": rows}
    return found


def _encode(path: Path, max_bytes: int) -> Json | None:
    """The image in a file; None if there is none that fits."""
    try:
        image = _encoded(path, path.stat().st_mtime_ns)
    except OSError:  # removed
        return None
    return image if image is not None and len(image["uri"]) <= max_bytes else None


@lru_cache(maxsize=256)
def _encoded(path: Path, modified: int) -> Json | None:
    """Size and data URI of an image, reduced to what a screen shows; once, however often the page is written."""
    try:
        with open_regular(path) as file, PIL.Image.open(file, formats=["PNG"]) as image:
            if image.width * image.height > _MAX_PIXELS:
                raise ValueError(f"more than {_MAX_PIXELS:,} pixels")
            pixels = image.convert("RGB")
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        print(f"{path}: left out of the report ({error})", file=sys.stderr, flush=True)
        return None
    pixels.thumbnail(_MAX_IMAGE_SIZE, PIL.Image.Resampling.LANCZOS)
    content = BytesIO()
    pixels.save(content, format="WEBP", quality=80, method=2)
    uri = f"data:image/webp;base64,{base64.b64encode(content.getvalue()).decode('ascii')}"
    return {"width": pixels.width, "height": pixels.height, "uri": uri}


def _columns(points: list[Point], digits: int = 6) -> Json:
    return {"x": [step for step, _ in points], "y": [_rounded(value, digits) for _, value in points]}


def _rounded(value: float | None, digits: int = 6) -> float | None:
    """A number as short as it is still read the same on a screen."""
    return value if value is None or isinstance(value, int) else float(f"{value:.{digits}g}")


def _read_status(folder: Path) -> Json:
    status = read_json(folder / "status.json")
    status = status if isinstance(status, dict) else {}
    reason = status.get("reason")
    numbers = {name: status.get(name) for name in ("step", "total_steps", "epoch")}
    return {
        "state": read_state(folder),
        "reason": reason if isinstance(reason, str) else None,
        **{name: value if is_number(value) else None for name, value in numbers.items()},
    }


def _recipe_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Each line of the recipe, and where its value came from."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    for line in text.splitlines():
        found = _ORIGIN.fullmatch(line)
        yield (found["text"], found["origin"]) if found else (line, "")


def _read_skipped(path: Path) -> Json:
    """The samples that were skipped: how many of each split, and the first of them."""
    try:
        with open_regular(path) as file:
            lines = file.read(_MAX_SKIPPED_BYTES).splitlines()
    except OSError:
        lines = []
    found = [each for each in map(parse_skipped, lines) if each is not None]
    counts = {split: sum(each == split for each, _ in found) for split in dict.fromkeys(split for split, _ in found)}
    return {"counts": counts, "samples": [{"split": split} | each._asdict() for split, each in found[:_MAX_SKIPPED]]}
