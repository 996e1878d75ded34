"""The frames of a video file, found from its packets without decoding them."""

from __future__ import annotations

import math
import os
import re
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import NamedTuple, TypeAlias

import av
import numpy as np
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.data.io.video_file import OpenVideo, open_video

Times = NDArray[np.int64]
_SEEK_PACKETS = 4  # decoding more small packets than this takes longer than entering the file at another place


class UnnumberedError(Exception):
    """The times of the packets do not tell which frame is which."""


class Run(NamedTuple):
    """Frames that are decoded in one go, from the keyframe at packet `start` on."""

    start: int
    numbers: list[int]


class PacketTimes(NamedTuple):
    """What a packet tells of itself."""

    shown: int
    decoded: int
    is_key: bool
    is_visible: bool


@dataclass(frozen=True)
class Timeline:
    """The packets of a video that tell their times, in the order in which they are decoded."""

    shown: Times
    decoded: Times
    keys: Times
    """Where keyframes are."""
    order: Times
    """Where frame 0, 1, … is."""

    @property
    def is_reordered(self) -> bool:
        """Whether some frame is shown earlier than one that is decoded before it."""
        return bool(np.any(np.diff(self.shown) < 0))

    def runs(self, numbers: Sequence[int]) -> list[Run]:
        """The frames, rising, parted wherever it is worth to jump ahead to a keyframe."""
        runs: list[Run] = []
        last = -1
        for number, start in zip(numbers, self._starts(numbers), strict=True):
            if not runs or start - last > _SEEK_PACKETS:
                runs.append(Run(start, []))
            runs[-1].numbers.append(number)
            last = max(last, int(self.order[number]))
        return runs

    def _starts(self, numbers: Sequence[int]) -> list[int]:
        """For each frame, the last keyframe that is both decoded and shown no later than it.

        Frames that are decoded after a keyframe and shown before it may need what was decoded before.
        """
        places = self.order[list(numbers)]
        by_time = np.searchsorted(self.shown[self.keys], self.shown[places], side="right")
        by_place = np.searchsorted(self.keys, places, side="right")
        starts: list[int] = self.keys[np.minimum(by_time, by_place) - 1].tolist()
        return starts

    def time(self, number: int) -> int:
        """When this frame is shown."""
        return int(self.shown[self.order[number]])

    def place(self, time: int | None) -> int:
        """Where the packet is that is shown at this time; UnnumberedError if nowhere."""
        found = np.flatnonzero(self.shown == time)
        if len(found) != 1:
            raise UnnumberedError
        return int(found[0])


def make_timeline(packets: Sequence[PacketTimes]) -> Timeline | None:
    """The timeline of packets in the order in which they are decoded; None if their times make no sense."""
    shown, decoded, is_key, is_visible = np.array(packets, np.int64).reshape(-1, 4).T
    keys, visible = np.flatnonzero(is_key), np.flatnonzero(is_visible)
    order = visible[np.argsort(shown[visible], kind="stable")]
    is_sound = (
        len(order) > 0
        and len(keys) > 0
        and keys[0] == 0
        and shown[order[0]] >= shown[0]  # else there are frames whose past is not in the file
        and bool(np.all(np.diff(np.sort(shown)) > 0))
        and bool(np.all(np.diff(shown[keys]) > 0))
    )
    return Timeline(shown, decoded, keys, order) if is_sound else None


NumberedFrame: TypeAlias = tuple[int, VideoFrame]

_KEPT_BYTES = 1 << 26  # packets that are kept in memory, so that a short video is read once
_LAST_FRAMES = 4  # among which the frame of the last packet is: it may be shown before some that are decoded earlier
_ONE_FRAME_CONTAINERS = {"mov", "matroska"}  # a packet of these codecs in these containers is one frame
_ONE_FRAME_CODECS = {"h264", "hevc", "av1", "vp9", "mpeg4", "mpeg2video", "mjpeg"}
_SKIPPABLE_CODECS = {"h264", "mpeg4", "mpeg2video"}  # their decoders can leave out just what no other frame needs


@dataclass(frozen=True)
class PacketScan:
    """What the packets of a video tell without being decoded."""

    video: OpenVideo
    timeline: Timeline | None
    """None if decoding from the beginning has to tell which frame is which."""
    num_frames: int | None
    """None if decoding has to tell that too."""
    kept: list[VideoPacket] | None
    """All packets, unless they are large."""
    num_packets: int
    """How many packets there are, but for incomplete ones at the end of the file."""
    is_open_ended: bool
    """Whether the container does not tell where a video ends, so that only decoding shows that it was cut short."""
    decoded: list[int]
    """When each packet is decoded."""


