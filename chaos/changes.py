"""2, then 1, then 3 processes, each group killed at a random instant: bit-identical, and every sample once an epoch."""

from __future__ import annotations

import json
import random
import signal
import tempfile
import time
from collections import Counter
from itertools import groupby
from pathlib import Path

from chaos.row import Row
from chaos.training import STEPS, Command, difference, send, undisturbed

_WORLD = ("train.reproducible=world", "train.micro_batch_size=16")
_NOTING = '''
import json, os
from paceline import register
from paceline.losses.classification import CrossEntropy


@register.loss("noting")
class Noting(CrossEntropy):
    """Cross entropy that writes down which samples it saw in passes that learn."""

    def __call__(self, outputs, batch):
        if outputs.requires_grad:
            with open(f"ids-{os.environ.get('RANK', 0)}-{os.getpid()}.jsonl", "a") as file:
                file.write(json.dumps(batch.ids.tolist()) + "\\n")
        return super().__call__(outputs, batch)
'''


def run(quick: bool) -> list[Row]:
    """The bits with `reproducible: world`, and the samples that were learned from."""
    number = 1 if quick else 5
    generator = random.Random(19)
    good, problems, seen = 0, [], ""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = undisturbed(folder, 1, *_WORLD)
        for attempt in range(number):
            problem = _change(folder, f"changed-{attempt}", generator, whole)
            good += problem is None
            problems += [f"changed-{attempt}: {problem}"] if problem else []
        wrong, seen = _samples(folder / "samples")
    print("\n".join(problems))
    return [
        Row(
            "2 → 1 → 3 processes, all killed at random instants in between, `reproducible: world`",
            "bit-identical to one process that was not disturbed",
            f"{good}/{number}",
            good == number,
        ),
        Row("2 → 1 → 3 processes, stopped in between", "each sample once an epoch", seen, not wrong),
    ]


def _change(folder: Path, out: str, generator: random.Random, whole: dict[str, str]) -> str | None:
    for procs, until in ((2, 0.35), (1, 0.7)):
        command = Command(folder, out, procs, *_WORLD)
        wanted = int((until - generator.uniform(0.0, 0.3)) * STEPS)
        command.wait_until(lambda command=command, wanted=wanted: command.steps_done() >= wanted)  # type: ignore[misc]
        time.sleep(generator.uniform(0.0, 0.2))
        for pid in [command.process.pid, *command.ranks().values()]:
            send(pid, signal.SIGKILL)
        command.wait()
    last = Command(folder, out, 3, *_WORLD)
    code = last.wait()
    return f"ended with {code}: {last.output()[-500:]}" if code else difference(whole, last)


def _samples(folder: Path) -> tuple[bool, str]:
    """Two epochs on 2, 1 and 3 processes; stopped on request, so that no update is done twice.

    A run this short is not compared with one process, and a replica of three begins with passes that count nothing:
    these see the samples of the first step, which then come again, so what follows itself is left out.
    """
    folder.mkdir()
    (folder / "noting.py").write_text(_NOTING)
    words = ("losses=[{name: noting}]", "train.steps=96", "data.batch_size=125", "--use", "noting")
    for procs, wanted in ((2, 25), (1, 60), (3, None)):
        command = Command(folder, "run", procs, *words)
        if wanted is not None:
            command.wait_until(lambda command=command, wanted=wanted: command.steps_done() >= wanted)  # type: ignore[misc]
            send(command.process.pid, signal.SIGTERM)
        code = command.wait()
        if code not in (0, 75):
            return True, f"ended with {code}: {command.output()[-300:]}"
    lines = [line for path in folder.glob("ids-*.jsonl") for line, _ in groupby(path.read_text().splitlines())]
    times = Counter(sample for line in lines for sample in json.loads(line))
    wrong = [sample for sample in range(6000) if times[sample] != 2]
    return bool(wrong), f"{6000 - len(wrong):,} of 6,000 samples twice in two epochs, no other"
