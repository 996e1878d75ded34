from __future__ import annotations

import math

from paceline.metrics.class_metrics import split_classes, summarize


def test_few_classes_are_listed_and_many_are_not() -> None:
    many, few = [f"ap.{number}" for number in range(11)], [f"iou.{number}" for number in range(10)]
    assert split_classes(["loss", *many, *few, "ap"]) == (["loss", *few, "ap"], ["ap"])
    assert split_classes([]) == ([], [])


def test_the_mean_and_the_classes_at_both_ends() -> None:
    values = {
        "ap": 1.0,
        **{f"ap.class.{number}": number / 8 for number in range(5)},
        "ap.none": None,
        "ap.nan": math.nan,
    }
    assert summarize(values, "ap") == (
        "0.2500 of 5",
        "class.4 0.5, class.3 0.375, class.2 0.25",
        "class.0 0, class.1 0.125, class.2 0.25",
    )
    assert summarize({"ap.a": math.nan}, "ap") == ("nan", "", "")
    assert summarize({"ap": 1.0}, "ap") == ("", "", "")
