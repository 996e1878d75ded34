"""`paceline new`: create a project with a model, a data set, a loss and a metric to edit."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from string import Template

from paceline.commands.sample import TASKS, create_folder, write_samples

_TEMPLATES = Path(__file__).parent.parent / "templates"
_NUM_SAMPLES = 48
_ONLY = re.compile(r" *#: (not )?([\w ]+)$")  # behind a line, or before lines, for these tasks alone


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new or empty folder")
    parser.add_argument(
        "--task",
        choices=(*TASKS, "masked_autoencoder"),
        default="classification",
        help="the task (default: classification)",
    )


def main(options: argparse.Namespace) -> int:
    """Create the project completely or not at all, and print what to do next."""
    folder, task = options.folder, options.task
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", folder.absolute().name).strip("._-")[:100] or "project"
    create_folder(folder, lambda new: _write(new, task, name))
    article = "an" if task[0] in "aeiou" else "a"
    about = f"{article} {task.replace('_', ' ')} project that trains as it is"
    print(f"{folder}: {about}. Edit what is marked with ← in parts.py. Next:")
    for command in (shlex.join(["cd", str(folder)]), "paceline check recipe.yaml", "paceline train recipe.yaml"):
        print(f"  {command}")
    return 0


def _write(folder: Path, task: str, name: str) -> None:
    for file in ("README.md", "recipe.yaml", "finetune.yaml", "test_parts.py", "parts.txt"):
        text = Template((_TEMPLATES / file).read_text(encoding="utf-8")).substitute(name=name, task=task)
        (folder / file.replace(".txt", ".py")).write_text(_lines_of(task, text), encoding="utf-8")
    (folder / "data").mkdir()
    write_samples("classification" if task == "masked_autoencoder" else task, folder / "data", _NUM_SAMPLES, seed=0)


def _lines_of(task: str, text: str) -> str:
    """The lines for a task: `#: TASKS` behind a line is about it, alone on a line about what follows, up to the next.

    `#: not TASKS` are all others, `#: all` is every task.
    """
    lines, is_block_kept = [], True
    for line in text.splitlines():
        mark = _ONLY.search(line)
        is_kept = mark is None or (task in mark[2].split()) != bool(mark[1]) or mark[2] == "all"
        if mark is not None and mark.start() == 0:
            is_block_kept = is_kept
        elif is_kept and is_block_kept:
            lines.append(_ONLY.sub("", line))
    return "".join(f"{line}\n" for line in lines)
