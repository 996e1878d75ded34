"""Idle OpenMP threads sleep unless the user wants otherwise, and cores are counted on every system."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core import process
from paceline.core.process import forget_spinning, limit_spinning, num_cores

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that what is set below is forgotten afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(process, "_torch_came_first", [])
    return monkeypatch


def test_threads_spin_for_a_moment_only(unset: pytest.MonkeyPatch) -> None:
    unset.delitem(sys.modules, "torch", raising=False)
    limit_spinning()
    assert [os.environ.get(name) for name in VARIABLES] == [None, "1000", "0"]
    forget_spinning()
    assert [os.environ.get(name) for name in VARIABLES] == [None, None, None]


@pytest.mark.parametrize(
    ("name", "value"), [("OMP_WAIT_POLICY", "active"), ("GOMP_SPINCOUNT", "5"), ("KMP_BLOCKTIME", "1")]
)
def test_what_the_user_has_set_stays(name: str, value: str, unset: pytest.MonkeyPatch) -> None:
    unset.setenv(name, value)
    limit_spinning()
    assert {each: os.environ[each] for each in VARIABLES if each in os.environ} == {name: value}


_SCRIPT = """
import json, os, sys, warnings
before = dict(os.environ)
import {first}
import {second}
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as caught:
    keys = {{"model.widths": [4], "train.epochs": None, "train.steps": 1, "train.threads": 2, "train.device": "cpu"}}
    keys |= {{"schedule.warmup": "none", "schedule.warmup_epochs": None}}
    run = paceline.build("quickstart", keys, sys.argv[1])
    next_batch = next(iter(run.batches))
    paceline.train_step(run, next_batch)
    paceline.train(run)
warned = [each for each in caught if issubclass(each.category, RuntimeWarning) and each.filename == sys.argv[0]]
changed = {{name for name in before.keys() | os.environ if before.get(name) != os.environ.get(name)}}
set_on_import = {{"LD_LIBRARY_PATH", "TORCHINDUCTOR_CACHE_DIR"}}  # by OpenCV and by torch
print(json.dumps([len(warned), sorted(changed - set_on_import)]))
"""


@pytest.mark.parametrize(("first", "second", "spins"), [("paceline", "torch", "1000"), ("torch", "paceline", "300000")])
def test_a_script_limits_spinning_if_it_imports_the_package_first(
    first: str, second: str, spins: str, tmp_path: Path
) -> None:
    """OpenMP itself tells what it waits by. The environment of the script is as before once the run is built."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT.format(first=first, second=second))
    variables = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, str(script), str(tmp_path / "run")]
    done = subprocess.run(
        command, env={**variables, "OMP_DISPLAY_ENV": "verbose"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [int(first == "torch"), []]


def test_cores_are_counted_where_nobody_tells_which_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    assert num_cores() == os.cpu_count()
