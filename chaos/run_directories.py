"""Run directories as copies, other machines, other users and attackers leave them: a run goes on in each of them."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import shutil
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from chaos.row import Row
from paceline import cli

Change = Callable[[Path], object]
"""Changes a run directory that was saved at step 2 of 4."""
_ODD = os.fsdecode(b"\xff\xfe")
_PRECIOUS = "mine"
_RECIPE: dict[str, Any] = {
    "name": "odd",
    "task": "classification",
    "model": {"name": "convnet", "widths": [4]},
    "data": {
        "batch_size": 48,
        "train": {"dataset": "fashion_small", "split": "train"},
        "val": {"dataset": "fashion_small", "split": "test"},
    },
    "losses": ["cross_entropy"],
    "optimizer": {"name": "sgd", "lr": 0.01},
    "train": {"steps": 2, "threads": 1},
    "evaluate": {"every_steps": 2},
    "checkpoint": {"every_steps": 2, "keep_last": 9, "best": "top1"},
    "logging": {"every_steps": 1, "images": False, "tensorboard": False},
}


def _best(make: Change) -> Change:
    """Put something else in the place of the link `best`."""

    def change(run: Path) -> None:
        (run / "best").unlink()
        make(run / "best")

    return change


def _lock(**changes: Any) -> Change:
    """A lock that a process which is gone has left, with other content."""

    def change(run: Path) -> None:
        owner = {"pid": 7, "host": socket.gethostname(), "boot": "x", "ticks": 1, "since": "2026-01-01 00:00:00"}
        (run / ".lock").write_text(json.dumps({**owner, **changes}))

    return change


def _later(change: Change) -> Change:
    """A lock whose time lies in the future."""

    def make(run: Path) -> None:
        change(run)
        os.utime(run / ".lock", (time.time() + 1e8, time.time() + 1e8))

    return make


def _link(name: str) -> Change:
    """A link that leads from a name which a run writes to somebody's file beside the run directory."""

    def change(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).symlink_to(run.parent / "precious")

    return change


def _make_part(best: Path) -> None:
    best.mkdir()
    (best / "state.json").write_text("{}")


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target)


DIRECTORIES: dict[str, tuple[str, dict[str, Change]]] = {
    "`best` is no link": (
        "the run goes on, saves, and `best` leads to the best checkpoint",
        {
            "a copy": _best(lambda best: _copy(best.parent / "checkpoints/step-00000002", best)),
            "part of a copy": _best(_make_part),
            "an empty folder": _best(Path.mkdir),
            "a file that names it": _best(lambda best: best.write_text("checkpoints/step-00000002\n")),
            "another file": _best(lambda best: best.write_text("my best recipe")),
            "a pipe": _best(os.mkfifo),
            "a link that leads nowhere": _best(lambda best: best.symlink_to("checkpoints/step-00000099")),
            "a link to itself": _best(lambda best: best.symlink_to("best")),
            "a link out of the run": _best(lambda best: best.symlink_to("/etc")),
        },
    ),
    "a lock that was left behind": (
        "the run goes on at once",
        {
            "of a process that is gone": _lock(),
            "of a container with another name": _lock(host="pod-7"),
            "of another machine that had this disk": _lock(host="elsewhere", boot="y", pid=1),
            "of a time to come": _later(_lock()),
            "of a time to come elsewhere": _later(_lock(host="elsewhere")),
            "empty": lambda run: (run / ".lock").touch(),
            "of bytes": lambda run: (run / ".lock").write_bytes(b"\xff" * 99),
            "of 5,000 digits": lambda run: (run / ".lock").write_text(f'{{"pid": {"9" * 5000}}}'),
        },
    ),
    "links that somebody planted in a run directory": (
        "never followed; the run goes on, or refuses in a line",
        {
            name: _link(name)
            for name in (
                *(".status.json.partial", ".recipe.yaml.partial", ".metrics.jsonl.partial", ".best.partial", ".lock"),
                *("status.json", "recipe.yaml", "metrics.jsonl", "logs/rank-0.log", "logs/heartbeats/rank-0"),
                *("checkpoints/index.json", "checkpoints/.step-00000004.partial"),
            )
        },
    ),
}
"""By fault: the goal, and the cases."""


def run(quick: bool) -> list[Row]:
    """Every directory, then names that are not UTF-8 and cells that are formulas."""
    with tempfile.TemporaryDirectory() as name, _in(Path(name)):
        home = Path(name)
        code, output = _train(_RECIPE, home / "sound")
        if code != 0:
            raise RuntimeError(f"the run did not begin: {output}")
        rows = []
        for fault, (goal, cases) in DIRECTORIES.items():
            chosen = dict(list(cases.items())[: 1 if quick else None])
            problems = {case: _goes_on(home, change) for case, change in chosen.items()}
            rows.append(_row(fault, goal, problems))
        return [*rows, _row(*_NAMES, _odd_names(home)), _row(*_CELLS, _formulas(home))]


def _row(fault: str, goal: str, problems: dict[str, str | None]) -> Row:
    found = {case: problem for case, problem in problems.items() if problem}
    print("\n".join(f"{fault}: {case}: {problem}" for case, problem in found.items()))
    return Row(fault, goal, f"{len(problems) - len(found)}/{len(problems)}", not found)


