"""Videos that are opened but not decoded yet: frames by number, exactly those and nothing that is damaged."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.data.io.video_file import MAX_PIXELS, explaining, open_video
from paceline.data.io.video_index import (
    PacketScan,
    UnnumberedError,
    count_frames,
    decode_counted,
    decode_timed,
    scan_packets,
)

Pixels = NDArray[np.uint8]

MAX_FRAMES = 1_000_000
"""Frames of the longest video that is taken: nine hours at 30 a second."""
MAX_BYTES = 1 << 32
"""Bytes that the frames asked for at once may take."""

_OF_THREAD = threading.local()


class EncodedVideo:
    """A video file. Nothing of it is read before something is asked; then what is wrong with it is a DataError.

    Frames are numbered as they are shown, from 0, as decoding all of them would number them. In mp4, mov and Matroska
    files the packets tell the numbers; where packets have no times, decoding starts at the beginning, and the frames of
    other containers are also counted by decoding. A file of these, or of Matroska, that is cut off has as many as are
    left whole; in Matroska the last few may skip some that are lost, elsewhere they are left out if times tell that.
    Frames stand upright as the file's display matrix says, turned by quarters only.
    """

    def __init__(self, path: Path, max_pixels: int = MAX_PIXELS, max_frames: int = MAX_FRAMES) -> None:
        self.path = path
        self.max_pixels = max_pixels
        self.max_frames = max_frames
        self._scan: PacketScan | None = None
        self._size: tuple[int, int] | None = None

    def __reduce__(self) -> tuple[type[EncodedVideo], tuple[Path, int, int]]:
        return EncodedVideo, (self.path, self.max_pixels, self.max_frames)  # an open file stays in its process

    @property
    def num_frames(self) -> int:
        """How many frames there are; at least one."""
        return self._scanned().num_frames or 0

    @property
    def fps(self) -> float:
        """Frames a second, on average; 0 if the file does not tell."""
        scan = self._scanned()
        stream = scan.video.stream
        if scan.timeline is None or self.num_frames == 1 or stream.time_base is None:
            return float(stream.guessed_rate or 0)
        ticks = scan.timeline.time(self.num_frames - 1) - scan.timeline.time(0)
        return (self.num_frames - 1) / float(ticks * stream.time_base)

    @property
    def height(self) -> int:
        """Of the upright frames, in pixels."""
        return self._upright_size()[0]

    @property
    def width(self) -> int:
        """Of the upright frames, in pixels."""
        return self._upright_size()[1]

    def frames(self, numbers: Sequence[int] | NDArray[np.int64]) -> Pixels:
        """These frames, in this order, as RGB, uint8 [T, H, W, 3]; numbers may repeat. IndexError if there is none."""
        unique, places = np.unique(np.asarray(numbers, np.int64), return_inverse=True)
        if not 0 <= unique[0] <= unique[-1] < self.num_frames:
            raise IndexError(f"{self.path}: frames {unique[0]} to {unique[-1]} of {self.num_frames}")
        context = self._scanned().video.stream.codec_context
        needed = 3 * len(places) * context.width * context.height
        if needed > MAX_BYTES:
            raise DataError(
                f"{self.path}: {len(places)} of its frames take {needed:,} bytes; at most {MAX_BYTES:,} may"
            )
        with explaining(self.path):
            decoded = self._decode(unique.tolist())
        return decoded if np.array_equal(places, np.arange(len(unique))) else decoded[places]

    def decode(self, min_height: int = 0, min_width: int = 0) -> Pixels:
        """Refused: all frames of a video are never wanted at once."""
        raise DataError(
            f"{self.path}: a video is not decoded as a whole; let the first of the transforms choose frames, such as"
            " {name: clip, num_frames: 16, stride: 2} for training or {name: multi_clip, num_clips: 10, num_frames: 16}"
        )

    def _scanned(self) -> PacketScan:
        if self._scan is None:
            video = open_video(self.path, self.max_pixels)
            with explaining(self.path):
                scan = scan_packets(video, self.max_frames)
                self._scan = scan if scan.num_frames is not None else count_frames(scan)
            if not self._scan.num_frames:
                raise DataError(f"{self.path}: a video without frames")
        return self._scan

    def _decode(self, numbers: list[int]) -> Pixels:
        """The frames with these rising numbers."""
        scan = self._scanned()
        if scan.timeline is not None:
            try:
                return self._converted(decode_timed(scan, scan.timeline, numbers), numbers)
            except UnnumberedError:
                self._scan = scan = count_frames(scan)
        return self._converted(decode_counted(scan), numbers)

    def _converted(self, frames: Iterator[tuple[int, VideoFrame]], numbers: list[int]) -> Pixels:
        """Those of the frames that have these rising numbers, upright, in RGB."""
        places = {number: place for place, number in enumerate(numbers)}
        converter = _converter()
        pixels: Pixels | None = None
        for number, frame in frames:
            place = places.pop(number, None)
            if place is None:
                continue
            if frame.is_corrupt:
                raise DataError(f"{self.path}: frame {number} is damaged")
            rgb = converter.reformat(frame, format="rgb24", threads=1).to_ndarray()
            picture = upright(np.asarray(rgb, np.uint8), _display_matrix(frame))
            if pixels is None:
                pixels = np.empty((len(numbers), *picture.shape), np.uint8)
            if picture.shape != pixels.shape[1:]:
                raise DataError(f"{self.path}: frame {number} has another size than others ({picture.shape[:2]})")
            pixels[place] = picture
            if not places:
                break
        if pixels is None or places:
            raise DataError(f"{self.path}: damaged video: frame {min(places)} cannot be decoded; replace or remove it")
        self._size = pixels.shape[1], pixels.shape[2]
        return pixels

    def _upright_size(self) -> tuple[int, int]:
        if self._size is None:
            self.frames([0])  # only a frame tells how it is to be turned
        assert self._size is not None
        return self._size


def _converter() -> VideoReformatter:
    """This thread's own, kept: to make one takes as long as to decode several frames."""
    if not hasattr(_OF_THREAD, "converter"):
        _OF_THREAD.converter = VideoReformatter()
    kept: VideoReformatter = _OF_THREAD.converter
    return kept


def upright(picture: Pixels, matrix: Sequence[int]) -> Pixels:
    """The image turned and mirrored as the four numbers say: x' = a·x + c·y and y' = b·x + d·y."""
    a, b, c, d = matrix
    if math.hypot(b, c) > math.hypot(a, d):
        picture = picture.transpose(1, 0, 2)
        across, down = c, b
    else:
        across, down = a, d
    if across < 0:
        picture = picture[:, ::-1]
    return picture[::-1] if down < 0 else picture


def _display_matrix(frame: VideoFrame) -> tuple[int, int, int, int]:
    data: Any = frame.side_data.get("DISPLAYMATRIX")
    if data is None:
        return 1, 0, 0, 1
    a, b, _, c, d = np.frombuffer(bytes(data), np.int32)[:5].tolist()
    return a, b, c, d
