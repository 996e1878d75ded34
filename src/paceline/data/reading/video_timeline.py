"""Which frame of a video is which, found from its packets without decoding them.

Packets lie in a file in the order in which they are decoded; frames are numbered as they are shown. Where packets
tell the times at which they are shown, the numbers follow from those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