def scan_packets(video: OpenVideo, max_frames: int) -> PacketScan:
    """Look through the packets of a file that was just opened; more than `max_frames` are a DataError."""
    rows: list[PacketTimes] = []
    kept: list[VideoPacket] = []
    incomplete: list[int] = []
    last_two: deque[VideoPacket] = deque(maxlen=2)
    size, has_times = 0, True
    for packet in _packets(video):
        has_times &= packet.pts is not None
        time = packet.pts or 0
        decoded = time if packet.dts is None else packet.dts
        rows.append(PacketTimes(time, decoded, packet.is_keyframe, not packet.is_discard))
        if len(rows) > max_frames:
            raise DataError(f"{video.path}: more than {max_frames:,} frames; cut it into shorter videos")
        if packet.is_corrupt:
            incomplete.append(len(rows) - 1)
        last_two.append(packet)
        size += packet.size
        if size <= _KEPT_BYTES:
            kept.append(packet)
    all_kept = kept if len(kept) == len(rows) else None
    is_open_ended = not _is_in(video, _ONE_FRAME_CONTAINERS)
    num_packets = num_complete(video, len(rows), incomplete, last_two) if is_open_ended else len(rows)
    if rows and not num_packets:
        raise DataError(f"{video.path}: frame 0 is damaged, and nothing whole follows; replace or remove the file")
    times = [row.decoded for row in rows]
    unnumbered = PacketScan(video, None, None, all_kept, num_packets, is_open_ended, times)
    if not _is_frame_by_frame(video) or not rows or not rows[0].is_key:
        return unnumbered
    if video.stream.frames > len(rows):
        found = f"{video.stream.frames} frames are announced and {len(rows)} are there"
        raise DataError(f"{video.path}: truncated video: {found}; replace or remove it")
    timeline = make_timeline(rows) if has_times else None
    if timeline is not None and video.stream.codec_context.has_b_frames and not timeline.is_reordered:
        timeline = None  # frames change places, and no time says so: these are the times of decoding
    return replace(unnumbered, timeline=timeline, num_frames=sum(row.is_visible for row in rows))


def decode_timed(scan: PacketScan, timeline: Timeline, numbers: Sequence[int]) -> Iterator[NumberedFrame]:
    """The frames with these rising numbers, in any order, decoding as little as that takes.

    Raises UnnumberedError if one does not come out, if frames come out in another order than their times have, or if
    the file cannot be entered where it should.
    """
    context = scan.video.stream.codec_context
    can_skip = context.codec.canonical_name in _SKIPPABLE_CODECS
    for start, run in timeline.runs(numbers):
        missing = {timeline.time(number): number for number in run}
        unread = set(missing)
        packets = _packets_from(scan, timeline, start)
        last = -math.inf
        while missing:
            packet = next(packets, None) if unread else None  # nothing more to read: what is inside comes out
            if packet is not None:
                unread.discard(packet.pts or 0)
            if can_skip:
                context.skip_frame = "DEFAULT" if packet is None or packet.pts in missing else "NONREF"
            for frame in context.decode(packet):
                if frame.pts is None or frame.pts <= last:
                    raise UnnumberedError
                last = frame.pts
                if frame.pts in missing:
                    yield missing.pop(frame.pts), frame
            if packet is None and missing:
                raise UnnumberedError


def decode_counted(scan: PacketScan, to_the_end: bool = True) -> Iterator[NumberedFrame]:
    """All frames from the beginning, with their numbers; or without those that wait for what may come before them."""
    packets: Iterator[VideoPacket]
    if scan.kept is not None:
        context = scan.video.stream.codec_context
        context.flush_buffers()
        packets = iter(scan.kept)
    else:
        video = open_video(scan.video.path, scan.video.max_pixels)
        context = video.stream.codec_context
        packets = _packets(video)
    context.skip_frame = "DEFAULT"
    packets = islice(packets, scan.num_packets)
    frames = (frame for packet in chain(packets, [None] * to_the_end) for frame in context.decode(packet))
    yield from enumerate(frames)


def count_frames(scan: PacketScan) -> PacketScan:
    """The same, with the frames numbered by decoding them all.

    Of a file that may have been cut short anywhere, the last packets are left out if the last frames are whole without
    them and damaged with them, and so are frames that are shown after others that are lost, as far as that can be
    told. Damage elsewhere is left to whoever asks for the frames.
    """
    scan = replace(scan, timeline=None)
    if not scan.is_open_ended:
        return replace(scan, num_frames=sum(1 for _ in decode_counted(scan)))
    for num_packets in range(scan.num_packets, max(0, scan.num_packets - INCOMPLETE_PACKETS - 1), -1):
        shorter = replace(scan, num_packets=num_packets)
        with suppress(av.FFmpegError):
            found = [(frame.is_corrupt, frame.pts) for _, frame in decode_counted(shorter)]
            if not any(is_damaged for is_damaged, _ in found[-_LAST_FRAMES:]):
                return replace(shorter, num_frames=_num_in_sequence(shorter, [time for _, time in found]))
    return replace(scan, num_frames=sum(1 for _ in decode_counted(scan)))


def _num_in_sequence(scan: PacketScan, shown: Sequence[int | None]) -> int:
    """How many of the frames, shown at these times, come before any that is lost."""
    decoded = scan.decoded[: scan.num_packets]
    if not _is_in(scan.video, {"avi"}):
        return num_before_gap(shown, decoded)
    # Here libav makes up the times at which frames are shown.
    if not shown or not ends_before(scan.video.stream.frames, decoded):
        return len(shown)
    return max(1, sum(1 for _ in decode_counted(scan, to_the_end=False)))


