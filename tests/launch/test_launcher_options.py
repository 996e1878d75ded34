"""From the options of a command to a launch."""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import Any

import pytest
from launching import environment
from support.waiting import TIMEOUT

from paceline import __version__
from paceline.core.errors import UsageError
from paceline.launch.launcher import read_plan
from paceline.launch.machines import Launch
from paceline.launch.network import Endpoint, address_towards, can_connect, interface_of, is_loopback


def options(**given: Any) -> argparse.Namespace:
    default = {"procs": None, "nodes": None, "rendezvous": None, "rendezvous_timeout": 60.0, "restarts": 3}
    return argparse.Namespace(**(default | given))


def test_plans() -> None:
    assert read_plan(options(), 1) == Launch(1)
    assert read_plan(options(), 4) == Launch(4)
    assert read_plan(options(procs=2, restarts=0), 4) == Launch(2, restarts=0)
    endpoint = Endpoint("host", 29400)
    assert read_plan(options(nodes="2", rendezvous="host:29400"), 1) == Launch(1, 2, 2, endpoint)
    assert read_plan(options(nodes="1:3", rendezvous="host:29400", rendezvous_timeout=5), 1) == Launch(
        1, 1, 3, endpoint, 5
    )


_SHARE = """
import argparse, sys
from paceline.launch import devices
devices.count_devices = lambda: 2
from paceline.launch.launcher import launch_if_needed
options = argparse.Namespace(arguments=["--version"], procs=PROCS, nodes=None, rendezvous=None, restarts=0)

code = launch_if_needed(options, "cuda", [1])
print("answer", code, "torch" in sys.modules, getattr(options, "device_notes", "none"))
"""


@pytest.mark.parametrize(
    ("processes", "variables", "answer"),
    [
        (2, {}, f"paceline {__version__}\nanswer 0 False none\n"),
        (1, {}, "answer None False ['process 0 on device 5']\n"),
        (2, {"RANK": "0", "WORLD_SIZE": "1"}, "answer None False ['process 0 on device 5']\n"),
    ],
)
def test_work_here_or_start_processes_that_do(processes: int, variables: dict[str, str], answer: str) -> None:
    code = _SHARE.replace("PROCS", str(processes))
    given = environment(CUDA_VISIBLE_DEVICES="4,5", **variables)
    done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, timeout=TIMEOUT)
    assert (done.stdout, done.stderr) == (answer, "")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"procs": 0}, r"--procs: expected a number from 1 to \d+ .* got 0"),
        ({"procs": 10**6}, "--procs: .* got 1000000"),
        ({"restarts": -1}, "--restarts"),
        ({"nodes": "2"}, "--nodes and --rendezvous"),
        ({"rendezvous": "host:1"}, "--nodes and --rendezvous"),
        ({"nodes": "2:1", "rendezvous": "host:1"}, "--nodes: expected"),
        ({"nodes": "0", "rendezvous": "host:1"}, "--nodes: expected"),
        ({"nodes": "two", "rendezvous": "host:1"}, "--nodes: expected"),
        ({"nodes": "2", "rendezvous": "host"}, "HOST:PORT"),
        ({"nodes": "2", "rendezvous": "host:99999"}, "HOST:PORT"),
        ({"nodes": "2", "rendezvous": "host:1", "rendezvous_timeout": 0.0}, "--rendezvous-timeout"),
    ],
)
def test_wrong_options(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        read_plan(options(**given), 1)


def test_addresses_of_this_machine() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "127.0.1.1", "::1", "localhost")] == [True] * 4
    assert not any(is_loopback(host) for host in ("192.0.2.1", "host", "127.host"))
    assert address_towards(Endpoint("127.0.0.1", 1)) == "127.0.0.1"
    assert interface_of("127.0.0.1") in ("lo", "lo0", None)
    assert interface_of("192.0.2.1") is None
    assert not can_connect(Endpoint("127.0.0.1", 1), timeout=1.0)


def test_a_name_that_other_machines_cannot_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.launch import machines

    monkeypatch.setattr(machines, "address_towards", lambda endpoint: "127.0.1.1")
    with pytest.raises(UsageError, match=r"--rendezvous gpu07:29400: .* 127\.0\.1\.1"):
        machines.join_machines(Launch(1, 1, 2, Endpoint("gpu07", 29400), rendezvous_timeout=1.0))


def test_endpoints_in_words() -> None:
    assert str(Endpoint.parse("host:29400")) == "host:29400"
    assert Endpoint.parse("[::1]:29400") == Endpoint("::1", 29400)
    assert str(Endpoint.parse("[::1]:29400")) == "[::1]:29400"
