"""The code blocks of the documentation, and how each is checked."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from paceline.cli import _parse
from paceline.recipe.load import load, shipped_recipes
from paceline.recipe.search_space import read_search_space
from paceline.recipe.validate import validate

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
BASES = {
    "detection": "detection_sample",
    "instance_segmentation": "instance_segmentation_sample",
    "keypoints": "keypoints_sample",
    "saliency": "saliency_sample",
    "segmentation": "segmentation_sample",
    "video": "video_sample",
    "masked_autoencoder": "mae_fashion",
}
"""The recipe that a part of one belongs to, by task; others belong to quickstart."""
OTHER_PROGRAMS = {
    "cd", "docker", "done", "for", "git", "kubectl", "pip", "python", "sbatch", "source", "tensorboard", "torchrun",
}  # fmt: skip
"""What may stand beside `paceline` and `make` in a block of commands; it is not run here."""


@dataclass(frozen=True)
class Block:
    """A fenced block; `file` is the name that the sentence before it gives, as in "Save this as `flowers.yaml`:"."""

    page: Path
    line: int
    language: str
    text: str
    file: str | None

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def name_of(page: Path) -> str:
    """A page as it is named in messages and tables."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """All blocks of a page, in their order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, match.start()) + 1, match[1], match[2], _file(text[: match.start()]))
        for match in FENCE.finditer(text)
    ]


def _file(before: str) -> str | None:
    named = re.search(r"`([\w.-]+\.(?:yaml|yml|json))`[:：]\n\n$", before)
    return named[1] if named else None


def commands(block: Block) -> Iterator[list[str]]:
    """The words of every command of a block; variables of loops become 0."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if block.language == "console" and not line.startswith("$ "):
            continue  # output
        if words := shlex.split(re.sub(r"\$\w+", "0", line.removeprefix("$ ")), comments=True):
            yield words


def check_command(words: list[str], folder: Path, makefile: str) -> None:
    """Raise unless a command of a page can be parsed and the recipe that it names is valid with its overrides."""
    program, *arguments = words
    if program == "make":
        assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in arguments), words
    elif program != "paceline":
        assert program in OTHER_PROGRAMS, words
    else:
        options = _parse(arguments[: arguments.index(">")] if ">" in arguments else arguments)
        reference = getattr(options, "recipe", None)
        if reference and not getattr(options, "use", None) and (recipe := _recipe(reference, folder)):
            for overrides in _expanded(options.overrides, options.command):
                validate(load(recipe, overrides))


def _recipe(reference: str, folder: Path) -> str | None:
    """The recipe behind a name, a file of the page, or the run directory of either; None for one that a test makes."""
    name = Path(reference).name if reference.startswith("runs/") else reference
    known = [str(folder / name), str(folder / f"{name}.yaml"), name]
    return next((each for each in known if Path(each).is_file() or each in shipped_recipes()), None)


def _expanded(overrides: list[str], command: str) -> Iterator[list[str]]:
    """The overrides of each trial of a sweep; each setting of a plan (`key=a,b`) by itself; others together."""
    if command == "sweep":
        space = read_search_space(overrides)
        yield from map(space.overrides, space.sample(2, seed=0))
        return
    if command != "plan":
        yield overrides
        return
    for override in overrides:
        key, _, values = override.partition("=")
        plain = not re.search(r"[\[{]", values)
        yield from ([f"{key}={value}"] for value in (values.split(",") if plain else [values]))


def check_recipe(block: Block, folder: Path) -> None:
    """Raise unless a block is a valid recipe, or a valid part of one."""
    tree: dict[str, Any] = yaml.safe_load(block.text)
    task = tree.get("task", block.page.stem if block.page.stem != "masked_autoencoder" else None)
    base = BASES.get(task["name"] if isinstance(task, dict) else str(task), "quickstart")
    start = "" if {"name", "extends"} & tree.keys() else f"extends: {base}\nname: page\n"
    path = folder / "part.yaml"
    path.write_text(start + block.text, encoding="utf-8")
    validate(load(str(path)))


def without_comments(text: str) -> str:
    """A block as its translation has it too: no comments, no trailing whitespace."""
    return "\n".join(re.sub(r"(^|\s)#.*$", "", line).rstrip() for line in text.splitlines())