def _packets(video: OpenVideo) -> Iterator[VideoPacket]:
    """The packets from where the file stands, without the empty ones that mark the end or repeat a frame."""
    return (packet for packet in video.container.demux(video.stream) if packet.size)


def _packets_from(scan: PacketScan, timeline: Timeline, start: int) -> Iterator[VideoPacket]:
    """The packets from a keyframe, or one before it, to the end, for a decoder that knows nothing of others."""
    video = scan.video
    if scan.kept is not None:
        video.stream.codec_context.flush_buffers()
        return islice(scan.kept, start, None)
    for target in (timeline.shown[start], timeline.decoded[start], timeline.shown[0]):
        video.container.seek(int(target), stream=video.stream)  # this empties the decoder too
        packets = _packets(video)
        first = next(packets, None)
        if first is not None and timeline.place(first.pts) <= start:
            return chain([first], packets)
    raise UnnumberedError


def _is_frame_by_frame(video: OpenVideo) -> bool:
    return _is_in(video, _ONE_FRAME_CONTAINERS) and video.stream.codec_context.codec.canonical_name in _ONE_FRAME_CODECS


def _is_in(video: OpenVideo, containers: set[str]) -> bool:
    return not containers.isdisjoint(video.container.format.name.split(","))


VideoPacket: TypeAlias = "Packet[VideoStream]"

INCOMPLETE_PACKETS = 3
"""That a cut may leave at the end of a file, as its container parts them."""
_TIMED_PACKETS = 64  # at the end, whose times tell how long a frame is shown
_ROW = re.compile(rb"\x00\x00\x01([\x01-\xaf])")  # begins a row of blocks in MPEG-2, and tells which
_PIECE, _SYNC = 188, 0x47  # of an MPEG transport stream: how long a piece is, and its first byte
_LAST_PIECES = 4096  # among which one of the video is looked for
_HAS_CONTENT, _HAS_FIELD, _HAS_CLOCK = 0x10, 0x20, 0x10  # bits of a piece; the field before the content may fill it up


def num_complete(video: OpenVideo, num_packets: int, incomplete: Sequence[int], last: Sequence[VideoPacket]) -> int:
    """How many packets there are before those at the end that are incomplete.

    To those that libav calls so come those of codecs whose decoders do not mind: given are the last two packets.
    """
    found = [place for place in incomplete if place >= num_packets - INCOMPLETE_PACKETS]
    codec = video.stream.codec_context.codec.canonical_name
    is_last_cut = (codec == "mpeg2video" and _lacks_rows(last)) or (
        codec == "hevc" and video.container.format.name == "mpegts" and _ends_inside(video.path, video.stream.id)
    )
    return min([*found, num_packets - (is_last_cut and num_packets > 0)])


def _lacks_rows(last: Sequence[VideoPacket]) -> bool:
    """Whether the last packet has fewer rows than the one before it."""
    lowest = [max(_ROW.findall(bytes(packet)), default=b"") for packet in last]
    return len(lowest) > 1 and lowest[-1] < lowest[0]


def _ends_inside(path: Path, stream_id: int) -> bool:
    """Whether an MPEG transport stream ends inside a frame, whose last piece would be filled up unless it just fits."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END) // _PIECE * _PIECE
        file.seek(max(0, end - _LAST_PIECES * _PIECE))
        data = file.read(end - file.tell())
    for start in range(len(data) - _PIECE, -1, -_PIECE):
        sync, number, control, length, flags = struct.unpack_from(">BHBBB", data, start)
        if sync != _SYNC:
            return False  # pieces of another size
        if number & 0x1FFF == stream_id and control & _HAS_CONTENT:
            needed = 7 if flags & _HAS_CLOCK else 1 if flags else 0
            return not control & _HAS_FIELD or 0 < length <= needed
    return False


def ends_before(length: int, decoded: Sequence[int]) -> bool:
    """Whether packets that are decoded at these times end before the length that an AVI file announces."""
    longest = max(np.diff(decoded[-_TIMED_PACKETS:]), default=1)  # the last may be repeated as often as another
    return bool(length > decoded[-1] + longest)


def num_before_gap(shown: Sequence[int | None], decoded: Sequence[int]) -> int:
    """How many frames are shown before a gap that lost ones have left, by the times of frames and of all packets.

    A packet that is lost would be decoded, and so shown, later than the last one that is there. Only frames that are
    shown later yet may have lost some before them. Where frames are not about equally long, nothing can be told.
    """
    times = [time for time in shown if time is not None]
    steps = np.diff(decoded[-_TIMED_PACKETS:])
    if len(times) < len(shown) or not len(steps) or not 0 < steps.max() < 2 * steps.min():
        return len(shown)
    sure = [time for time in times if time <= decoded[-1]][-_TIMED_PACKETS:]
    longest = max(steps.max(), *np.diff(sure), 0)  # a packet may be half a frame, of every other line
    for number, (before, after) in enumerate(pairwise(times), 1):
        if after > decoded[-1] and after - before > 1.5 * longest:
            return number
    return len(shown)
