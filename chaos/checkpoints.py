"""Checkpoints under damage, and saves that end at any operation on the file system."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from chaos.row import Row
from paceline.checkpoint.store import Store

_SCRIPTS = Path(__file__).resolve().parent.parent / "tests" / "checkpoint"
_WAYS = [f"{way},{how}" for way in ("plain", "background", "shared") for how in ("killed", "torn", "full")]


def run(quick: bool) -> list[Row]:
    """Both kinds of fault."""
    return [_damaged(300 if quick else 10_000), *_interrupted(_WAYS[:1] if quick else _WAYS)]


def _damaged(number: int) -> Row:
    with tempfile.TemporaryDirectory() as name:
        generator = torch.Generator().manual_seed(0)
        model = {"weight": torch.randn(40, 25, generator=generator)}
        state = {"step": 7, "momentum": torch.randn(40, 25, generator=generator)}
        saved = Store(Path(name) / "checkpoints").save(7, model, state, {"top1": 0.5})
        found = _python("damage.py", str(saved.path), str(number), "0").split()
    return Row(
        "one byte of a checkpoint changed, or a file of it cut short",
        f"{number:,} of {number:,} noticed",
        f"{int(found[0]):,} of {number:,} noticed",
        int(found[0]) == number,
    )


def _interrupted(ways: list[str]) -> list[Row]:
    rows = []
    for way in ways:
        saving, how = way.split(",")
        with tempfile.TemporaryDirectory() as name:
            number = _python("interrupted.py", name, way).split()[-1]
        fault = {"killed": "killed after", "torn": "killed with half written at", "full": "no space from"}[how]
        goal = "the newest committed checkpoint loads, the next save succeeds"
        rows.append(Row(f"{saving} save, {fault} each operation", goal, f"{number} of {number} operations", True))
    return rows


def _python(script: str, *arguments: str) -> str:
    """What a script says; one that found a fault ends the trial."""
    command = [sys.executable, str(_SCRIPTS / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
