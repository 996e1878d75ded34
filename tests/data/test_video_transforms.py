"""Which frames of a video become its clips."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from support.registered import arguments_of
from video_files import HEIGHT, WIDTH, Pixels, decode_all, write_video

from paceline.core.errors import ArgumentError, DataError
from paceline.data.io.video import EncodedVideo
from paceline.data.transforms.video import Clip, MultiClip, Stride, frame_numbers, require_clips

_NONE = np.empty(0)


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Pixels]:
    path = write_video(tmp_path_factory.mktemp("clips") / "video.mp4", num_frames=20)
    return path, decode_all(path)


def _seen(clip: Clip | MultiClip, video: tuple[Path, Pixels], *draws: float) -> Any:
    """Which frames of the video a transform gives, found by their pixels."""
    path, frames = video
    image = clip({"image": EncodedVideo(path), "label": 1}, np.array(draws))["image"]
    flat = image.reshape(-1, HEIGHT, WIDTH, 3)
    found = [int(np.flatnonzero((frames == each).all((1, 2, 3)))[0]) for each in flat]
    return np.array(found).reshape(image.shape[:-3]).tolist()


def test_the_place_is_drawn(video: tuple[Path, Pixels]) -> None:
    clip = Clip(num_frames=4, stride=3)
    assert _seen(clip, video, 0.0, 0.0) == [0, 3, 6, 9]
    assert _seen(clip, video, 0.0, 0.5) == [5, 8, 11, 14]
    assert _seen(clip, video, 0.0, 0.999) == [10, 13, 16, 19]


def test_the_speed_is_drawn_and_multiplies_the_stride(video: tuple[Path, Pixels]) -> None:
    clip = Clip(num_frames=4, stride=2, speed=(1.0, 2.0))
    assert _seen(clip, video, 0.0, 0.0) == [0, 2, 4, 6]
    assert _seen(clip, video, 0.5, 0.0) == [0, 3, 6, 9]
    assert _seen(clip, video, 0.75, 0.0) == [0, 3, 7, 10]


def test_the_middle_depends_on_no_draw(video: tuple[Path, Pixels]) -> None:
    clip = Clip(num_frames=4, stride=2, position="center")
    assert _seen(clip, video, 0.1, 0.9) == _seen(clip, video, 0.8, 0.2) == [7, 9, 11, 13]


def test_frames_are_spread_over_the_whole_video(video: tuple[Path, Pixels]) -> None:
    assert _seen(Clip(num_frames=4, stride="whole", position="center"), video, 0.0, 0.0) == [2, 7, 12, 17]
    assert _seen(Clip(num_frames=4, stride="whole"), video, 0.0, 0.0) == [0, 5, 10, 15]
    assert _seen(Clip(num_frames=4, stride="whole"), video, 0.0, 0.99) == [4, 9, 14, 19]


def test_short_videos(video: tuple[Path, Pixels]) -> None:
    assert _seen(Clip(num_frames=4, stride=8), video, 0.0, 0.7) == [0, 8, 16, 4]
    assert _seen(Clip(num_frames=4, stride=8, short="last"), video, 0.0, 0.7) == [0, 8, 16, 19]


def test_clips_of_evaluation_go_from_the_beginning_to_the_end(video: tuple[Path, Pixels]) -> None:
    views = MultiClip(num_clips=3, num_frames=4, stride=2)({"image": EncodedVideo(video[0]), "label": 1}, _NONE)
    assert views["image"].shape == (3, 4, HEIGHT, WIDTH, 3)
    assert views["label"] == 1
    assert _seen(MultiClip(num_clips=3, num_frames=4, stride=2), video) == [
        [0, 2, 4, 6],
        [7, 9, 11, 13],
        [13, 15, 17, 19],
    ]
    assert _seen(MultiClip(num_clips=1, num_frames=4, stride=2), video) == [[7, 9, 11, 13]]
    assert _seen(MultiClip(num_clips=2, num_frames=4, stride="whole"), video) == [[1, 6, 11, 16], [3, 8, 13, 18]]


@given(
    num_frames=st.integers(1, 300),
    frames=st.integers(1, 40),
    stride=st.one_of(st.integers(1, 20), st.just("whole")),
    place=st.floats(0, 1),
    speed=st.floats(0.25, 4),
)
def test_every_choice_lies_in_the_video(
    num_frames: int, frames: int, stride: Stride, place: float, speed: float
) -> None:
    for short in ("loop", "last"):
        numbers = frame_numbers(num_frames, frames, stride, place, short, speed)
        assert len(numbers) == frames
        assert numbers.min() >= 0
        assert numbers.max() < num_frames
    assert bool(np.all(np.diff(numbers) >= 0))


def test_every_place_is_drawn_equally_often() -> None:
    drawn = [int(frame_numbers(10, 3, 2, (draw + 0.5) / 600, "loop")[0]) for draw in range(600)]
    assert np.bincount(drawn).tolist() == [100] * 6


class _Videos:
    reads_videos = True


def test_a_data_set_of_videos_needs_clips_first() -> None:
    require_clips(_Videos(), [Clip(8)])
    require_clips(_Videos(), [MultiClip(2, 8), object()])
    require_clips(object(), [])
    for transforms in ([], [object(), Clip(8)]):
        with pytest.raises(ValueError, match=r"add \{name: clip"):
            require_clips(_Videos(), transforms)


def test_what_is_no_video_is_refused() -> None:
    with pytest.raises(DataError, match=r"found pixels \[2, 2, 3\]"):
        Clip(8)({"image": np.zeros((2, 2, 3), np.uint8)}, np.zeros(2))


def test_arguments() -> None:
    assert arguments_of("transform", "clip")(num_frames=8, stride="whole").speed == [1.0, 1.0]
    with pytest.raises(ValidationError, match="lower bound"):
        arguments_of("transform", "clip")(num_frames=8, speed=[2.0, 1.0])
    with pytest.raises(ArgumentError, match=r"speed: .* where stride is whole"):
        Clip(8, stride="whole", speed=[1.0, 2.0])


def test_frames_that_are_decoded_already_are_chosen_alike(video: tuple[Path, Pixels]) -> None:
    """As a data set of a user's gives them."""
    path, frames = video
    for clip, draws in ((Clip(num_frames=4, stride=3), [0.0, 0.5]), (MultiClip(num_clips=2, num_frames=4), [])):
        read, given = ({"image": image} for image in (EncodedVideo(path), frames))
        chosen = [clip(sample, np.array(draws))["image"] for sample in (read, given)]
        assert np.array_equal(*chosen)
    with pytest.raises(DataError, match=r"pixels \[4, 4, 3\]"):
        Clip(num_frames=1)({"image": np.zeros((4, 4, 3), np.uint8)}, np.zeros(2))
