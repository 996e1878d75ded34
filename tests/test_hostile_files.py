"""Files made to do harm are refused in a sentence: nothing in them runs, memory stays small, nothing waits for ever.

The files themselves, and the trial in its long form, are in `chaos`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def hostile() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        yield importlib.import_module("chaos.hostile")


def test_all_are_refused(hostile: Any) -> None:
    outcomes = hostile.try_all()
    assert [f"{outcome.name}: {outcome.problem}" for outcome in outcomes if outcome.problem] == []
    assert len(outcomes) >= 140
    assert {outcome.code for outcome in outcomes} == {2, 3, 4}
    assert max(outcome.megabytes for outcome in outcomes) < 1024


@pytest.mark.parametrize("name", ["a pipe as a recipe", "a torch archive that holds code"])
def test_so_they_are_as_commands(hostile: Any, name: str, tmp_path: Path) -> None:
    case = next(case for case in hostile.CASES if case.name == name)
    assert hostile.try_command(case, tmp_path / "place").problem == ""


def test_a_trial_that_would_notice(hostile: Any, tmp_path: Path) -> None:
    """A pickle that is read by the wrong function runs what it holds."""
    case = next(case for case in hostile.CASES if case.name == "a pickle as .pth")

    def opener() -> list[str]:
        case.make()
        Path("opener.py").write_text("import pickle; pickle.load(open('weights.pth', 'rb'))")
        return ["check", "quickstart", "train.epochs=none", "--use", "opener"]

    outcome = hostile.try_command(case._replace(make=opener), tmp_path / "place")
    assert outcome.problem == "something in it was executed"
