"""Modules of a user's own: imported before a recipe is checked, and recorded by the run that uses them.

A run directory may be somebody else's: what it records is imported only if this user has imported that file before.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paceline.core.cache_folder import cache_folder
from paceline.core.errors import DataError, PacelineError, UsageError
from paceline.recipe.document import COMMAND_LINE, Document, Origin, places
from paceline.recipe.load import load
from paceline.recipe.problems import near
from paceline.recipe.schema import UsedModule
from paceline.recipe.validate import CheckedRecipe, validate


@dataclass
class ImportedModules:
    """What was imported, and what to tell the user about it."""

    modules: list[tuple[UsedModule, Origin]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def record(self, document: Document) -> Document:
        """The document with a `use` that says what was imported; unchanged if nothing was."""
        if not self.modules:
            return document
        if "use" in document.tree:
            document.forget(("use",))
        document.tree["use"] = [module.model_dump() for module, _ in self.modules]
        document.values["use",] = self.modules[0][1]
        for index, (module, origin) in enumerate(self.modules):
            document.values |= dict.fromkeys(places(module.model_dump(), ("use", index)), origin)
        return document


def read_checked(
    reference: str, overrides: Sequence[str] = (), modules: Sequence[str] = (), is_run: bool = False
) -> CheckedRecipe:
    """The checked recipe, after importing `modules` and what its `use` names; `is_run` if a run has written it."""
    return check_document(load(reference, overrides), modules, is_run)


def check_document(document: Document, modules: Sequence[str] = (), is_run: bool = False) -> CheckedRecipe:
    """The same of a recipe that is loaded."""
    imported = import_modules(modules, document, is_run)
    checked = validate(imported.record(document))
    return replace(checked, notes=[*imported.notes, *checked.notes])


def import_modules(given: Sequence[str], document: Document | None = None, is_run: bool = False) -> ImportedModules:
    """Import what `--use` names and then what the recipe's `use` names; a given one replaces one of the same name."""
    imported = ImportedModules()
    for name in given:
        _import_named(name, Path.cwd(), f"--use {name}", Origin(COMMAND_LINE), imported)
    for written, origin in _written(document) if document else ():
        known = [module.module.rpartition(".")[2] for module, _ in imported.modules]
        if isinstance(written, UsedModule):
            is_gone = not Path(written.file).is_file()
            if written.module.rpartition(".")[2] not in known and not (given and is_gone):
                _import_recorded(written, origin, imported)
        elif is_run:
            found = f"{origin}: use: {written} was not written by a run, which records files with their hashes"
            raise UsageError(f"{found}; to import it, add --use {written}")
        else:
            _import_named(written, Path(origin.source).parent, f"{origin}: use: {written}", origin, imported)
    return imported


def _written(document: Document) -> Iterator[tuple[str | UsedModule, Origin]]:
    """The items of a recipe's `use`; those that are wrong are reported when it is checked."""
    written: Any = document.tree.get("use", [])
    for index, each in enumerate(written if isinstance(written, list) else [written]):
        origin = document.values["use", index] if isinstance(written, list) else document.values["use",]
        with suppress(ValidationError):
            yield each if isinstance(each, str) else UsedModule.model_validate(each), origin


def _import_named(name: str, folder: Path, label: str, origin: Origin, imported: ImportedModules) -> None:
    folder, module = folder.resolve(), name.removesuffix(".py").replace("/", ".")
    file = (folder / name).resolve() if name.endswith(".py") else None
    if file and (name.startswith(("/", "../")) or "/../" in name):
        folder, module = file.parent, file.stem
    if file in [Path(each.file) for each, _ in imported.modules]:
        return
    loaded = _import(module, folder, label, file) if file is None or not _is_loaded(file) else None
    if found := file or getattr(loaded, "__file__", None):
        used = UsedModule(module=module, file=str(Path(found).resolve()), sha256=_hash(Path(found)))
        _remember(used)
        imported.modules.append((used, origin))


def _import_recorded(used: UsedModule, origin: Origin, imported: ImportedModules) -> None:
    file, where = Path(used.file), f"{origin}: use: {used.file}"
    if not file.is_file():
        raise UsageError(f"{where} does not exist; add --use FILE with the place where it is now")
    if [used.file, used.module] not in _remembered():
        raise UsageError(f"{where} was never imported by you: read it, since it would run, then add --use {used.file}")
    now = used.model_copy(update={"sha256": _hash(file)})
    if now != used:
        imported.notes.append(f"{used.file} has changed since the run recorded it: results may differ")
    if not _is_loaded(file):
        _import(used.module, file.parents[used.module.count(".") + (file.name == "__init__.py")], where, file)
    imported.modules.append((now, origin))


def _is_loaded(file: Path) -> bool:
    """Whether some module is this file, perhaps under another name: twice, it would register its parts twice."""
    return any(getattr(module, "__dict__", {}).get("__file__") == str(file) for module in list(sys.modules.values()))


def _import(module: str, folder: Path, label: str, file: Path | None) -> Any:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        loaded = _import_beside_torchvision(module)
    except PacelineError:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
            meant = near(f"{module}.py", [path.name for path in folder.glob("*.py")])
            hint = f"did you mean {meant[0]}? " if meant else ""
            searched = f"searched in {folder} and in installed packages"
            raise UsageError(f"{label}: {error}; {hint}{searched}") from error
        from paceline.core.user_code import described

        cure = "; install it with pip" if isinstance(error, ModuleNotFoundError) else ""
        raise UsageError(f"{label}: {described(error)}{cure}") from error
    found = getattr(loaded, "__file__", None)
    if file and (found is None or Path(found).resolve() != file):
        raise UsageError(f"{label}: Python has another module {module}, {found or 'built in'}; rename the file")
    return loaded


def _import_beside_torchvision(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        from paceline.core.torchvision_ops import import_torchvision

        import_torchvision()  # beside a torch build that its compiled operators do not fit
        return importlib.import_module(module)


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _memory() -> Path | None:
    """The file that lists what this user has imported; None if no folder can be this user's."""
    with suppress(DataError):
        return cache_folder() / "used-modules.jsonl"
    return None


def _remembered() -> list[list[str]]:
    memory = _memory()
    if memory is None or not memory.is_file():
        return []
    return [json.loads(line) for line in memory.read_text(encoding="utf-8").splitlines()]


def _remember(used: UsedModule) -> None:
    memory, line = _memory(), [used.file, used.module]
    with suppress(OSError):
        if memory and line not in _remembered():
            with memory.open("a", encoding="utf-8") as lines:
                lines.write(f"{json.dumps(line)}\n")
