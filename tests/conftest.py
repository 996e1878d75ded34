"""What tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Threads that wait for others of their operation shall not keep a core busy: several tests share the machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data sets: PACELINE_DATA, or `shared/data` beside the project."""
    named = os.environ.get("PACELINE_DATA")
    for folder in (Path(named) if named else None, ROOT.parent / "shared" / "data"):
        if folder is not None and folder.is_dir():
            return folder
    pytest.skip("no real data: neither PACELINE_DATA nor ../shared/data is there")


# Files whose tests wait for processes the longest: begun first, they do not keep one worker busy at the end.
_LONG = {
    "test_readme.py",
    "test_any_number_of_processes.py",
    "test_shared_training.py",
    "test_two_machines.py",
    "test_health.py",
    "test_shared_mistakes.py",
    "test_recipes.py",
    "test_tasks_resume.py",
    "test_tasks_over_processes.py",
    "test_tasks_precision.py",
    "test_task_docs.py",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long files first; the others stay in their order."""
    items.sort(key=lambda item: item.path.name not in _LONG)
