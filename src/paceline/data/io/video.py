"""Videos that are opened but not decoded yet: frames by number, exactly those that decoding everything would give."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DamagedFileError, DataError, UsageError, missing_extra
from paceline.data.io.image import open_named

try:
    import av
    from av.codec import CodecContext
    from av.container import InputContainer
    from av.stream import Discard, Disposition
    from av.video.frame import VideoFrame
    from av.video.reformatter import VideoReformatter
    from av.video.stream import VideoStream
except ModuleNotFoundError as error:
    raise UsageError(f"videos: {missing_extra('video') or error}") from error

Pixels = NDArray[np.uint8]
Times = NDArray[np.int64]
NumberedFrame = tuple[int, VideoFrame]

EXTENSIONS = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".flv", ".3gp")
"""The extensions of video files."""
CONTAINERS = ("mov", "matroska", "avi", "mpegts", "mpeg", "flv")
"""Demuxers that may be asked; "mov" stands for mp4 and its kin, "matroska" for webm too."""
CODECS = ("h264", "hevc", "av1", "vp8", "vp9", "mpeg1video", "mpeg2video", "mpeg4", "mjpeg")
MAX_PIXELS = 8192 * 8192
"""Pixels of the largest frame that is decoded."""
MAX_FRAMES = 1_000_000
"""Frames of the longest video that is taken: nine hours at 30 a second."""

_DECODERS = (*CODECS, "libdav1d")
_TIMED_CONTAINERS = {"mov", "matroska"}  # a packet of these codecs in these containers is one frame
_TIMED_CODECS = {"h264", "hevc", "av1", "vp9", "mpeg4", "mpeg2video", "mjpeg"}
_SKIPPABLE_CODECS = {"h264", "mpeg4", "mpeg2video"}  # their decoders can leave out just what no other frame needs
_KEPT_BYTES = 1 << 26  # packets that are kept in memory, so that a short video is read once
_SEEK_PACKETS = 4  # decoding more small packets than this takes longer than entering the file at another place
_DAMAGE = (av.FFmpegError, ValueError, EOFError, OSError)


class EncodedVideo:
    """A video file. Nothing of it is read before something is asked; then what is wrong with it is a DataError.

    Frames are numbered as they are shown, from 0. In mp4, mov and Matroska files the times of packets tell which frame
    is which; where they do not, and in other containers, decoding from the beginning does. Frames stand upright as the
    file's display matrix says, turned by quarters only.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._num_frames = 0
        self._timeline: Timeline | None = None  # if decoding from the beginning has to tell which frame is which
        self._kept: list[Any] | None = None  # all packets, unless they are large

    def __reduce__(self) -> tuple[type[EncodedVideo], tuple[Path]]:
        return EncodedVideo, (self.path,)  # an open file stays in its process

    @property
    def num_frames(self) -> int:
        """How many frames there are; at least one."""
        if not self._num_frames:
            with _errors(self.path):
                self._scan()
                self._num_frames = len(self._timeline.order) if self._timeline else self._count()
            if not self._num_frames:
                raise DamagedFileError(f"{self.path}: a video without frames")
        return self._num_frames

    @property
    def height(self) -> int:
        """Of the upright frames, in pixels."""
        return self._upright_size[0]

    @property
    def width(self) -> int:
        """Of the upright frames, in pixels."""
        return self._upright_size[1]

    @cached_property
    def _upright_size(self) -> tuple[int, int]:
        _, height, width, _ = self.frames([0]).shape  # only a frame tells how it is to be turned
        return height, width

    def frames(self, numbers: Sequence[int] | NDArray[np.int64]) -> Pixels:
        """These frames, in this order, as RGB, uint8 [T, H, W, 3]; numbers may repeat. IndexError if there is none."""
        unique, places = np.unique(np.asarray(numbers, np.int64), return_inverse=True)
        if not 0 <= unique[0] <= unique[-1] < self.num_frames:
            raise IndexError(f"{self.path}: frames {unique[0]} to {unique[-1]} of {self.num_frames}")
        with _errors(self.path):
            decoded = self._decode(unique.tolist())
        return decoded if np.array_equal(places, np.arange(len(unique))) else decoded[places]

    def decode(self, min_height: int = 0, min_width: int = 0) -> Pixels:
        """Refused: all frames of a video are never wanted at once."""
        raise DataError(
            f"{self.path}: a video is not decoded as a whole; let the first of the transforms choose frames, such as"
            " {name: clip, num_frames: 16, stride: 2} for training or {name: multi_clip, num_clips: 10, num_frames: 16}"
        )

    @cached_property
    def _opened(self) -> tuple[InputContainer, VideoStream]:
        return open_video(self.path)

    def _scan(self) -> None:
        """Look through all packets, which may tell which frame is which."""
        container, stream = self._opened
        rows, kept, size = list[tuple[Any, bool, bool]](), [], 0
        for packet in _packets(container, stream):
            rows.append((packet.pts, packet.is_keyframe, not packet.is_discard))
            size += packet.size
            if size <= _KEPT_BYTES:
                kept.append(packet)
            if len(rows) > MAX_FRAMES:
                self._refuse_length()
        self._kept = kept if len(kept) == len(rows) else None
        is_timed = not _TIMED_CONTAINERS.isdisjoint(container.format.name.split(","))
        if not is_timed or stream.codec_context.codec.canonical_name not in _TIMED_CODECS or not rows or not rows[0][1]:
            return
        if stream.frames > len(rows):
            found = f"its header says {stream.frames} frames, but {len(rows)} are there"
            raise DataError(f"{self.path}: truncated video: {found}; replace or remove it")
        timeline = None if any(time is None for time, *_ in rows) else make_timeline(*zip(*rows, strict=True))
        # Where frames change places and no time says so, these are the times of decoding.
        if timeline is not None and (np.any(np.diff(timeline.pts) < 0) or not stream.codec_context.has_b_frames):
            self._timeline = timeline

    def _refuse_length(self) -> NoReturn:
        raise DataError(f"{self.path}: more than {MAX_FRAMES:,} frames; cut it into shorter videos")

    def _count(self) -> int:
        """How many frames there are, by decoding all; damaged ones at the end of a cut file do not count."""
        whole = 0
        for number, frame in self._decode_all():
            whole = whole if frame.is_corrupt else number + 1
            if number >= MAX_FRAMES:
                self._refuse_length()
        return whole

    def _decode_all(self) -> Iterator[NumberedFrame]:
        if self._kept is not None:
            packets, context = iter(self._kept), self._opened[1].codec_context
            context.flush_buffers()
        else:
            container, stream = open_video(self.path)
            packets, context = _packets(container, stream), stream.codec_context
        error: av.FFmpegError | None = None
        number = 0
        context.skip_frame = "DEFAULT"
        for packet in chain(packets, [None]):
            if packet is not None and error is not None:
                raise error  # not of the last packet, which a cut may have left incomplete
            try:
                frames = context.decode(packet)
            except av.FFmpegError as found:
                error, frames = found, []
            yield from enumerate(frames, number)
            number += len(frames)

    def _decode(self, numbers: list[int]) -> Pixels:
        """The frames with these rising numbers."""
        if self._timeline is not None:
            try:
                return self._to_rgb(self._decode_timed(self._timeline, numbers), numbers)
            except _TimesError:
                self._timeline, self._num_frames = None, self._count()
        return self._to_rgb(self._decode_all(), numbers)

    def _decode_timed(self, timeline: Timeline, numbers: Sequence[int]) -> Iterator[NumberedFrame]:
        """The frames with these rising numbers, in any order, decoding as little as that takes.

        Raises _TimesError if one does not come out, if frames come out in another order than their times have, or if
        the file cannot be entered where it should.
        """
        context = self._opened[1].codec_context
        can_skip = context.codec.canonical_name in _SKIPPABLE_CODECS
        for start, run in timeline.runs(numbers):
            missing = {int(timeline.pts[timeline.order[number]]): number for number in run}
            unread, last = set(missing), -math.inf
            packets = self._packets_from(timeline, start)
            while missing:
                packet = next(packets, None) if unread else None  # nothing more to read: what is inside comes out
                if packet is not None:
                    unread.discard(packet.pts)
                if can_skip:
                    context.skip_frame = "DEFAULT" if packet is None or packet.pts in missing else "NONREF"
                for frame in context.decode(packet):
                    if frame.pts is None or frame.pts <= last:
                        raise _TimesError
                    last = frame.pts
                    if frame.pts in missing:
                        yield missing.pop(frame.pts), frame
                if packet is None and missing:
                    raise _TimesError

    def _packets_from(self, timeline: Timeline, start: int) -> Iterator[Any]:
        """The packets from a keyframe, or one before it, to the end, for a decoder that knows nothing of others."""
        container, stream = self._opened
        if self._kept is not None:
            stream.codec_context.flush_buffers()
            return islice(self._kept, start, None)
        for target in (timeline.pts[start], timeline.pts[0]):
            container.seek(int(target), stream=stream)  # this empties the decoder too
            packets = _packets(container, stream)
            first = next(packets, None)
            if first is not None and first.pts in timeline.pts[: start + 1]:
                return chain([first], packets)
        raise _TimesError

    def _to_rgb(self, frames: Iterator[NumberedFrame], numbers: list[int]) -> Pixels:
        """Those of the frames that have these rising numbers, upright."""
        places = {number: place for place, number in enumerate(numbers)}
        pixels: Pixels | None = None
        for number, frame in frames:
            place = places.pop(number, None)
            if place is None:
                continue
            if frame.is_corrupt:
                raise DamagedFileError(f"{self.path}: frame {number} is damaged")
            rgb = _LOCAL.converter.reformat(frame, format="rgb24", threads=1).to_ndarray()
            image = _upright(np.asarray(rgb, np.uint8), frame)
            if pixels is None:
                pixels = np.empty((len(numbers), *image.shape), np.uint8)
            if image.shape != pixels.shape[1:]:
                raise DataError(f"{self.path}: frame {number} has another size than others ({image.shape[:2]})")
            pixels[place] = image
            if not places:
                break
        if pixels is None or places:
            raise DamagedFileError(
                f"{self.path}: damaged video: frame {min(places)} cannot be decoded; replace or remove it"
            )
        return pixels


