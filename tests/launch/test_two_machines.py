"""A run over two machines, which may lose one and get it back: real commands, and the bits of one process alone."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import launcher, write_worker
from namespaces import Machine, two_machines
from support.waiting import TIMEOUT, is_alive, wait_until

from paceline import cli
from paceline.launch.machines import Launch
from paceline.launch.network import Endpoint

# A data set whose processes wait for a signal, or for the file `go`, when they read for the fifth time.
_DATA = """
import os, select, signal, time
from pathlib import Path
import paceline
from paceline.data.datasets.idx import fashion_small
from paceline.data.datasets.idx import MemoryImages

class Pausing(MemoryImages):
    asked = 0

    def gather(self, ids):
        self.asked += 1
        if self.asked == 5 and "RANK" in os.environ and not Path("go").exists():
            note = Path("pausing-" + os.environ["RANK"])
            note.write_text(f"{os.environ['WORLD_SIZE']} {os.getpid()}")
            note.replace("paused-" + os.environ["RANK"])
            awakened, tell = os.pipe()
            os.set_blocking(tell, False)
            signal.set_wakeup_fd(tell)
            while not Path("go").exists() and not select.select([awakened], [], [], 0.01)[0]:
                pass
        return super().gather(ids)

@paceline.register.dataset("pausing")
def pausing(split: str) -> MemoryImages:
    base = fashion_small(split)
    return Pausing(base.images[:200], {"label": base.fields["label"][:200]}, base.classes)
"""
_RECIPE = {
    "name": "far",
    "task": "classification",
    "model": {"name": "convnet", "widths": [4, 6], "dropout": 0.2},
    "data": {
        "batch_size": 16,
        "train": {"dataset": "pausing", "split": "train", "transforms": [{"name": "random_horizontal_flip"}]},
    },
    "losses": [{"name": "cross_entropy"}],
    "optimizer": {"name": "adamw", "lr": 0.01},
    "train": {"steps": 12, "micro_batch_size": 5, "reproducible": "world"},
    "checkpoint": {"every_steps": 1, "keep_last": 20},
    "logging": {"every_steps": 3, "images": False, "tensorboard": False},
}
_STEPS = 12


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as pair:
        yield pair


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "far_data.py").write_text(_DATA)
    (tmp_path / "recipe.json").write_text(json.dumps(_RECIPE))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(rendezvous: str, nodes: str) -> list[str]:
    """The command, the same on both machines."""
    words = ["train", "recipe.json", "--use", "far_data", "--out", "run", "--nodes", nodes, "--rendezvous", rendezvous]
    return [sys.executable, "-m", "paceline", *words, "--restarts", "1"]


def bits(run: Path) -> list[str]:
    """Hashes of the last checkpoint's tensors."""
    folder = run / "checkpoints" / f"step-{_STEPS:08d}"
    return [hashlib.sha256((folder / f"{name}.safetensors").read_bytes()).hexdigest() for name in ("model", "state")]


def metrics(run: Path) -> list[dict[str, object]]:
    """All that was recorded but for the clock's metrics."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in record.items() if name != "clock"} for record in records]


def test_a_lost_machine_may_come_back_and_changes_no_bit(machines: tuple[Machine, Machine], project: Path) -> None:
    command = train(f"{machines[0].address}:29402", "1:2")
    first, second = (machine.start(command, project, f"{machine.name}.log") for machine in machines)

    def paused_in_a_world_of(size: int) -> bool:
        assert first.poll() is None, _logs(project)
        notes = [path.read_text().split() for path in project.glob("paused-*")]
        return len(notes) == size and all(int(note[0]) == size for note in notes)

    wait_until(lambda: paused_in_a_world_of(2), "both machines are at work")
    # The store of the launchers, that of the processes, and each process: nowhere but where they meet.
    assert [set(machine.listening().values()) for machine in machines] == [{machine.address} for machine in machines]
    assert 29402 in machines[0].listening()
    processes = _forget(project)
    second.kill()
    second.wait()
    (project / "go").touch()
    wait_until(lambda: not any(map(is_alive, processes)), "the processes of both machines have ended")
    (project / "go").unlink()
    wait_until(lambda: paused_in_a_world_of(1), "the first machine goes on alone")
    _forget(project)

    second = machines[1].start(command, project, f"{machines[1].name}.log")
    wait_until(lambda: paused_in_a_world_of(2), "the second machine is back")
    # Neither change was counted: the only restart is still there to be used.
    os.kill(_forget(project)[0], signal.SIGKILL)
    (project / "go").touch()
    assert [process.wait(TIMEOUT) for process in (first, second)] == [0, 0], _logs(project)
    assert cli.main(["train", "recipe.json", "--use", "far_data", "--out", "alone"]) == 0
    assert bits(project / "run") == bits(project / "alone"), _logs(project)
    assert metrics(project / "run") == metrics(project / "alone")


def test_an_error_on_one_machine_ends_the_other_alike(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    body = """
    def body():
        note(start)
        wait_for_all()
        if rank == 1:
            raise DataError("cat.jpg: cannot be read")
        wait_for(lambda: list(Path().glob("paceline-*/start-*/rank-1.json")))
        raise RuntimeError("Connection closed by peer")
    """
    write_worker(tmp_path, body)
    plan = Launch(1, 2, 2, Endpoint(machines[0].address, 29401))
    going = [machine.start(launcher(plan), tmp_path, f"{machine.name}.log") for machine in machines]
    assert [process.wait(TIMEOUT) for process in going] == [3, 3], _logs(tmp_path)
    for machine in machines:
        assert (tmp_path / f"{machine.name}.log").read_text().splitlines()[1:] == ["cat.jpg: cannot be read"]


def _forget(folder: Path) -> list[int]:
    """The ids of the processes that wait, in the order of their ranks; their notes are removed."""
    notes = sorted(folder.glob("paused-*"))
    processes = [int(note.read_text().split()[1]) for note in notes]
    for note in notes:
        note.unlink()
    return processes


def _logs(folder: Path) -> str:
    return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(folder.glob("*.log")))
