"""Two machines on one: network namespaces with addresses of their own and a cable between them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from launching import environment


@dataclass(frozen=True)
class Machine:
    """A namespace, in which commands see only its own address and the loopback."""

    name: str
    address: str

    def start(self, command: Sequence[str], folder: Path, log: str) -> subprocess.Popen[bytes]:
        """Start a command here; what it writes is added to a file in the folder."""
        with (folder / log).open("ab") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command],
                cwd=folder, env=environment(TMPDIR=str(folder)), stdout=output, stderr=output,
            )  # fmt: skip

    def run(self, *command: str) -> str:
        """What a command writes here."""
        return _run("ip", "netns", "exec", self.name, *command)

    def listening(self) -> dict[int, str]:
        """The ports that take connections, and the address of each."""
        found: dict[int, str] = {}
        for file in ("tcp", "tcp6"):
            table = self.run("cat", f"/proc/net/{file}").splitlines()[1:]
            places = [line.split()[1].split(":") for line in table if line.split()[3] == "0A"]
            found |= {int(port, 16): ".".join(map(str, bytes.fromhex(host)[::-1])) for host, port in places}
        return found

    def set_cable(self, state: str) -> None:
        """Plug the cable in (`up`) or out (`down`)."""
        _run("ip", "-n", self.name, "link", "set", "cable", state)


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Two machines; the test is skipped, with the reason, where they cannot be made."""
    number = os.getpid() % 60000
    network = f"10.{200 + number // 16384}.{number // 64 % 256}.{number % 64 * 4}".rsplit(".", 1)
    machines = tuple(
        Machine(f"paceline-{number}-{which}", f"{network[0]}.{int(network[1]) + which}") for which in (1, 2)
    )
    if shutil.which("ip") is None:
        pytest.skip("no `ip` command: network namespaces cannot be made")
    try:
        for machine in machines:
            _run("ip", "netns", "add", machine.name)
        first, second = machines
        ends = ["cable", "netns", first.name, "type", "veth", "peer", "name", "cable", "netns", second.name]
        _run("ip", "link", "add", *ends)
        for machine in machines:
            _run("ip", "-n", machine.name, "address", "add", f"{machine.address}/30", "dev", "cable")
            _run("ip", "-n", machine.name, "link", "set", "lo", "up")
            machine.set_cable("up")
    except subprocess.CalledProcessError as error:
        _remove(machines)
        pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
    try:
        yield first, second
    finally:
        _remove(machines)


def _remove(machines: Sequence[Machine]) -> None:
    for machine in machines:
        subprocess.run(["ip", "netns", "delete", machine.name], capture_output=True, check=False)


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout
