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
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.regular_file import open_regular
from paceline.loggers.events import Evaluated, Event, Logged, Logger, Record, Visualized
from paceline.loggers.files import AppendFile

_OURS = "events.out.tfevents.*.paceline"
_NOT_METRICS = {"step", "epoch", "split", "smoothed", "clock", "num_samples", "num_skipped"}
_CLOCK_METRICS = ("samples_per_second", "data_wait", "memory_mb")
_numbers = itertools.count()

_Words = NDArray[np.uint32]

_POLYNOMIAL = 0x82F63B78
_SHORT = 2048  # bytes; below this arrays cost more than they save


class TensorBoardLogger(Logger):
    """Writes metrics as scalars ("train/loss", "val/top1") and images ("val/confusion")."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: AppendFile | None = None

    def handle(self, event: Event) -> None:
        """Write the metrics and images of the event, if any."""
        if isinstance(event, Logged | Evaluated):
            self._append(_scalars_frame(event.record))
        elif isinstance(event, Visualized):
            for name, path in event.images.items():
                self._append(_image_frame(event.step, f"{event.split}/{name}", path, path.stat().st_mtime))

    def close(self) -> None:
        """Close the file."""
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
    """The tags and values of a record; None, a value that is not finite, becomes NaN."""
    for tag, value in _tagged(record):
        if value is None or isinstance(value, int | float):
            yield tag, math.nan if value is None else float(value)


def _tagged(record: Record) -> Iterator[tuple[str, Any]]:
    split = record["split"]
    for name, value in record.items():
        if name not in _NOT_METRICS:
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
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def crc32c(data: bytes) -> int:
    """CRC-32C, the checksum of event files, fast enough for images.

    No package that we depend on has it compiled. As it is linear, pieces of the data are worked through side by side,
    each element of an array the state of one piece, and the states are joined afterwards: 3 ms a megabyte instead of
    120.
    """
    if len(data) < _SHORT:
        return _bytewise(data)
    length = 1 << (len(data).bit_length() - 4) // 2  # bytes of a piece; there are some ten times as many pieces
    pieces = -(-len(data) // length)
    # Zeros in front of the data do not change a state of 0; the state to begin with is added to the first bytes.
    padded = np.zeros(pieces * length, np.uint8)
    padded[-len(data) :] = np.frombuffer(data, np.uint8)
    start = len(padded) - len(data)
    padded[start : start + 4] ^= 0xFF
    low, high = _word_tables()
    states = np.zeros(pieces, np.uint32)
    for words in np.ascontiguousarray(padded.view("<u4").reshape(pieces, -1).T):
        states ^= words
        states = low.take(states & 0xFFFF, mode="clip") ^ high.take(states >> 16, mode="clip")  # faster than low[…]
    return _joined(states, length) ^ 0xFFFFFFFF


def _joined(states: _Words, length: int) -> int:
    """The state of all pieces, of `length` bytes each, behind each other: neighbors are joined until one is left."""
    while len(states) > 1:
        if len(states) % 2:
            states = np.concatenate([np.zeros(1, np.uint32), states])
        first, second = states.reshape(-1, 2).T
        states = _moved(first, length) ^ second
        length *= 2
    return int(states[0])


def _moved(states: _Words, length: int) -> _Words:
    """What becomes of states when so many bytes of 0 follow."""
    tables = _zeros_tables(length)
    found: _Words = tables[0][states & 0xFF]
    for number in range(1, 4):
        found = found ^ tables[number][states >> np.uint32(8 * number) & np.uint32(0xFF)]
    return found


@cache
def _zeros_tables(length: int) -> list[_Words]:
    """What becomes of each value of each of a state's four bytes when so many bytes of 0, a power of two, follow."""
    values = [np.arange(256, dtype=np.uint32) << np.uint32(8 * number) for number in range(4)]
    if length == 1:
        return [_with_zero_byte(each) for each in values]
    return [_moved(_moved(each, length // 2), length // 2) for each in values]


@cache
def _word_tables() -> tuple[_Words, _Words]:
    """What becomes of the lower and of the upper half of a state with four bytes."""
    halves = np.arange(1 << 16, dtype=np.uint32)
    return _moved(halves, 4), _moved(halves << np.uint32(16), 4)


def _with_zero_byte(states: _Words) -> _Words:
    found: _Words = _byte_table()[states & 0xFF] ^ (states >> np.uint32(8))
    return found


@cache
def _byte_table() -> _Words:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = table >> np.uint32(1) ^ (table & np.uint32(1)) * np.uint32(_POLYNOMIAL)
    return table


def _bytewise(data: bytes) -> int:
    table, crc = _plain_table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


@cache
def _plain_table() -> list[int]:
    found: list[int] = _byte_table().tolist()
    return found
