"""Labels as lists write them, class names or numbers, encoded as class indices."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.core.text import join_first, pluralize
from paceline.data.index.list_file import at_line

_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_MAX_CLASSES = 1 << 20
_MANY = 100_000  # classes that hardly any list has
_SHOWN = 10


class LabelEncoder:
    """Numbers the different labels of a list as they come; which class each means is known when all are read.

    Whole numbers count classes from `first` on; if that is None, they are names as all others.
    """

    def __init__(self, path: Path, first: int | None = 0) -> None:
        self.path, self._first = path, first
        self._numbers: dict[str, int] = {}
        self._lines: list[int] = []

    def number(self, label: str, line: int) -> int:
        """The number of a label by order of appearance."""
        known = self._numbers.get(label)
        return known if known is not None else self._enter(label.strip(), line)

    def _enter(self, label: str, line: int) -> int:
        if not label:
            raise DataError(f"{at_line(self.path, line)}: the label is empty")
        if any("\udc80" <= character <= "\udcff" for character in label):
            found = label.encode(errors="surrogateescape")
            advice = "save the list as UTF-8; it may be Latin-1 now (`iconv -f LATIN1 -t UTF-8`)"
            raise DataError(f"{at_line(self.path, line)}: the label {found!r} is not UTF-8; {advice}")
        if label not in self._numbers:
            if len(self._lines) == _MAX_CLASSES:
                raise DataError(
                    f"{self.path}: more than {_MAX_CLASSES:,} different labels; name another `label` column"
                )
            self._numbers[label] = len(self._lines)
            self._lines.append(line)
        return self._numbers[label]

    def classes(self, given: Sequence[str] | None, num_samples: int) -> tuple[list[str], NDArray[np.int32]]:
        """The names of the classes, and the class that each number of a label means.

        Without given names these are the labels, sorted; or as many as the largest label asks for, if all labels are
        whole numbers. More than 100,000 of those, and than ten for each sample, are a DataError.
        """
        labels = list(self._numbers)
        is_counted = self._first is not None and bool(labels) and all(map(_WHOLE.fullmatch, labels))
        if given is None and not is_counted:
            given = sorted(labels)
        if given is not None and set(given).issuperset(labels):
            return list(given), self._meanings({name: place for place, name in enumerate(given)}.__getitem__)
        if is_counted and self._first is not None:
            return self._counted(given, self._first, num_samples)
        assert given is not None
        unknown = next(label for label in labels if label not in given)
        expected = f"expected one of the {len(given):,} classes: {join_first(given, _SHOWN)}"
        raise DataError(f"{self._at(unknown)}: the label {unknown!r} is no class; {expected}")

    def notes(self) -> list[str]:
        """What is odd about the labels."""
        labels = list(self._numbers)
        if self._first != 0 or not labels or not all(map(_WHOLE.fullmatch, labels)) or min(map(int, labels)) != 1:
            return []
        return ["the least label is 1, none is 0: if labels begin at 1, add `first_label: 1`"]

    def _counted(
        self, given: Sequence[str] | None, first: int, num_samples: int
    ) -> tuple[list[str], NDArray[np.int32]]:
        least, largest = min(self._numbers, key=int), max(self._numbers, key=int)
        most = min(_MAX_CLASSES, max(_MANY, 10 * num_samples)) if given is None else len(given)
        for label in (least, largest):
            if not 0 <= int(label) - first < most:
                samples = pluralize(num_samples, "sample")
                why = f"of {samples}: is it the column of labels?" if given is None else "as `classes` has names"
                found = f"{self._at(label)}: the label {label} is out of range"
                raise DataError(f"{found}: expected {first} to {first + most - 1}, {why}{self._advice(first, most)}")
        names = given if given is not None else [str(number) for number in range(first, 1 + int(largest))]
        return list(names), self._meanings(lambda label: int(label) - first)

    def _advice(self, first: int, most: int) -> str:
        least, largest = min(map(int, self._numbers)), max(map(int, self._numbers))
        if least == first or least < 0 or largest - least >= most:
            return ""
        return f"; labels go from {least} to {largest}: if they begin at {least}, add `first_label: {least}`"

    def _meanings(self, meaning: Callable[[str], int]) -> NDArray[np.int32]:
        table = np.empty(len(self._lines), np.int32)
        for label, number in self._numbers.items():
            table[number] = meaning(label)
        return table

    def _at(self, label: str) -> str:
        return at_line(self.path, self._lines[self._numbers[label]])
