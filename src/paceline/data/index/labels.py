"""Labels as lists write them, names of classes or numbers, as numbers of classes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.core.text import pluralize
from paceline.data.index.list_file import at_line

_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_MOST = 1 << 20
_MANY = 100_000  # classes that hardly any list has


class LabelEncoder:
    """The different labels of a list, numbered as they come; which class each means is told when all are known.

    Whole numbers count classes from `first` on; if that is None, they are names as all others.
    """

    def __init__(self, path: Path, first: int | None = 0) -> None:
        self.path, self._first = path, first
        self._numbers: dict[str, int] = {}
        self._lines: list[int] = []

    def number(self, label: str, line: int) -> int:
        """The number of a label by order of appearance."""
        known = self._numbers.get(label)
        return known if known is not None else self._enter(label, line)

    def _enter(self, label: str, line: int) -> int:
        stripped = label.strip()
        if not stripped:
            raise DataError(f"{at_line(self.path, line)}: the label is empty")
        if any("\udc80" <= character <= "\udcff" for character in stripped):
            found = stripped.encode(errors="surrogateescape")
            advice = "save the list as UTF-8; it may be Latin-1 now (`iconv -f LATIN1 -t UTF-8`)"
            raise DataError(f"{at_line(self.path, line)}: the label {found!r} is not UTF-8; {advice}")
        if stripped not in self._numbers:
            if len(self._lines) == _MOST:
                raise DataError(f"{self.path}: more than {_MOST:,} different labels; name another column as `label`")
            self._numbers[stripped] = len(self._lines)
            self._lines.append(line)
        return self._numbers[stripped]

    def classes(self, given: Sequence[str] | None, num_samples: int) -> tuple[list[str], NDArray[np.int32]]:
        """The names of the classes, and the class that each number of a label means.

        Without given names these are the labels, sorted; or as many as the largest label asks for, if all labels are
        whole numbers. More than 100,000 of those, and than ten for each sample, are a DataError.
        """
        labels, known = list(self._numbers), set(given or ())
        if given is not None and known.issuperset(labels):
            return list(given), self._meanings({name: place for place, name in enumerate(given)}.__getitem__)
        if self._first is not None and labels and all(map(_WHOLE.fullmatch, labels)):
            self._refuse_ids(given, self._first, num_samples)
            return self._counted(given, self._first)
        if given is not None:
            unknown = next(label for label in labels if label not in known)
            expected = f"expected one of the {len(given):,} classes"
            raise DataError(f"{self._at(unknown)}: the label {unknown!r} is no class; {expected}: {_some(given)}")
        names = sorted(labels)
        return names, self._meanings({name: place for place, name in enumerate(names)}.__getitem__)

    def notes(self) -> list[str]:
        """What is odd about the labels."""
        labels = list(self._numbers)
        if self._first != 0 or not labels or not all(map(_WHOLE.fullmatch, labels)) or min(map(int, labels)) != 1:
            return []
        return ["the least label is 1, none is 0: if labels begin at 1, add `first_label: 1`"]

    def _counted(self, given: Sequence[str] | None, first: int) -> tuple[list[str], NDArray[np.int32]]:
        most = _MOST if given is None else len(given)
        for label in self._numbers:
            if not 0 <= int(label) - first < most:
                why = "as `classes` has names" if given is not None else "which is the most there may be"
                found = f"{self._at(label)}: the label {label} is out of range"
                expected = f"expected {first} to {first + most - 1}, {why}"
                raise DataError(f"{found}: {expected}{self._advice_on_range(first, most)}")
        names = given if given is not None else [str(k) for k in range(first, 1 + max(map(int, self._numbers)))]
        return list(names), self._meanings(lambda label: int(label) - first)

    def _refuse_ids(self, given: Sequence[str] | None, first: int, num_samples: int) -> None:
        """Numbers that are far beyond the samples do not count classes."""
        largest = max(self._numbers, key=int)
        num_classes = int(largest) - first + 1
        if given is None and max(_MANY, 10 * num_samples) < num_classes <= _MOST:
            found = f"the label {largest} asks for {num_classes:,} classes of {pluralize(num_samples, 'sample')}"
            advice = "name another column as `label` if these are no classes, or give the names of all as `classes`"
            raise DataError(f"{self._at(largest)}: {found}; {advice}")

    def _advice_on_range(self, first: int, most: int) -> str:
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


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
