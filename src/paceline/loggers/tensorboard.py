"""TensorBoard event files, written from the records of `metrics.jsonl` and rebuilt from them.

Only the messages of the tensorboard package are used: they load in a tenth of the time of its writer, and writing
the records here needs no thread and leaves nothing half-written.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from paceline.core.regular_file import open_regular
from paceline.loggers.events import Evaluated, Event, Logged, Logger, Record, Visualized
from paceline.loggers.files import AppendFile
from paceline.loggers.jsonl import metrics_of

_OURS = "events.out.tfevents.*.paceline"
_CLOCK_METRICS = ("samples_per_second", "data_wait", "memory_mb")
_numbers = itertools.count()


class TensorBoardLogger(Logger):
    """Writes metrics as scalars ("train/loss", "val/top1") and images ("val/confusion")."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: AppendFile | None = None

    def handle(self, event: Event) -> None:
        if isinstance(event, Logged | Evaluated):
            self._append(_scalars_frame(event.record))
        elif isinstance(event, Visualized):
            for name, path in event.images.items():
                self._append(_image_frame(event.step, f"{event.split}/{name}", path, path.stat().st_mtime))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _append(self, frame: bytes) -> None:
        if self._file is None:
            self._file = AppendFile(self._folder / _file_name())
            frame = _header_frame(time.time()) + frame
        self._file.append(frame)


def rebuild(folder: Path, records: Iterable[Record], images: Iterable[tuple[int, str, Path]] = ()) -> None:
    """Replace our event files in `folder` by one with `records` and `images`.

    Images are given as step, tag ("val/confusion") and PNG file; damaged files are skipped. Event files of other
    programs stay.
    """
    frames = [_scalars_frame(record) for record in records]
    frames += [_image_frame(step, tag, path, path.stat().st_mtime) for step, tag, path in images if _is_png(path)]
    for path in folder.glob(_OURS):
        path.unlink()
    if frames:
        file = AppendFile(folder / _file_name())
        file.append(b"".join([_header_frame(time.time()), *frames]))
        file.close()


def scalars_of(record: Record) -> Iterator[tuple[str, float]]:
    """The tags and values of a record; a value that is not finite, or None in a file, becomes NaN."""
    for tag, value in _tagged(record):
        if value is None or isinstance(value, int | float):
            yield tag, float(value) if value is not None and math.isfinite(value) else math.nan


def _tagged(record: Record) -> Iterator[tuple[str, Any]]:
    split = record["split"]
    for name, value in metrics_of(record).items():
        yield f"{split}/{name}", value
    for name, summary in record.get("smoothed", {}).items():
        if name != "lr" and isinstance(summary, dict) and "median" in summary:  # a schedule has no noise to smooth
            yield f"{split}/{name}_median", summary["median"]
    if split == "train":
        for name in _CLOCK_METRICS:
            if name in record.get("clock", {}):
                yield f"clock/{name}", record["clock"][name]


def _time_of(record: Record) -> float:
    moment = record.get("clock", {}).get("time")
    return float(moment) if isinstance(moment, int | float) else time.time()


def _file_name() -> str:
    # TensorBoard reads the files of a folder by name, one after the other: later ones must sort behind.
    return (
        f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        f".{next(_numbers):04d}.paceline"
    )


def _header_frame(moment: float) -> bytes:
    return _frame(wall_time=moment, file_version="brain.Event:2")


def _scalars_frame(record: Record) -> bytes:
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars_of(record)]
    return _frame(wall_time=_time_of(record), step=record["step"], summary=Summary(value=values))


def _is_png(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return len(start := file.read(24)) == 24 and start.startswith(b"\x89PNG")
    except OSError:
        return False


def _image_frame(step: int, tag: str, path: Path, moment: float) -> bytes:
    from tensorboard.compat.proto.summary_pb2 import Summary

    png = path.read_bytes()
    width, height = struct.unpack(">II", png[16:24])  # the header chunk comes first in every PNG
    image = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=png)
    return _frame(wall_time=moment, step=step, summary=Summary(value=[Summary.Value(tag=tag, image=image)]))


def _frame(**fields: Any) -> bytes:
    """Encode one event: length, data, and a checksum of each."""
    from tensorboard.compat.proto.event_pb2 import Event as Message

    data: bytes = Message(**fields).SerializeToString(deterministic=True)
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
    """CRC-32C, rotated and offset as the format requires."""
    import google_crc32c

    crc: int = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
