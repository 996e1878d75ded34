"""How soon a wrong recipe is refused."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.measuring import interleave
from benchmarks.processes import PACELINE, seconds_to_exit
from benchmarks.report import Section, at_most

LIMIT = 2.0
_USAGE = 2
_WRONG_VALUES = "paceline train quickstart optimizer.lr=fast model.width=3"
_WRONG_FILE = "paceline train wrong.yaml"
_RECIPE = """\
name: wrong
task: clasification
model: {name: timm/resnet81}
data:
  batch_size: 0
  train: {dataset: fashion_small, split: training}
losses: [{name: cross_entropy, smoothing: 0.1}]
optimizer: {name: adamw, lr: -1}
train: {epochs: ten}
"""


def measure(is_quick: bool) -> Section:
    """The time from the start to the exit of commands with wrong recipes."""
    rounds = 3 if is_quick else 11
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "wrong.yaml").write_text(_RECIPE, encoding="utf-8")
        measured = interleave(
            {
                text: lambda text=text: seconds_to_exit([str(PACELINE), *text.split()[1:]], _USAGE, folder)  # type: ignore[misc]
                for text in (_WRONG_VALUES, _WRONG_FILE)
            },
            rounds,
        )
    slowest = max(each.median for each in measured.values())
    return Section(
        "Refusing a wrong recipe",
        f"Wall-clock time of the process, with all errors printed; {rounds} rounds.",
        ["command", "seconds"],
        [[f"`{each.name}`", f"{each.median:.2f}"] for each in measured.values()],
        [at_most("all errors of a wrong recipe", slowest, LIMIT, "{:.2f} s", is_ratio=False)],
    )
