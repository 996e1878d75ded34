"""The tasks that recipes can name."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from paceline.core.arguments import Arguments, Count
from paceline.core.registry import register

tasks = register.kind("task")


class ClassificationArguments(Arguments):
    """Arguments of `classification`."""

    top_k: Annotated[list[Count], Field(min_length=1)] = [1, 5]
    multi_label: bool = False


tasks.add(
    "classification",
    "paceline.tasks.classification:Classification",
    ClassificationArguments,
    "one label per image, or several with multi_label",
)
