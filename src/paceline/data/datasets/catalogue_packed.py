"""The data set of packs that recipes can name."""

from __future__ import annotations

from paceline.core.arguments import Arguments
from paceline.core.registry import register
from paceline.data.argument_types import Name


class PackedArguments(Arguments):
    """Arguments of `packed`."""

    file: Name


register.kind("dataset").add(
    "packed",
    "paceline.data.datasets.packed:packed",
    PackedArguments,
    "images that `paceline data RECIPE --pack` wrote into one file",
)
