"""The rank of this process, from environment variables. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.core.errors import UsageError

HERE = "127.0.0.1"
FIRST_PORT = 20000  # below the ports that systems give out on their own
LAST_PORT = 65535
_MOST = 10**10


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
