"""One of a kind is not many."""

import numpy as np
import pytest

from paceline.core.text import format_metric, join_first, pluralize


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
    assert pluralize(number, noun) == expected


def test_counts_are_printed_whole_and_shares_with_four_digits() -> None:
    assert (format_metric(0), format_metric(12_000), format_metric(0.5), format_metric(1.0)) == (
        "0",
        "12,000",
        "0.5000",
        "1.0000",
    )


def test_long_lists_end_with_a_number() -> None:
    assert join_first(["a", "b"], 2) == "a, b"
    assert join_first(np.arange(1_500), 3) == "0, 1, 2 and 1,497 more"
