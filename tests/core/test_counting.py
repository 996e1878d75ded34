"""One of a kind is not many."""

import pytest

from paceline.core.counting import counted


@pytest.mark.parametrize(
    ("number", "noun", "expected"),
    [
        (0, "sample", "0 samples"),
        (1, "sample", "1 sample"),
        (1003, "sample", "1,003 samples"),
        (1, "micro-batch", "1 micro-batch"),
        (2, "micro-batch", "2 micro-batches"),
        (2, "process", "2 processes"),
        (1.0, "epoch", "1 epoch"),
        (1.5, "epoch", "1.5 epochs"),
    ],
)
def test_numbers_and_nouns(number: float, noun: str, expected: str) -> None:
    assert counted(number, noun) == expected
