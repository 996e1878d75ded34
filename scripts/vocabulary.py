"""Count files, lines and words of the former private vocabulary, room by room.

    python scripts/vocabulary.py [FOLDER_OF_A_CHECKOUT]

The words are those that `docs/decisions/0010-the-fields-own-words.md` replaced. *Names* are identifiers where they are
defined, file names included. *Prose* is comments, docstrings, messages and Markdown outside of code blocks.
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PARTS = re.compile(
    "agenda|asking|blanks|chance|choosing|counting|desks?|endings?|examining|exchange|exhibits?|figures?|gallery|ghosts?|"
    "glimpse|lettering|listed|looking|mesh|mirror|mirrored|noted|ownership|periods|pictures?|preparation|publish|"
    "recompute|recomputed|recomputing|remat|said|settle|shown|tally|told|wording|workshop",
    re.IGNORECASE,
)
"""Words that no identifier contains; `trials` stays free, as torchvision's `RandomIoUCrop` has it."""

NAMES = re.compile(
    "_*(Agreement|LabelBook|Objective|Order|OrderedTree|Replicated|Sharded|Source|Stack|Term|Total|Update|ask|"
    "copied_beside)"
)
"""Words that are no identifier by themselves, though they may be part of one."""

PROSE = re.compile(
    r"\b(figures?|pictures?|told|blanks?|endings?|number formats?|computed again|ghosts?|anew|same bits|to the bit|"
    r"bit for bit|cannot be had|left alone|(?:un)?grey\w*|colour\w*|licence|behaviour|honour\w*|labelled|"
    r"\w*(?:normal|synchron|initial|optim|serial)is(?:e|ed|es|ing|ation))\b",
    re.IGNORECASE,
)


def defined_names(tree: ast.AST) -> Iterator[str]:
    """Every identifier at the places where it gets its name."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def is_private_word(name: str) -> bool:
    """Whether an identifier is, or contains, a word of the former vocabulary."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", re.sub("device_?mesh", "", name, flags=re.IGNORECASE))
    return bool(NAMES.fullmatch(name)) or any(map(PARTS.fullmatch, words))


def private_names(path: Path) -> list[str]:
    """The identifiers of a Python file that use the former vocabulary."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [name for name in (path.stem, *defined_names(tree)) if is_private_word(name)]


def private_prose(path: Path) -> list[str]:
    """The words of the former vocabulary in what a file says to people."""
    if path.suffix == ".md":
        return PROSE.findall(re.sub(r"```.*?```|`[^`]+`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL))
    with path.open("rb") as file:
        tokens = [token.string for token in tokenize.tokenize(file.readline) if _is_prose(token)]
    return PROSE.findall("\n".join(tokens))


def _is_prose(token: tokenize.TokenInfo) -> bool:
    kind = tokenize.tok_name[token.type]
    return kind == "COMMENT" or "STRING" in kind


def count(root: Path, code: str = "[bcst]*") -> dict[str, Counter[str]]:
    """Files, lines, names and prose of the documentation, the rooms of the package and other folders of code."""
    rooms: dict[str, Counter[str]] = {}
    package = root / "src" / "paceline"
    for path in sorted([*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob(f"{code}/**/*.py")]):
        if path.stem.removeprefix("test_") == Path(__file__).stem:
            continue  # the list itself, and its test
        inside = path.relative_to(package).parts if path.is_relative_to(package) else path.relative_to(root).parts
        room = "documentation" if path.suffix == ".md" else inside[0] if len(inside) > 1 else "top"
        counts = rooms.setdefault(room, Counter())
        counts.update(files=1, lines=len(path.read_text(encoding="utf-8").splitlines()), prose=len(private_prose(path)))
        counts.update(names=len(private_names(path)) if path.suffix == ".py" else 0)
    return rooms


def main() -> None:
    """Print a table in Markdown."""
    columns = ("files", "lines", "names", "prose")
    print("| room | " + " | ".join(columns) + " |\n|---" + "|---:" * len(columns) + "|")
    for room, counts in count(Path(sys.argv[1] if len(sys.argv) > 1 else ".")).items():
        print(f"| `{room}` | " + " | ".join(f"{counts[column]:,}" for column in columns) + " |")


if __name__ == "__main__":
    main()
