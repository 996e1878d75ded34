"""Environment variables: the rank of this process, and what it sets for torch and its children. Needs no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from paceline.core.errors import UsageError

HERE = "127.0.0.1"
FIRST_PORT = 20000  # below the ports that systems give out on their own
LAST_PORT = 65535
_MOST = 10**10
_before: dict[str, str | None] = {}
_is_inside: list[bool] = []


@dataclass(frozen=True)
class Place:
    """One process among `world`, `local_world` of them on this machine, who meet at `address`:`port`."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    address: str = HERE
    port: int = FIRST_PORT

    def variables(self) -> dict[str, str]:
        """The names under which torch looks for this."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


class Numbers:
    """Environment variables read as whole numbers; what cannot be one, or is out of range, is a UsageError."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.text = variables

    def has(self, *names: str) -> bool:
        """Whether all of them are set to something."""
        return all(self.text.get(name) for name in names)

    def get(self, name: str, default: int, low: int = 0, high: int = _MOST) -> int:
        """The number, which must be from `low` to `high`; the default if the variable is not set."""
        text = self.text.get(name)
        if not text:
            return default
        if not re.fullmatch(r"[0-9]{1,10}", text) or not low <= int(text) <= high:
            limits = f"from {low} to {high}" if high < _MOST else f"from {low} up"
            raise UsageError(
                f"the environment variable {name}: expected a whole number {limits}, got {text!r};"
                " if no launcher has set it, unset it"
            )
        return int(text)


def read_place(variables: Mapping[str, str]) -> Place | None:
    """The place by the names that torch uses (torchrun, `torch.distributed.launch`, our launcher); None without one."""
    found = Numbers(variables)
    if not found.has("RANK", "WORLD_SIZE"):
        return None
    world = found.get("WORLD_SIZE", 1, low=1)
    rank = found.get("RANK", 0, high=world - 1)
    if world > 1 and not found.has("MASTER_ADDR", "MASTER_PORT"):
        raise UsageError(
            f"RANK and WORLD_SIZE={world} are set, MASTER_ADDR and MASTER_PORT are not: "
            "start with --procs, or set all four"
        )
    local_world = found.get("LOCAL_WORLD_SIZE", world, low=1, high=world)
    local_rank = found.get("LOCAL_RANK", rank % local_world, high=local_world - 1)
    port = found.get("MASTER_PORT", FIRST_PORT, low=1, high=LAST_PORT)
    return Place(rank, world, local_rank, local_world, variables.get("MASTER_ADDR") or HERE, port)


def set_variables(variables: Mapping[str, str]) -> None:
    """Set environment variables until the outermost `restored_variables` ends."""
    for name, value in variables.items():
        _before.setdefault(name, os.environ.get(name))
        os.environ[name] = value


def set_missing_variables(variables: Mapping[str, str]) -> None:
    """The same for those that are not set yet."""
    set_variables({name: value for name, value in variables.items() if name not in os.environ})


@contextmanager
def restored_variables() -> Iterator[None]:
    """Put back what `set_variables` changes inside: a Python program that runs a command keeps its environment."""
    if _is_inside:
        yield
        return
    outside = dict(_before)  # set by a run that was built in this program, and still in use
    _before.clear()
    _is_inside.append(True)
    try:
        yield
    finally:
        for name, value in _before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _before.clear()
        _before.update(outside)
        _is_inside.clear()
