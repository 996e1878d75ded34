"""The tutorial: every command on it runs, in order, with the edits that it tells the reader to make."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from support.forkserver import paceline

from paceline.checkpoint.reader import open_checkpoint
from paceline.cli import main

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "tutorial.md").read_text(encoding="utf-8")
SHORT = ["train.epochs=1", "train.threads=1", "data.num_workers=0", "evaluate.num_workers=0"]
SHORTER = {
    "paceline train quickstart": ["model.widths=[4]"],
    "paceline train recipe.yaml": SHORT,
    "paceline train recipe.yaml train.epochs": [*SHORT, "train.epochs=2"],
}
"""What is appended to the commands that begin like this; the longest beginning counts."""


def commands() -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", PAGE, flags=re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]


@pytest.mark.usefixtures("own_names")
def test_commands_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    (snippet,) = re.findall(r"```python\n# parts.py\n(.*?)```", PAGE, flags=re.DOTALL)
    for command in commands():
        if command.startswith("cd "):
            monkeypatch.chdir(command.removeprefix("cd "))
            continue
        if "two_layers" in command and snippet not in Path("parts.py").read_text(encoding="utf-8"):
            with Path("parts.py").open("a", encoding="utf-8") as file:
                file.write(f"\n\n{snippet}")
        monkeypatch.delitem(sys.modules, "parts", raising=False)
        begun = max((each for each in SHORTER if command.startswith(each)), key=len, default="")
        words = [*shlex.split(command)[1:], *SHORTER.get(begun, [])]
        # In a process of its own, the launcher sets signals for good.
        code = paceline(Path.cwd(), *words).returncode if "--procs" in words else main(words)
        assert code == 0, command
    assert {command.split()[1] for command in commands()} >= {
        "train", "eval", "new", "check", "data", "results", "report", "predict", "export",
    }  # fmt: skip
    assert open_checkpoint(Path("runs/flowers/checkpoints/step-00000010")).path.exists()
    assert Path("samples.png").exists()
    assert Path("report.html").exists()
    assert len(Path("predictions/predictions.csv").read_text().splitlines()) == 1 + 48
    assert Path("runs/flowers/export/model.pt2").exists()
    monkeypatch.delitem(sys.modules, "parts", raising=False)
