"""What somebody else on the network finds of a run: nothing of one on one machine, and nothing that runs their code.

Machines are network namespaces with a cable between them, so this needs the right to make them.
"""

from __future__ import annotations

import importlib
import json
import pickle
import sys
import tempfile
import time
from base64 import b64encode
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from chaos.row import Row
from chaos.training import RECIPE

_TESTS = Path(__file__).resolve().parent.parent / "tests"
_TIMEOUT = 120.0
_KNOCK = """
import socket, sys
for port in sys.argv[2:]:
    try:
        socket.create_connection((sys.argv[1], int(port)), 5).close()
        print(port)
    except OSError:
        pass
"""
_RUNS: dict[str, tuple[int, list[str]]] = {
    "ddp": (2, []),
    "world": (2, ["train.reproducible=world"]),
    "fsdp": (2, ["train.strategy=fsdp"]),
    "zero": (2, ["train.strategy=zero"]),
    "ddp on 3": (3, []),
}
"""How many processes, and what the recipe says."""


class _Planted:
    """What makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self.path), "w")


def _encoded(path: Path) -> str:
    return b64encode(pickle.dumps(_Planted(path))).decode()


PLANTS: dict[str, Callable[[Path], str]] = {
    "as torch writes it": _encoded,
    "not encoded": lambda path: pickle.dumps(_Planted(path), 0).decode("latin-1"),
    "within JSON": lambda path: b64encode(f'{{"round": "{_encoded(path)}"}}'.encode()).decode(),
    "after JSON": lambda path: b64encode(b"{}" + pickle.dumps(_Planted(path))).decode(),
}
"""Values that somebody who reaches the store of a rendezvous puts in the place of the membership."""


def run(quick: bool) -> list[Row]:
    """Knocks at every port of runs on one machine, and values in the store of several."""
    sys.path[:0] = [str(_TESTS), str(_TESTS / "launch")]
    namespaces: Any = importlib.import_module("namespaces")
    skipped: Any = importlib.import_module("_pytest.outcomes").Skipped
    try:
        with namespaces.two_machines() as machines, tempfile.TemporaryDirectory() as name:
            chosen = list(_RUNS)[: 1 if quick else None]
            found = [_knock(machines, Path(name), kind) for kind in chosen]
            planted = [_plant(Path(name), kind) for kind in list(PLANTS)[: 1 if quick else None]]
    except skipped as reason:
        print(f"network: left out: {reason}")
        goal = "not tried: network namespaces cannot be made here"
        return [Row("connections from another machine to a run on one machine", "none", goal, True)]
    print("\n".join(problem for problem in [*(each[1] for each in found), *planted] if problem))
    ports = sum(number for number, _ in found)
    closed = sum(number for number, problem in found if problem is None)
    return [
        Row(
            "connections from another machine to every port of a run on one machine, under every strategy",
            "all refused; every port is bound to the loopback",
            f"{closed}/{ports} ports of {len(found)} runs refused",
            closed == ports > 0,
        ),
        Row(
            "a pickle in the store of a rendezvous, in the place of the membership",
            "never loaded, nothing executed; the run ends in a line",
            f"{planted.count(None)}/{len(planted)}",
            planted.count(None) == len(planted),
        ),
    ]


def _knock(machines: Any, folder: Path, kind: str) -> tuple[int, str | None]:
    """How many ports a run has open, and what is wrong with them, if anything."""
    procs, words = _RUNS[kind]
    out = folder / kind.replace(" ", "-")
    out.mkdir()
    (out / "recipe.json").write_text(json.dumps(RECIPE))
    endless = ["train.steps=100000", "evaluate.every_steps=100000", "logging.every_steps=1"]
    command = ["train", "recipe.json", "--out", "run", "--procs", str(procs), *words, *endless]
    going = machines[0].start([sys.executable, "-m", "paceline", *command], out, "log")
    try:
        _wait(lambda: (out / "run/metrics.jsonl").exists() or going.poll() is not None)
        ports = machines[0].listening()
        answered = machines[1].run(sys.executable, "-c", _KNOCK, machines[0].address, *map(str, ports))
    finally:
        going.terminate()
        code = going.wait(_TIMEOUT)
    if code != 75 or not ports:
        return len(ports), f"{kind}: ended with {code}: {(out / 'log').read_text()[-500:]}"
    outside = sorted(set(ports.values()) - {"127.0.0.1"})
    return len(ports), f"{kind}: {answered.split()} answered, bound to {outside}" if answered or outside else None


def _plant(folder: Path, kind: str) -> str | None:
    """What came of a value in the store of a launcher that waits for another machine."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from paceline.launch.machines import Launch
    from paceline.launch.network import Endpoint, can_connect

    launching: Any = importlib.import_module("launching")
    out = folder / f"planted-{list(PLANTS).index(kind)}"
    out.mkdir()
    endpoint = Endpoint("127.0.0.1", launching.free_port())
    plan = Launch(1, 2, 2, endpoint, rendezvous_timeout=60)
    with launching.begin(out, "def body(): return 0", plan) as going:
        _wait(lambda: can_connect(endpoint, 1.0))
        store = TCPStore(endpoint.host, endpoint.port, None, False, timedelta(seconds=30))
        store.set(f"paceline/machine/{store.add('paceline/machines', 1)}", PLANTS[kind](out / "executed"))
        done = going.wait()
    if (out / "executed").exists():
        return f"{kind}: executed"
    is_refused = done.returncode == 1 and "Traceback" not in done.stderr
    return None if is_refused else f"{kind}: ended with {done.returncode}: {done.stderr[-500:]}"


def _wait(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _TIMEOUT
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.05)