class _TimesError(Exception):
    """The times of the packets do not tell which frame is which."""


def open_video(path: Path) -> tuple[InputContainer, VideoStream]:
    """A video opened for decoding with one thread. What is missing, no video or too large is a DataError."""
    with open_named(path) as file:
        head = file.read(12)
    options = {
        "protocol_whitelist": "file",
        "format_whitelist": ",".join(CONTAINERS),
        "codec_whitelist": ",".join(_DECODERS),
        "max_pixels": str(MAX_PIXELS),
        "threads": "1",
    }
    try:
        # The prefix keeps a name such as "http:x.mp4" a name.
        container = av.open(f"file:{path}", options=options, metadata_errors="replace")
    except _DAMAGE as error:
        why = getattr(error, "strerror", None) or str(error)
        is_mp4 = head[4:8] in (b"ftyp", b"mdat", b"wide", b"free", b"skip", b"moov")
        likely = "cut short or damaged mp4 file: download it again, or remove it" if is_mp4 else "not a video"
        raise DataError(f"{path}: {likely} ({why}); formats are {', '.join(CONTAINERS)}") from error
    stream = _moving_stream(path, container)
    width, height = stream.codec_context.width, stream.codec_context.height
    if width * height > MAX_PIXELS:
        raise DataError(f"{path}: frames of {width}×{height} are more than {MAX_PIXELS:,} pixels")
    stream.codec_context.options = {"max_pixels": str(MAX_PIXELS)}  # a stream may grow on its way
    stream.codec_context.thread_count = 1
    for other in container.streams:
        other.discard = Discard.default if other.index == stream.index else Discard.all
    return container, stream


