"""Load a recipe with the recipes it extends and the overrides of the command line."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

from paceline.core.errors import RecipeError, UsageError, in_one_line
from paceline.core.text import pluralize
from paceline.recipe.document import (
    COMMAND_LINE,
    MAX_DEPTH,
    SUFFIXES,
    Document,
    KeyPath,
    Origin,
    dotted,
    lookup,
    parse_value,
    places,
    read_document,
)
from paceline.recipe.parts import PARTS
from paceline.recipe.problems import near

MAX_EXTENDS = 8
MAX_FILES = 64
_SHIPPED = Path(__file__).parent.parent / "recipes"


def load(reference: str, overrides: Sequence[str] = ()) -> Document:
    """The merged document of a recipe file or a shipped recipe."""
    path, display = find_recipe(reference)
    files = _Files()
    document = files.read(path, display, ())
    if files.problems:
        raise RecipeError(files.problems)
    return override(document, overrides)


def extended(document: Document, source: str) -> Document:
    """A document that is not of a file, with parts given as a name expanded, merged over those it extends."""
    files = _Files()
    merged = files.extended(document, Path(source), source)
    if files.problems:
        raise RecipeError(files.problems)
    return merged


def shipped_recipes() -> dict[str, Path]:
    """The shipped recipes by file name; with the folder where two have the same name."""
    found = sorted(path for suffix in SUFFIXES for path in _SHIPPED.glob(f"*/*{suffix}"))
    stems = [path.stem for path in found]
    named = {path.stem if stems.count(path.stem) == 1 else _folder_name(path): path for path in found}
    return dict(sorted(named.items()))


def expand_shorthand(document: Document) -> None:
    """Expand parts given as a name (`task: classification`) to mappings, in place."""
    for part in PARTS:
        for path in part.places(document.tree):
            name = lookup(document.tree, path)
            if isinstance(name, str):
                lookup(document.tree, path[:-1])[path[-1]] = {part.name_key: name}
                inner = (*path, part.name_key)
                document.keys[inner] = document.values[inner] = document.values[path]


def merge(below: Document, above: Document) -> Document:
    """`below` overridden by `above`: mappings key by key, anything else as a whole; `{}` empties a mapping."""
    merged = Document(below.tree, dict(below.keys), dict(below.values))
    merged.tree = _merged(below.tree, above.tree, (), merged, above)
    return merged


def _merged(old: Any, new: Any, path: KeyPath, merged: Document, above: Document) -> Any:
    is_emptied = path and new == {}  # the root is left empty by a file that only says what it extends
    if is_emptied or not _is_merged_into(new, old):
        _replace_origins(old, new, path, merged, above)
        return new
    # A mapping keeps its place in the file when the command line only adds to it.
    if above.values[path].line is not None:
        _copy_origins(path, merged, above)
    result = old.copy()
    for segment, value in new.items():
        inner = (*path, segment)
        if isinstance(old, list) or segment in old:
            result[segment] = _merged(old[segment], value, inner, merged, above)
        else:
            result[segment] = value
            for place in places(value, inner):
                _copy_origins(place, merged, above)
    return result


def _is_merged_into(new: Any, old: Any) -> bool:
    if not isinstance(new, dict):
        return False
    # Only overrides hold mappings with numbers for keys: they address the items of a list.
    return isinstance(old, dict) or (isinstance(old, list) and any(isinstance(key, int) for key in new))


def _replace_origins(old: Any, new: Any, path: KeyPath, merged: Document, above: Document) -> None:
    before = merged.values[path]
    for place in places(old, path):
        merged.keys.pop(place, None)
        merged.values.pop(place, None)
    for place in places(new, path):
        _copy_origins(place, merged, above)
    if type(old) is type(new) and old == new:  # repeated, not changed
        merged.values[path] = replace(merged.values[path], layer=before.layer)


def _copy_origins(path: KeyPath, merged: Document, above: Document) -> None:
    merged.values[path] = above.values[path]
    if path in above.keys:
        merged.keys[path] = above.keys[path]


class _Files:
    """Reads files and what they extend, collecting all problems."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.count = 0

    def read(self, path: Path, display: str, above: tuple[Path, ...]) -> Document:
        """The document of a file merged over those it extends; `above` are the files that extend it."""
        try:
            document = read_document(path, display)
        except RecipeError as error:
            self.problems += error.problems
            return Document({}, {}, {(): Origin(display, 1, 1)})
        return self.extended(document, path, display, above)

    def extended(self, document: Document, path: Path, display: str, above: tuple[Path, ...] = ()) -> Document:
        """A document merged over those it extends."""
        bases = self._bases(document, path, display, (*above, path.resolve()))
        expand_shorthand(document)
        merged = reduce(merge, [*bases, _at_layer(document, self.count)])
        self.count += 1
        return merged

    def _bases(self, document: Document, path: Path, display: str, above: tuple[Path, ...]) -> list[Document]:
        if "extends" not in document.tree:
            return []
        extends = document.tree["extends"]
        wanted = list(enumerate(extends)) if isinstance(extends, list) else [(None, extends)]
        bases = []
        for index, reference in wanted:
            origin = document.values[("extends",) if index is None else ("extends", index)]
            try:
                base, name = self._base(reference, path, display, above)
            except UsageError as error:
                self.problems.append(f"{origin}: extends: {error}")
                continue
            bases.append(self.read(base, name, above))
        document.forget(("extends",))
        del document.tree["extends"]
        return bases

    def _base(self, reference: Any, path: Path, display: str, above: tuple[Path, ...]) -> tuple[Path, str]:
        if not isinstance(reference, str):
            raise UsageError("expected the name of a recipe or a list of names")
        base, name = find_recipe(reference, path.parent, os.path.dirname(display))  # noqa: PTH120 - keeps it as displayed
        if base.resolve() in above:
            raise UsageError(f"{name} extends itself, directly or through others")
        if len(above) > MAX_EXTENDS:
            raise UsageError(f"more than {MAX_EXTENDS} recipes extend one another")
        if self.count + len(above) >= MAX_FILES:
            raise UsageError(f"more than {MAX_FILES} files are read for one recipe")
        return base, name


