"""`paceline new`: create a project with a model, a data set, a loss and a metric to edit."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from string import Template

from paceline.commands.sample import create_folder, write_samples

_TEMPLATES = Path(__file__).parent.parent / "templates"
_NUM_SAMPLES = 48
_ONLY = re.compile(r" *#: ([\w ]+)$")  # behind a line that is for these tasks alone


def main(options: argparse.Namespace) -> int:
    """Create the project completely or not at all, and print what to do next."""
    folder, task = options.folder, options.task
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", folder.absolute().name).strip("._-")[:100] or "project"
    create_folder(folder, lambda new: _write(new, task, name))
    print(f"{folder}: a {task} project that trains as it is. Edit what is marked with ← in parts.py. Next:")
    for command in (shlex.join(["cd", str(folder)]), "paceline check recipe.yaml", "paceline train recipe.yaml"):
        print(f"  {command}")
    return 0


def _write(folder: Path, task: str, name: str) -> None:
    for file in ("README.md", "recipe.yaml", "finetune.yaml", "test_parts.py"):
        text = (_TEMPLATES / file).read_text(encoding="utf-8")
        if not file.endswith(".py"):
            text = Template(text).substitute(name=name, task=task)
        (folder / file).write_text(_lines_of(task, text), encoding="utf-8")
    (folder / "parts.py").write_text((_TEMPLATES / f"{task}.py").read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "data").mkdir()
    write_samples("classification" if task == "masked_autoencoder" else task, folder / "data", _NUM_SAMPLES, seed=0)


def _lines_of(task: str, text: str) -> str:
    """The text without the lines that are for other tasks alone."""
    lines = [(_ONLY.sub("", line), _ONLY.search(line)) for line in text.splitlines()]
    return "".join(f"{line}\n" for line, only in lines if only is None or task in only[1].split())
