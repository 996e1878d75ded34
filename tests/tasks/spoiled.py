"""What tests of bad input share: a copy of `paceline sample` data to spoil, a recipe for it, and what commands say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.sample_recipes import settings_kept

from paceline.cli import main

NORMALIZE = {"name": "normalize", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
RESIZE = {"name": "resize", "size": [32, 32]}
_COMMON: dict[str, Any] = {
    "name": "spoiled",
    "optimizer": {"name": "sgd", "lr": 0.01},
    "train": {"epochs": 1, "device": "cpu", "threads": 1},
    "logging": {"tensorboard": False, "images": False},
}


class Answer(NamedTuple):
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        """The message that it ended with."""
        return self.err.strip().rpartition("\n")[2]

    @property
    def json(self) -> Any:
        """What it printed for programs."""
        return json.loads(self.out)


class Spoiled:
    """A folder with data and a recipe, and the commands that are run there."""

    def __init__(self, folder: Path, recipe: dict[str, Any], capture: pytest.CaptureFixture[str]) -> None:
        self.data, self.out = folder / "data", folder / "run"
        self.recipe = {**_COMMON, **recipe}
        self.recipe["data"] |= {"batch_size": 4, "num_workers": 0}
        self._file, self._capture = folder / "recipe.json", capture

    def tell(self, command: str, *words: str) -> Answer:
        """Run a command on the recipe, or `eval` on its run; nothing may end in a traceback."""
        self._file.write_text(json.dumps(self.recipe))
        more = {
            "train": [str(self._file), "--out", str(self.out)],
            "check": [str(self._file), "--json"],
            "data": [str(self._file), "--json", "--sheet", str(self.out.parent / "sheet.png")],
            "eval": [str(self.out), "--json"],
        }[command]
        self._capture.readouterr()
        with settings_kept():
            code = main([command, *more, *words])
        answer = self._capture.readouterr()
        assert "Traceback" not in answer.out + answer.err
        return Answer(code, answer.out, answer.err)

    def refused(self, *parts: str, is_made: bool = False) -> int:
        """The code that `check` and `train` both end with, one message with these parts, and nothing left behind.

        Only if it cannot be known before is the run directory made.
        """
        codes = set()
        for command in ("check", "train"):
            answer = self.tell(command)
            codes.add(answer.code)
            assert [part for part in parts if part not in answer.last] == [], answer.err
        assert self.out.exists() == is_made
        assert not (self.out / "checkpoints").exists()
        (code,) = codes
        return code

    def skipped(self, split: str, sample: int, *parts: str) -> dict[str, Any]:
        """With `on_error: skip` the run leaves out this sample alone, says so by name, and finishes; its metrics."""
        shutil.rmtree(self.out, ignore_errors=True)
        self.recipe["data"] |= {"on_error": "skip", "max_skipped": 1}
        answer = self.tell("train")
        assert answer.code == 0, answer.err
        assert f"{split}: skipped sample {sample} (" in answer.err
        skipped = [json.loads(line) for line in (self.out / "skipped.jsonl").read_text().splitlines()]
        assert [(each["split"], each["sample"]) for each in skipped] == [(split, sample)]
        assert [part for part in parts if part not in f"{skipped[0]['path']}: {skipped[0]['reason']}"] == []
        found: dict[str, Any] = self.tell("eval").json
        return found


def copy_of(sample: Path, folder: Path, recipe: dict[str, Any], capture: pytest.CaptureFixture[str]) -> Spoiled:
    """A copy of the data, to be spoiled; `recipe` names them as DATA."""
    shutil.copytree(sample, folder / "data")
    filled = json.loads(json.dumps(recipe).replace("DATA", str(folder / "data")))
    return Spoiled(folder, filled, capture)