def _goes_on(home: Path, change: Change) -> str | None:
    """What went wrong with a run that was continued in a changed directory, if anything."""
    folder = Path(tempfile.mkdtemp(dir=home))
    out = Path(shutil.copytree(home / "sound", folder / "run", symlinks=True))
    (folder / "precious").write_text(_PRECIOUS)
    change(out)
    code, output = _train({**_RECIPE, "train": {"steps": 4, "threads": 1}}, out)
    if (folder / "precious").read_text() != _PRECIOUS:
        return "somebody's file was written to"
    if code in (2, 3) and any(path.is_symlink() for path in out.rglob("*") if path.name != "best"):
        return None if len(output.splitlines()) == 1 else f"not refused in a line: {output[-500:]}"
    saved = [path.name for path in sorted((out / "checkpoints").glob("step-*"))]
    if code != 0 or saved[-1] != "step-00000004":
        return f"ended with {code}, saved {saved[-1]}: {output[-500:]}"
    return None if (out / "best").resolve().name in saved else f"best leads to {(out / 'best').resolve()}"


def _train(recipe: dict[str, Any], out: Path) -> tuple[int, str]:
    """The command in this process: how it ended, and what it printed."""
    Path("recipe.json").write_text(json.dumps(recipe))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            code = cli.main(["train", "recipe.json", "--procs", "1", f"--out={out}"])
        except BaseException:  # noqa: BLE001 - whatever it is, it is what is looked for
            return -1, traceback.format_exc()
    return code, printed.getvalue()


_NAMES = (
    "names that are not UTF-8: of the project, the run directory, classes, images, an image that cannot be read",
    "trained, continued and measured; the bad image skipped, and listed by its name",
)
_CELLS = (
    "names that begin with `=`, `+`, `-`, `@` or a tab: of a run directory, of classes and of images",
    "no cell of a written table begins with one of them",
)


def _folder_recipe(root: str, **changes: Any) -> dict[str, Any]:
    resize = [{"name": "resize", "size": [16, 16]}]
    split = {"dataset": "image_folder", "root": root, "transforms": resize}
    data = {"batch_size": 4, "num_workers": 0, "on_error": "skip", "max_skipped": 1, "train": split, "val": split}
    return {**_RECIPE, "data": data, "evaluate": {"every_steps": 2, "save_predictions": True}, **changes}


def _paint(root: Path, classes: tuple[str, str], stem: str) -> None:
    import numpy as np
    from PIL import Image

    generator = np.random.default_rng(0)
    for name in classes:
        (root / name).mkdir(parents=True)
        for number in range(4):
            with (root / name / f"{stem}{number}.png").open("wb") as file:
                Image.fromarray(generator.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(file, "PNG")


def _odd_names(home: Path) -> dict[str, str | None]:
    folder = home / f"project{_ODD}"
    _paint(folder / "photos", ("a", f"b{_ODD}"), _ODD)
    (folder / "photos/a" / f"bad{_ODD}.png").write_bytes(b"no image")
    problems: dict[str, str | None] = {}
    with _in(folder):
        for name, out in (("a sound run directory", "run"), ("another", f"run{_ODD}")):
            for doing, steps in (("begun", 2), ("continued", 4)):
                recipe = _folder_recipe("photos", train={"steps": steps, "threads": 1})
                code, output = _train(recipe, folder / out)
                problems[f"{name}, {doing}"] = f"ended with {code}: {output[-500:]}" if code else None
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
                code = cli.main(["eval", out, "--json"])
            problems[f"{name}, measured"] = f"ended with {code}: {errors.getvalue()[-500:]}" if code else None
            skipped = (folder / out / "skipped.jsonl").read_text(encoding="utf-8").splitlines()
            found = {Path(json.loads(line)["path"]).name for line in skipped}
            problems[f"{name}, listed"] = None if found == {f"bad{_ODD}.png"} else f"listed {found}"
    return problems


def _formulas(home: Path) -> dict[str, str | None]:
    problems: dict[str, str | None] = {}
    for number, start in enumerate("=+-@\t"):
        folder = home / f"cells-{number}"
        _paint(folder / "photos", (f"{start}cmd|x", "b"), f"{start}1+1")
        with _in(folder):
            logging = {**_RECIPE["logging"], "results": "all.csv"}
            code, output = _train(_folder_recipe("photos", logging=logging), Path(f"{start}out"))
            tables = [path for path in folder.rglob("*.csv") if path.is_file()]
            cells = [cell for path in tables for row in csv.reader(io.StringIO(path.read_text())) for cell in row]
        bad = [
            cell for cell in cells if cell[:1] in ("=", "+", "@", "\t") or (cell[:1] == "-" and not _is_number(cell))
        ]
        problem = f"ended with {code}: {output[-500:]}" if code or len(tables) < 2 else None
        problems[repr(start)] = problem or (f"wrote {bad[0]!r}" if bad else None)
    return problems


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


@contextlib.contextmanager
def _in(folder: Path) -> Iterator[None]:
    """Inside a folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
