"""Machines that meet in one store: who takes part in a start, and what the others learn of those who leave."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from support.waiting import wait_until

from paceline.core.errors import DataError, PacelineError
from paceline.launch import machines as module
from paceline.launch.failure import ExitRecord
from paceline.launch.machines import Change, Launch, Machines, MemoryStore, Start
from paceline.launch.network import Endpoint


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("_LAST_CALL", 0.3), ("_HEARTBEAT", 0.02), ("_LOST", 0.4), ("_LOOK", 0.01), ("_POLL", 0.005)):
        monkeypatch.setattr(module, f"{name}_SECONDS", seconds)


class Group:
    """Machines in one memory, which begin together."""

    def __init__(self, least: int, most: int, timeout: float = 20.0) -> None:
        self._store, self._nodes, self._timeout = MemoryStore(), (least, most), timeout

    def machine(self, processes: int = 1, leads: bool = False) -> Machines:
        plan = Launch(processes, *self._nodes, Endpoint("127.0.0.1", 29400), self._timeout)
        return Machines(plan, self._store, leads)


def begin(*machines: Machines) -> list[Start]:
    """What each is told, in the order of the machines."""
    starts: dict[int, Start] = {}

    def one(number: int) -> None:
        starts[number] = machines[number].begin()

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(machines))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [starts[number] for number in range(len(machines))]


def silence(machine: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """No heartbeat of this one is seen any more."""
    add: Callable[[str, int], int] = machine._store.add
    mine = module._BEATS.format(machine._name)
    monkeypatch.setattr(machine._store, "add", lambda key, number: add(key, 0 if key == mine else number))


def test_one_machine_begins_at_once_and_again() -> None:
    alone = Machines(Launch(3), MemoryStore())
    first, second = alone.begin(), alone.begin()
    assert [(each.number, each.num_machines, each.first_rank, each.world) for each in (first, second)] == [
        (1, 1, 0, 3),
        (2, 1, 0, 3),
    ]
    assert (first.address, alone.change(), alone.peer_failure()) == ("127.0.0.1", None, None)


def test_ranks_follow_the_number_of_processes_and_the_leader_comes_first() -> None:
    group = Group(2, 2)
    other, leader = group.machine(processes=3), group.machine(processes=2, leads=True)
    theirs, ours = begin(other, leader)
    assert (ours.first_rank, theirs.first_rank, ours.world, theirs.world) == (0, 2, 5, 5)
    assert (ours.port, ours.number) == (theirs.port, theirs.number)
    assert leader.change() is other.change() is None


def test_a_machine_that_comes_later_joins_and_one_too_many_does_not() -> None:
    group = Group(1, 2)
    leader = group.machine(leads=True)
    assert leader.begin().num_machines == 1
    second = group.machine()
    waiting = threading.Thread(target=second.begin)
    waiting.start()
    wait_until(lambda: leader.change() is Change.JOINING, "the leader sees it")
    assert leader.begin().num_machines == 2
    waiting.join()
    third = group.machine()
    ended: list[PacelineError] = []

    def begin_in_vain() -> None:
        try:
            third.begin()
        except PacelineError as error:
            ended.append(error)

    waiting = threading.Thread(target=begin_in_vain)
    waiting.start()
    waiting.join(0.3)
    assert leader.change() is None
    leader.finish(0)
    waiting.join()
    assert len(ended) == 1


def test_a_silent_machine_is_lost_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(2, 3)
    leader, second, third = group.machine(leads=True), group.machine(), group.machine()
    assert {start.num_machines for start in begin(leader, second, third)} == {3}
    silence(third, monkeypatch)
    wait_until(lambda: leader.change() is second.change() is Change.LOST, "both see it")
    assert [(start.number, start.num_machines) for start in begin(leader, second)] == [(2, 2)] * 2


def test_who_begins_again_is_waited_for_and_ends_the_processes_of_the_others() -> None:
    group = Group(1, 2)
    leader, other = group.machine(leads=True), group.machine()
    begin(leader, other)
    again = threading.Thread(target=other.begin)
    again.start()
    wait_until(lambda: leader.change() is Change.LOST, "the leader sees it")
    assert (leader.begin().num_machines, leader.change()) == (2, None)
    again.join()


def test_an_error_is_shared_and_ends_the_run_of_all() -> None:
    group = Group(2, 2)
    leader, other = group.machine(leads=True), group.machine()
    begin(leader, other)
    record = ExitRecord(1, DataError.exit_code, "no such folder", True, 1.0)
    other.share_failure(record)
    assert (leader.change(), leader.peer_failure()) == (Change.LOST, record)
    other.finish(0, is_done=False)
    with pytest.raises(PacelineError, match="no such folder") as caught:
        leader.begin()
    assert caught.value.exit_code == DataError.exit_code


def test_who_gives_up_ends_the_others_who_then_need_not_be_waited_for() -> None:
    group = Group(2, 2)
    leader, other = group.machine(leads=True), group.machine()
    begin(leader, other)
    leader.finish(0, is_done=False)
    assert other.change() is Change.LOST
    with pytest.raises(PacelineError, match="has ended"):
        other.begin()
    assert leader._num_finished() == 2


def test_who_is_done_is_not_lost_and_nobody_begins_after_the_end() -> None:
    group = Group(2, 2)
    leader, other = group.machine(leads=True), group.machine()
    begin(leader, other)
    other.finish(0)
    assert leader.change() is None
    leader.finish(10)
    with pytest.raises(PacelineError, match="has ended"):
        group.machine().begin()


def test_too_few_machines_are_given_up() -> None:
    with pytest.raises(PacelineError, match="fewer than 2 machines joined"):
        Group(2, 2, timeout=0.2).machine(leads=True).begin()
