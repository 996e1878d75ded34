"""Videos that tests make: every frame differs from every other, in any codec, container and rhythm."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
HEIGHT, WIDTH = 48, 64


def image(number: int, height: int = HEIGHT, width: int = WIDTH) -> Pixels:
    """Frame `number`: colors that drift, and a noisy patch that jumps."""
    y, x = np.mgrid[:height, :width]
    drift = np.stack([2 * x + 5 * number, 3 * y + 3 * number, x + y + 7 * number], axis=-1).astype(np.uint8)
    top, left = number * 5 % (height - 12), number * 7 % (width - 12)
    drift[top : top + 12, left : left + 12] = np.random.default_rng(number).integers(0, 256, (12, 12, 3))
    return drift


def write_video(
    path: Path,
    codec: str = "libx264",
    num_frames: int = 40,
    options: Mapping[str, str] | None = None,
    milliseconds: Sequence[int] | None = None,
    matrix: Sequence[int] | None = None,
    size: tuple[int, int] = (HEIGHT, WIDTH),
    container_options: Mapping[str, str] | None = None,
) -> Path:
    """Encode frames 0, 1, …, 25 a second or shown at the given times."""
    with av.open(str(path), "w", container_options=dict(container_options or {})) as container:
        stream: Any = container.add_stream(codec, rate=25, options=dict(options or {}))
        stream.height, stream.width = size
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.codec_context.thread_count = 1
        if milliseconds is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        if matrix is not None:
            stream.set_display_matrix(matrix)
        for number in range(num_frames):
            frame = av.VideoFrame.from_ndarray(image(number, *size), format="rgb24")
            if milliseconds is not None:
                frame.pts, frame.time_base = milliseconds[number], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def decode_all(path: Path) -> Pixels:
    """Every frame, one after the other, as libav gives them: what any other way has to agree with."""
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]).astype(np.uint8)


def forget_times(path: Path, boxes: Sequence[bytes] = (b"stts", b"ctts")) -> Path:
    """Overwrite the times in an mp4 file, so that all frames seem to be shown at once, or when they are decoded."""
    data = bytearray(path.read_bytes())
    for box in boxes:
        at = data.find(box)
        if at >= 0:
            (entries,) = struct.unpack_from(">I", data, at + 8)
            for entry in range(entries):
                struct.pack_into(">I", data, at + 16 + 8 * entry, 0)
    struct.pack_into(">I", data, data.find(b"elst") + 16, 0)  # else what is shown begins later
    path.write_bytes(data)
    return path
