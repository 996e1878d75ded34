"""The metrics that recipes can name; the number of classes is supplied when they are built."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from paceline.core.arguments import Arguments, Count
from paceline.core.registry import NoArguments, register


class TopKArguments(Arguments):
    """Arguments of top_k."""

    k: list[Count] = Field(default=[1, 5], min_length=1)


class MultiLabelArguments(Arguments):
    """Arguments of multi_label."""

    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5


_metrics = register.kind("metric")
_metrics.add(
    "top_k",
    "paceline.metrics.classification:TopK",
    TopKArguments,
    "share of samples whose label is among the k best classes",
)
_metrics.add(
    "confusion_matrix",
    "paceline.metrics.classification:ConfusionMatrix",
    NoArguments,
    "confusion matrix, with precision, recall and F1 averaged over classes",
)
_metrics.add(
    "auroc",
    "paceline.metrics.ranking:Auroc",
    NoArguments,
    "area under the ROC curve, averaged over classes",
)
_metrics.add(
    "map",
    "paceline.metrics.ranking:MeanAveragePrecision",
    NoArguments,
    "average precision, averaged over classes",
)
_metrics.add(
    "multi_label",
    "paceline.metrics.classification:MultiLabel",
    MultiLabelArguments,
    "precision, recall, F1, accuracy and exact matches of several labels per sample",
)
