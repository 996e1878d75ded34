"""Checkpoint folders whose manifest, or what it lists, is not what it should be."""

from __future__ import annotations

import hashlib
import json
import os
from functools import partial
from pathlib import Path

from chaos.hostile_files import checkpoint_contents
from chaos.hostile_files.case import Cases
from chaos.hostile_files.commands import evaluate_checkpoint

case = Cases()


@case("a manifest that names files elsewhere", 4)
def _() -> list[str]:
    command = evaluate_checkpoint()
    files = {"../../../../etc/passwd": {"size": 1, "sha256": "0" * 64}}
    Path("checkpoint/manifest.json").write_text(json.dumps({"format": 1, "step": 1, "files": files, "metrics": {}}))
    return command


@case("a manifest a hundred thousand deep", 4)
def _() -> list[str]:
    command = evaluate_checkpoint()
    Path("checkpoint/manifest.json").write_text("[" * 100_000)
    return command


@case("a pipe as a manifest", 4)
def _() -> list[str]:
    command = evaluate_checkpoint()
    os.mkfifo("checkpoint/manifest.json")
    return command


@case("a pipe as a checkpoint's empty file", 4)
def _() -> list[str]:
    from paceline.checkpoint.files import FORMAT, dump_checksummed

    command = evaluate_checkpoint()
    names = ("model.safetensors", "state.safetensors", "state.json")
    files = {name: {"size": 0, "sha256": hashlib.sha256().hexdigest()} for name in names}
    manifest = {"format": FORMAT, "step": 1, "metrics": {}, "files": files}
    Path("checkpoint/manifest.json").write_bytes(dump_checksummed(manifest))
    for name in names:
        os.mkfifo(f"checkpoint/{name}")
    return command


@case("a manifest of a gigabyte", 4)
def _() -> list[str]:
    command = evaluate_checkpoint()
    Path("checkpoint/manifest.json").touch()
    os.truncate("checkpoint/manifest.json", 1 << 30)
    return command


def _spoiled(world: int, spoil: checkpoint_contents.Spoil) -> list[str]:
    command = evaluate_checkpoint()
    Path("checkpoint").rmdir()
    spoil(checkpoint_contents.save_sound(Path("saved"), 2, world).rename("checkpoint"))
    return command


for _world, _spoils in ((1, checkpoint_contents.ONE_PROCESS), (2, checkpoint_contents.TWO_PROCESSES)):
    for _name, _spoil in _spoils.items():
        case(f"a checkpoint with {_name}", 4)(partial(_spoiled, _world, _spoil))
