"""Addresses and interfaces of this machine, as seen from another. Needs no torch."""

from __future__ import annotations

import ipaddress
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from paceline.core.errors import UsageError
from paceline.core.place import HERE, set_missing_variables

_GET_ADDRESS = 0x8915  # SIOCGIFADDR of <linux/sockios.h>


@dataclass(frozen=True)
class Endpoint:
    """A machine and a port on it."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """From `HOST:PORT`; an IPv6 address stands in brackets."""
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UsageError(f"--rendezvous: expected HOST:PORT with a port from 1 to 65535, got {text!r}")
        return cls(host.strip("[]"), int(port))


def is_loopback(host: str) -> bool:
    """Whether the host is a loopback address or localhost; nothing is looked up."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def can_connect(endpoint: Endpoint, timeout: float) -> bool:
    """Whether a server listens at the endpoint."""
    try:
        socket.create_connection((endpoint.host, endpoint.port), timeout).close()
    except OSError:
        return False
    return True


def free_port(address: str) -> int:
    """A port of this machine's address that nobody listens on."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as trial:
        return int(trial.getsockname()[1])


def watch(endpoint: Endpoint, seconds: float, on_loss: Callable[[], None]) -> None:
    """Call `on_loss` from a thread once the endpoint was unreachable for so many seconds."""

    def look() -> None:
        heard = time.monotonic()
        while True:
            # Tried once more before giving up: this machine may have slept meanwhile.
            if can_connect(endpoint, timeout=min(5.0, seconds)):
                heard = time.monotonic()
            elif time.monotonic() - heard >= seconds:
                break
            time.sleep(min(5.0, seconds / 4))
        on_loss()

    threading.Thread(target=look, name="rendezvous-watch", daemon=True).start()


def address_towards(endpoint: Endpoint) -> str:
    """The address of this machine on the route to the endpoint; nothing is sent."""
    for family, _, _, _, address in _resolve(endpoint):
        with closing(socket.socket(family, socket.SOCK_DGRAM)) as trial:
            try:
                trial.connect(address)
            except OSError:
                continue
            return str(trial.getsockname()[0])
    return socket.gethostname()


def use_interface_of(address: str) -> None:
    """Make this process and its children use the network interface of this address, unless the user has set one.

    By default gloo uses the interface of the host name, which others may not, or should not, reach. NCCL finds routes
    between machines itself; on one machine it is bound to loopback too.
    """
    interface = interface_of(HERE if is_loopback(address) else address)
    if interface is None:
        return
    names = ("GLOO_SOCKET_IFNAME", *(("NCCL_SOCKET_IFNAME",) if is_loopback(address) else ()))
    set_missing_variables(dict.fromkeys(names, interface))


def interface_of(address: str) -> str | None:
    """The name of the network interface that has this IPv4 address; None if it cannot be determined."""
    try:
        import fcntl

        names = [name for _, name in socket.if_nameindex()]
    except (ImportError, OSError):
        return None
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as any_socket:
        for name in names:
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(any_socket.fileno(), _GET_ADDRESS, request)
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def _resolve(endpoint: Endpoint) -> list[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int]]]:
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"--rendezvous {endpoint}: unknown host ({error.strerror})") from error
    return found  # type: ignore[return-value]
