"""Where a video that may have been cut short ends: what its last packets and frames tell of others that are lost."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np
from av.packet import Packet
from av.video.stream import VideoStream

from paceline.data.reading.video_opening import OpenVideo

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
