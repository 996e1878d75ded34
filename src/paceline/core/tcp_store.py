"""The store in which processes find each other, served at one address; torch's own listens on every interface."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from paceline.core.errors import UsageError
from paceline.core.place import Place


def open_store(place: Place, timeout: timedelta) -> TCPStore:
    """The store of a run's processes: the first one serves it, unless torchrun does."""
    try:
        address = socket.getaddrinfo(place.address, place.port, type=socket.SOCK_STREAM)[0][4][0]
    except (OSError, UnicodeError) as error:
        raise UsageError(f"MASTER_ADDR={place.address}: no machine of this name is known ({error})") from error
    if place.rank or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return TCPStore(place.address, place.port, place.world, False, timeout)
    listener = _listen_for_others(place, str(address))
    return TCPStore(place.address, place.port, place.world, True, timeout, master_listen_fd=listener.detach())


def serve_store(host: str, port: int, timeout: timedelta) -> TCPStore:
    """A store that listens at this address, and nowhere else; OSError if it is taken, or not of this machine."""
    descriptor = _listen(host, port).detach()
    return TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=descriptor)


def _listen_for_others(place: Place, address: str) -> socket.socket:
    """At the address that all were told; everywhere if it is none of this machine's that the others can reach."""
    # Some machines know their own name as that of the loopback only.
    is_own_name = ipaddress.ip_address(address.partition("%")[0]).is_loopback and place.local_world < place.world
    if not is_own_name:
        try:
            return _listen(place.address, place.port)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    return socket.create_server(("", place.port))


def _listen(host: str, port: int) -> socket.socket:
    """At the first address of that name that is one of this machine's."""
    problem = OSError(errno.EADDRNOTAVAIL, host)
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            return socket.create_server((str(address[0]), port), family=family)
        except OSError as error:
            problem = error
    raise problem
