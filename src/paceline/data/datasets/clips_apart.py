"""Videos of which each clip is a sample of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paceline.data.batch import Sample
from paceline.data.loading.source import Dataset


class ClipsApart:
    """A data set of videos as one of clips: sample k·clips + c is clip c of video k.

    A sample has the number of its video as "video", by which metrics join clips again, and that of its clip as "clip",
    by which the transform chooses frames.
    """

    reads_videos = True

    def __init__(self, videos: Dataset, clips: int) -> None:
        self.videos = videos
        self.clips = clips
        self.classes, self.channels = videos.classes, videos.channels
        self.notes: list[str] = getattr(videos, "notes", [])
        self.why_no_labels: str = getattr(videos, "why_no_labels", "")
        self._open: Callable[[int], Sample] = getattr(videos, "open", videos.read)

    def __len__(self) -> int:
        return len(self.videos) * self.clips

    def path(self, index: int) -> Path:
        """The file of the video that clip `index` is of."""
        find: Callable[[int], Path] = self.videos.path  # type: ignore[attr-defined]  # all data sets of videos have it
        return find(index // self.clips)

    def open(self, index: int) -> Sample:
        """The video, not decoded, with its number and that of the clip."""
        video, clip = divmod(index, self.clips)
        return {**self._open(video), "video": video, "clip": clip}

    def read(self, index: int) -> Sample:
        """The same: a video is decoded by the transform that chooses frames."""
        return self.open(index)


def clips_apart(videos: Dataset, first_transform: object) -> Dataset:
    """The data set as its first transform wants it: videos, or each clip of them apart."""
    clips: int = getattr(first_transform, "samples_a_video", 1)
    return ClipsApart(videos, clips) if clips > 1 else videos


def joined(dataset: Dataset) -> Dataset:
    """The data set with a sample for each video, where it has one for each clip."""
    return dataset.videos if isinstance(dataset, ClipsApart) else dataset
