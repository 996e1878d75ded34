"""Imports point one way, and what needs no torch does not import it."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "paceline"
ROOMS = [
    "core", "visualize", "data", "models", "losses", "optim", "metrics", "tasks", "checkpoint", "loggers", "engine",
    "recipe", "convert", "plan", "launch", "report", "run", "commands", "cli",
]  # fmt: skip
SUB_ROOMS = {
    "data": ["io", "index", "datasets", "transforms"],
    "engine": ["activation_checkpointing", "precision", "strategies"],
}  # in import order; files beside them stand where the graph without circles puts them
FACADE = {"__init__", "__main__"}  # the package's front door gives out what the rooms make
TEMPLATES = SOURCE / "templates"  # files of a user's, which are copied and never imported
FILES = sorted(path for path in SOURCE.rglob("*.py") if path.parent != TEMPLATES)


def module_name(path: Path) -> str:
    return ".".join(["paceline", *path.relative_to(SOURCE).with_suffix("").parts]).removesuffix(".__init__")


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Every module of ours that a file imports, wherever it does: in functions and for type checkers too."""
    package = module_name(path).split(".")
    package = package if path.stem == "__init__" else package[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.startswith("paceline"))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == "paceline":
                yield from ((node.lineno, f"paceline.{alias.name}") for alias in node.names)
            elif module.startswith("paceline."):
                yield node.lineno, module


def test_there_is_something_to_check() -> None:
    assert len(FILES) > 50
    assert sum(len(list(imported(path))) for path in FILES) > 100


def test_rooms_and_sub_rooms_are_those_that_are_declared() -> None:
    assert {room_of(module_name(path)) for path in FILES} == {*ROOMS, *FACADE}
    folders = {path.parent.relative_to(SOURCE).parts for path in FILES}
    found = {room: {parts[1] for parts in folders if len(parts) == 2 and parts[0] == room} for room in ROOMS}
    assert {room: names for room, names in found.items() if names} == {
        room: set(names) for room, names in SUB_ROOMS.items()
    }
    assert max(len(parts) for parts in folders) == 2
    assert not [path for path in SOURCE.rglob("*") if "util" in path.name.lower()]


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_point_one_way(path: Path) -> None:
    room = room_of(module_name(path))
    if room in FACADE:
        return
    allowed = {*ROOMS[: ROOMS.index(room) + 1], "__version__"}
    wrong = [f"{path}:{line}: {module}" for line, module in imported(path) if room_of(module) not in allowed]
    assert wrong == []


@pytest.mark.parametrize("room", ["plan", "convert"])
def test_only_commands_import_the_plan_and_converters(room: str) -> None:
    users = {room_of(module_name(path)) for path in FILES for _, module in imported(path) if room_of(module) == room}
    assert users == {room, "commands"}


@pytest.mark.parametrize(("room", "order"), SUB_ROOMS.items())
def test_sub_rooms_import_one_way(room: str, order: list[str]) -> None:
    wrong = []
    for path in (path for path in FILES if path.parent.parent == SOURCE / room):
        for line, module in imported(path):
            other = module.split(".")[2:-1]
            if room_of(module) == room and other and order.index(other[0]) > order.index(path.parent.name):
                wrong.append(f"{path}:{line}: {module}")
    assert wrong == []


def test_no_file_imports_itself_through_others() -> None:
    """Late imports and those for type checkers count: a circle that is hidden is one all the same."""
    modules = {module_name(path) for path in FILES}
    graph = {module_name(path): {each for _, each in imported(path) if each in modules} for path in FILES}
    graph.pop("paceline")  # the front door, which gives out what the rooms make
    finished: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " → ".join([*trail[trail.index(module) :], module])
        if module not in finished:
            for inner in graph.get(module, ()):
                visit(inner, (*trail, module))
            finished.add(module)

    for module in graph:
        visit(module, ())


def test_only_one_room_draws() -> None:
    """Lines, letters and plots are made in `visualize`; decoding and encoding images is no drawing."""
    draws = re.compile(
        r"\b(ImageDraw|ImageFont|matplotlib|seaborn|make_grid)\b"
        r"|\bcv2\.(line|polylines|rectangle|circle|ellipse|putText|drawContours|fillPoly|applyColorMap)\b"
    )
    found = {path: draws.search(path.read_text(encoding="utf-8")) for path in FILES}
    rooms = {room_of(module_name(path)) for path, match in found.items() if match}
    assert rooms == {"visualize"}, [f"{path}: {match[0]}" for path, match in found.items() if match]


def test_recipes_are_checked_without_torch() -> None:
    """Each step in turn, in one fresh interpreter; the first that brings torch in is named."""
    modules = ["paceline", "paceline.core.registry", "paceline.recipe.validate", "paceline.recipe.load"]
    code = (
        "import contextlib, importlib, io, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
        "from paceline.cli import main\n"
        "with contextlib.redirect_stderr(io.StringIO()) as out:\n"
        "    assert main(['train', 'quickstart', 'optimizer.lr=fast']) == 2\n"
        "assert 'optimizer.lr' in out.getvalue(), out.getvalue()\n"
        "assert 'torch' not in sys.modules\n"
        "print('free')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "free\n", done.stderr


def test_help_imports_one_command_and_nothing_that_takes_long() -> None:
    code = (
        "import contextlib, io, sys\n"
        "from paceline.cli import COMMANDS, main\n"
        "def loaded(*names): return [name for name in names if name in sys.modules]\n"
        "for words in (['--help'], ['--version'], *([name, '--help'] for name in COMMANDS)):\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "        main(words)\n"
        "    assert 'paceline' in out.getvalue(), words\n"
        "    assert not loaded('torch', 'numpy', 'timm', 'pydantic'), words\n"
        "    assert words[1:] or not loaded('paceline.commands'), words\n"
        "print('free')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "free\n", done.stderr


def test_the_front_door_gives_out_what_it_names() -> None:
    import paceline

    assert {
        name: callable(getattr(paceline, name)) for name in paceline.__all__ if name != "register"
    } == dict.fromkeys([name for name in paceline.__all__ if name != "register"], True)
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = paceline.no_such_thing
