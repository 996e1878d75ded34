"""Opening a video file: only files, only known formats, and nothing larger than what is allowed."""

from __future__ import annotations

import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO

import av
from av.codec import CodecContext
from av.container import InputContainer
from av.stream import Discard, Disposition
from av.video.stream import VideoStream

from paceline.core.errors import DataError
from paceline.core.regular_file import why_no_file

CONTAINERS = ("mov", "matroska", "avi", "mpegts", "mpeg", "flv")
"""Demuxers that may be asked; "mov" stands for mp4 and its kin, "matroska" for webm too."""
CODECS = ("h264", "hevc", "av1", "vp8", "vp9", "mpeg1video", "mpeg2video", "mpeg4", "mjpeg")
MAX_PIXELS = 8192 * 8192
"""Pixels of the largest frame that is decoded unless more are allowed."""
_FIRST_BOXES = ([b"ftyp"], [b"mdat"], [b"wide"], [b"free"], [b"skip"])
_MOST_BOXES = 1000
_DECODERS = (*CODECS, "libdav1d")
_DAMAGE = (av.FFmpegError, ValueError, EOFError, OSError)


@dataclass(frozen=True)
class OpenVideo:
    """A file that is open for reading, and the one stream of it that is shown."""

    path: Path
    container: InputContainer
    stream: VideoStream
    max_pixels: int


def open_video(path: Path, max_pixels: int = MAX_PIXELS) -> OpenVideo:
    """Open a video for decoding with one thread. What is missing, no video or too large is a DataError."""
    _refuse_other_than_file(path)
    options = {
        "protocol_whitelist": "file",
        "format_whitelist": ",".join(CONTAINERS),
        "codec_whitelist": ",".join(_DECODERS),
        "max_pixels": str(max_pixels),
        "threads": "1",
    }
    try:
        # The prefix keeps a name such as "http:x.mp4" a name.
        container = av.open(f"file:{path}", options=options, metadata_errors="replace")
    except _DAMAGE as error:
        if _has_lost_its_end(path):
            raise DataError(
                f"{path}: cut short: its table of contents (moov), which comes last, is missing; fetch it again, or"
                " remove it"
            ) from error
        raise DataError(
            f"{path}: not a video that can be read, or damaged ({_told(error)}); expected one of these formats:"
            f" {', '.join(CONTAINERS)}"
        ) from error
    stream = _shown(path, container)
    _refuse_large(path, stream.codec_context.width, stream.codec_context.height, max_pixels)
    stream.codec_context.options = {"max_pixels": str(max_pixels)}  # a stream may grow on its way
    stream.codec_context.thread_count = 1
    for other in container.streams:
        other.discard = Discard.default if other.index == stream.index else Discard.all
    return OpenVideo(path, container, stream, max_pixels)


@contextmanager
def explaining(path: Path) -> Iterator[None]:
    """Turn what libav says of a file inside into a DataError that names it."""
    try:
        yield
    except av.FFmpegError as error:
        raise DataError(f"{path}: damaged or truncated video ({_told(error)})") from error


def _refuse_other_than_file(path: Path) -> None:
    try:
        status = path.stat()
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path}: {why_no_file(path)}; expected a video")
    if status.st_size == 0:
        raise DataError(f"{path}: the file is empty (0 bytes)")


def _has_lost_its_end(path: Path) -> bool:
    """Whether this is an mp4 file, or one of its kin, without the box that tells what is where in it."""
    try:
        with path.open("rb") as file:
            kinds = list(islice(_boxes(file), _MOST_BOXES))
    except (OSError, OverflowError, ValueError):
        return False
    return kinds[:1] in _FIRST_BOXES and b"moov" not in kinds


def _boxes(file: IO[bytes]) -> Iterator[bytes]:
    """The kinds of the boxes that an mp4 file consists of, as far as it goes."""
    at = 0
    while len(header := file.read(16)) >= 8:
        length, kind = struct.unpack(">I4s", header[:8])
        yield kind
        if length == 1 and len(header) == 16:  # too long for 32 bits
            (length,) = struct.unpack(">Q", header[8:])
        if length < 8:  # to the end of the file, or nonsense
            return
        at += length
        file.seek(at)


def _shown(path: Path, container: InputContainer) -> VideoStream:
    """The first stream that moves: a image on the cover of a sound file is none."""
    streams = [each for each in container.streams.video if not each.disposition & Disposition.attached_pic]
    if not streams:
        raise DataError(f"{path}: has no video in it ({_kinds(container)})")
    context: CodecContext | None = streams[0].codec_context  # none, where libav has no decoder
    name = context.codec.canonical_name if context is not None else None
    if name not in CODECS:
        raise DataError(f"{path}: its frames are coded as {name or 'something unknown'}; expected {', '.join(CODECS)}")
    return streams[0]


def _refuse_large(path: Path, width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise DataError(f"{path}: frames of {width}×{height} are more than {max_pixels:,} pixels")


def _kinds(container: InputContainer) -> str:
    kinds = ", ".join(sorted({each.type for each in container.streams}))
    return f"only {kinds}" if kinds else "nothing at all"


def _told(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