def _at_layer(document: Document, layer: int) -> Document:
    keys = {path: replace(origin, layer=layer) for path, origin in document.keys.items()}
    values = {path: replace(origin, layer=layer) for path, origin in document.values.items()}
    return Document(document.tree, keys, values)


def run_recipe(run: Path) -> Path:
    """The recipe of a run directory."""
    recipe = run / "recipe.yaml"
    if not recipe.is_file():
        raise UsageError(f"{run} is not a run directory: it has no recipe.yaml")
    return recipe


def find_recipe(reference: str, directory: Path = Path(), display_directory: str = "") -> tuple[Path, str]:
    """The path and display name of a recipe; a file wins over a shipped recipe of the same name."""
    path = directory / reference
    if path.suffix.lower() in SUFFIXES and os.path.exists(path):  # noqa: PTH110 - False for impossible names too
        return path, os.path.normpath(os.path.join(display_directory, reference))  # noqa: PTH118
    shipped = shipped_recipes()
    named = shipped | {_folder_name(path): path for path in shipped.values()}
    if reference in named:
        return named[reference], f"paceline/recipes/{named[reference].relative_to(_SHIPPED).as_posix()}"
    if os.path.isfile(path):  # noqa: PTH113
        raise UsageError(f"{reference}: expected a .yaml, .yml or .json file")
    meant = near(reference, list(named))
    hint = "`paceline recipes` lists the shipped ones"
    if meant:
        hint = f'did you mean "{meant[0]}"?'
    elif path.suffix.lower() not in SUFFIXES:
        hint += "; there is no such run directory either"
    quoted = in_one_line(json.dumps(reference, ensure_ascii=False))
    raise UsageError(f"{quoted} is neither a file nor a shipped recipe; {hint}")


def _folder_name(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def override(document: Document, overrides: Sequence[str]) -> Document:
    """A document with overrides as the command line gives them, which win over all that it has."""
    problems: list[str] = []
    layer = 1 + max(origin.layer for origin in document.values.values())
    for text in overrides:
        segments, value = _split_override(text)
        label = f"{COMMAND_LINE}: {text}"
        try:
            read = parse_value(value, label)
            path = _address(document.tree, segments, label)
        except RecipeError as error:
            problems += error.problems
            continue
        layered = _at_layer(_nested(path, read), layer)
        expand_shorthand(layered)
        document = merge(document, layered)
    if problems:
        raise RecipeError(problems)
    return document


def _split_override(override: str) -> tuple[list[str], str]:
    key, equals, value = override.partition("=")
    segments = key.strip().split(".")
    quoted = f'"{in_one_line(override)}"'
    if not equals:
        raise UsageError(f"{quoted}: expected key=value, such as train.epochs=3")
    if not all(segments):
        raise UsageError(f"{quoted}: the key before = is empty or has an empty part")
    if len(segments) > MAX_DEPTH:
        raise UsageError(f"{quoted}: the key has more than {MAX_DEPTH} parts")
    return segments, value


def _address(tree: Any, segments: list[str], label: str) -> KeyPath:
    """The place of a dotted key in this tree; numbers are indices into lists."""
    if segments[0] == "extends":
        raise RecipeError(f"{label}: extends is only allowed in a file")
    if segments[0] == "use":
        raise RecipeError(f"{label}: use is only allowed in a file; give --use MODULE")
    path: KeyPath = ()
    for segment in segments:
        if isinstance(tree, list):
            if not segment.isdecimal() or int(segment) >= len(tree):
                held = f"{pluralize(len(tree), 'item')}, counted from 0"
                raise RecipeError(f"{label}: {dotted(path)} has {held}; got {segment}")
            path = (*path, int(segment))
            tree = tree[int(segment)]
        else:
            path = (*path, segment)
            tree = tree.get(segment) if isinstance(tree, dict) else None
    return path


def _nested(path: KeyPath, value: Document) -> Document:
    """The value nested in mappings from the root."""
    nested = Document(value.tree)
    origin = value.values[()]
    for segment in reversed(path):
        nested.tree = {segment: nested.tree}
    for end in range(len(path) + 1):
        nested.values[path[:end]] = origin
        if end and isinstance(path[end - 1], str):
            nested.keys[path[:end]] = origin
    nested.keys |= {(*path, *inner): origin for inner in value.keys}
    nested.values |= {(*path, *inner): origin for inner in value.values}
    return nested
