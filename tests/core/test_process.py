"""Idle OpenMP threads sleep unless the user wants otherwise, and cores are counted on every system."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from paceline.core.process import limit_spinning, num_cores

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that what is set below is forgotten afterwards
        monkeypatch.delenv(name)
    return monkeypatch


def test_threads_spin_for_a_moment_only(unset: pytest.MonkeyPatch) -> None:
    limit_spinning()
    assert [os.environ.get(name) for name in VARIABLES] == [None, "1000", "0"]


@pytest.mark.parametrize(
    ("name", "value"), [("OMP_WAIT_POLICY", "active"), ("GOMP_SPINCOUNT", "5"), ("KMP_BLOCKTIME", "1")]
)
def test_what_the_user_has_set_stays(name: str, value: str, unset: pytest.MonkeyPatch) -> None:
    unset.setenv(name, value)
    limit_spinning()
    assert {each: os.environ[each] for each in VARIABLES if each in os.environ} == {name: value}


def test_torch_is_loaded_with_it() -> None:
    """OpenMP itself tells what it waits by, when torch is imported through the package."""
    code = "import paceline; paceline.train_step"
    variables = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**variables, "OMP_DISPLAY_ENV": "verbose"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "GOMP_SPINCOUNT = '1000'" in done.stderr


def test_cores_are_counted_where_nobody_tells_which_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    assert num_cores() == os.cpu_count()
