"""How fast clips of videos come, beside decoding all of a video and taking frames of that."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import av
import numpy as np
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray

from benchmarks.measuring import Measured, Turn, interleave, spread
from benchmarks.report import Goal, Section, at_least
from paceline.data.io.video import EncodedVideo
from paceline.data.transforms.video import Clip

LEAST = 2.0
_FRAMES, _STRIDE = 8, 4
_CLIP = Clip(_FRAMES, _STRIDE, short="last")
_OURS, _NAIVE, _KEPT = "Paceline", "decode all, then sample", "the same, its color converter kept"
Read = Callable[[Path, NDArray[np.float64]], NDArray[np.uint8]]


def by_number(path: Path, draws: NDArray[np.float64]) -> NDArray[np.uint8]:
    """The clip as a recipe's transform takes it."""
    clip: NDArray[np.uint8] = _CLIP({"image": EncodedVideo(path)}, draws)["image"]
    return clip


def decode_all(path: Path, draws: NDArray[np.float64]) -> NDArray[np.uint8]:
    """The clip of all frames, as PyAV's documentation shows how to get them."""
    with av.open(str(path)) as container:
        container.streams.video[0].codec_context.thread_count = 1
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return _taken(np.stack(frames).astype(np.uint8, copy=False), draws)


def decode_all_with_one_converter(path: Path, draws: NDArray[np.float64]) -> NDArray[np.uint8]:
    """The same by someone who knows that each frame makes a converter of its own unless it is given one."""
    converter = VideoReformatter()
    with av.open(str(path)) as container:
        container.streams.video[0].codec_context.thread_count = 1
        decoded = container.decode(video=0)
        frames = [converter.reformat(frame, format="rgb24", threads=1).to_ndarray() for frame in decoded]
    return _taken(np.stack(frames).astype(np.uint8, copy=False), draws)


def _taken(frames: NDArray[np.uint8], draws: NDArray[np.float64]) -> NDArray[np.uint8]:
    offsets = np.arange(_FRAMES) * _STRIDE
    room = len(frames) - 1 - int(offsets[-1])
    return frames[np.minimum(offsets + max(0, int(draws[1] * (room + 1))), len(frames) - 1)]


def measure(is_quick: bool) -> Section:
    """Milliseconds a clip, of short videos with one keyframe and of longer ones with several."""
    rounds, number = (3, 8) if is_quick else (11, 30)
    with tempfile.TemporaryDirectory() as folder:
        short, origin = _short_videos(Path(folder), number)
        long = [_make(Path(folder) / f"long-{k}.mp4", 300, (256, 340), keyframe_every=48, shift=k) for k in range(2)]
        rows, goals = [], []
        for kind, paths in ((f"short, {origin}", short), ("long", long)):
            measured = interleave(_turns(paths), rounds)
            rows += [_row(kind, each, measured[_OURS]) for each in measured.values()]
            goals += [_goal(kind, measured[name], measured[_OURS]) for name in (_NAIVE,)]
    return Section(
        "Clips of videos",
        f"{_FRAMES} frames, {_STRIDE} apart, from a random position, as RGB, one thread; H.264 with B-frames."
        " Short videos have about 60 frames of about 228×128 and one keyframe, so seeking does not help; long ones have"
        " 300 frames of 340×256 and a keyframe every 48. All contestants return the same pixels, which is checked."
        f" {rounds} rounds.",
        ["videos, way", "clips/s", "Paceline is faster by", "middle half"],
        rows,
        goals,
    )


def _turns(paths: Sequence[Path]) -> dict[str, Turn]:
    readers: dict[str, Read] = {_OURS: by_number, _NAIVE: decode_all, _KEPT: decode_all_with_one_converter}
    draws = np.random.default_rng(0).random((len(paths), 2))
    for path, drawn in zip(paths, draws, strict=True):
        clips = [read(path, drawn) for read in readers.values()]
        assert all(np.array_equal(clip, clips[0]) for clip in clips), path
    return {name: _turn(read, paths) for name, read in readers.items()}


def _turn(read: Read, paths: Sequence[Path]) -> Turn:
    generator = np.random.default_rng(1)

    def take() -> float:
        draws = generator.random((len(paths), 2))
        begin = perf_counter()
        for path, drawn in zip(paths, draws, strict=True):
            read(path, drawn)
        return (perf_counter() - begin) / len(paths)

    return take


def _row(kind: str, each: Measured, ours: Measured) -> list[str]:
    ratios = each.ratios(ours)
    return [f"{kind}: {each.name}", f"{1 / each.median:,.0f}", f"{statistics.median(ratios):.1f} ×", spread(ratios)]


def _goal(kind: str, naive: Measured, ours: Measured) -> Goal:
    factor = statistics.median(naive.ratios(ours))
    return at_least(f"clips of videos ({kind}): faster than {naive.name}", factor, LEAST, "{:.1f} ×")


def _short_videos(folder: Path, number: int) -> tuple[list[Path], str]:
    """Real ones if they are there, else such as those."""
    named = os.environ.get("PACELINE_DATA")
    beside = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
    real = sorted((Path(named) if named else beside).glob("surv_fight_128/*/*.mp4"))
    if len(real) >= number:
        return real[:: len(real) // number][:number], "real"
    return [_make(folder / f"{k}.mp4", 60, (128, 228), keyframe_every=250, shift=k) for k in range(number)], "made"


def _make(path: Path, num_frames: int, size: tuple[int, int], keyframe_every: int, shift: int) -> Path:
    """A video of drifting colors with some noise."""
    y, x = np.mgrid[: size[0], : size[1]]
    noise = np.random.default_rng(shift).integers(0, 24, (*size, 3))
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=25, options={"g": str(keyframe_every), "preset": "veryfast"})
        stream.height, stream.width = size
        stream.pix_fmt = "yuv420p"
        for number in range(num_frames):
            drift = np.stack([x + 3 * number, y + 2 * number + shift, x + y + number], axis=-1)
            frame = (drift + np.roll(noise, number, axis=0)).astype(np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    return path