def _moving_stream(path: Path, container: InputContainer) -> VideoStream:
    """The first stream that moves: an image on the cover of a sound file does not."""
    streams = [each for each in container.streams.video if not each.disposition & Disposition.attached_pic]
    if not streams:
        kinds = ", ".join(sorted({each.type for each in container.streams})) or "nothing"
        raise DataError(f"{path}: has no video in it (only {kinds})")
    context: CodecContext | None = streams[0].codec_context  # none, where libav has no decoder
    name = context.codec.canonical_name if context is not None else None
    if name not in CODECS:
        raise DataError(f"{path}: its codec is {name or 'unknown'}; expected one of {', '.join(CODECS)}")
    return streams[0]


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    """Turn what libav raises into a DataError that names the file."""
    try:
        yield
    except av.FFmpegError as error:
        raise DamagedFileError(f"{path}: damaged or truncated video ({error.strerror or error})") from error


@dataclass(frozen=True)
class Timeline:
    """The packets of a video, in the order in which they are decoded."""

    pts: Times
    """When each one's frame is shown."""
    keys: Times
    """Where keyframes are."""
    order: Times
    """Where frame 0, 1, … is."""

    def runs(self, numbers: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Frames, rising, that are decoded in one go, and the keyframe to begin at, wherever a jump ahead pays."""
        runs: list[tuple[int, list[int]]] = []
        places = self.order[list(numbers)]
        # The last keyframe that is both decoded and shown no later: frames that are decoded after a keyframe and shown
        # before it may need what was decoded before.
        by_time = np.searchsorted(self.pts[self.keys], self.pts[places], side="right")
        by_place = np.searchsorted(self.keys, places, side="right")
        starts = self.keys[np.minimum(by_time, by_place) - 1]
        last = -1
        for number, start, place in zip(numbers, starts.tolist(), places.tolist(), strict=True):
            if not runs or start - last > _SEEK_PACKETS:
                runs.append((start, []))
            runs[-1][1].append(number)
            last = max(last, place)
        return runs


def make_timeline(pts: Sequence[int], is_key: Sequence[bool], is_visible: Sequence[bool]) -> Timeline | None:
    """The timeline of packets in the order in which they are decoded; None if their times make no sense."""
    times, keys, visible = np.array(pts, np.int64), np.flatnonzero(is_key), np.flatnonzero(is_visible)
    order = visible[np.argsort(times[visible], kind="stable")]
    if not len(order) or not len(keys) or keys[0] != 0 or times[order[0]] < times[0]:
        return None  # there are no frames, or some whose past is not in the file
    is_rising = np.all(np.diff(np.sort(times)) > 0) and np.all(np.diff(times[keys]) > 0)
    return Timeline(times, keys, order) if is_rising else None


def _packets(container: InputContainer, stream: VideoStream) -> Iterator[Any]:
    """The packets from where the file stands, without the empty ones that mark the end or repeat a frame."""
    return (packet for packet in container.demux(stream) if packet.size)


class _Local(threading.local):
    """What each thread has of its own: to make a converter takes as long as to decode several frames."""

    def __init__(self) -> None:
        self.converter = VideoReformatter()


_LOCAL = _Local()


def _upright(image: Pixels, frame: VideoFrame) -> Pixels:
    """The image turned and flipped as the frame's display matrix says: x' = a·x + c·y and y' = b·x + d·y."""
    data: Any = frame.side_data.get("DISPLAYMATRIX")
    if data is None:
        return image
    a, b, _, c, d = np.frombuffer(bytes(data), np.int32)[:5].tolist()
    across, down = a, d
    if math.hypot(b, c) > math.hypot(a, d):
        image = image.transpose(1, 0, 2)
        across, down = c, b
    if across < 0:
        image = image[:, ::-1]
    return image[::-1] if down < 0 else image
