"""The packets of a video: looked through once, and decoded from where it is worth to begin."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TypeAlias

import av
from av.video.frame import VideoFrame

from paceline.core.errors import DataError
from paceline.data.reading.video_ending import (
    INCOMPLETE_PACKETS,
    VideoPacket,
    ends_before,
    num_before_gap,
    num_complete,
)
from paceline.data.reading.video_opening import OpenVideo, open_video
from paceline.data.reading.video_timeline import PacketTimes, Timeline, UnnumberedError, make_timeline

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
