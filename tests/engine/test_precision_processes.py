"""Two real processes: an overflow on one of them is one for both."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.forkserver import script_ranks

SCRIPT = Path(__file__).resolve().parent / "scripts" / "overflow.py"
NAMES = ["fp16", "O2", "O3"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes decided, by precision."""
    folder = tmp_path_factory.mktemp("pair")
    done = script_ranks(2, SCRIPT, folder, *NAMES, OMP_NUM_THREADS="1")
    assert [each.returncode for each in done] == [0, 0], done[0].stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", NAMES)
def test_both_leave_out_the_same_updates_and_hold_the_same_weights(name: str, pair: list[dict[str, Any]]) -> None:
    first, second = (found[name] for found in pair)
    assert first == second
    assert first["done"] == first["finite"]
    assert not first["done"][1]
    assert not first["done"][3]
    assert first["done"][-1]
    assert first["state"]["scale"] == 2.0 ** (16 - first["done"].count(False))
    assert first["state"]["skipped"] == first["done"].count(False)
