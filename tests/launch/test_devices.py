"""Devices by their ids; counting them needs a driver, which most machines that test this do not have."""

from __future__ import annotations

import pytest

from paceline.core.errors import UsageError
from paceline.launch import devices
from paceline.launch.devices import (
    check_exist,
    count_devices,
    default_processes,
    map_devices,
    use_devices,
    visible_names,
)


def test_ids_count_within_what_is_visible() -> None:
    assert map_devices([0, 2], "4,5,6", 2).visible == "4,6"
    assert map_devices([0, 2], "4,5,6", 2).text == "process 0 on device 4, process 1 on device 6"
    assert map_devices([2, 0], None, 2).visible == "2,0"
    assert map_devices([1], "GPU-aa, GPU-bb", 1).visible == "GPU-bb"
    assert map_devices([0, 2], None, 1).text == "process 0 on device 0"


@pytest.mark.parametrize(
    ("named", "visible", "processes", "problem"),
    [
        ([0, 0], None, 2, "names a device twice"),
        ([0, 3], "4,5,6", 2, "no device 3: CUDA_VISIBLE_DEVICES=4,5,6 has 3 devices"),
        ([-1], None, 1, "no device -1"),
        ([0], "", 1, "has 0 devices"),
        ([0, 1], None, 3, "3 processes for 2 devices"),
    ],
)
def test_what_cannot_be_chosen(named: list[int], visible: str | None, processes: int, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        map_devices(named, visible, processes)


def test_a_list_of_devices_ends_where_it_is_wrong() -> None:
    assert visible_names("0,1,-1,2") == ["0", "1"]
    assert visible_names("") == visible_names("NoDevFiles") == []
    assert visible_names("MIG-1/2, GPU-x") == ["MIG-1/2", "GPU-x"]


def test_this_process_sees_only_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert use_devices(None, 1) is None
    assert use_devices([1], 1) == "process 0 on device 5"
    import os

    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"


@pytest.mark.parametrize("strategy", ["single", "dp"])
def test_strategies_of_one_process_need_no_other_word(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "count_devices", lambda: 4)
    assert default_processes("auto", None) == 4
    assert default_processes("auto", None, strategy) == default_processes("cuda", [0, 2], strategy) == 1


def test_one_process_on_several_devices_is_reported() -> None:
    assert map_devices([0, 2], "4,5,6", 1, "dp").text == "one process on devices 4, 6"
    assert map_devices([0, 2], "4,5,6", 1, "single").text == "process 0 on device 4"


def test_devices_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "count_devices", lambda: 0)
    check_exist(None)
    with pytest.raises(UsageError, match=r"train\.devices: there is no device 0: .* no CUDA device"):
        check_exist([0, 1])
    monkeypatch.setattr(devices, "count_devices", lambda: 2)
    check_exist([1, 0])
    with pytest.raises(UsageError, match=r"there is no device 2: this machine has 2 CUDA devices"):
        check_exist([0, 2])


def test_one_process_for_each_device_else_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_processes("cpu", [0, 1]) == 1
    assert default_processes("cuda:1", None) == 1
    assert default_processes("auto", [0, 2]) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert count_devices() == 0
    assert default_processes("auto", None) == 1
