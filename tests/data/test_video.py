"""Frames of videos by number, compared with decoding everything."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from video_files import HEIGHT, WIDTH, Pixels, decode_all, forget_times, write_video

from paceline.core.errors import DataError
from paceline.data.io import video as video_module
from paceline.data.io.video import EncodedVideo, Timeline, make_timeline

_LONG = {"g": "250", "bf": "3", "preset": "veryfast"}
_SHORT = {"g": "8", "bf": "2", "preset": "veryfast", "x264-params": "scenecut=0"}
_OPEN = {"bf": "3", "preset": "veryfast", "x264-params": "open-gop=1:keyint=8:scenecut=0"}
_UNEVEN = [sum(range(1, n)) + 7 * n for n in range(1, 41)]
_KINDS: dict[str, Callable[[Path], Path]] = {
    "one keyframe.mp4": lambda path: write_video(path, options=_LONG),
    "many keyframes.mp4": lambda path: write_video(path, options=_SHORT),
    "open groups.mp4": lambda path: write_video(path, options=_OPEN),
    "uneven.mp4": lambda path: write_video(path, options=_SHORT, milliseconds=_UNEVEN),
    "uneven.mkv": lambda path: write_video(path, options=_OPEN, milliseconds=_UNEVEN),
    "untimed.mp4": lambda path: forget_times(write_video(path, options=_SHORT)),
    "decode times.mp4": lambda path: forget_times(write_video(path, options=_SHORT), [b"ctts"]),
    "mpeg4.mp4": lambda path: write_video(path, "mpeg4", options={"g": "10", "bf": "2"}),
    "mpeg4.avi": lambda path: write_video(path, "mpeg4", options={"g": "10", "bf": "2"}),
    "h264.avi": lambda path: write_video(path, options=_SHORT),
    "h264.ts": lambda path: write_video(path, options=_SHORT),
    "mjpeg.mov": lambda path: write_video(path, "mjpeg"),
    "mpeg2.mpg": lambda path: write_video(path, "mpeg2video", options={"g": "10", "bf": "2"}),
    "vp8.webm": lambda path: write_video(path, "libvpx", options={"deadline": "realtime", "auto-alt-ref": "1"}),
    "vp9.webm": lambda path: write_video(path, "libvpx-vp9", options={"deadline": "realtime", "cpu-used": "8"}),
}
_TIMED = {"one keyframe.mp4", "many keyframes.mp4", "open groups.mp4", "uneven.mp4", "uneven.mkv", "mpeg4.mp4"}


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Pixels]]:
    folder = tmp_path_factory.mktemp("videos")
    made = {name: write(folder / name) for name, write in _KINDS.items()}
    return {name: (path, decode_all(path)) for name, path in made.items()}


@pytest.mark.parametrize("kept_bytes", [1 << 26, 0], ids=["kept", "sought"])
@pytest.mark.parametrize("name", _KINDS)
def test_frames_are_those_that_decoding_everything_gives(
    videos: dict[str, tuple[Path, Pixels]], name: str, kept_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(video_module, "_KEPT_BYTES", kept_bytes)
    path, expected = videos[name]
    video = EncodedVideo(path)
    assert (video.num_frames, video.height, video.width) == (len(expected), HEIGHT, WIDTH)
    rng = random.Random(name)
    for _ in range(6):
        numbers = [rng.randrange(len(expected)) for _ in range(rng.randrange(1, 9))]
        np.testing.assert_array_equal(video.frames(numbers), expected[numbers])
    np.testing.assert_array_equal(EncodedVideo(path).frames(range(len(expected))), expected)
    assert (video._timeline is not None) == (name in _TIMED | {"mjpeg.mov", "vp9.webm"})


@settings(max_examples=40, deadline=None)
@given(numbers=st.lists(st.integers(0, 39), min_size=1, max_size=12), name=st.sampled_from(sorted(_TIMED)))
def test_any_numbers_in_any_order(videos: dict[str, tuple[Path, Pixels]], numbers: list[int], name: str) -> None:
    path, expected = videos[name]
    np.testing.assert_array_equal(EncodedVideo(path).frames(numbers), expected[numbers])


def _timeline(displayed: list[int], keys: list[int], hidden: tuple[int, ...] = ()) -> Timeline | None:
    places = range(len(displayed))
    return make_timeline(displayed, [at in keys for at in places], [at not in hidden for at in places])


def test_runs_begin_at_the_keyframe_before_and_jump_only_where_it_saves_work() -> None:
    timeline = _timeline([*range(100)], keys=[0, 10, 50, 90])
    assert timeline is not None
    assert timeline.runs([3, 7]) == [(0, [3, 7])]
    assert timeline.runs([12, 55]) == [(10, [12]), (50, [55])]
    assert timeline.runs([9, 11]) == [(0, [9, 11])], "decoding on is cheaper than a jump to the next packet"


def test_what_is_displayed_before_its_keyframe_is_decoded_from_the_one_before() -> None:
    # Decoded: I0 P3 B1 B2 I6 B4 B5 P9 B7 B8; frames 4 and 5 come after keyframe 6 in the file.
    timeline = _timeline([0, 3, 1, 2, 6, 4, 5, 9, 7, 8], keys=[0, 4])
    assert timeline is not None
    assert timeline.order.tolist() == [0, 2, 3, 1, 5, 6, 4, 8, 9, 7]
    assert timeline.runs([5]) == [(0, [5])]
    assert timeline.runs([7]) == [(4, [7])]


def test_frames_that_are_not_displayed_have_no_number() -> None:
    timeline = _timeline([0, 1, 2, 3], keys=[0], hidden=(0, 1))
    assert timeline is not None
    assert timeline.pts[timeline.order].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("displayed", "keys"), [([0, 0, 0], [0]), ([0, 1, 2], [1]), ([2, 0, 1], [0]), ([5, 6, 1, 2], [0, 2]), ([], [])]
)
def test_times_that_make_no_sense_number_nothing(displayed: list[int], keys: list[int]) -> None:
    assert _timeline(displayed, keys) is None


_ONE = 1 << 16
_TURNED: dict[str, tuple[list[int], Callable[[Pixels], Pixels]]] = {
    # x' = a·x + c·y and y' = b·x + d·y, written a b u c d v x y w: a telephone held upright writes the first one.
    "clockwise": ([0, _ONE, 0, -_ONE, 0, 0, 0, 0, 1 << 30], lambda frame: np.rot90(frame, -1)),
    "counterclockwise": ([0, -_ONE, 0, _ONE, 0, 0, 0, 0, 1 << 30], lambda frame: np.rot90(frame, 1)),
    "upside down": ([-_ONE, 0, 0, 0, -_ONE, 0, 0, 0, 1 << 30], lambda frame: np.rot90(frame, 2)),
    "mirrored": ([-_ONE, 0, 0, 0, _ONE, 0, 0, 0, 1 << 30], lambda frame: frame[:, ::-1]),
}


@pytest.mark.parametrize("name", _TURNED)
def test_frames_stand_upright(tmp_path: Path, name: str) -> None:
    matrix, turn = _TURNED[name]
    path = write_video(tmp_path / "turned.mp4", num_frames=3, matrix=matrix)
    lying = decode_all(path)
    video = EncodedVideo(path)
    expected = turn(lying[2])
    assert (video.height, video.width) == expected.shape[:2]
    np.testing.assert_array_equal(video.frames([2])[0], expected)


def test_one_frame_is_a_video_too(tmp_path: Path) -> None:
    video = EncodedVideo(write_video(tmp_path / "still.mp4", num_frames=1))
    assert video.num_frames == 1
    assert video.frames([0, 0, 0]).shape == (3, HEIGHT, WIDTH, 3)


def test_an_opened_video_can_go_to_another_process(videos: dict[str, tuple[Path, Pixels]]) -> None:
    path, expected = videos["one keyframe.mp4"]
    video = EncodedVideo(path)
    video.frames([3])
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(video)).frames([5]), expected[[5]])


def test_content_counts_not_the_name(videos: dict[str, tuple[Path, Pixels]], tmp_path: Path) -> None:
    path, expected = videos["uneven.mkv"]
    odd = tmp_path / "http: matroska.mp4"
    odd.write_bytes(path.read_bytes())
    np.testing.assert_array_equal(EncodedVideo(odd).frames([7]), expected[[7]])


def test_a_number_that_is_not_there(videos: dict[str, tuple[Path, Pixels]]) -> None:
    with pytest.raises(IndexError, match="of 40"):
        EncodedVideo(videos["one keyframe.mp4"][0]).frames([40])


def _text(path: Path) -> Path:
    path.write_text("#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:9/secret.ts\n#EXT-X-ENDLIST\n")
    return path


def _photo(path: Path) -> Path:
    Image.new("RGB", (20, 10)).save(path, "JPEG")
    return path


def _pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def _sound(path: Path) -> Path:
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16000, layout="mono")
        for start in range(0, 8192, 1024):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 16000, start
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def _cut(path: Path, first: bool) -> Path:
    """An mp4 file that ends too early: before its table of contents, or after it."""
    write_video(path, options=_SHORT, container_options={"movflags": "faststart"} if first else None)
    path.write_bytes(path.read_bytes()[: -path.stat().st_size // 3])
    return path


def _shortened(path: Path, length: int) -> Path:
    write_video(path, num_frames=3)
    path.write_bytes(path.read_bytes()[:length])
    return path


def _empty(path: Path) -> Path:
    path.touch()
    return path


def _without_frames(path: Path) -> Path:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.height, stream.width = HEIGHT, WIDTH
        container.start_encoding()
    return path


_BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (lambda path: path, "no such file"),
    "empty": (_empty, "0 bytes"),
    "text": (_text, "not a video"),
    "photo": (_photo, "not a video"),
    "pipe": (_pipe, "a pipe, not a file"),
    "folder": (lambda path: path.parent, "a directory, not a file"),
    "sound": (_sound, r"no video in it \(only audio\)"),
    "without frames": (_without_frames, "no video in it"),
    "without frames, avi": (lambda path: _without_frames(path.with_suffix(".avi")), "without frames"),
    "cut before its contents": (
        lambda path: _cut(path, first=False),
        "cut short or damaged mp4 file",
    ),
    "first bytes of a film": (lambda path: _shortened(path, 20), "cut short or damaged mp4 file"),
    "five bytes": (lambda path: _shortened(path, 5), "not a video"),
    "cut after its contents": (lambda path: _cut(path, first=True), "truncated"),
    "raw": (lambda path: write_video(path.with_suffix(".h264"), num_frames=3), "not a video .*; formats are mov"),
    "lossless": (lambda path: write_video(path.with_suffix(".mkv"), "ffv1", 3), "its codec is ffv1"),
}


@pytest.mark.parametrize("name", _BAD)
def test_what_is_no_good_video_is_named(tmp_path: Path, name: str) -> None:
    make, message = _BAD[name]
    path = make(tmp_path / "bad.mp4")
    with pytest.raises(DataError, match=message) as caught:
        EncodedVideo(path).frames([0])
    assert str(path) in str(caught.value)


def test_limits(videos: dict[str, tuple[Path, Pixels]], monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = videos["one keyframe.mp4"]
    monkeypatch.setattr(video_module, "MAX_FRAMES", 39)
    for each in (path, videos["h264.avi"][0]):
        with pytest.raises(DataError, match="more than 39 frames"):
            _ = EncodedVideo(each).num_frames
    monkeypatch.setattr(video_module, "MAX_PIXELS", HEIGHT * WIDTH - 1)
    with pytest.raises(DataError, match="64×48"):
        _ = EncodedVideo(path).num_frames


def test_as_a_whole_it_is_refused(videos: dict[str, tuple[Path, Pixels]]) -> None:
    with pytest.raises(DataError, match="name: clip"):
        EncodedVideo(videos["one keyframe.mp4"][0]).decode()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damage_ends_in_an_error_or_in_frames(videos: dict[str, tuple[Path, Pixels]], data: st.DataObject) -> None:
    path, _ = videos[data.draw(st.sampled_from(["many keyframes.mp4", "uneven.mkv", "mpeg4.avi", "h264.ts"]))]
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + 4] = data.draw(st.binary(min_size=4, max_size=4))
    damaged = path.with_name(f"damaged-{path.name}")
    damaged.write_bytes(content[: data.draw(st.integers(1, len(content)))])
    with suppress(DataError, IndexError):
        assert EncodedVideo(damaged).frames([0, 5]).shape[0] == 2


@pytest.mark.parametrize("name", ["mpeg4.avi", "h264.avi", "h264.ts", "mpeg2.mpg"])
def test_what_is_cut_short_has_frames_up_to_the_cut(
    videos: dict[str, tuple[Path, Pixels]], name: str, tmp_path: Path
) -> None:
    path, expected = videos[name]
    content = path.read_bytes()
    for cut in range(len(content) * 70 // 100, len(content) * 82 // 100, len(content) // 20):
        (tmp_path / name).write_bytes(content[:cut])
        video = EncodedVideo(tmp_path / name)
        assert 6 < video.num_frames < 40
        sure = video.num_frames - 4  # the last may be damaged without the decoder's notice
        differences = np.abs(video.frames(range(sure)).astype(int) - expected[:sure]).mean((1, 2, 3))
        assert differences.max() < 1


def test_whole_videos_of_uneven_times_lose_nothing(tmp_path: Path) -> None:
    for name in ("uneven.flv", "uneven.ts"):
        path = write_video(tmp_path / name, options=_SHORT, milliseconds=_UNEVEN)
        assert EncodedVideo(path).num_frames == 40


def test_damage_before_the_end_is_named_and_shortens_nothing(
    videos: dict[str, tuple[Path, Pixels]], tmp_path: Path
) -> None:
    path, expected = videos["mpeg4.avi"]
    content = bytearray(path.read_bytes())
    with av.open(str(path)) as container:
        places = [packet.pos for packet in container.demux(video=0) if packet.size]
    start = places[12] or 0
    content[start + 20 : start + 40] = b"\xff" * 20
    damaged = tmp_path / "damaged.avi"
    damaged.write_bytes(content)
    video = EncodedVideo(damaged)
    assert video.num_frames == len(expected)
    with pytest.raises(DataError, match=r"damaged\.avi: frame 1\d is damaged"):
        video.frames(range(20))
