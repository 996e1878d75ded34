"""Two real processes: an overflow on one of them is one for both."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parent / "scripts" / "overflow.py"
NAMES = ["fp16", "O2", "O3"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes decided, by precision."""
    folder = tmp_path_factory.mktemp("pair")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen([sys.executable, SCRIPT, folder, str(rank), *NAMES], env=environment, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=120)[1].decode() for process in running]
        assert [process.returncode for process in running] == [0, 0], "\n".join(errors)
    finally:
        for process in running:
            process.kill()
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
