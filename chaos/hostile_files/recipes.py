"""Recipes that are too deep, too long, or not a recipe at all."""

from __future__ import annotations

import os
from pathlib import Path

from chaos.hostile_files.case import CANARY, Cases
from chaos.hostile_files.commands import check, check_text

case = Cases()


@case("a YAML tag that calls", 2)
def _() -> list[str]:
    return check_text(f"!!python/object/apply:os.system ['touch {CANARY.absolute()}']")


@case("a YAML tag that constructs", 2)
def _() -> list[str]:
    return check_text("name: !!python/object/new:os.system ['touch executed']\ntask: !!python/module:os\n")


@case("a billion laughs", 2)
def _() -> list[str]:
    lines = ["a0: &a0 [ha, ha, ha, ha, ha, ha, ha, ha, ha]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 7)]
    return check_text("\n".join(lines))


@case("an anchor inside itself", 2)
def _() -> list[str]:
    return check_text("name: &a [*a]\nmodel: &b {b: *b}\n")


@case("brackets a hundred thousand deep", 2)
def _() -> list[str]:
    return check_text("[" * 100_000)


@case("JSON a hundred thousand deep", 2)
def _() -> list[str]:
    return check_text('{"a":' * 100_000 + "1" + "}" * 100_000, "recipe.json")


@case("ninety thousand keys", 2)
def _() -> list[str]:
    return check_text("{" + ",".join(f"k{n:x}: 1" for n in range(90_000)) + "}")


@case("nineteen thousand keys that nobody knows", 2)
def _() -> list[str]:
    return check_text("{" + ",".join(f"optimizer{n:x}: 1" for n in range(19_000)) + "}")


@case("four thousand losses that nobody knows", 2)
def _() -> list[str]:
    return check(losses=[{"name": "cross_entropi"}] * 4_000)


@case("a number of a hundred thousand digits", 2)
def _() -> list[str]:
    return check_text('{"name": ' + "9" * 100_000 + "}", "recipe.json")


@case("a recipe of a gigabyte", 2)
def _() -> list[str]:
    command = check_text("name: x\n")
    os.truncate("recipe.yaml", 1 << 30)
    return command


@case("a pipe as a recipe", 2)
def _() -> list[str]:
    os.mkfifo("recipe.yaml")
    return ["check", "recipe.yaml"]


@case("a device as a recipe", 2)
def _() -> list[str]:
    Path("recipe.yaml").symlink_to("/dev/zero")
    return ["check", "recipe.yaml"]


@case("a directory as a recipe", 2)
def _() -> list[str]:
    Path("recipe.yaml").mkdir()
    return ["check", "recipe.yaml"]


@case("NUL bytes in a recipe", 2)
def _() -> list[str]:
    return check_text(b"name: a\0b\ntask: \0\n")


@case("a run's name that is a path", 2)
def _() -> list[str]:
    return check(name="/tmp/elsewhere")


@case("a run's name that leads up", 2)
def _() -> list[str]:
    return check(name="../elsewhere")


@case("a run's name with a NUL", 2)
def _() -> list[str]:
    return check(name="a\0b")


@case("a recipe that extends itself through another", 2)
def _() -> list[str]:
    Path("b.yaml").write_text("extends: recipe.yaml")
    return check_text("extends: b.yaml")


@case("recipes that extend two others each, thirty deep", 2)
def _() -> list[str]:
    for n in range(30):
        Path(f"{n}.yaml").write_text(f"extends: [{n + 1}.yaml, {n + 1}.yaml]")
    Path("30.yaml").write_text("name: x")
    return ["check", "0.yaml"]


@case("a recipe that extends a pipe", 2)
def _() -> list[str]:
    os.mkfifo("pipe.yaml")
    return check_text("extends: pipe.yaml")


@case("a name that is code", 2)
def _() -> list[str]:
    return check(model={"name": "os:system", "command": f"touch {CANARY.absolute()}"})


@case("a model of ten million blocks", 2)
def _() -> list[str]:
    return check(model={"name": "convnet", "depth": 10_000_000})


@case("a layer that no memory holds", 2)
def _() -> list[str]:
    return check(model={"name": "convnet", "widths": [1_000_000]})


@case("a layer of more channels than can be counted", 2)
def _() -> list[str]:
    return check(model={"name": "convnet", "widths": [10**30]})


@case("a weight that makes every loss infinite", 2)
def _() -> list[str]:
    return check(losses=[{"name": "cross_entropy", "weight": 1e300}])
