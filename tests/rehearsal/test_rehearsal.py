"""Training, evaluation and checkpoints on CUDA devices that are not there; docs/gpu.md says what that proves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_stub import compile_stub, compiler
from rehearsal_cases import FAULTS, PROCESSES, SETTINGS, SHIPPED, TASKS, TRANSFORMS, write_data

pytestmark = pytest.mark.skipif(compiler() is None, reason="the CUDA device of the rehearsal needs g++ to be built")

RUNS = [*TASKS, *TRANSFORMS, *SETTINGS, *PROCESSES, *SHIPPED]
_PROGRAM = Path(__file__).with_name("rehearsal_program.py")
_CAUGHT = {"mismatch": "FakeTensorDeviceMismatchError", "read": "HostWaitError"}


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By case, the error that ended it; empty if it reached the end."""
    folder = tmp_path_factory.mktemp("rehearsal")
    write_data(folder)
    (folder / "cases.json").write_text(json.dumps([*RUNS, *FAULTS]))
    command = [sys.executable, str(_PROGRAM), str(compile_stub(folder)), "cases.json", "out"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(RUNS) + len(FAULTS), done.stderr[-2000:]
    return {answer["name"]: answer["error"] for answer in answers}


@pytest.mark.parametrize("name", [case["name"] for case in RUNS])
def test_no_tensor_is_left_behind_and_no_step_waits_for_the_device(name: str, errors: dict[str, str]) -> None:
    assert errors[name] == ""


@pytest.mark.parametrize("name", [case["name"] for case in FAULTS])
def test_planted_faults_are_caught(name: str, errors: dict[str, str]) -> None:
    assert _CAUGHT[name.partition(": ")[2]] in errors[name]
