"""What tests share."""

from __future__ import annotations

import compileall
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Threads that wait for others of their operation shall not keep a core busy: several tests share the machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# How output looks, and the place that a job gave to the command of the tests: theirs are to be as on any machine.
_ODD = re.compile(
    r"(FORCE|NO)_COLOR|CLICOLOR(_FORCE)?|TTY_\w+|COLUMNS|LINES|LANG|LANGUAGE|LC_\w+|PYTHON(UTF8|IOENCODING|WARNINGS)|"
    r"(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|(SLURM|OMPI|PMIX|TORCHELASTIC)_\w+|"
    r"PACELINE_(LAUNCHER|PARENT|RECORDS|RESTARTS)"
)
for name in filter(_ODD.fullmatch, list(os.environ)):
    del os.environ[name]

# A shell that starts the tests in the background, or nohup, has them ignore these, and so would all that they start.
_HANDLERS = dict.fromkeys(
    (signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU), signal.SIG_DFL
)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for number, handler in _HANDLERS.items():
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# How long an example takes is the machine's affair.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

ROOT = Path(__file__).resolve().parent.parent

_NO_BYTECODE = sys.dont_write_bytecode


def pytest_configure(config: pytest.Config) -> None:
    """Compile once what every process would compile again where the environment asks for no bytecode.

    That is the package, in each process that a test starts, and the tests themselves, in each worker.
    """
    if not hasattr(config, "workerinput"):
        compileall.compile_dir(ROOT / "src", quiet=2)
    sys.dont_write_bytecode = False


def pytest_collection_finish() -> None:
    """What tests write and import in this process is not kept, if that is asked for."""
    sys.dont_write_bytecode = _NO_BYTECODE


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data sets: PACELINE_DATA, or `shared/data` beside the project."""
    named = os.environ.get("PACELINE_DATA")
    for folder in (Path(named) if named else None, ROOT.parent / "shared" / "data"):
        if folder is not None and folder.is_dir():
            return folder
    pytest.skip("no real data: neither PACELINE_DATA nor ../shared/data is there")


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that indexes are kept in, here and in all processes that tests start."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["PACELINE_CACHE"] = str(folder)
    return folder


@pytest.fixture
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same for one test alone."""
    folder = tmp_path_factory.mktemp("own-cache")
    monkeypatch.setenv("PACELINE_CACHE", str(folder))
    return folder


@pytest.fixture
def own_names() -> Iterator[None]:
    """What a test registers has no name any more behind it."""
    from paceline.core.registry import KINDS, _shipped, register

    before = {kind: dict(register.kind(kind)._entries) for kind in KINDS}
    known = set(register.definitions)
    yield
    for kind, name in register.definitions.keys() - known:  # a class of ours that was given another name
        if name not in _shipped().get(kind, {}):
            del register.definitions[kind, name]
    for kind, entries in before.items():
        register.kind(kind)._entries = entries


@pytest.fixture
def shipped_names(own_names: None) -> None:
    """Nothing is registered but what is shipped, whatever tests in this process have imported."""
    from paceline.core.registry import KINDS, _shipped, register

    for kind in KINDS:
        entries, shipped = register.kind(kind)._entries, _shipped().get(kind, {})
        register.kind(kind)._entries = {name: entry for name, entry in entries.items() if name in shipped}


@pytest.fixture(autouse=True)
def _no_signal_stays_ignored() -> Iterator[None]:
    """All processes that later tests start would ignore it too."""
    yield
    ignored = [number for number in _HANDLERS if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, _HANDLERS[number])
    assert ignored == []


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Models are tested with the same weights and images in every run."""
    if request.path.parent == ROOT / "tests" / "models":
        import torch

        torch.manual_seed(0)


# Files that take the longest, the longest first: begun first, they do not keep one worker busy at the end.
_LONG = [
    "test_rehearsal.py",
    "test_shipped_plans.py",
    "test_readme.py",
    "test_shared_training.py",
    "test_two_machines.py",
    "test_export.py",
    "test_nonfinite.py",
    "test_tasks_resume.py",
    "test_stop_signals.py",
    "test_new.py",
    "test_sweep.py",
    "test_torchvision_detectors.py",
    "test_recipes.py",
    "test_plan_docs.py",
    "test_interrupted_saves.py",
    "test_tutorial.py",
    "test_setup_kills.py",
    "test_gloo.py",
    "test_local.py",
    "test_extending_docs.py",
    "test_resume.py",
    "test_hostile_files.py",
    "test_python_docs.py",
    "test_tasks_precision.py",
    "test_tasks_over_processes.py",
    "test_any_number_of_processes.py",
    "test_shared_updates.py",
    "test_results_rows.py",
    "test_commands.py",
    "test_task_docs.py",
    "test_predict.py",
    "test_package.py",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long files first; the others stay in their order."""
    places = {name: place for place, name in enumerate(_LONG)}
    items.sort(key=lambda item: places.get(item.path.name, len(_LONG)))
